"""What a coordinator says and writes: for as long as it is the coordinator, and exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from gatheringroom import KEY, Room

from potluck.errors import HubUnavailableError, RevisionConflictError
from potluck.hub.subjects import Subjects
from potluck.peer.identity import Identity
from potluck.round.coordinator import announcing as module
from potluck.round.coordinator.announcing import RETRY_SECONDS, Announcer
from potluck.round.coordinator.commitment import make_commit
from potluck.round.plan.messages import Abort, Commit, Plan
from potluck.round.plan.signing import read_word
from potluck.sim.virtualloop import LoopClock, in_virtual_time

IDENTITY = Identity.temporary()
SUBJECTS = Subjects("run")
AWAY = HubUnavailableError("the hub is away")


class Desk:
    """An announcer with its session, lease and lineage; what it publishes and commits is written down, and may fail."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.said: list[tuple[str, bytes]] = []
        self.committed: list[Commit] = []
        self.tries_at: list[float] = []
        self.counts: Counter[str] = Counter()
        self.token = KEY.token  # of its lease
        self.identity, self.peer_id, self.subjects, self.hub = IDENTITY, IDENTITY.peer_id, SUBJECTS, self
        self.is_away = False
        self.loses_lease = False  # at the first try
        self._outcomes = list(outcomes)
        self._clock = LoopClock()
        self.announcer = Announcer(self, self, self, self.counts)  # type: ignore[arg-type]

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.is_away:
            raise AWAY
        self.said.append((subject, payload))

    async def commit(self, commit: Commit, identity: Identity) -> None:
        assert identity is IDENTITY
        self.tries_at.append(self._clock.monotonic())
        if self.loses_lease:
            self.token = 0
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if outcome is not None:
            raise outcome
        self.committed.append(commit)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The milestones, as they are reached."""
    names: list[str] = []
    monkeypatch.setattr(module, "reach", lambda name, **_labels: names.append(name))
    return names


def plan() -> Plan:
    room = Room()
    room.add("A")
    return room.plan()


def commit(term: int = KEY.token) -> Commit:
    return make_commit(
        plan(), "d", (0,), None, term=term, coordinator=IDENTITY.peer_id, parent="", committed_at=1.0, seconds=0.0
    )


@in_virtual_time
async def test_a_plan_is_said_signed_and_then_the_milestone_is_reached(reached: list[str]) -> None:
    desk = Desk()
    await desk.announcer.publish(plan(), "round.plan_published")
    [(subject, data)] = desk.said
    assert subject == SUBJECTS.plan(IDENTITY.peer_id)
    assert read_word(data, IDENTITY.peer_id, "run") == plan()
    assert reached == ["round.plan_published"]


@in_virtual_time
async def test_what_cannot_be_said_is_counted_and_no_error() -> None:
    desk = Desk()
    desk.is_away = True
    await desk.announcer.say(Abort(key=KEY, reason="why not"))
    assert desk.said == []
    assert desk.counts == {"unsaid": 1}


@in_virtual_time
async def test_a_commit_is_written_once(reached: list[str]) -> None:
    desk = Desk()
    await desk.announcer.commit(commit(), plan())
    assert desk.committed == [commit()]
    assert desk.counts == {"commits": 1}
    assert reached == ["round.committing", "round.committed"]


@in_virtual_time
async def test_while_the_hub_is_away_it_is_tried_again(reached: list[str]) -> None:
    desk = Desk(AWAY, AWAY)
    await desk.announcer.commit(commit(), plan())
    first, *others = desk.tries_at
    assert [at - first for at in others] == pytest.approx([RETRY_SECONDS, 2 * RETRY_SECONDS], abs=0.001)
    assert len(desk.committed) == 1
    assert desk.counts == {"retries": 2, "commits": 1}


@in_virtual_time
async def test_whom_somebody_else_was_faster_than_gives_up(reached: list[str]) -> None:
    desk = Desk(RevisionConflictError("another came first"))
    await desk.announcer.commit(commit(), plan())
    assert (len(desk.tries_at), desk.committed) == (1, [])
    assert not desk.counts["commits"]
    assert reached == ["round.committing"]


@in_virtual_time
async def test_who_has_lost_the_lease_commits_nothing(reached: list[str]) -> None:
    desk = Desk()
    await desk.announcer.commit(commit(term=KEY.token - 1), plan())
    assert desk.tries_at == []
    desk = Desk(AWAY)
    desk.loses_lease = True
    await desk.announcer.commit(commit(), plan())
    assert (len(desk.tries_at), desk.committed) == (1, [])
