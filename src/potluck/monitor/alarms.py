"""When an organiser should look: what is wrong with a run, and what to do about it (pure).

Events in, alarms out. What peers say of themselves raises an alarm at most: nothing here changes the run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal

from potluck.errors import ConfigurationError
from potluck.hub.presence import Beacon, Presence
from potluck.monitor.cutalarm import CutAlarm
from potluck.round.plan.messages import Commit, CommittedMember
from potluck.run.hostnews import FRESH_SECONDS, HostNews
from potluck.state.announcement import Kept
from potluck.training.books.history import shown_names

Kind = Literal[
    "standstill",
    "loss not finite",
    "loss rising",
    "all clients",
    "dropped",
    "claims",
    "disk",
    "hub server",
    "states differ",
    "no backup",
    "no cut",
]
HOST_KINDS: tuple[Kind, ...] = ("disk", "hub server")

SILENT_SECONDS = 10.0  # a beacon older than that says nothing any more
LONGEST_NAME = 40
KEPT_EPOCHS = 512
KEPT_EVALUATIONS = 64
NOISE_FACTOR = 7.0  # the best window of many is always some noise below the others
KEPT_DEATHS = 64
MAX_NAMES = 4096
NAMED = 3  # peers in a text


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmConfig:
    """When to speak."""

    standstill_seconds: float = 60.0
    """No epoch for so long is nothing unusual."""

    standstill_factor: float = 5.0
    """Nor is so many times what epochs have taken lately."""

    loss_window: int = 30
    """Over how many epochs losses are averaged."""

    loss_factor: float = 1.2
    """The loss rises when the newest is so many times the best one, and beyond what noise explains."""

    clients_seconds: float = 30.0
    """How long peers have, to find out that somebody can be dialled."""

    dropped_epochs: int = 5
    """A peer left out of so many of the last 20 epochs."""

    deaths: int = 3
    """Or one that died so often within ten minutes."""

    backup_seconds: float = 600.0
    """No newer backup for so long is nothing unusual …"""

    backup_epochs: int = 30
    """… nor while so few epochs pass."""

    cut_seconds: float = 1200.0
    """So long a cut may take to be on trusted disks, where lines are slow."""

    def __post_init__(self) -> None:
        if self.loss_window < 2 or self.loss_factor <= 1.0 or self.dropped_epochs < 1 or self.deaths < 1:
            raise ConfigurationError(f"{self}: windows need 2 epochs, the factor is above 1, and counts are at least 1")


RECENT_EPOCHS = 20
DEATH_SECONDS = 600.0
FAR_MORE = 4.0  # times what counts: no honest peer is so far beyond the cap by chance


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something to look at."""

    kind: Kind
    text: str
    since: float  # by the clock of the watcher
    peer: str = ""

    @property
    def key(self) -> tuple[Kind, str]:
        """By which one is known from another."""
        return self.kind, self.peer


@dataclass(slots=True)
class _Peer:
    presence: Presence
    trouble: str = ""
    loss: float | None = None
    heard_at: float = -math.inf


@dataclass(slots=True)
class Alarms:
    """What is wrong with one run, as far as a watcher can tell."""

    config: AlarmConfig = field(default_factory=AlarmConfig)
    cuts: CutAlarm = field(default_factory=CutAlarm)
    """To be told of groups beside `main`, and of cuts."""
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _commits: deque[tuple[float, Commit]] = field(default_factory=lambda: deque(maxlen=RECENT_EPOCHS))
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_EPOCHS))
    _deaths: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_DEATHS))
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _moved_at: float | None = None  # when an epoch came last, or training became possible
    _clients_since: float | None = None
    _saved: int = -1  # the newest epoch that is on a disk that the run trusts …
    _saved_at: float | None = None  # … since when …
    _saved_head: int = 0  # … and where the run was then
    _evaluations: dict[int, float] = field(default_factory=dict)  # losses on data that nobody trains on, by epoch
    _restored_at: int = 0  # the newest epoch whose state is an earlier one
    _is_rising: bool = False  # the loss, as told last
    _hosts: dict[str, tuple[float, HostNews]] = field(default_factory=dict)

    # What happens

    def peer_changed(self, presence: Presence, now: float) -> None:
        """What the guard says about a peer."""
        known = self._peers.get(presence.peer)
        if presence.state in ("dead", "left"):
            self._peers.pop(presence.peer, None)
            if known is not None and presence.state == "dead":
                self._deaths.append((now, presence.peer))
            return
        if len(self._names) >= MAX_NAMES:
            self._names.clear()  # those who are still there say theirs again
        self._names[presence.peer] = presence.card.name[:LONGEST_NAME] or presence.peer[:12]
        if known is None or known.presence.card.session != presence.card.session:
            if presence.card.role == "trainer" and not self._alive("trainer"):
                self._moved_at = now  # nobody could train before
            self._peers[presence.peer] = _Peer(presence)
        else:
            known.presence = presence

    def beacon_came(self, peer: str, beacon: Beacon, now: float) -> None:
        """What a peer says about itself; of strangers, nothing."""
        known = self._peers.get(peer)
        if known is not None and known.presence.card.session == beacon.session:
            known.loss, known.heard_at = beacon.loss, now

    def kept(self, peer: str, kept: Kept, now: float) -> None:
        """What a peer says of the states that it has; only those count that the run trusts."""
        known = self._peers.get(peer)
        if known is None or known.presence.card.session != kept.session or not _is_trusted(known.presence):
            return
        known.trouble = kept.trouble
        newest = max((state.epoch for state in kept.saved), default=-1)
        if newest > self._saved or self._saved_at is None:
            self._saved, self._saved_at, self._saved_head = newest, now, self._head

    def committed(self, commit: Commit, now: float) -> None:
        """An epoch is final."""
        if commit.restored is not None and self._saved_at is not None:
            self._saved, self._saved_at, self._saved_head = -1, now, commit.epoch
        self._commits.append((now, commit))
        self._moved_at = now
        if commit.restored is not None:
            self._losses.clear()  # what comes is compared with what comes
            self._evaluations.clear()
            self._restored_at = commit.epoch
            return
        known = [loss for loss in self._told_losses(now) if math.isfinite(loss)]
        if known:
            self._losses.append(sum(known) / len(known))

    def host_told(self, peer: str, news: HostNews, now: float) -> None:
        """What a host says about itself. Believed of trusted peers that may coordinate."""
        known = self._peers.get(peer)
        if known is not None and known.presence.trusted and known.presence.coordinates:
            self._hosts[peer] = (now, news)

    def evaluated(self, epoch: int, loss: float) -> None:
        """The host has tried the state of an epoch on data that nobody trains on."""
        if epoch > self._restored_at and math.isfinite(loss):
            self._evaluations[epoch] = loss
            if len(self._evaluations) > KEPT_EVALUATIONS:
                del self._evaluations[min(self._evaluations)]

    # What follows from it

    def look(self, now: float, *, is_paused: bool = False, coordinator: str = "") -> list[Alarm]:
        """What is wrong now; `coordinator` is empty where nobody coordinates."""
        if is_paused or self._moved_at is None:
            self._moved_at = now  # from here on, when training can go on
        found = [
            *self._standstill(now, is_paused, coordinator),
            *self._bad_losses(now),
            *self._rising_loss(),
            *self._all_clients(now),
            *self._dropped(now),
            *self._troubles(),
            *self._no_backup(now),
            *self._no_cut(now),
            *self._claims(),
            *self._host_troubles(now),
        ]
        self._since = {key: self._since.get(key, now) for key, _ in found}
        return [Alarm(kind, text, self._since[kind, peer], peer) for (kind, peer), text in found]

    def _standstill(self, now: float, is_paused: bool, coordinator: str) -> Iterator[tuple[tuple[Kind, str], str]]:
        assert self._moved_at is not None
        quiet = now - self._moved_at
        usual = self._seconds_per_epoch()
        limit = max(self.config.standstill_seconds, self.config.standstill_factor * (usual or 0.0))
        trainers = self._alive("trainer")
        has_begun = bool(self._commits) or bool(trainers)
        if is_paused or not has_begun or quiet <= limit:
            return
        if not trainers:
            why = "nobody trains: invite somebody, or join yourself"
        elif not coordinator:
            why = "nobody coordinates: start the host again, or let a full peer coordinate (potluck members invite)"
        else:
            why = "see whether trainers make samples (potluck monitor), and what the host's log says"
        often = f", where one took {usual:.0f} s before" if usual is not None else ""
        yield ("standstill", ""), f"no epoch for {quiet:.0f} s{often}: {why}"

    def _bad_losses(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        bad = [peer for peer, loss in self._losses_by_peer(now) if not math.isfinite(loss)]
        if bad:
            who = self._listed(bad)
            text = f"the loss is not finite at {who}: take a smaller learning rate (potluck run set), or roll back"
            yield ("loss not finite", ""), text

    def _rising_loss(self) -> Iterator[tuple[tuple[Kind, str], str]]:
        rise = self._held_out_rise() if self._is_evaluated() else self._training_rise()
        self._is_rising = rise is not None
        if rise is not None:
            remedy = "Take a smaller learning rate (potluck run set), or roll back (potluck run rollback)"
            yield ("loss rising", ""), f"the loss rises: {rise}. {remedy}"

    def _is_evaluated(self) -> bool:
        """Whether the model's loss on data that nobody trains on is known, and known to be of now."""
        epochs = sorted(self._evaluations)
        if len(epochs) < 3 or not self._commits:
            return False
        usual = median([later - earlier for earlier, later in pairwise(epochs)])
        return self._commits[-1][1].epoch - epochs[-1] <= max(3 * usual, self.config.loss_window)

    def _held_out_rise(self) -> str | None:
        """That loss has little noise: two in a row that are well above the best one mean something."""
        losses = [self._evaluations[epoch] for epoch in sorted(self._evaluations)]
        best, newest = min(losses[:-2]), min(losses[-2:])
        if newest <= best + self._eased((self.config.loss_factor - 1.0) * abs(best)):
            return None
        return f"{losses[-1]:.4g} on data that nobody trains on, {best:.4g} at its best"

    def _training_rise(self) -> str | None:
        """What peers say of their own batches, in windows: how much one differs from the next is the noise.

        Batches near in time are alike (the same shard, the same peers), so windows have to be long, and a rise has to
        last for two of them. With noise whose memory is 33 epochs this speaks up once in 6,000 epochs without reason.
        """
        window = self.config.loss_window
        num_windows = len(self._losses) // window
        if num_windows < 6:
            return None
        losses = list(self._losses)[-num_windows * window :]
        means = [_mean(losses[start : start + window]) for start in range(0, len(losses), window)]
        before, recent = means[:-2], min(means[-2:])
        best = min(before)
        noise = math.sqrt(_mean([(later - earlier) ** 2 for earlier, later in pairwise(before)]) / 2)
        if recent <= best + self._eased(max((self.config.loss_factor - 1.0) * abs(best), NOISE_FACTOR * noise)):
            return None
        return f"{means[-1]:.4g} over the last {window} epochs, {best:.4g} at its best"

    def _eased(self, margin: float) -> float:
        """What was told stays told until it is half as bad: else it would come and go with the noise."""
        return margin / 2 if self._is_rising else margin

    def _all_clients(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        computing = [known for known in self._peers.values() if known.presence.card.role != "observer"]
        trainers = self._alive("trainer")
        if len(trainers) < 2 or any(known.presence.card.addresses for known in computing):
            self._clients_since = None
            return
        if self._clients_since is None:
            self._clients_since = now
        if now - self._clients_since > self.config.clients_seconds:
            text = (
                "everybody is a client peer, so all bytes go through the hub: open a port on one machine and have it "
                "join with --listen tcp://0.0.0.0:PORT, or add an aux peer with a public address"
            )
            yield ("all clients", ""), text

    def _dropped(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        left_out = Counter(peer for _, commit in self._commits for peer in commit.left_out)
        reasons = {peer: why for _, commit in self._commits for peer, why in commit.left_out.items()}
        died = Counter(peer for at, peer in self._deaths if now - at <= DEATH_SECONDS)
        for peer in sorted(left_out.keys() | died.keys()):
            name = self._called(peer)
            if left_out[peer] >= self.config.dropped_epochs:
                last = f"{left_out[peer]} of the last {len(self._commits)} epochs"
                text = f"{name} was left out of {last} (last: {reasons[peer]})"
                yield ("dropped", peer), f"{text}. Its line or machine may be too slow; `potluck doctor` there tells"
            elif died[peer] >= self.config.deaths:
                text = f"{name} was lost {died[peer]} times in ten minutes: have its person look at its log"
                yield ("dropped", peer), text

    def _troubles(self) -> Iterator[tuple[tuple[Kind, str], str]]:
        texts = {known.trouble for known in self._peers.values() if known.trouble}
        if texts:
            yield ("states differ", ""), min(texts)

    def _no_backup(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        config = self.config
        if self._saved_at is None or now - self._saved_at <= config.backup_seconds:
            return
        num_epochs = self._head - self._saved_head
        if num_epochs <= config.backup_epochs:
            return
        what = f"the newest backup is of epoch {self._saved}" if self._saved >= 0 else "there is no backup"
        text = (
            f"{what}, and the run is at epoch {self._head}: if all trainers died now, what came since would be lost. "
            "See what the host's log says of the run's state and of its disk, or start a peer that keeps states there "
            "(potluck aux, invited with --trusted)"
        )
        yield ("no backup", ""), text

    def _no_cut(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        if text := self.cuts.text(now, self.config.cut_seconds):
            yield ("no cut", ""), text

    def _claims(self) -> Iterator[tuple[tuple[Kind, str], str]]:
        """Who says to have made more samples than can be: once is enough where it is far more."""
        cut: dict[str, list[CommittedMember]] = {}
        for _, commit in self._commits:
            for member in commit.members:
                if member.claimed:
                    cut.setdefault(member.peer, []).append(member)
        for peer, members in sorted(cut.items()):
            last = members[-1]
            if len(members) < self.config.dropped_epochs and all(m.claimed < FAR_MORE * m.weight for m in members):
                continue
            name = self._called(peer)
            text = (
                f"{name} claims {last.claimed:,.0f} samples for an epoch, and {last.weight:,.0f} count: more than the "
                "others' speed makes plausible. Where others have only just begun, this passes. If it stays and it "
                "really is so fast, invite it as trusted, or raise weight_cap in run.toml and start the host again; if "
                "not, ban it (potluck members ban)"
            )
            yield ("claims", peer), text

    def _host_troubles(self, now: float) -> Iterator[tuple[tuple[Kind, str], str]]:
        self._hosts = {peer: told for peer, told in self._hosts.items() if now - told[0] <= FRESH_SECONDS}
        for peer, (_, news) in self._hosts.items():
            for kind in HOST_KINDS:
                if text := news.troubles.get(kind):
                    yield (kind, peer), text

    # What it looks at

    @property
    def _head(self) -> int:
        return self._commits[-1][1].epoch if self._commits else 0

    def _alive(self, role: str) -> list[str]:
        return [peer for peer, known in self._peers.items() if known.presence.card.role == role]

    def _losses_by_peer(self, now: float) -> Iterator[tuple[str, float]]:
        for peer, known in self._peers.items():
            if known.loss is not None and now - known.heard_at <= SILENT_SECONDS:
                yield peer, known.loss

    def _told_losses(self, now: float) -> Iterator[float]:
        return (loss for _, loss in self._losses_by_peer(now))

    def _seconds_per_epoch(self) -> float | None:
        times = [commit.committed_at for _, commit in self._commits]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return median(gaps) if gaps else None

    def _listed(self, peers: Sequence[str]) -> str:
        names = [self._called(peer) for peer in peers]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more

    def _called(self, peer: str) -> str:
        return shown_names(self._names.keys() | {peer}, self._names)[peer]


def _is_trusted(presence: Presence) -> bool:
    return presence.trusted or presence.coordinates


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
