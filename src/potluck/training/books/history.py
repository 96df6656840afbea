"""The run's history (pure): what is written down of it, and how it lies in the hub's `history` store.

    page.N      PAGE_POINTS points of the run's figures, complete
    tail.now    the newest points, which become the next page
    round.K     one committed epoch with its members, for K the epoch modulo KEPT_ROUNDS
    failed.K.A  an attempt at an epoch that came to nothing, for K the epoch modulo KEPT_FAILURES, A the attempt
    preview.K   what the model said at an epoch, the newest KEPT_PREVIEWS, each in the place of the oldest

Points come at most once a second and at least every IDLE_SECONDS, so a week has some hundred thousand. A program that
reads takes all pages once and follows the tail: no change of the store is larger than a page, however long the run is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from potluck.errors import ProtocolError
from potluck.messages import Message
from potluck.round.outcome import FailedRound
from potluck.round.plan.messages import Commit

PAGE_POINTS = 256
KEPT_ROUNDS = 256
KEPT_FAILURES = 64  # epochs with attempts that failed
KEPT_ATTEMPTS = 4  # of each of them
KEPT_PREVIEWS = 128
MAX_PAGES = 1 << 16
LONGEST_NAME = 40
LONGEST_REASON = 1000
LONGEST_PREVIEW = 4000
TAIL_KEY = "tail.now"

POINT = np.dtype(
    [
        ("at", "<f8"),  # hub time
        ("epoch", "<i8"),
        ("loss", "<f4"),  # of all trainers, weighted by speed; nan: nobody said
        ("rate", "<f4"),  # samples per second of all
        ("alone", "<f4"),  # of the fastest trainer: what one alone would do
        ("trainers", "<i4"),
        ("peers", "<i4"),
        ("sent_bytes", "<f8"),  # in the rounds since the point before
        ("round_seconds", "<f4"),  # of the newest round; nan: there was none
    ]
)
Points = NDArray[np.void]


class HistoryTail(Message, frozen=True, kw_only=True):
    """The points that are not yet a whole page."""

    page: int  # the number that they will have
    points: bytes


class RoundMember(Message, frozen=True, kw_only=True, array_like=True):
    """What one member did in a round."""

    peer: str
    name: str = ""
    weight: float = 0.0
    holds: bool = True
    seconds: float = 0.0  # from the plan until it had the averages
    sent_bytes: int = 0
    received_bytes: int = 0


class RoundRecord(Message, frozen=True, kw_only=True):
    """One committed epoch."""

    epoch: int
    committed_at: float
    seconds: float  # from plan to commit
    since_last_seconds: float | None = None  # from the commit before to the plan; None: not known
    attempts: int = 1
    repairs: int = 0
    audited: int = 0
    coordinator: str = ""
    members: tuple[RoundMember, ...] = ()
    went_back_to: int | None = None  # an organiser's order: the state of that epoch was taken over again
    left_out: dict[str, str] = {}  # by name
    excluded: dict[str, str] = {}


class FailureRecord(Message, frozen=True, kw_only=True):
    """An attempt at an epoch that came to nothing; the next one is another record."""

    epoch: int
    attempt: int
    failed_at: float
    seconds: float  # from the plan until it was given up; 0: there was no plan
    phase: str
    reason: str
    members: tuple[str, ...] = ()  # by name
    troubles: dict[str, str] = {}  # by name: who was in trouble, and which


EVALUATION_LOSS = "evaluation_loss"  # among a preview's figures, where the recipe has one


class Preview(Message, frozen=True, kw_only=True):
    """What the model said at one epoch."""

    epoch: int
    at: float  # when that state was saved, seconds since 1970
    text: str
    figures: dict[str, float] = {}  # the recipe's evaluation


@dataclass(slots=True)
class HistoryLog:
    """The end of the history, as its writer holds it."""

    page: int = 0
    points: Points = field(default_factory=lambda: np.empty(0, POINT))

    @classmethod
    def of(cls, tail: HistoryTail) -> HistoryLog:
        """Go on where somebody else has stopped."""
        return cls(page=tail.page, points=read_points(tail.points))

    def append(self, **figures: float) -> None:
        """One more point."""
        point = np.zeros(1, POINT)
        for name in POINT.names or ():
            point[name] = figures[name]
        self.points = np.concatenate([self.points, point])

    def complete_page(self) -> tuple[str, bytes] | None:
        """Key and value of the page that is full, to be written before the tail goes on; None: it is not full."""
        if len(self.points) < PAGE_POINTS:
            return None
        return page_key(self.page), self.points[:PAGE_POINTS].tobytes()

    def turn_page(self) -> None:
        """The full page is written: begin the next."""
        self.page += 1
        self.points = self.points[PAGE_POINTS:]

    def tail(self) -> HistoryTail:
        """What is to be written of the rest."""
        return HistoryTail(page=self.page, points=self.points.tobytes())


def page_key(number: int) -> str:
    """Where a page stands."""
    return f"page.{number}"


def round_key(epoch: int) -> str:
    """Where an epoch's round stands, until KEPT_ROUNDS later."""
    return f"round.{epoch % KEPT_ROUNDS}"


def failure_key(epoch: int, attempt: int) -> str:
    """Where a failed attempt stands, until others take its place."""
    return f"failed.{epoch % KEPT_FAILURES}.{attempt % KEPT_ATTEMPTS}"


def preview_key(place: int) -> str:
    """Where a preview stands."""
    return f"preview.{place % KEPT_PREVIEWS}"


def read_points(data: bytes) -> Points:
    """Points out of the store; ProtocolError when they are none."""
    if len(data) % POINT.itemsize or len(data) > PAGE_POINTS * POINT.itemsize * 2:
        raise ProtocolError(f"{len(data)} bytes are no page of the history: ignored")
    return np.frombuffer(data, POINT)


def record_of(commit: Commit, names: Mapping[str, str], before: Commit | None) -> RoundRecord:
    """What is kept of a commit; `names` are the peers' own, shown and never trusted."""
    everybody = [member.peer for member in commit.members]
    called = shown_names([*everybody, *commit.left_out, *commit.excluded, commit.coordinator], names)
    began = commit.committed_at - commit.seconds
    follows = before is not None and before.epoch == commit.epoch - 1
    return RoundRecord(
        epoch=commit.epoch,
        committed_at=commit.committed_at,
        seconds=commit.seconds,
        since_last_seconds=max(0.0, began - before.committed_at) if follows and before is not None else None,
        attempts=commit.key.attempt + 1,
        repairs=commit.revisions,
        audited=commit.audited,
        coordinator=called[commit.coordinator],
        went_back_to=commit.restored.epoch if commit.restored is not None else None,
        members=tuple(
            RoundMember(
                peer=member.peer,
                name=called[member.peer],
                weight=member.weight,
                holds=member.holds,
                seconds=member.seconds,
                sent_bytes=member.sent_bytes,
                received_bytes=member.received_bytes,
            )
            for member in commit.members
        ),
        left_out={called[peer]: reason for peer, reason in commit.left_out.items()},
        excluded={called[peer]: exclusion.reason for peer, exclusion in commit.excluded.items()},
    )


def record_of_failure(failed: FailedRound, names: Mapping[str, str], at: float) -> FailureRecord:
    """What is kept of a round that was given up, told by names."""
    called = shown_names([*failed.members, *failed.troubles], names)

    def told(text: str) -> str:
        for peer in failed.members:
            text = text.replace(peer, called[peer])
        return text[:LONGEST_REASON]

    return FailureRecord(
        epoch=failed.key.epoch,
        attempt=failed.key.attempt + 1,
        failed_at=at,
        seconds=failed.seconds,
        phase=failed.phase,
        reason=told(failed.reason),
        members=tuple(called[peer] for peer in failed.members),
        troubles={called[peer]: told(trouble) for peer, trouble in failed.troubles.items()},
    )


def shown_names(peers: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """What peers call themselves, or the beginnings of their ids; both where two of them have the same name."""
    called = {peer: (names.get(peer) or peer[:12])[:LONGEST_NAME] for peer in peers}
    times = Counter(called.values())
    return {peer: name if times[name] == 1 else f"{name} ({peer[:8]})" for peer, name in called.items()}


def mean_loss(told: Iterable[tuple[float | None, float]]) -> float | None:
    """Of losses, each with its peer's speed: a fast peer has seen more of the data."""
    known = [(loss, rate) for loss, rate in told if loss is not None and math.isfinite(loss) and math.isfinite(rate)]
    weight = sum(rate for _, rate in known)
    return sum(loss * rate for loss, rate in known) / weight if weight > 0 else None
