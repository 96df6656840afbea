"""Jobs: what fleet.toml says, where they go, what has to be done so that they run, and what an owner allows."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, ProtocolError
from potluck.fleet.agent.reconciler import Exit, Instance, Remove, Start, Stop, reconcile
from potluck.fleet.agent.runners.explaining import last_words
from potluck.fleet.jobs import desired as desired_jobs
from potluck.fleet.jobs import sealing
from potluck.fleet.jobs.desired import Desired
from potluck.fleet.jobs.fleetfile import FleetFile, amount_of, parse
from potluck.fleet.jobs.job import Allowance, Job, Limits, Mount, Restart
from potluck.fleet.jobs.machine import MachineFacts
from potluck.fleet.jobs.parcels import pack
from potluck.fleet.jobs.placement import KnownMachine, place
from potluck.hub.keys import Signer, new_seed, public_key

SEED = new_seed("user")
HERE = public_key(SEED)
THERE = public_key(new_seed("user"))
GB = 10**9


def job(name: str = "walker", **changes: Any) -> Job:
    return Job(**{"name": name, "machine": HERE, "command": ("python", "walk.py"), **changes})


def written(text: str, folder: Path = Path()) -> FleetFile:
    return parse(tomllib.loads(text), folder)


# fleet.toml


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "walk.py").touch()
    file = written(
        """
        [queues.experience]
        when_full = "drop"
        max_bytes = "64MB"

        [jobs.walker]
        machine = "anna"
        command = "python walk.py --task 'cart pole'"
        files = ["walk.py"]
        environment = { SEED = 7, FAST = true }
        secrets = ["TOKEN"]
        limits = { cpus = 1.5, memory = "2GB" }
        restart = "always"
        queues = ["experience=put"]

        [jobs.learner]
        image = "learner:1"
        needs = { cpus = 2, memory = "4GiB" }
        mounts = ["/data:/data", "/scratch:/out:rw"]
        restart = { when = "never" }
        """,
        tmp_path,
    )
    learner, walker = file.jobs
    assert walker.command == ("python", "walk.py", "--task", "cart pole")
    assert walker.environment == {"SEED": "7", "FAST": "true"}
    assert walker.limits == Limits(cpus=1.5, memory_bytes=2 * GB)
    assert walker.queues == {"experience": ("put",)}
    assert learner.mounts == (
        Mount(source="/data", target="/data"),
        Mount(source="/scratch", target="/out", read_only=False),
    )
    assert learner.needs.memory_bytes == 4 * 2**30
    assert (learner.restart.when, walker.restart.when) == ("never", "always")
    assert file.queues[0].when_full == "drop"
    assert file.queues[0].max_bytes == 64 * 10**6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "jobs"),
        ("[jobs.a]\nmachine='x'", "says nothing to run"),
        ("[jobs.a]\ncommand='x'", "where shall a run"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nneeds={}", "leave one out"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\ncolour='red'", "colour"),
        ("[jobs.'A b']\ncommand='x'\nmachine='m'", "cannot name a job"),
        ("[jobs.a]\ncommand=\"x 'y\"\nmachine='m'", "write a list"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nfiles=['nothing.py']", "there is no"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nfiles=['/etc/hostname']", "not below"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nlimits={memory='much'}", "4GB"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nenvironment={POTLUCK_LINK='x'}", "Potluck's own"),
        ("[jobs.a]\nimage='x'\nmachine='m'\nmounts=['data']", "/data:/data"),
        ("[jobs.a]\nimage='x'\nbuild='.'\nmachine='m'", "leave one out"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nqueues=['q=steal']", "no right"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\n[queues.q]\nsize=1", "no setting 'size'"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nrestart={when='sometimes'}", "restart"),
        ("[jobs.a]\ncommand='x'\nmachine='m'\nrun='r'", "no command of its own"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        written(text, tmp_path)


@given(st.text(max_size=12))
def test_amounts_never_raise_anything_else(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        assert amount_of(text) >= 0


# Placement


def machine(name: str, *, cpus: int = 4, memory: int = 8, gpus: int = 0, away: bool = False) -> KnownMachine:
    facts = MachineFacts(cpus=cpus, memory_bytes=memory * GB, gpus=("gpu",) * gpus, disk_free_bytes=100 * GB)
    return KnownMachine(peer=f"U{name}", name=name, is_there=not away, facts=None if away else facts)


def plans(text: str) -> FleetFile:
    return written(text)


def test_jobs_go_where_they_are_told_and_else_where_there_is_room() -> None:
    file = plans(
        """
        [jobs.a]
        command = "x"
        machine = "anna"
        [jobs.b]
        command = "x"
        needs = { cpus = 3 }
        [jobs.c]
        command = "x"
        needs = { gpus = 1 }
        """
    )
    machines = [machine("anna"), machine("bert", cpus=8), machine("cleo", gpus=1), machine("away", cpus=64, away=True)]
    assert place(file.jobs, machines) == {"a": "Uanna", "b": "Ubert", "c": "Ucleo"}
    assert place(file.jobs, machines, {"b": "Ucleo"})["b"] == "Ucleo"  # it stays where it is
    with pytest.raises(ConfigurationError, match="there is no machine anna"):
        place(file.jobs, machines[1:])
    with pytest.raises(ConfigurationError, match="no machine fits c"):
        place(file.jobs, machines[:2])
    with pytest.raises(ConfigurationError, match="2 machines are called anna"):
        place(file.jobs, [*machines, msgspec_replace(machines[0])])


def msgspec_replace(known: KnownMachine) -> KnownMachine:
    return KnownMachine(peer="Uother", name=known.name, is_there=True, facts=known.facts)


# What has to be done


def instance(of: Job, **changes: Any) -> Instance:
    usual = {"job": of.name, "digest": of.digest, "state": "running", "started_at": 100.0}
    return Instance(**{**usual, **changes})


def ended(of: Job, code: int = 1, *, at: float = 110.0, **changes: Any) -> Instance:
    return instance(of, state="ended", ended_at=at, exit=Exit(code=code), **changes)


def actions(wanted: list[Job], there: list[Instance], now: float = 110.0) -> list[Any]:
    decision = reconcile({each.name: each for each in wanted}, {each.job: each for each in there}, now)
    return list(decision.actions)


def test_what_shall_run_is_started_and_nothing_twice() -> None:
    a = job("a")
    assert actions([a], []) == [Start(job=a)]
    assert actions([a], [instance(a)]) == []


def test_what_shall_not_run_ends_and_is_forgotten() -> None:
    a = job("a")
    assert actions([], [instance(a)]) == [Stop(name="a", grace_seconds=20.0)]
    assert actions([], [ended(a)]) == [Remove(name="a")]
    stopped = msgspec.structs.replace(a, state="stopped", stop_seconds=5.0)
    assert actions([stopped], [instance(a)]) == [Stop(name="a", grace_seconds=5.0)]
    assert actions([stopped], [ended(a)]) == []
    assert actions([stopped], []) == []


def test_a_changed_job_is_started_anew_and_an_unchanged_one_is_not() -> None:
    a = job("a")
    for changed in (
        msgspec.structs.replace(a, generation=1),
        msgspec.structs.replace(a, environment={"SEED": "2"}),
        msgspec.structs.replace(a, sealed_mark="other"),
    ):
        assert actions([changed], [instance(a)]) == [Stop(name="a", grace_seconds=20.0)]
        assert actions([changed], [ended(a, 143)]) == [Start(job=changed)]
    for same in (
        msgspec.structs.replace(a, restart=Restart(when="always")),
        msgspec.structs.replace(a, sealed=b"sealed anew", invite="other"),
        msgspec.structs.replace(a, stop_seconds=3.0),
    ):
        assert actions([same], [instance(a)]) == []


def test_back_off_doubles_up_to_a_limit_and_begins_anew_after_a_good_while() -> None:
    a = job("a", restart=Restart(first_seconds=2.0, longest_seconds=10.0, healthy_seconds=60.0))
    pauses = []
    for failures in range(5):
        decision = reconcile({"a": a}, {"a": ended(a, failures=failures)}, 110.0)
        assert not decision.actions
        pauses.append(decision.look_at - 110.0 if decision.look_at else None)
    assert pauses == [2.0, 4.0, 8.0, 10.0, 10.0]
    assert actions([a], [ended(a, failures=3, restarts=7)], 120.0) == [Start(job=a, restarts=8, failures=4)]
    long = ended(a, failures=3, restarts=7, at=1000.0)
    assert actions([a], [long], 1002.0) == [Start(job=a, restarts=8, failures=1)]


def test_policies() -> None:
    always, failure = job("a", restart=Restart(when="always")), job("a")
    never, twice = job("a", restart=Restart(when="never")), job("a", restart=Restart(tries=2))
    late = 10_000.0
    assert actions([failure], [ended(failure, 0)], late) == []
    assert actions([always], [ended(always, 0)], late) == [Start(job=always, restarts=1)]
    assert actions([never], [ended(never, 1)], late) == []
    assert actions([twice], [ended(twice, 1)], late) == [Start(job=twice, restarts=1, failures=1)]
    assert actions([twice], [ended(twice, 1, failures=1, restarts=1)], late) == []


def test_a_job_that_was_stopped_by_hand_starts_at_once_when_it_is_wanted_again() -> None:
    a = job("a", restart=Restart(when="never"))
    assert actions([a], [ended(a, 143, stopped=True, failures=9)]) == [Start(job=a)]


@given(
    wanted=st.lists(st.sampled_from("abcd"), unique=True),
    there=st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["running", "ended", "old", "done"])),
    now=st.floats(0, 1e6),
)
def test_acting_on_decisions_ends_with_exactly_the_desired_jobs(
    wanted: list[str], there: dict[str, str], now: float
) -> None:
    jobs = {name: job(name, restart=Restart(when="always", longest_seconds=5.0)) for name in wanted}
    made = {
        "running": lambda j: instance(j),
        "ended": lambda j: ended(j, at=now),
        "old": lambda j: instance(msgspec.structs.replace(j, generation=9)),
        "done": lambda j: ended(j, 0, at=now),
    }
    instances = {name: made[state](job(name)) for name, state in there.items()}
    for _ in range(6):
        decision = reconcile(jobs, instances, now)
        for action in decision.actions:
            match action:
                case Start():
                    before = instances.get(action.job.name)
                    assert before is None or before.state == "ended", "started while it runs"
                    instances[action.job.name] = instance(action.job, started_at=now)
                case Stop():
                    assert instances[action.name].state == "running"
                    digest = instances[action.name].digest
                    instances[action.name] = Instance(
                        job=action.name, digest=digest, state="ended", ended_at=now, stopped=True
                    )
                case Remove():
                    assert instances.pop(action.name).state == "ended"
        now += 10.0
    running = {name for name, each in instances.items() if each.state == "running"}
    assert running == set(wanted)
    assert set(instances) == set(wanted)
    assert all(instances[name].digest == jobs[name].digest for name in wanted)


# Allowances, signatures, secrets


def test_an_owner_allows_by_kind() -> None:
    allowed = Allowance.parse(["images=potluck-*,learner:1", "mounts=/data,/scratch:rw", "process"])
    assert allowed.images == ("potluck-*", "learner:1")
    assert allowed.process
    assert not allowed.gpus
    assert Allowance.parse([allowed.words()]) == allowed
    assert not allowed.refusal(job())
    assert "no plain processes" in Allowance().refusal(job())
    box = job(image="learner:1", command=())
    assert not allowed.refusal(box)
    assert "learner:2" in allowed.refusal(msgspec.structs.replace(box, image="learner:2"))
    for mount, fine in (("/data/a", True), ("/etc", False), ("/database", False)):
        mounted = msgspec.structs.replace(box, mounts=(Mount(source=mount, target="/x"),))
        assert (not allowed.refusal(mounted)) == fine, mount
    written_to = msgspec.structs.replace(box, mounts=(Mount(source="/data", target="/x", read_only=False),))
    assert "/data:rw" in allowed.refusal(written_to)
    assert "GPU" in allowed.refusal(msgspec.structs.replace(box, limits=Limits(gpus=1)))
    assert "network" in allowed.refusal(msgspec.structs.replace(box, network="host"))
    for wrong in ("everything", "mounts=data", "images="):
        with pytest.raises(ConfigurationError):
            Allowance.parse([wrong])


def test_only_the_signed_document_of_this_run_counts() -> None:
    signer = Signer(SEED)
    document = Desired(run="bakery", revision=3, jobs=(job(),))
    data = desired_jobs.sign(document, signer)
    assert desired_jobs.read(data, "bakery") == (document, HERE)
    with pytest.raises(ProtocolError):
        desired_jobs.read(data, "another")
    for at in range(0, len(data), 7):
        with pytest.raises(ProtocolError):
            desired_jobs.read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "bakery")
    with pytest.raises(ConfigurationError, match="same name"):
        Desired(run="bakery", jobs=(job(), job()))
    large = Desired(run="bakery", jobs=tuple(job(f"j{n}", environment={"A": "x" * 4000}) for n in range(20)))
    with pytest.raises(ConfigurationError, match="bytes"):
        desired_jobs.sign(large, signer)


def test_secrets_are_for_one_machine() -> None:
    secrets = {"TOKEN": "very secret"}
    sealed = sealing.seal(secrets, HERE)
    assert b"secret" not in sealed
    assert sealing.unseal(sealed, SEED) == secrets
    with pytest.raises(ProtocolError, match="not sealed for this machine"):
        sealing.unseal(sealed, new_seed("user"))
    marks = {
        sealing.mark(secrets, SEED),
        sealing.mark({"TOKEN": "other"}, SEED),
        sealing.mark(secrets, new_seed("user")),
    }
    assert len(marks) == 3
    assert sealing.mark(secrets, SEED) in marks
    assert sealing.mark({}, SEED) == ""
    assert sealing.unseal(b"", SEED) == {}


def test_the_same_files_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "code").mkdir(parents=True)
        (tmp_path / name / "code" / "a.py").write_text("a")
        (tmp_path / name / "code" / "__pycache__").mkdir()
        (tmp_path / name / "b.txt").write_text("b")
        pack([("code", tmp_path / name / "code"), ("b.txt", tmp_path / name / "b.txt")], tmp_path / f"{name}.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


@pytest.mark.parametrize(
    ("how", "log", "says"),
    [
        (Exit(code=1), "Traceback\nValueError: too short\n", "exit code 1; it said: ValueError: too short"),
        (Exit(code=1), "OSError: [Errno 28] No space left on device", "disk is full"),
        (Exit(code=1), "OSError: [Errno 98] Address already in use", "port"),
        (Exit(signal=9), "", "killed by SIGKILL"),
        (Exit(signal=9, out_of_memory=True), "", "killed for memory: it wanted more than its limit of 512 MB"),
        (Exit(reason="there is no program x"), "", "there is no program x"),
        (Exit(code=0), "bye", "finished"),
        (Exit(code=127), "", "not there"),
        (Exit(code=137), "", "SIGKILL"),
        (Exit(), "", "not known"),
    ],
)
def test_last_words_are_plain(how: Exit, log: str, says: str) -> None:
    a = job("a", limits=Limits(memory_bytes=512 * 10**6))
    assert says in last_words(a, instance(a, state="ended", exit=how), log)
