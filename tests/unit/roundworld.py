"""Members of a round and a director, as pure cores on a network that reorders, kills, freezes and cuts.

Members may also have values that cannot be used, or lie about what they hold, and reports may come twice or never.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest

from potluck.round.coordinator.director import OTHER_DIGEST, Director, DirectorTimeouts, Finish, GiveUp, Publish
from potluck.round.member.exchange import (
    Complete,
    Discard,
    Exchange,
    Reduce,
    SendAverage,
    SendContribution,
)
from potluck.round.plan.messages import Offence, Part, Participant, Plan, Report, RoundKey, bitmap

KEY = RoundKey(epoch=1, token=7, attempt=0)
LIE = "a lie"
MOST_SILENT_SECONDS = 1.2  # with the third of a second between reports, what a director has patience with


def make_plan(num_members: int, num_reducers: int, chunks_each: int, clients: int = 0, aux: int = 0) -> Plan:
    members = tuple(
        Participant(
            peer=f"peer{i}",
            session="s",
            weight=0.0 if i < aux else float(i + 1),
            sends=i >= aux,
            reduces=i < num_members - clients,
        )
        for i in range(num_members)
    )
    parts = tuple(Part(reducer=r, start=r * chunks_each, stop=(r + 1) * chunks_each) for r in range(num_reducers))
    return Plan(key=KEY, members=members, parts=parts, layout="x", deadline=1e9)


@dataclass
class Member:
    index: int
    exchange: Exchange
    averages: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    made: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    early: list[tuple[Any, Any]] = field(default_factory=list)  # with their senders, as the incoming_frames keeps them
    heard_at: float = 0.0
    num_reports: int = 0
    offences: dict[int, str] = field(default_factory=dict)
    alive: bool = True
    frozen: bool = False
    poisoned: bool = False  # nobody can use its values
    lies: bool = False  # about its digest

    def digest(self) -> str:
        if self.lies and self.exchange.is_complete:
            return f"{LIE} of {self.index}"
        return str(sorted(self.averages.items())) if self.exchange.is_complete else ""

    def report(self, now: float) -> Report:
        exchange = self.exchange
        self.num_reports += 1
        return Report(
            key=KEY,
            number=self.num_reports,
            revision=exchange.plan.revision,
            held=bitmap(exchange.held),
            waiting_for=exchange.waiting_for,
            missing_from=exchange.missing_from,
            idle_seconds=now - self.heard_at,
            digest=self.digest(),
            offences=tuple(Offence(member=index, reason=reason) for index, reason in self.offences.items()),
        )


class World:
    """A round on a virtual network; every pair is a queue, and any queue may go next."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.members = [Member(i, Exchange(plan, i)) for i in range(len(plan.members))]
        self.director = Director(plan, DirectorTimeouts(), 0.0)
        self.queues: dict[tuple[Any, Any], deque[Any]] = defaultdict(deque)
        self.cut: set[tuple[int, int]] = set()
        self.suspects: set[int] = set()  # frozen now or once: may have seemed lost
        self.waited_seconds = 0.0
        self.outcome: Finish | GiveUp | None = None
        self.moved: list[tuple[str, int, int]] = []  # kind, chunk, generation
        for member in self.members:
            self.act(member, member.exchange.start())

    def act(self, member: Member, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendContribution(chunk, generation, to):
                    self.queues[member.index, to].append(("contribution", chunk, generation, None))
                case Reduce(chunk, generation, contributors):
                    self.reduce(member, chunk, generation, contributors)
                case SendAverage(chunk, generation, to):
                    for other in to:
                        self.queues[member.index, other].append(("average", chunk, generation, member.made[chunk]))
                case Discard(chunk):
                    member.averages.pop(chunk, None)
                case Complete():
                    pass
        self.queues[member.index, "director"].append(member.report(self.now))

    def reduce(self, member: Member, chunk: int, generation: int, contributors: tuple[int, ...]) -> None:
        if member.poisoned and member.index in contributors:  # its own values: those of others are refused as they come
            member.offences[member.index] = "poisoned"
            contributors = tuple(index for index in contributors if index != member.index)
        if not contributors:
            self.act(member, member.exchange.contributions_refused([member.index], chunk, generation))
            return
        member.made[chunk] = member.averages[chunk] = (generation, contributors)
        self.act(member, member.exchange.reduced(chunk, generation))

    def decide(self, decisions: list[Any]) -> None:
        for decision in decisions:
            if isinstance(decision, Publish):
                for member in self.members:
                    self.queues["director", member.index].append(decision.plan)
            else:
                assert self.outcome is None
                self.outcome = decision

    def movable(self) -> list[tuple[Any, Any]]:
        def ready(source: Any, target: Any) -> bool:
            if (source, target) in self.cut:
                return False
            sender = self.members[source] if isinstance(source, int) else None
            receiver = self.members[target] if isinstance(target, int) else None
            return not (sender and sender.frozen) and not (receiver and receiver.frozen)

        return sorted(((s, t) for (s, t), queue in self.queues.items() if queue and ready(s, t)), key=str)

    def deliver(self, pair: tuple[Any, Any]) -> None:
        source, target = pair
        item = self.queues[pair].popleft()
        if target == "director":
            self.decide(self.director.report_arrived(source, item, self.now))
            return
        member = self.members[target]
        if not member.alive:
            return
        if source == "director":
            member.heard_at = self.now
            self.act(member, member.exchange.revise(item))
            early, member.early = member.early, []
            for sender, mail in early:
                self.take(member, sender, mail)
            return
        self.take(member, source, item)

    def take(self, member: Member, source: int, item: Any) -> None:
        kind, chunk, generation, content = item
        if generation > member.exchange.generation(chunk):
            member.early.append((source, item))
            return
        self.moved.append((kind, chunk, generation))
        member.heard_at = self.now
        if kind == "contribution" and self.members[source].poisoned:
            if member.exchange.wants_contribution(source, chunk, generation):
                member.offences[source] = "poisoned"
                self.act(member, member.exchange.contributions_refused([source], chunk, generation))
        elif kind == "contribution":
            self.act(member, member.exchange.contribution_arrived(source, chunk, generation))
        elif member.exchange.wants_average(source, chunk, generation):
            member.averages[chunk] = content
            self.act(member, member.exchange.average_arrived(source, chunk, generation))

    def kill(self, index: int) -> None:
        member = self.members[index]
        member.alive = False
        for (source, target), queue in self.queues.items():
            if source == index and target != "director":
                for _ in range(self.rng.randint(0, len(queue))):
                    queue.pop()  # what the socket had not sent yet
            elif source == index:
                queue.clear()
        self.decide(self.director.member_gone(index, "killed", self.now))

    def freeze(self, index: int, *, frozen: bool = True) -> None:
        self.members[index].frozen = frozen
        self.suspects.add(index)

    def repeat_report(self, index: int) -> None:
        """The oldest report that is under way comes once more, after all others."""
        if queue := self.queues[index, "director"]:
            queue.append(queue[0])

    def lose_report(self, index: int) -> None:
        if queue := self.queues[index, "director"]:
            queue.popleft()

    def wait(self, seconds: float) -> None:
        """Nothing arrives for so long."""
        self.now += seconds
        self.waited_seconds += seconds
        self.decide(self.director.tick(self.now))

    def settle(self, steps: int = 400) -> None:
        """Let time pass until the round is over."""
        for _ in range(steps):
            for _ in range(2_000):
                pairs = self.movable()
                if not pairs or self.outcome:
                    break
                self.deliver(self.rng.choice(pairs))
            if self.outcome:
                return
            self.now += 0.3
            for member in self.members:
                if member.alive and not member.frozen:
                    self.queues[member.index, "director"].append(member.report(self.now))
            self.decide(self.director.tick(self.now))
        pytest.fail(f"the round did not end: {self.director.describe_trouble()}")

    def check(self) -> None:
        if not isinstance(self.outcome, Finish):
            assert isinstance(self.outcome, GiveUp)
            assert not self.must_finish(), self.outcome.reason
            return
        contents = [self.members[index].averages for index in self.outcome.holders]
        assert contents
        assert all(content == contents[0] for content in contents)
        assert set(contents[0]) == set(range(self.outcome.plan.num_chunks))
        for _generation, contributors in contents[0].values():
            assert contributors, "an average of nobody"
        if self.outcome.digest.startswith(LIE):
            others = [m for m in self.outcome.plan.members if m.trouble == OTHER_DIGEST]
            assert len(others) <= 1, "a liar's word stands against one other at most"

    def must_finish(self) -> bool:
        """Whether those who are well outnumber all who may seem lost, and can do all that there is to do."""
        if self.waited_seconds > MOST_SILENT_SECONDS:
            return False  # anybody may have seemed lost
        odd = {m.index for m in self.members if m.poisoned or m.lies} | self.suspects | set(chain(*self.cut))
        well = [self.director.plan.members[m.index] for m in self.members if m.alive and m.index not in odd]
        able = any(member.weight > 0 for member in well) and any(member.reduces for member in well)
        return able and len(well) > len(odd)
