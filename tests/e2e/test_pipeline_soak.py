"""Pipelines with the real commands for longer: through relays, after SIGKILL of the host, and with many kills.

    scripts/test tests/e2e/test_pipeline_soak.py -m soak -rA

Each compares with one process that trains the same run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import PATIENCE_SECONDS, Terminal, events, until_event
from stagedcompany import ONE_THREAD, StagedCompany, steps, until_steps

from potluck.pipeline.cuts import CutShelf
from potluck.pipeline.judging import CEILING
from potluck.testing.natlab import Host, NatLab
from potluck.testing.processes import ManagedProcess

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

RUN = """\
name = "bakery"
recipe = "stdlib-lm"

[model]
width = 16
layers = 2
heads = 2
context = 16

[training]
algorithm = "sync"
target_batch_size = 16

[optimizer]
learning_rate = 1e-2

[schedule]
warmup_epochs = 0

[pipeline]
stages = 2
"""
LARGER = (
    RUN.replace("width = 16\nlayers = 2", "width = 64\nlayers = 8")
    .replace("context = 16", "context = 64")
    .replace("stages = 2", "stages = 5")
)
SMALL_HOST = (sys.executable, str(Path(__file__).with_name("smallhost.py")))
NUM_STEPS, KILL_EVERY = 100, 20


def end_all(*processes: ManagedProcess) -> None:
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()


def assert_as_one_process(company: StagedCompany, *, relative: float) -> int:
    """The newest cut has the values that one process has after as many steps."""
    shelf = CutShelf(company.hub / "cuts")
    step = shelf.cuts[-1].step
    expected = company.one_process(step).values
    for unit in range(company.blueprint().num_units):
        for name, values in shelf.load(unit, step).items():
            wanted = expected.get(f"{unit}/{name}")
            if wanted is not None:
                error = (values - wanted).abs().max() / wanted.abs().max()
                assert error <= relative, f"{name} differs by {error:.2g} after {step} steps"
    return step


@pytest.mark.usefixtures("needs_lab")
def test_stages_behind_symmetric_routers_hand_over_through_the_hub(lab: NatLab, terminal: Terminal) -> None:
    public = lab.public("hub")
    homes = {name: lab.behind_nat(name, kind="symmetric") for name in ("ada", "bob", "carl")}

    def at(node: Host) -> Callable[..., ManagedProcess]:
        def start(*arguments: str | Path, name: str = "host", **environment: str) -> ManagedProcess:
            own = {"XDG_DATA_HOME": str(terminal.folder / "data"), **environment}
            return node.popen([sys.executable, "-m", "potluck.cli", *map(str, arguments)], name=name, env=own)

        return start

    company = StagedCompany(terminal, RUN)
    host = company.host("--announce", public.address, start=at(public))
    joined = [
        company.join(name, *(("--feed",) if name == "carl" else ()), start=at(node)) for name, node in homes.items()
    ]
    until_steps(host, 10, 3 * PATIENCE_SECONDS)
    shown = public.popen(
        [sys.executable, "-m", "potluck.cli", "monitor", company.link, "--once", "--json"],
        name="monitor",
        env=ONE_THREAD,
    )
    assert shown.wait(PATIENCE_SECONDS) == 0
    reach = {row["name"]: row["reach"] for row in json.loads(shown.output())["peers"]}
    assert [reach[name] for name in homes] == ["client"] * 3, "nobody can be dialled: all links are relayed"
    end_all(*joined, host)
    assert assert_as_one_process(company, relative=1e-4) >= 10


def test_a_host_that_dies_by_sigkill_comes_back_and_the_weights_are_those_of_one_process(terminal: Terminal) -> None:
    """Hub, conductor and saver are gone at once; servers keep their sums, and the step goes on.

    The host has no room for the whole model: its held-out data go through the pipeline.
    """
    company = StagedCompany(terminal, RUN)
    host = company.host(program=SMALL_HOST)
    link = company.link
    joined = [company.join("ada"), company.join("bob"), company.join("carl", "--feed")]
    until_steps(host, 8)
    told = until_event(host, "pipeline evaluated")
    expected = company.one_process(told["step"]).figures
    assert told["evaluation_loss"] == pytest.approx(expected["evaluation_loss"], rel=1e-4)
    os.kill(host.pid, signal.SIGKILL)
    host.wait(PATIENCE_SECONDS)
    host = company.host(program=SMALL_HOST)
    assert company.link == link
    until_steps(host, 8)
    assert not [each for each in events(host) if each["event"] == "pipeline restored"], "no step was lost"
    end_all(*joined, host)
    assert assert_as_one_process(company, relative=1e-4) >= 16


def test_servers_of_two_arithmetics_pass_all_spot_checks(terminal: Terminal) -> None:
    company = StagedCompany(terminal, LARGER.replace("stages = 5", "stages = 2\ncheck_rate = 1.0"))
    host = company.host()
    joined = [company.join("feeder", "--feed")]
    for stage in ("0", "1"):
        joined += [
            company.join(f"vector-{stage}", "--stage", stage),
            company.join(f"scalar-{stage}", "--stage", stage, ATEN_CPU_CAPABILITY="default"),
        ]
    until_steps(host, 40, 4 * PATIENCE_SECONDS)
    checks = terminal.ask("pipeline", company.link)["checks"]
    print(checks)
    limits = {each["of"]: each["limit"] for each in checks["tolerances"] if each["one"] != each["other"]}
    assert checks["failed"] == 0
    assert checks["made"] >= 40
    assert set(limits) == {"output", "gradient", "sum"}, "they were compared with each other"
    assert max(limits.values()) < CEILING, "rounding between the two was measured"
    end_all(*joined, host)


def test_a_model_of_which_nobody_holds_more_than_a_quarter_learns_as_one_process_does(terminal: Terminal) -> None:
    company = StagedCompany(terminal, LARGER)
    host = company.host()
    feeders = [company.join("feeder", "--feed"), company.join("other-feeder", "--feed")]
    names = iter(f"server-{number}" for number in range(1000))
    servers = {name: company.join(name) for name in (next(names) for _ in range(7))}
    everybody = dict(servers)
    for process in servers.values():
        until_event(process, "stage")
    chance, kills, at = random.Random(7), 0, 0
    while at + KILL_EVERY < NUM_STEPS:
        at += KILL_EVERY
        until_steps(host, at, 3 * PATIENCE_SECONDS)
        victim = chance.choice(sorted(servers))
        os.kill(servers.pop(victim).pid, signal.SIGKILL)
        kills += 1
        newcomer = next(names)
        servers[newcomer] = everybody[newcomer] = company.join(newcomer)
        until_event(servers[newcomer], "stage")
    until_steps(host, NUM_STEPS, 3 * PATIENCE_SECONDS)
    told = steps(host)
    end_all(*servers.values(), *feeders, host)
    assert not [each for each in events(host) if each["event"] == "pipeline restored"]

    blueprint = company.blueprint()
    shares = [
        blueprint.values_in(each["blocks"]) / sum(blueprint.num_values)
        for process in everybody.values()
        for each in events(process)
        if each["event"] == "stage"
    ]
    losses = company.one_process(len(told)).losses
    ours = torch.tensor([each["loss"] for each in told])
    difference = (ours / torch.tensor(losses) - 1).abs().max().item()
    replayed = int(sum(each["replayed"] for each in told))
    print(
        f"{len(told)} steps, {kills} servers killed, {replayed} micro-batches again; loss {losses[0]:.4f} to "
        f"{losses[-1]:.4f} in one process and {ours[-1]:.4f} in the pipeline, at most {difference:.1e} apart; nobody "
        f"held more than {max(shares):.1%}"
    )
    assert max(shares) <= 0.25
    assert difference < 1e-2
    assert losses[-1] < losses[0] - 1.5
