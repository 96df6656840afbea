"""What keepers say they hold, and who may be believed (pure).

A state has no signature of its own: an epoch is committed before anybody has applied its averages. What vouches for a
state is who says to hold it. The hub lets nobody speak in another's name, the guard tells which person each peer
belongs to and which the organisers trust, and the coordinator's signed commit tells who holds the averages that the
state comes from. So, of the keepers that are present:

1. peers that may coordinate or are trusted with reducing decide, if there are any: they could spoil the run anyway;
2. else those that the commit names as holders of the epoch;
3. else all others: they can only have fetched it, when it was vouched for.

Within such a tier each *person* has one vote, however many peers it runs. Of the first tier, the state with most votes
is believed, and that of the first peer by id in a tie.
Strangers are believed only where more than half of all keepers among them say the same, those included that have not
spoken of this epoch yet: being the first to speak gains a liar nothing. Keepers that are more than one epoch behind
are not waited for, nor those that do not train: they take a state over now and then. At epoch 0 nothing is trained yet,
and most votes of all who have spoken do among strangers too: so peers that begin with different weights agree on one of
them.

Machines that compute differently hold other bits and the same values. Where no digest has a majority, a peer that needs
a verdict compares values (appraising.py), and peers whose states are the same but for rounding are one *camp*: it has
all of their votes, and one of its digests counts. Camps that are equally large, of strangers who have all spoken, lock
nothing: that of the first peer by id is taken, and the verdict is *contested*, which is told to the organisers.

What is compared and voted on is what peers should hold alike. Where a state has a part that is each peer's own, that
part is taken from one of those who vouch for the rest: they made the epoch, and could have spoilt its averages as well.
A keeper that did not serve its announced state is asked last from then on.

A verdict is *settled* when those who are yet to speak could not change it, trainers who are far behind included. Who
fetches need not wait for that, but who compares its own state does: else one that deviates could win by speaking first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import msgspec

from potluck.errors import ProtocolError
from potluck.hub.presence import Presence
from potluck.messages import Message
from potluck.peer.roster import Roster

KEPT, WANTED = "state", "state-wanted"  # topics of the run's news
MAX_KEPT = 32
MAX_SAVED = 16
MAX_TROUBLE = 500

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Counted = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class KeptState(Message, frozen=True, kw_only=True):
    """One state that a peer holds and serves, or had."""

    epoch: Counted  # that the state belongs to
    digest: Digest
    num_bytes: Counted
    made_at: Counted  # the epoch it was made at; another than `epoch` when the run went on from a backup
    is_backup: bool = False  # read from disk: fit to go on from, but no claim that the run has this state now
    is_served: bool = True  # False: no longer held, and told so that others can compare
    common: Digest | None = None  # of what all peers should hold alike, where a part of it is the keeper's own
    cut: Counted = 0  # held, or saved, as the group's part of this cut

    @property
    def compared(self) -> str:
        """The digest that is compared with those of others."""
        return self.common or self.digest


class Kept(Message, frozen=True, kw_only=True):
    """All states that a peer holds, published when that changes, now and then, and when somebody asks."""

    session: Annotated[str, msgspec.Meta(max_length=128)]
    states: Annotated[tuple[KeptState, ...], msgspec.Meta(max_length=MAX_KEPT)] = ()
    saved: Annotated[tuple[KeptState, ...], msgspec.Meta(max_length=MAX_SAVED)] = ()  # on its disk: no offer yet
    leaving: bool = False  # who wants to have one of them should fetch it now
    beginner: Annotated[str, msgspec.Meta(max_length=128)] = ""  # by a coordinator: who begins a run that has nothing …
    begins_at: Counted = 0  # … when it is at this epoch
    trouble: Annotated[str, msgspec.Meta(max_length=MAX_TROUBLE)] = ""  # for the organisers, with the remedy
    cut: Counted = 0  # by a coordinator: for this cut, peers that have the state must hold it …
    cut_epoch: Counted = 0  # … of this epoch

    @property
    def says_anything(self) -> bool:
        """Whether others need to hear it."""
        return bool(self.states or self.saved or self.beginner or self.trouble or self.cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state of an epoch, as far as can be told."""

    epoch: int
    digest: str
    """Of the state to fetch."""

    num_bytes: int
    made_at: int
    keepers: tuple[str, ...]
    """Who serves it, or one that differs only in what is each peer's own."""

    is_trusted: bool
    """Whether peers vouch for it that are trusted anyway."""

    vouchers: tuple[str, ...] = ()
    """The holders of exactly the bits to compare."""

    equivalent: frozenset[str] = frozenset()
    """The digests of states that are the same but for rounding, where values were compared; else of this one alone."""

    dissenters: tuple[str, ...] = ()
    """Who announces another state for this epoch."""

    is_contested: bool = False
    """Whether as many vouch for another state, by value: it was chosen so that the run goes on."""

    is_settled: bool = True
    """Whether it stays the same whatever those say who have not spoken yet."""

    common: str = ""
    """The digest of what all should hold alike; empty: not known."""

    is_backup: bool = False
    """Whether it was read from disk."""

    @property
    def is_replaceable(self) -> bool:
        """Whether others serve a state that differs from this one only in what is each peer's own."""
        return self.common not in ("", self.digest) and len(self.keepers) > 1


@dataclass(frozen=True, slots=True)
class Claim:
    """One keeper's word on one epoch; None: it has said nothing of it."""

    peer: str
    person: str
    tier: int
    state: KeptState | None
    is_late: bool = False
    """A trainer whose last word was of a much earlier epoch: not waited for, but it may have more to say."""

    camp: str = ""
    """Common to all whose states are the same but for rounding; empty: values were not compared."""

    @property
    def vote(self) -> str:
        """What it votes for; empty: it has not spoken."""
        return self.camp or (self.state.compared if self.state is not None else "")


@dataclass(frozen=True, slots=True)
class Appraised:
    """What peers hold of one epoch, compared by value (appraising.py)."""

    epoch: int
    states: Mapping[str, KeptState]
    """What each peer is bound to."""

    camps: Mapping[str, str]
    """Common to all peers whose states are the same but for rounding."""

    refusing: Collection[str] = ()
    """Keepers that have repeatedly not answered: their claim counts, and they are no longer waited for."""

    def applied(self, claims: Iterable[Claim]) -> list[Claim]:
        """The claims with their camps. A keeper without an answer is in the camp of its bits, or has not voted yet."""
        by_digest = {self.states[peer].compared: camp for peer, camp in self.camps.items() if peer in self.states}
        found = []
        for claim in claims:
            state = self.states.get(claim.peer, claim.state)
            camp = self.camps.get(claim.peer) or (by_digest.get(state.compared, "") if state is not None else "")
            if not camp and claim.peer not in self.refusing:
                state = None
            found.append(replace(claim, state=state, camp=camp, is_late=claim.is_late and state is None))
        return found


class Announcements:
    """What peers announce. Those that are not present, or were started anew since, do not count."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def take(self, peer: str, kept: Kept) -> None:
        """A peer has spoken."""
        if len({(state.epoch, state.is_backup) for state in kept.states}) != len(kept.states):
            raise ProtocolError(f"{peer} announces several states for one epoch: ignored")
        self._kept[peer] = kept

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        self._kept.pop(peer, None)

    def is_leaving(self, peer: str) -> bool:
        """Whether a peer has said that it is about to be gone."""
        kept = self._kept.get(peer)
        return kept is not None and kept.leaving

    def newest_of(self, peer: str) -> int:
        """The newest epoch whose state a peer serves from memory; -1: none."""
        kept = self._kept.get(peer)
        states = kept.states if kept is not None else ()
        return max((state.epoch for state in states if state.is_served and not state.is_backup), default=-1)

    def beginner(self, coordinator: str, roster: Roster, epoch: int) -> str:
        """The peer that a coordinator has chosen to begin the run at this epoch; empty: nobody."""
        kept = self._of_present(coordinator, roster)
        return kept.beginner if kept is not None and kept.begins_at == epoch else ""

    def wanted_for_cut(self, coordinator: str, roster: Roster) -> tuple[int, int]:
        """The cut that a coordinator wants a state for, and of which epoch; (0, 0): none."""
        kept = self._of_present(coordinator, roster)
        return (kept.cut, kept.cut_epoch) if kept is not None else (0, 0)

    def savers(self, cut: int, epoch: int, roster: Roster) -> list[Presence]:
        """The trusted or coordinating peers that have saved the group's part of a cut."""
        found = []
        for peer in sorted(self._kept):
            kept, presence = self._of_present(peer, roster), roster.get(peer)
            if kept is not None and presence is not None and _tier(presence, ()) == 1:
                found += [presence] * any(state.cut == cut and state.epoch == epoch for state in kept.saved)
        return found

    def _of_present(self, peer: str, roster: Roster) -> Kept | None:
        kept, presence = self._kept.get(peer), roster.get(peer)
        return kept if kept is not None and presence is not None and presence.card.session == kept.session else None

    def on_disk(self) -> Announcements:
        """What peers have saved, as if they offered it: for who asks what the run could go back to."""
        found = Announcements()
        found._kept = {peer: Kept(session=kept.session, states=kept.saved) for peer, kept in self._kept.items()}
        return found

    def epochs(self, roster: Roster, *, backups: bool = False) -> list[int]:
        """The epochs that somebody serves a state of, the newest first."""
        found = {state.epoch for _, states in self._present(roster, backups) for state in states if state.is_served}
        return sorted(found, reverse=True)

    def claims(
        self, epoch: int, roster: Roster, holders: Collection[str] = (), *, backups: bool = False
    ) -> list[Claim]:
        """What is said about an epoch; `holders` are the peers that its commit names."""
        found = []
        for presence, states in self._present(roster, backups):
            state = next((state for state in states if state.epoch == epoch), None)
            # Backups are of any age: every peer that offers one has a say in which is believed.
            is_late = state is None and not any(backups or state.epoch + 1 >= epoch for state in states)
            # A peer that does not train takes a state now and then: no state of this epoch means nothing.
            may_speak = backups or presence.card.role == "trainer"
            if state is not None or (states and may_speak):
                person, tier = presence.person or presence.peer, _tier(presence, holders)
                found.append(Claim(presence.peer, person, tier, state, is_late))
        return found

    def _present(self, roster: Roster, backups: bool) -> Iterator[tuple[Presence, list[KeptState]]]:
        for peer, kept in sorted(self._kept.items()):
            presence = roster.get(peer)
            if presence is not None and presence.card.session == kept.session:
                yield presence, [state for state in kept.states if state.is_backup == backups]


def _tier(presence: Presence, holders: Collection[str]) -> int:
    if presence.trusted or presence.coordinates:
        return 1
    return 2 if presence.peer in holders else 3


def judge(
    epoch: int, claims: Iterable[Claim], failures: Mapping[str, int] | None = None, *, by_value: bool = False
) -> Verdict | None:
    """The state of an epoch; None when it cannot be told (yet).

    `failures` tells how often peers did not give what they announced; `by_value`, that claims have their camps.
    """
    everybody = list(claims)
    claims = [claim for claim in everybody if not claim.is_late]
    tier = min((claim.tier for claim in claims), default=0)
    judges = [claim for claim in claims if claim.tier == tier]
    votes = _votes(judges)
    if not votes:
        return None
    most = max(votes.values())
    tied = {vote for vote, number in votes.items() if number == most}
    # Not the smaller digest: the same peer has to win every time, or two that differ would take turns in following.
    _, winner = min((claim.peer, claim.vote) for claim in judges if claim.vote in tied)
    num_persons = len({claim.person for claim in judges})
    late = {claim.person for claim in everybody if claim.is_late and claim.tier <= tier}
    num_silent = num_persons - sum(votes.values()) + len(late)
    is_settled = not num_silent or most > num_silent + max((n for v, n in votes.items() if v != winner), default=0)
    if tier > 1 and not (2 * most > num_persons or ((epoch == 0 or by_value) and is_settled)):
        return None
    failed = failures or {}
    spoken = [(claim, claim.state) for claim in claims if claim.state is not None]
    camp = [(claim, state) for claim, state in spoken if claim.vote == winner]
    num_alike = Counter(state.compared for _, state in camp)
    # Of bits that are equally good, those of the trusted, then those that most can give.
    _, chosen = min(
        camp,
        key=lambda pair: (
            not pair[1].is_served,
            pair[0].tier,
            failed.get(pair[0].peer, 0),
            -num_alike[pair[1].compared],
            pair[0].peer,
        ),
    )
    common = chosen.compared
    agreeing = [(claim, state) for claim, state in camp if state.compared == common]
    _, voucher = min(agreeing, key=lambda pair: (pair[0].tier, pair[0].peer))
    _, given = min(
        agreeing,
        key=lambda pair: (
            not pair[1].is_served,
            pair[1].common is not None,  # what can be checked by its own digest comes first
            pair[0].tier,
            failed.get(pair[0].peer, 0),
            pair[0].peer,
        ),
    )
    return Verdict(
        epoch=epoch,
        digest=given.digest,
        common=common,
        num_bytes=given.num_bytes,
        made_at=voucher.made_at,
        keepers=tuple(claim.peer for claim, state in agreeing if state.is_served),
        is_trusted=tier == 1,
        vouchers=tuple(claim.peer for claim, _ in agreeing),
        equivalent=frozenset(num_alike),
        dissenters=tuple(claim.peer for claim, _ in spoken if claim.vote != winner),
        is_settled=is_settled,
        is_contested=by_value and len(tied) > 1,
        is_backup=given.is_backup,
    )


def _votes(claims: list[Claim]) -> dict[str, Fraction]:
    peers = Counter(claim.person for claim in claims)
    votes: dict[str, Fraction] = defaultdict(Fraction)
    for claim in claims:
        if claim.vote:
            votes[claim.vote] += Fraction(1, peers[claim.person])
    return votes


def describe_claims(claims: Iterable[Claim]) -> str:
    """Who says what."""
    by_digest: dict[str, list[str]] = defaultdict(list)
    for claim in claims:
        if claim.state is not None:
            by_digest[claim.state.compared].append(claim.peer)
    return "; ".join(f"{digest[:12]} by {', '.join(peers)}" for digest, peers in sorted(by_digest.items())) or "nothing"
