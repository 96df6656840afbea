"""States among real processes, with a real hub, real links and real threads."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roundhouse import ANYTHING, RUN, RoundHouse, open_house
from statechild import model

from potluck.errors import StateUnavailableError
from potluck.peer.identity import Identity
from potluck.round.averager import Averager, AveragerConfig
from potluck.run.peer import Peer, PeerConfig
from potluck.state.backups import BackupConfig
from potluck.state.config import StateConfig
from potluck.state.keeper import StateKeeper
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children, ManagedProcess

PROGRAM = Path(__file__).with_name("statechild.py")
PATIENCE_SECONDS = 90.0
MEGABYTES = 64


class Company:
    """A hub, and peers in this process and in others."""

    def __init__(self, house: RoundHouse, folder: Path, children: Children, stack: AsyncExitStack) -> None:
        self.house = house
        self.folder = folder
        self.fired = folder / "fired.jsonl"
        self._children = children
        self._stack = stack
        self._num_children = 0

    async def spawn_keeper(self, *, kill_at: int = 0) -> ManagedProcess:
        """A keeper's process; the invite is for as many as like."""
        self._num_children += 1
        name = f"keeper-{self._num_children}"
        arguments = {
            "servers": self.house.address.servers,
            "ca_pem": self.house.address.ca_pem,
            "run": RUN,
            "invite": await self.house.invite(ANYTHING),
            "identity": str(self.folder / f"{name}.nkey"),
            "kill_at": kill_at,
            "fired": str(self.fired),
            "seed": 1,
            "megabytes": MEGABYTES,
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(arguments))
        return self._children.spawn([sys.executable, str(PROGRAM), str(path)], name=name)

    async def join(self, config: StateConfig) -> StateKeeper:
        """A peer of this process."""
        invite = await self.house.invite(ANYTHING)
        options = PeerConfig(invite=invite, listen=("tcp://127.0.0.1:0",))
        peer = Peer(self.house.address, RUN, Identity.temporary(), options)
        self._stack.push_async_callback(peer.close)
        await peer.start()
        averager = Averager(peer, AveragerConfig(num_threads=1))
        self._stack.push_async_callback(averager.close)
        await averager.start()
        keeper = StateKeeper(peer, averager, config)
        self._stack.push_async_callback(keeper.close)
        await keeper.start()
        return keeper


@pytest.fixture
async def company(tmp_path: Path) -> AsyncIterator[Company]:
    with Children(log_folder=tmp_path) as children:
        async with open_house(tmp_path / "hub") as house, AsyncExitStack() as stack:
            yield Company(house, tmp_path, children, stack)


@pytest.mark.timeout(300)
async def test_64_megabytes_come_though_a_keeper_is_killed_meanwhile(company: Company, tmp_path: Path) -> None:
    doomed = await company.spawn_keeper(kill_at=6)
    steady = await company.spawn_keeper()
    kept = [json.loads((await p.until_line(r'^\{"kept".*\}$', PATIENCE_SECONDS)).group(0)) for p in (doomed, steady)]
    assert kept[0]["kept"] == kept[1]["kept"]
    joiner = await company.join(StateConfig(keep="never", folder=tmp_path / "joiner", backups=None))
    ids = {one["peer"] for one in kept}
    await poll_until(
        lambda: set(joiner.directory.keepers(0, kept[0]["kept"])) == ids, PATIENCE_SECONDS, "both keepers to be known"
    )
    seen: list[int] = []
    started = time.monotonic()
    with await joiner.fetch(
        epoch=0, progress=lambda done, _total: seen.append(done), timeout_seconds=PATIENCE_SECONDS
    ) as fetched:
        seconds = time.monotonic() - started
        assert fetched.digest == kept[0]["kept"]
        wanted = model(1, MEGABYTES)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in fetched.tensors().items())
        report = fetched.report
    assert await doomed.until_exit(PATIENCE_SECONDS) == -9
    assert company.fired.read_text().count("state.chunk_served") == 1
    assert report.given[kept[0]["peer"]] > 0, "some came from the one that died"
    assert report.given[kept[1]["peer"]] >= 62 - 6
    assert report.liars == {}
    assert seen[-1] == fetched.snapshot.inventory.num_bytes
    assert steady.exit_code is None
    logging.getLogger(__name__).info("%d MB in %.2f s: %s", MEGABYTES, seconds, report)


class Clockwork:
    """A training thread that does nothing but notice when it cannot."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clockwork")

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._over.wait(0.0005):
            now = time.perf_counter()
            self.longest_seconds = max(self.longest_seconds, now - before)
            before = now

    def __enter__(self) -> Clockwork:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """As the user's thread would call it."""
    return asyncio.ensure_future(asyncio.to_thread(work))


async def test_the_training_thread_waits_for_the_copy_and_for_nothing_else(company: Company, tmp_path: Path) -> None:
    keeper = await company.join(
        StateConfig(keep="always", folder=tmp_path / "keeper", backups=BackupConfig(every_epochs=1))
    )
    tensors = await in_thread(lambda: model(1, MEGABYTES))

    def publish(epoch: int) -> tuple[Any, float]:
        for tensor in tensors.values():
            np.add(tensor.numpy(), 1, out=tensor.numpy())
        started = time.thread_time()
        outcome = keeper.publish(tensors, {"epoch": epoch}, epoch)
        return outcome, time.thread_time() - started

    hash_seconds, copy_seconds = [], []
    for epoch in range(4):  # the first ones need fresh memory
        started = time.monotonic()
        outcome, seconds = await in_thread(lambda epoch=epoch: publish(epoch))
        copy_seconds.append(seconds)
        with Clockwork() as clockwork:
            await asyncio.wrap_future(outcome)
        hash_seconds.append(time.monotonic() - started)
        logging.getLogger(__name__).info("others waited %.4f s at most", clockwork.longest_seconds)
    assert min(copy_seconds[1:]) < 0.5 * min(hash_seconds), (copy_seconds, hash_seconds)
    assert keeper.backups is not None
    await poll_until(lambda: keeper.statistics().get("backup_saved"), PATIENCE_SECONDS, "a backup")
    assert keeper.backups.epochs()


async def test_states_that_come_too_fast_are_passed_over(company: Company) -> None:
    keeper = await company.join(StateConfig(keep="always"))
    outcomes = [keeper.publish({"w": torch.full((2_000_000,), float(e))}, {}, e) for e in range(6)]
    done = await asyncio.gather(*map(asyncio.wrap_future, outcomes), return_exceptions=True)
    assert isinstance(done[-1], str), "the newest is never passed over"
    assert any(isinstance(one, StateUnavailableError) for one in done)
    assert keeper.statistics()["publish_passed_over"]


async def test_a_full_disk_does_not_stop_the_training(
    company: Company, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = StateConfig(keep="always", folder=tmp_path / "full", backups=BackupConfig(every_epochs=1))
    keeper = await company.join(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        for epoch in (1, 2):
            await asyncio.wrap_future(keeper.publish(model(epoch, 4), {"epoch": epoch}, epoch))
            failed = lambda epoch=epoch: keeper.statistics().get("backup_failed") == epoch  # noqa: E731
            await poll_until(failed, PATIENCE_SECONDS, "the backup to fail")  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "epoch 1 could not be saved" in caplog.text
    assert caplog.text.count("Training goes on without backups") == 1, "said once"
    await asyncio.wrap_future(keeper.publish(model(3, 4), {"epoch": 3}, 3))
    await poll_until(lambda: keeper.statistics().get("backup_saved") == 1, PATIENCE_SECONDS, "the next backup")
    assert keeper.backups is not None
    assert keeper.backups.epochs() == [3]
