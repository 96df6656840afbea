"""Trouble of every kind for a run in memory, by a seed, and a record of what was agreed on.

Trouble strikes at random times and at random points of a round. All of it but death passes within seconds, so that
every member that lives must learn of every epoch.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from roundlab import ELEMENTS, Lab, Member, contributors_of

from potluck import faultpoints
from potluck.errors import RoundFailedError
from potluck.messages import decode
from potluck.peer.identity import Identity
from potluck.round.lineage import Head
from potluck.round.outcome import RoundResult
from potluck.round.plan.messages import Commit
from potluck.round.plan.signing import read_commit
from potluck.sim.memorycarrier import PERFECT, Conditions
from potluck.sim.memorystore import MemoryTable

ROUND_SECONDS = 90.0  # far more than any trouble lasts
FEWEST_MEMBERS = 2
MOST_OUT_OF_REACH = 2
LASTS_SECONDS = [0.01, 0.5, 2.0, 4.0, 8.0]
POINTS = [
    "planned",
    "first_sent",
    "half_sent",
    "all_sent",
    "first_reduced",
    "half_averages_sent",
    "complete",
    "reported",
    "plan_published",
    "revision_published",
    "committing",
    "committed",
]


class Chain:
    """All that was ever written to the lineage: each epoch once, each on top of the one before."""

    def __init__(self, table: MemoryTable, run: str) -> None:
        self.commits: dict[int, Commit] = {}
        self._run = run
        self._write = table.write
        table.write = self._watch  # type: ignore[method-assign]

    def _watch(self, key: str, value: bytes | None, ttl_seconds: float | None) -> int:
        head = decode(Head, value or b"")
        if head.commit is not None:
            commit = read_commit(head.commit, self._run)
            known = self.commits.setdefault(commit.epoch, commit)
            assert known == commit, f"epoch {commit.epoch} was committed twice"
            assert commit.epoch == max(self.commits), f"epoch {commit.epoch} came back"
            assert commit.epoch == 1 or commit.epoch - 1 in self.commits, f"epoch {commit.epoch} skips one"
        return self._write(key, value, ttl_seconds)


class Chaos:
    """Trouble, and its record."""

    def __init__(self, there: Lab, seed: int) -> None:
        self.there = there
        self.rng = random.Random(seed)
        self.chain = Chain(there.run.hub.table("lineage"), there.run.hub.subjects.run)
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.averages: dict[int, str] = {}
        self._out: set[Member] = set()  # severed or frozen
        self._dead: dict[int, tuple[Identity, dict[str, Any]]] = {}
        self._hub_there = asyncio.Event()
        self._hub_there.set()
        self._deaths: set[Member] = set()
        self._arriving: set[str] = set()  # who has a connection, and is not a member yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()  # not that of a member, which might be frozen

    # When it strikes

    def strike(self) -> None:
        """One thing happens."""
        kinds = [self.kill, self.leave, self.join, self.join, self.sever, self.freeze, self.freeze]
        kinds += [self.cut, self.muffle, self.muffle, self.slow_network, self.lose_hub, self.hold_words]
        kinds += [self.hold_changes, self.hold_writes, self.lose_answer]
        self.rng.choice(kinds)()

    def strike_at_a_point(self) -> None:
        """One thing happens when somebody reaches some point of this round."""
        point, skip = self.rng.choice(POINTS), self.rng.randint(0, 3)

        def hook(name: str, labels: Mapping[str, object]) -> None:
            nonlocal skip
            if name == f"round.{point}":
                skip -= 1
                if skip < 0:
                    faultpoints.install(None)
                    self.counts["at_points"] += 1
                    self._note(f"at {point}")
                    self.strike()

        faultpoints.install(hook)

    def _anybody(self) -> Member | None:
        members = [member for member in self.there.members if member not in self._out | self._deaths]
        vital = [member for member in members if member.options["coordinates"]]
        if len(vital) <= FEWEST_MEMBERS:  # of those without whom nothing goes on
            members = [member for member in members if member not in vital]
        if not members or len(self._out) >= MOST_OUT_OF_REACH:
            return None
        return self.rng.choice(members)

    def _note(self, what: str, *members: Member) -> None:
        at = asyncio.get_running_loop().time()
        self.log.append(f"{at:8.2f} {what} {' '.join(str(member.number) for member in members)}")
        self.counts[what.split()[0]] += 1

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, heal: Callable[[], None]) -> None:
        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            heal()

        self._do(wait(self.rng.choice(LASTS_SECONDS)))

    async def calm(self) -> None:
        """Wait until all trouble has passed."""
        faultpoints.install(None)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self.there.run.hub.remove_rules()

    # Members

    def kill(self) -> None:
        if self._hub_there.is_set() and (member := self._anybody()) is not None:
            self._note("kill", member)
            self._deaths.add(member)
            self.there.sever(member)
            self._do(self._bury(member))

    async def _bury(self, member: Member) -> None:
        await self._hub_there.wait()  # whoever dies while the hub is away is missed when it is back
        await self.there.kill(member)
        self._dead[member.number] = (member.peer.identity, member.options)

    def leave(self) -> None:
        if self._hub_there.is_set() and (member := self._anybody()) is not None:
            self._note("leave", member)
            self._deaths.add(member)
            self._do(self._depart(member))

    async def _depart(self, member: Member) -> None:
        self.there.members.remove(member)
        await member.averager.close()
        await self.there.run.leave(member.peer)
        self._dead[member.number] = (member.peer.identity, member.options)

    def join(self) -> None:
        if self._dead and self._hub_there.is_set():
            number = self.rng.choice(sorted(self._dead))
            self._note(f"join {number}")
            self._do(self._arrive(number, *self._dead.pop(number)))

    async def _arrive(self, number: int, identity: Identity, options: dict[str, Any]) -> None:
        await self._hub_there.wait()
        self._arriving.add(identity.peer_id)
        await self.there.join(identity=identity, number=number, **options)
        self._arriving.discard(identity.peer_id)

    def freeze(self) -> None:
        if (member := self._anybody()) is not None:
            self._note("freeze", member)
            self._out.add(member)
            self.there.freeze(member)
            if self.rng.random() < 0.3:
                self._do(self._declare_dead(member))
            self._later(lambda: self._thaw(member))

    async def _declare_dead(self, member: Member) -> None:
        """The guard takes it for dead, as one that sends no beacons."""
        await asyncio.sleep(self.rng.choice([0.5, 3.0]))
        if member in self._out and self._hub_there.is_set():
            self._note("declare dead", member)
            await self.there.run.tell(member.id, "dead", "no beacon for long")

    def _thaw(self, member: Member) -> None:
        self._note("thaw", member)
        self.there.thaw(member)
        self._out.discard(member)

    # Links

    def sever(self) -> None:
        if self._hub_there.is_set() and (member := self._anybody()) is not None:
            self._note("sever", member)
            self._out.add(member)
            self.there.sever(member)
            self._later(lambda: self._reunite(member))

    def _reunite(self, member: Member) -> None:
        self._note("reunite", member)
        self._out.discard(member)
        for other in self.there.members:
            if other is not member and not self._is_severed(other):
                self.there.run.mend(member.peer, other.peer)
        if self._hub_there.is_set():
            self.there.run.hub.reconnect(member.id)

    def _is_severed(self, member: Member) -> bool:
        return member in self._out and not self.there.is_frozen(member)

    def _pair(self) -> list[Member]:
        members = [member for member in self.there.members if member not in self._out | self._deaths]
        return self.rng.sample(members, 2) if len(members) > FEWEST_MEMBERS else []

    def cut(self) -> None:
        """Both sides learn that there is no path."""
        if pair := self._pair():
            one, other = pair
            self._note("cut", one, other)
            self.there.run.cut(one.peer, other.peer)

            def mend() -> None:
                self._note("mend", one, other)
                if not self._is_severed(one) and not self._is_severed(other):
                    self.there.run.mend(one.peer, other.peer)

            self._later(mend)

    def muffle(self) -> None:
        """Nobody is told; one way, or both."""
        if pair := self._pair():
            one, other = pair
            ways = [(one, other), (other, one)][: self.rng.choice([1, 2, 2])]
            self._note(f"muffle {len(ways)} ways", one, other)
            for sender, receiver in ways:
                self.there.run.muffle(sender.peer, receiver.peer)

            def restore() -> None:
                self._note("unmuffle", one, other)
                for sender, receiver in ways:
                    self.there.run.muffle(sender.peer, receiver.peer, is_silent=False)

            self._later(restore)

    def slow_network(self) -> None:
        """Packets are late, doubled and lost for a while."""
        self._note("slow network")
        conditions = Conditions(
            delay_seconds=self.rng.choice([0.0, 0.01, 0.2]),
            loss=self.rng.choice([0.0, 0.05]),
            duplication=self.rng.choice([0.0, 0.2]),
        )
        self.there.run.network.set_conditions(conditions, kind="direct")
        self._later(lambda: self.there.run.network.set_conditions(PERFECT, kind="direct"))

    # The hub

    def lose_hub(self) -> None:
        if self._hub_there.is_set():
            self._note("lose hub")
            self._hub_there.clear()
            self.there.run.hub.disconnect()
            self._later(self._find_hub)

    def _find_hub(self) -> None:
        self._note("find hub")
        self._hub_there.set()
        self.there.run.hub.reconnect("GUARD")
        for member in self.there.members:
            if member not in self._deaths and not self._is_severed(member):
                self._later(lambda member=member: self._reconnect(member))  # type: ignore[misc]
        for peer in sorted(self._arriving):
            self._later(lambda peer=peer: self._reconnect_newcomer(peer))  # type: ignore[misc]

    def _reconnect(self, member: Member) -> None:
        """Peers find the hub again one by one."""
        lives = member in self.there.members and member not in self._deaths
        if self._hub_there.is_set() and lives and not self._is_severed(member):
            self.there.run.hub.reconnect(member.id)

    def _reconnect_newcomer(self, peer: str) -> None:
        """Whoever was about to join when the hub went tries again too."""
        member = next((member for member in self.there.members if member.id == peer), None)
        if member is not None:
            self._reconnect(member)
        elif self._hub_there.is_set() and peer in self._arriving:
            self.there.run.hub.reconnect(peer)

    def hold_words(self) -> None:
        """Plans come late, or never."""
        hub = self.there.run.hub
        pattern = hub.subjects.plan("*") if self.rng.random() < 0.7 else hub.subjects.news("*", "ready")
        if self.rng.random() < 0.5:
            self._note("drop words")
            hub.drop(pattern, count=self.rng.randint(1, 3))
        else:
            self._note("hold words")
            self._later(hub.hold(pattern).release)

    def hold_changes(self) -> None:
        """News of the lease, the lineage or the roster come late."""
        hub = self.there.run.hub
        store = self.rng.choice(["lease", "lineage", "roster"])
        self._note(f"hold changes of {store}")
        self._later(hub.hold(hub.subjects.store_change(store, ">")).release)

    def hold_writes(self) -> None:
        """A write reaches the hub late, perhaps when somebody else has long taken over."""
        hub = self.there.run.hub
        store = self.rng.choice(["lease", "lineage", "lineage"])
        self._note(f"hold writes of {store}")
        self._later(hub.hold(hub.subjects.store_write(store, ">"), count=1).release)

    def lose_answer(self) -> None:
        """A write is carried out, and its writer does not learn it."""
        store = self.rng.choice(["lease", "lineage", "lineage"])
        self._note(f"lose an answer of {store}")
        self.there.run.hub.table(store).num_answers_to_lose += 1

    # Rounds

    async def epoch(self) -> None:
        """Everybody takes part, and meanwhile something happens."""
        members = [member for member in self.there.members if member not in self._deaths]
        if self.rng.random() < 0.6:
            self.strike_at_a_point()
        tasks = dict(zip(members, self.there.start(members, timeout_seconds=ROUND_SECONDS), strict=True))
        for _ in range(self.rng.randint(0, 2)):
            await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.001, 0.01, 0.3, 2.0]))
            self.strike()
        outcomes = await asyncio.gather(*tasks.values(), return_exceptions=True)
        for member, outcome in zip(members, outcomes, strict=True):
            self._take(member, outcome)

    def _take(self, member: Member, outcome: RoundResult | BaseException) -> None:
        if isinstance(outcome, RoundFailedError):
            self._note(f"failed: {outcome}"[:400], member)
            assert member in self._deaths, f"member {member.number} lives, and has not heard of a commit: {outcome}"
            return
        assert isinstance(outcome, RoundResult), outcome
        commit = outcome.commit
        assert self.chain.commits[commit.epoch] == commit
        self.counts["held" if outcome.holds else "behind"] += 1
        if not outcome.holds:
            assert outcome.left_behind is not None
            assert outcome.left_behind.holders, "nobody to fetch from"
            return
        if member.is_aux:
            return
        digest = hashlib.sha256(member.values.numpy().tobytes()).hexdigest()
        assert self.averages.setdefault(commit.epoch, digest) == digest, "two members hold different averages"
        for index in range(0, ELEMENTS, ELEMENTS // 10):
            contributors_of(float(member.values[index]) - index % 7)
