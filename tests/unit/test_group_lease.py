"""Leases of groups: one heartbeat for all of a holder's, spread over candidates, fenced as the lease of `main` is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st

from potluck.hub.groupstore import GroupStore
from potluck.peer.grouplease import SETTLED_SECONDS, GroupLease, in_order
from potluck.peer.heartbeat import BEAT_EVERY_SECONDS, PREFIX, Heartbeat
from potluck.peer.lease import SILENT_SECONDS, TTL_SECONDS
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

SOON_SECONDS = 0.01
LONG_SECONDS = 20.0
EIGHT = tuple(f"g{number}" for number in range(8))


class Candidate:
    """One peer and its leases of several groups."""

    def __init__(self, name: str, session: str, heartbeat: Heartbeat, leases: dict[str, GroupLease]) -> None:
        self.name = name
        self.session = session
        self.heartbeat = heartbeat
        self.leases = leases

    @property
    def held(self) -> set[str]:
        return {group for group, lease in self.leases.items() if lease.is_held}


class Contest:
    """Candidates, and a roster that says who lives."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.dead: set[tuple[str, str]] = set()
        self.candidates: dict[str, Candidate] = {}
        self.all: list[Candidate] = []
        self.is_in_round = False

    async def join(self, name: str, groups: tuple[str, ...] = EIGHT, session: str = "s") -> Candidate:
        store = self.hub.connect(name).store("groups")
        heartbeat = Heartbeat(store, name, session, LoopClock())
        leases = {
            group: GroupLease(
                GroupStore(store, f"g.{group}.lease."),
                name,
                LoopClock(),
                group=group,
                heartbeat=heartbeat,
                candidates=lambda: list(self.candidates),
                may_hand_over=lambda: not self.is_in_round,
                session=session,
                is_gone=lambda holder, session: (holder, session) in self.dead,
            )
            for group in groups
        }
        candidate = self.candidates[name] = Candidate(name, session, heartbeat, leases)
        self.all.append(candidate)
        for lease in leases.values():
            await lease.start()
            lease.stand()
        return candidate

    def kill(self, candidate: Candidate, *, is_told: bool = True) -> None:
        """It is cut off from the hub; the roster says so at once, or does not."""
        self.hub.disconnect(candidate.name)
        self.candidates.pop(candidate.name, None)
        if is_told:
            self.bury(candidate)

    def bury(self, candidate: Candidate) -> None:
        """The roster says that it is dead."""
        self.dead.add((candidate.name, candidate.session))
        for other in self.all:
            for lease in other.leases.values():
                lease.reconsider()

    def holders(self, group: str) -> list[Candidate]:
        return [candidate for candidate in self.all if group in candidate.held]

    def are_all_held(self, *candidates: Candidate) -> bool:
        return set().union(*(candidate.held for candidate in candidates)) == set(EIGHT)


@asynccontextmanager
async def contest() -> AsyncIterator[Contest]:
    there = Contest()
    yield there
    for candidate in there.all:
        for lease in candidate.leases.values():
            await lease.close()
    for connection in list(there.hub.connections):
        await connection.close()


async def until(condition: Callable[[], bool], seconds: float = LONG_SECONDS) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < seconds, "it did not happen"
        await asyncio.sleep(SOON_SECONDS)
    return loop.time() - start


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=8), st.text(min_size=1, max_size=8))
def test_who_goes_changes_nothing_in_the_order_of_the_others(peers: set[str], group: str) -> None:
    order = in_order(group, peers)
    gone = order[0]
    assert in_order(group, peers - {gone}) == order[1:]


@in_virtual_time
async def test_a_holder_of_many_groups_writes_one_heartbeat() -> None:
    async with contest() as there:
        one = await there.join("A")
        await until(lambda: there.are_all_held(one))
        first = await there.hub.connect("W").store("groups").put("mark", b"")
        await asyncio.sleep(20 * BEAT_EVERY_SECONDS)
        last = await there.hub.connect("W").store("groups").put("mark", b"")
        assert 18 <= last - first <= 22, "writes of all groups together"
        entries = await there.hub.connect("W").store("groups").entries()
        assert sum(entry.key.startswith(PREFIX) for entry in entries) == 1
        assert one.held == set(EIGHT)


@in_virtual_time
async def test_groups_are_spread_and_those_of_a_dead_holder_go_to_several() -> None:
    async with contest() as there:
        those = [await there.join(name) for name in ("A", "B", "C", "D")]
        await asyncio.sleep(3 * SETTLED_SECONDS)
        for group in EIGHT:
            [holder] = there.holders(group)
            assert holder.name == in_order(group, "ABCD")[0], "hysteresis has settled"
        load = Counter({candidate: len(candidate.held) for candidate in those})
        dying, before = load.most_common(1)[0]
        groups, tokens = dying.held, {group: lease.token for group, lease in dying.leases.items()}
        there.kill(dying)
        others = [candidate for candidate in those if candidate is not dying]
        taken = await until(lambda: there.are_all_held(*others))
        assert taken < 2.0
        heirs = {candidate.name for group in groups for candidate in there.holders(group) if candidate is not dying}
        assert before < 2 or len(heirs) > 1, f"{groups} all went to {heirs}"
        for group in groups:
            [heir] = [candidate for candidate in others if group in candidate.held]
            assert heir.leases[group].token > tokens[group]
            assert not heir.leases[group].view.accepts(dying.name, tokens[group])


@in_virtual_time
async def test_a_silent_holder_loses_all_its_groups_and_knows_it() -> None:
    async with contest() as there:
        one = await there.join("A")
        await until(lambda: there.are_all_held(one))
        two = await there.join("B")
        there.kill(one, is_told=False)
        taken = await until(lambda: there.are_all_held(two))
        assert taken <= SILENT_SECONDS + 2.5
        assert two.heartbeat.num_tries <= 60, "one look at the store serves all groups"
        assert not one.held, "it must have noticed by its own clock"


@in_virtual_time
async def test_a_holder_that_is_wrongly_buried_loses_all_and_gets_in_line_again() -> None:
    async with contest() as there:
        one = await there.join("A")
        await until(lambda: there.are_all_held(one))
        tokens = {group: lease.token for group, lease in one.leases.items()}
        two = await there.join("B")
        there.bury(one)
        await until(lambda: there.are_all_held(one, two) and bool(two.held))
        for group in EIGHT:
            assert len(there.holders(group)) == 1
        there.dead.clear()
        await asyncio.sleep(3 * SETTLED_SECONDS)
        for group in EIGHT:
            [holder] = there.holders(group)
            assert holder.leases[group].token >= tokens[group]
            assert holder.name == in_order(group, "AB")[0]


@in_virtual_time
async def test_a_restarted_holder_need_not_wait_for_its_earlier_life() -> None:
    async with contest() as there:
        one = await there.join("A", session="life 1")
        await until(lambda: there.are_all_held(one))
        there.hub.disconnect("A")
        again = await there.join("A", session="life 2")
        there.bury(one)
        there.hub.reconnect("A")
        assert await until(lambda: there.are_all_held(again)) < 3.0


@in_virtual_time
async def test_a_group_is_handed_over_between_rounds_only() -> None:
    async with contest() as there:
        groups = tuple(group for group in EIGHT if in_order(group, "AB")[0] == "B")
        one = await there.join("A", groups)
        await until(lambda: one.held == set(groups))
        there.is_in_round = True
        two = await there.join("B", groups)
        await asyncio.sleep(3 * SETTLED_SECONDS)
        assert one.held == set(groups)
        there.is_in_round = False
        assert await until(lambda: two.held == set(groups)) < 3.0
        assert not one.held


@in_virtual_time
async def test_while_nobody_keeps_the_store_the_holder_stays() -> None:
    async with contest() as there:
        one = await there.join("A")
        await until(lambda: there.are_all_held(one))
        tokens = {group: lease.token for group, lease in one.leases.items()}
        await there.join("B")
        await asyncio.sleep(1.0)
        there.is_in_round = True  # no group is handed over meanwhile
        there.hub.depose("groups")
        for _ in range(90):
            await asyncio.sleep(0.1)
            assert one.held == set(EIGHT)
        there.hub.elect("groups")
        await asyncio.sleep(TTL_SECONDS)
        assert {group: lease.token for group, lease in one.leases.items()} == tokens


@in_virtual_time
async def test_who_closes_hands_its_groups_back_at_once() -> None:
    async with contest() as there:
        one = await there.join("A")
        await until(lambda: there.are_all_held(one))
        two = await there.join("B")
        await asyncio.sleep(1.0)
        there.candidates.pop("A")
        for lease in one.leases.values():
            await lease.close()
        assert await until(lambda: there.are_all_held(two)) < 1.0
