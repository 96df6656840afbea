"""The run as it is now, out of what peers say (pure).

What a peer says of itself is shown, never trusted: who is in the run is the guard's word, which epochs are committed is
the lineage's.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from potluck.hub.presence import Beacon, Presence
from potluck.hub.subjects import MAIN
from potluck.round.plan.messages import Commit
from potluck.run.cutboard import Cut
from potluck.run.linknews import LinkFigures, LinkNews
from potluck.training.books.history import mean_loss

SILENT_SECONDS = 10.0  # a beacon older than that says nothing any more
KEPT_COMMITS = 32  # from which the speed of epochs is taken
LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer, as a table shows it."""

    peer: str
    name: str
    role: str
    place: str  # kaggle, colab, local …
    state: str
    reach: str  # full: others can dial it; client: it only dials out
    epoch: int
    samples: int
    samples_per_second: float
    loss: float | None
    upload_bytes_per_second: float | None
    download_bytes_per_second: float | None
    coordinates: bool = False  # now
    version: str = ""
    share: float = 0.0  # of the samples per second of all
    since: float = 0.0  # hub time of the last change of state
    num_direct: int = 0  # links
    num_relayed: int = 0


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A link between two peers that are both there."""

    one: str
    other: str
    path: str  # direct or relay
    bytes_per_second: float | None  # the faster way
    rtt_seconds: float | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of the run, as a table shows it."""

    name: str
    epoch: int
    num_members: int
    coordinator: str
    committed_at: float | None = None  # hub time of its newest epoch
    cut_epoch: int | None = None  # its part of the newest cut that is safe on disks; None: it has none


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole run in a few figures."""

    run: str
    epoch: int
    samples: int  # towards the next epoch
    target: int
    samples_per_second: float
    loss: float | None
    seconds_per_epoch: float | None
    due_in_seconds: float | None
    num_trainers: int
    num_peers: int
    bytes_per_epoch: int
    coordinator: str
    fastest_samples_per_second: float = 0.0  # of one peer: what it would do alone
    roles: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    committed_at: float | None = None  # hub time of the newest epoch
    held_out_loss: float | None = None  # on data that nobody trains on
    held_out_epoch: int | None = None  # … of the state of this epoch


@dataclass(slots=True)
class _Heard:
    beacon: Beacon
    at: float


@dataclass(slots=True)
class RunView:
    """What is known of one run."""

    run: str
    coordinator: str = ""
    _presences: dict[str, Presence] = field(default_factory=dict)
    _beacons: dict[str, _Heard] = field(default_factory=dict)
    _links: dict[str, LinkNews] = field(default_factory=dict)
    _group_heads: dict[str, Commit] = field(default_factory=dict)
    _group_holders: dict[str, str] = field(default_factory=dict)
    cut: Cut | None = None
    """The newest that is safe on disks, where the run has several groups."""
    _commits: deque[Commit] = field(default_factory=lambda: deque(maxlen=KEPT_COMMITS))
    _evaluated: tuple[int, float] | None = None  # the newest epoch, and its loss

    def evaluated(self, epoch: int, loss: float) -> None:
        """The model was looked at with data that nobody trains on."""
        if self._evaluated is None or epoch >= self._evaluated[0]:
            self._evaluated = epoch, loss

    def peer_changed(self, presence: Presence) -> None:
        """What the guard says about a peer."""
        if presence.state in ("dead", "left"):
            self._presences.pop(presence.peer, None)
            self._beacons.pop(presence.peer, None)
            self._links.pop(presence.peer, None)
        else:
            self._presences[presence.peer] = presence

    def beacon_came(self, peer: str, beacon: Beacon, now: float) -> None:
        """What a peer says about itself; of strangers, nothing."""
        presence = self._presences.get(peer)
        if presence is not None and presence.card.session == beacon.session:
            self._beacons[peer] = _Heard(beacon, now)

    def links_told(self, peer: str, news: LinkNews) -> None:
        """What a peer says about its links."""
        if peer in self._presences:
            self._links[peer] = news

    def committed(self, commit: Commit) -> None:
        """An epoch is final."""
        self._commits.append(commit)

    def group_committed(self, group: str, commit: Commit) -> None:
        """An epoch of a group other than `main` is final."""
        self._group_heads[group] = commit

    def group_held(self, group: str, holder: str) -> None:
        """Who coordinates a group other than `main`."""
        self._group_holders[group] = holder

    @property
    def epoch(self) -> int:
        """How many updates are committed."""
        return self._commits[-1].epoch if self._commits else 0

    def rows(self, now: float) -> list[PeerRow]:
        """All peers, the trainers first, the fastest of them on top."""
        rows = [self._row(presence, now) for presence in self._presences.values()]
        if total := sum(row.samples_per_second for row in rows):
            rows = [replace(row, share=row.samples_per_second / total) for row in rows]
        return sorted(rows, key=lambda row: (row.role != "trainer", -row.samples_per_second, row.name, row.peer))

    def overview(self, now: float) -> Overview:
        """The whole run."""
        everybody = self.rows(now)
        rows = [row for row in everybody if row.role == "trainer"]
        at_work = [row for row in rows if row.epoch == self.epoch]
        rate = sum(row.samples_per_second for row in rows)
        samples = sum(row.samples for row in at_work)
        target = self._target(now)
        missing = target - samples
        return Overview(
            run=self.run,
            epoch=self.epoch,
            samples=samples,
            target=target,
            samples_per_second=rate,
            loss=mean_loss((row.loss, row.samples_per_second) for row in rows),
            seconds_per_epoch=self._seconds_per_epoch(),
            due_in_seconds=max(0.0, missing / rate) if target and rate > 0 else None,
            num_trainers=len(rows),
            num_peers=len(self._presences),
            bytes_per_epoch=sum(member.sent_bytes for member in self._commits[-1].members) if self._commits else 0,
            coordinator=self._name(self.coordinator),
            fastest_samples_per_second=max((row.samples_per_second for row in rows), default=0.0),
            roles=dict(Counter(row.role for row in everybody).most_common()),
            places=dict(Counter(row.place for row in everybody).most_common()),
            committed_at=self._commits[-1].committed_at if self._commits else None,
            held_out_loss=self._evaluated[1] if self._evaluated is not None else None,
            held_out_epoch=self._evaluated[0] if self._evaluated is not None else None,
        )

    def groups(self) -> list[GroupRow]:
        """All groups that have members or epochs, `main` first; one, where a run has no other."""
        members = Counter(group for presence in self._presences.values() for group in presence.card.groups)
        heads, holders = dict(self._group_heads), {**self._group_holders, MAIN: self.coordinator}
        if self._commits:
            heads[MAIN] = self._commits[-1]
        names = sorted({*members, *heads} - {MAIN})
        return [self._group_row(name, members[name], heads.get(name), holders.get(name, "")) for name in (MAIN, *names)]

    def _group_row(self, name: str, num_members: int, head: Commit | None, holder: str) -> GroupRow:
        return GroupRow(
            name=name,
            epoch=head.epoch if head is not None else 0,
            num_members=num_members,
            coordinator=self._name(holder) if holder else "",
            committed_at=head.committed_at if head is not None else None,
            cut_epoch=self.cut.epochs.get(name) if self.cut is not None else None,
        )

    def links(self) -> list[LinkRow]:
        """Which peers are linked. Each end may have told of a link: the one that knows its speed counts."""
        told: dict[tuple[str, str], list[LinkFigures]] = {}
        for peer, news in self._links.items():
            for link in news.links:
                if link.peer in self._presences:
                    told.setdefault((min(peer, link.peer), max(peer, link.peer)), []).append(link)
        return [_link_row(one, other, ends) for (one, other), ends in sorted(told.items())]

    def _row(self, presence: Presence, now: float) -> PeerRow:
        card = presence.card
        heard = self._beacons.get(presence.peer)
        news = self._links.get(presence.peer, LinkNews())
        links = [link for link in news.links if link.peer in self._presences]
        beacon = heard.beacon if heard is not None and now - heard.at <= SILENT_SECONDS else Beacon(session="")
        return PeerRow(
            peer=presence.peer,
            name=self._name(presence.peer),
            role=card.role,
            place=card.service[:LONGEST_NAME],
            state=presence.state,
            reach="full" if card.addresses else "client",
            epoch=beacon.epoch,
            samples=beacon.samples,
            samples_per_second=beacon.samples_per_second if math.isfinite(beacon.samples_per_second) else 0.0,
            loss=beacon.loss if beacon.loss is not None and math.isfinite(beacon.loss) else None,
            upload_bytes_per_second=card.upload_bytes_per_second,
            download_bytes_per_second=card.download_bytes_per_second,
            coordinates=presence.peer == self.coordinator,
            version=card.version[:LONGEST_NAME],
            since=presence.since,
            num_direct=sum(link.path == "direct" for link in links),
            num_relayed=sum(link.path == "relay" for link in links),
        )

    def _name(self, peer: str) -> str:
        presence = self._presences.get(peer)
        return (presence.card.name[:LONGEST_NAME] if presence is not None else "") or peer[:12]

    def _target(self, now: float) -> int:
        targets = [h.beacon.target for h in self._beacons.values() if now - h.at <= SILENT_SECONDS and h.beacon.target]
        return max(targets, key=lambda target: (targets.count(target), target), default=0)

    def _seconds_per_epoch(self) -> float | None:
        if len(self._commits) < 2:
            return None
        first, last = self._commits[0], self._commits[-1]
        epochs = last.epoch - first.epoch
        return (last.committed_at - first.committed_at) / epochs if epochs > 0 else None


def _link_row(one: str, other: str, ends: list[LinkFigures]) -> LinkRow:
    speeds = [s for end in ends for s in (end.upload_bytes_per_second, end.download_bytes_per_second) if _is_figure(s)]
    trips = [end.rtt_seconds for end in ends if _is_figure(end.rtt_seconds)]
    return LinkRow(
        one=one,
        other=other,
        path="direct" if any(end.path == "direct" for end in ends) else "relay",
        bytes_per_second=max((speed for speed in speeds if speed is not None), default=None),
        rtt_seconds=min((trip for trip in trips if trip is not None), default=None),
    )


def _is_figure(value: float | None) -> bool:
    return value is not None and 0.0 <= value < math.inf
