"""What `potluck join` does beside training: which role it takes, when it comes back, what it says."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
from collections import namedtuple
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck.cli import console, takingpart, training
from potluck.cli.loading import Loading
from potluck.cli.optiongroups import TrainOptions
from potluck.cli.preflight import check_this_machine
from potluck.cli.takingpart import Part, fitting_roles
from potluck.clock import SystemClock
from potluck.errors import ConfigurationError, HubUnavailableError, RoleRefusedError
from potluck.hub.joinlink import JoinLink
from potluck.hub.presence import Role
from potluck.messages import PROTOCOL_VERSION
from potluck.peer import machinecheck
from potluck.peer.identity import Identity
from potluck.recipes.reference import RecipeRef
from potluck.round.lineage import Lineage
from potluck.round.plan.messages import Commit, CommittedMember, RoundKey
from potluck.run.peer import PeerConfig
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.memoryrun import MemoryRun
from potluck.sim.virtualloop import in_virtual_time
from potluck.training.manifest.manifest import Manifest, Settings
from potluck.training.manifest.readiness import check_ready, last_epoch
from potluck.training.participant import PauseChanged, Progressed
from potluck.training.trainer.trainer import TrainProgress

LINK = JoinLink(host="127.0.0.1", port=4222, run="bakery", ca_hash="a" * 32, invite="secret-invite")
DIGITS = RecipeRef(name="digits")
Memory = namedtuple("Memory", "available")
Disk = namedtuple("Disk", "total used free")
Play = Callable[[Role, asyncio.Event], Awaitable[None]]


class Evenings:
    """Hours that are open for the second half of every 200 seconds of the loop's clock."""

    begin = datetime.time(22)

    def seconds_until_open(self, _now: datetime.datetime) -> float:
        return max(0.0, 100.0 - asyncio.get_running_loop().time() % 200.0)

    def seconds_until_close(self, _now: datetime.datetime) -> float:
        passed = asyncio.get_running_loop().time() % 200.0
        return 200.0 - passed if passed >= 100.0 else 0.0


def part(
    monkeypatch: pytest.MonkeyPatch, play: Play, *, hours: Any = None, roles: tuple[Role, ...] = ("trainer",)
) -> Part:
    monkeypatch.setattr(Part, "_as", lambda _self, role, stop: play(role, stop))
    options = TrainOptions()
    if hours is not None:
        monkeypatch.setattr(TrainOptions, "hours", hours)
    return Part(
        link=LINK,
        identity_path=None,
        config=PeerConfig(link=LINK),
        roles=roles,
        training=options,
        backups=None,
        as_json=True,
    )


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# Hours


@in_virtual_time
async def test_who_trains_in_the_evening_comes_back_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    evenings: list[tuple[float, float]] = []
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    start = loop.time() - loop.time() % 200.0

    async def play(_role: Role, closing: asyncio.Event) -> None:
        came_at = loop.time() - start
        await closing.wait()
        evenings.append((came_at, loop.time() - start))
        if len(evenings) == 2:
            stop.set()

    await part(monkeypatch, play, hours=Evenings()).play(stop)
    assert evenings == [pytest.approx((100.0, 200.0), abs=1.0), pytest.approx((300.0, 400.0), abs=1.0)]


@in_virtual_time
async def test_a_hub_that_is_away_at_the_hour_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[float] = []

    async def play(_role: Role, _closing: asyncio.Event) -> None:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 3:
            raise HubUnavailableError("nobody is there")

    await part(monkeypatch, play, hours=Evenings()).play(asyncio.Event())
    assert len(tries) == 3
    assert tries[1] - tries[0] == pytest.approx(takingpart.RETRY_SECONDS)
    told = [each for each in events(capsys) if each["event"] == "trying again"]
    assert [each["reason"] for each in told] == ["nobody is there"] * 2


@in_virtual_time
async def test_without_hours_a_hub_that_is_away_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(_role: Role, _stop: asyncio.Event) -> None:
        raise HubUnavailableError("nobody is there")

    with pytest.raises(HubUnavailableError):
        await part(monkeypatch, play).play(asyncio.Event())


# Roles


def test_a_machine_with_little_memory_helps_without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(available=64 * machinecheck.GIB))
    assert fitting_roles(as_json=True) == ("trainer", "aux")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(available=machinecheck.LEAST_TRAINING_BYTES - 1))
    assert fitting_roles(as_json=True) == ("aux",)


@pytest.mark.parametrize(
    ("roles", "allowed", "taken"),
    [
        (("trainer", "aux"), ("trainer", "aux", "observer"), ["trainer"]),
        (("trainer", "aux"), ("aux",), ["trainer", "aux"]),
    ],
)
@in_virtual_time
async def test_the_first_role_is_taken_that_the_link_allows(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[Role, ...], allowed: tuple[Role, ...], taken: list[Role]
) -> None:
    tried: list[Role] = []

    async def play(role: Role, _stop: asyncio.Event) -> None:
        tried.append(role)
        if role not in allowed:
            raise RoleRefusedError("only as something else", allowed)

    await part(monkeypatch, play, roles=roles).play(asyncio.Event())
    assert tried == taken


@pytest.mark.parametrize(("roles", "allowed"), [(("trainer",), ("aux",)), (("trainer", "aux"), ("observer",))])
@in_virtual_time
async def test_a_role_that_was_chosen_is_not_changed(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[Role, ...], allowed: tuple[Role, ...]
) -> None:
    async def play(_role: Role, _stop: asyncio.Event) -> None:
        raise RoleRefusedError("only as something else", allowed)

    with pytest.raises(RoleRefusedError):
        await part(monkeypatch, play, roles=roles).play(asyncio.Event())


# What is looked at first


def test_a_full_disk_keeps_this_machine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machinecheck.shutil, "disk_usage", lambda _: Disk(1, 1, 0))
    with pytest.raises(ConfigurationError, match=r"cannot take part\. disk: 0\.0 GiB free"):
        check_this_machine(True)


@pytest.mark.parametrize(("protocol", "says"), [(PROTOCOL_VERSION + 1, "too old"), (PROTOCOL_VERSION - 1, "organiser")])
def test_a_run_that_speaks_another_protocol(protocol: int, says: str) -> None:
    manifest = Manifest(run="test", recipe=DIGITS, settings=(Settings(),), protocol=protocol)
    with pytest.raises(ConfigurationError, match=says):
        check_ready(manifest, None)


def test_a_recipe_that_this_machine_has_not(tmp_path: Path) -> None:
    check_ready(Manifest(run="test", recipe=DIGITS), None)
    with pytest.raises(ConfigurationError, match="has no recipe 'clairvoyance'"):
        check_ready(Manifest(run="test", recipe=RecipeRef(name="clairvoyance")), None)
    own = Manifest(run="test", recipe=RecipeRef(name="own.py", digest="0" * 64))
    with pytest.raises(ConfigurationError, match="--recipe"):
        check_ready(own, None)
    file = tmp_path / "own.py"
    file.write_text("print('executed')")
    with pytest.raises(ConfigurationError, match="is not the recipe of this run"):
        check_ready(own, file)


@pytest.mark.parametrize(
    ("recipe", "device", "says"), [("def (", "", "SyntaxError"), ("print('fine')", "cuda:99", "--device cuda:99")]
)
async def test_what_a_trainer_names_is_looked_at_first(tmp_path: Path, recipe: str, device: str, says: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(recipe)
    options = TrainOptions(recipe=file, device=device)
    with pytest.raises(ConfigurationError, match=says):
        await takingpart.check_choices(options)


@in_virtual_time
async def test_a_run_that_has_ended() -> None:
    hub = MemoryHub("test").connect("ada")
    endless = Manifest(run="test", recipe=DIGITS)
    ending = Manifest(run="test", recipe=DIGITS, settings=(Settings(end_epoch=1),))
    coordinator = Identity.temporary()
    lineage = Lineage(hub.store("lineage"), "test")
    await lineage.start()
    await lineage.open_term(1)
    assert await last_epoch(hub.store("lineage"), ending) is None
    only = Commit(
        epoch=1,
        key=RoundKey(epoch=1, token=1, attempt=0),
        term=1,
        coordinator=coordinator.peer_id,
        members=(CommittedMember(peer=coordinator.peer_id, weight=1.0, holds=True),),
        digest="d",
        parent=lineage.parent_digest(),
        layout="l",
    )
    await lineage.commit(only, coordinator)
    assert await last_epoch(hub.store("lineage"), ending) == 1
    assert await last_epoch(hub.store("lineage"), endless) is None
    await lineage.close()
    await hub.close()


async def test_who_leaves_while_the_state_is_loaded_is_let_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = MemoryRun(clock=SystemClock())
    await run.open()
    peer: Any = await run.join("Ada")
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(60.0):
        await training.train(peer, TrainOptions(batch_size=4, threads=1), None, stop, True)
    assert "You left before training began" in capfd.readouterr().err
    await run.close()


# What it says


def test_progress_is_told_to_programs_with_the_number_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    training.Presenter(True).tell(
        Progressed(TrainProgress(7, 10, 80, 0.5, 12.0, given=64, seconds=20.0, seconds_waiting=1.5), 3)
    )
    [told] = events(capsys)
    assert (told["event"], told["epoch"], told["samples"], told["peers"]) == ("progress", 7, 80, 3)
    assert told["given"] == 64, "as the run's book says"
    assert (told["seconds"], told["seconds_waiting"]) == (20.0, 1.5)


def test_progress_is_told_to_people_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("potluck.cli.console.out.print", lambda line, **_options: lines.append(line))
    presenter = training.Presenter(False)
    for epoch in (7, 7, 8):
        if epoch == 8:
            presenter.tell(PauseChanged(True, "", ""))
        presenter.tell(Progressed(TrainProgress(epoch, 10, 96, 0.5, 12.0, given=80), 1))
    assert lines == [
        "epoch 7: loss 0.5000, 12.0 samples/s, 80 given, 1 peer",
        "The organiser has paused the run. Your samples are kept, and you go on when the run does.",
        "epoch 8: loss 0.5000, 12.0 samples/s, 80 given, 1 peer",
    ]


def test_a_state_that_takes_long_to_load_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    telling = Loading(True, lambda: now)
    with telling:
        for now in (0.5, 1.1, 1.5, 2.2):
            telling.tell(round(now * 1e6), 3_000_000)
    now = 9.0
    telling.tell(3_000_000, 3_000_000)
    assert [(each["bytes"], each["of"]) for each in events(capsys)] == [(1_100_000, 3_000_000), (2_200_000, 3_000_000)]


def test_a_bar_shows_how_much_of_a_state_is_here_how_fast_it_comes_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    terminal = console.PlainConsole(file=shown, force_terminal=True, width=120, legacy_windows=False)
    monkeypatch.setattr(console, "err", terminal)
    now = 0.0
    telling = Loading(False, lambda: now)
    with telling:
        for now in (1.1, 2.2):
            telling.tell(round(now * 300e6), 1_500_000_000)
    words = shown.getvalue()
    assert "loading the run's state" in words
    assert "0.3/1.5 GB" in words
    assert "0.7/1.5 GB" in words
