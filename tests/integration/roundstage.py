"""What the tests of rounds in real processes share: a cluster that outlasts a test, victims, and where they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from roundcluster import PATIENCE_SECONDS, ChildMember, Cluster, open_cluster

from potluck.testing.faults import Faults, FiredFault
from potluck.testing.polling import poll_until

T = TypeVar("T")
Victim = Literal["sender", "reducer", "coordinator"]

SENDER_POINTS = ["ready", "planned", "first_sent", "half_sent", "all_sent", "complete", "reported", "applying"]
REDUCER_POINTS = ["ready", "planned", "half_sent", "first_reduced", "half_averages_sent", "complete", "reported"]
COORDINATOR_POINTS = ["plan_published", "half_sent", "first_reduced", "complete", "committing", "committed", "applying"]
ALL_POINTS: list[tuple[Victim, str]] = [
    *(("sender", point) for point in SENDER_POINTS),
    *(("reducer", point) for point in REDUCER_POINTS),
    *(("coordinator", point) for point in COORDINATOR_POINTS),
]
ROLES: dict[str, str] = {
    "ready": "none",  # it has no plan yet
    **dict.fromkeys(["plan_published", "committing", "committed"], "coordinator"),
}


def role_of(who: Victim, point: str) -> str:
    """As what a victim must come to a point, or the fault does not fire: who is to fail as a reducer has to reduce."""
    return ROLES.get(point, "sender" if who == "sender" else "reducer")


class Stage:
    """The cluster, and the event loop it lives on between tests."""

    def __init__(self, runner: asyncio.Runner, cluster: Cluster) -> None:
        self._runner = runner
        self.cluster = cluster

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def victim(self, who: Victim) -> ChildMember:
        coordinator = await self.cluster.coordinator()
        if who == "coordinator":
            return coordinator
        if who == "sender":
            return next(m for m in self.cluster.members if m.is_client)
        return next(m for m in self.cluster.members if m is not coordinator and not m.is_client)

    async def arm(self, victim: ChildMember, point: str, action: str, **details: Any) -> None:
        """Let the victim fail at that point of the next epoch."""
        fault = {"point": f"round.{point}", "action": action, "epoch": self.cluster.epoch + 1, **details}
        await victim.ask("arm", faults=[fault])

    def fired(self) -> list[FiredFault]:
        """What fired in this epoch."""
        return [f for f in Faults(self.cluster.fired_path).fired() if f.labels["epoch"] == str(self.cluster.epoch)]

    async def until_fired(self) -> FiredFault:
        return (await poll_until(self.fired, PATIENCE_SECONDS, "the fault to fire"))[0]

    async def finish(self) -> None:
        """The cluster is whole again, and nothing is left of the fault."""
        await self.cluster.repair()
        await self.cluster.round()


@contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """Three trainers that listen and may coordinate, and one client."""
    with asyncio.Runner() as runner:
        opening = open_cluster(folder, num_full=3, num_clients=1)
        cluster = runner.run(opening.__aenter__())
        try:
            yield Stage(runner, cluster)
        finally:
            runner.run(opening.__aexit__(None, None, None))
