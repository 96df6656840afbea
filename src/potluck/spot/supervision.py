"""Which machines to start and end, so that every slot has one (pure).

The provider is asked each time, and nothing is counted from memory. A slot is filled by a machine
that carries its name; aux peers have slots of their own and never stand in for workers. A machine that was just started
may be missing from the list for a while (lists of clouds are eventually consistent), so a slot rests for
`settle_seconds` after a start. A start that fails makes its slot wait, twice as long each time, and the next try takes
the next kind of machine. So does a machine that is gone soon after its start: its peer may have refused to train, and
each try costs money. Supervision has no end of its own: a full complement is a state, not a goal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from potluck.errors import ConfigurationError
from potluck.spot.provider import Machine
from potluck.spot.tiers import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """How patient the runner is."""

    kinds: tuple[str, ...]
    """Kinds of machines in order of preference."""
    aux_kinds: tuple[str, ...] = ()
    """The same for aux peers; the same kinds unless given."""
    max_price: float | None = None
    """Dollars an hour for one machine; dearer kinds are not started."""
    settle_seconds: float = 60.0
    """How long a started machine may be missing from the provider's list."""
    first_wait_seconds: float = 10.0
    """How long a slot waits after its first failed start."""
    longest_wait_seconds: float = 600.0
    short_life_seconds: float = 300.0
    """A machine that is gone so soon after its start counts as a start that failed; 0: none does."""
    starts_at_once: int = 8
    """How many machines are started in one turn: providers limit the rate of requests."""

    def of(self, slot: Slot) -> tuple[str, ...]:
        """Return the kinds of machines for a slot."""
        return self.aux_kinds if slot.role == "aux" and self.aux_kinds else self.kinds

    def affordable(self, slot: Slot, prices: dict[str, float], first: int = 0) -> str | None:
        """Return the first kind for a slot, from `first` on, that is not too dear; None where all are."""
        kinds = self.of(slot)
        in_turn = (kinds[(first + offset) % len(kinds)] for offset in range(len(kinds)))
        return next(
            (kind for kind in in_turn if self.max_price is None or prices.get(kind, 0.0) <= self.max_price), None
        )

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigurationError("name at least one kind of machine")
        if self.max_price is not None and self.max_price <= 0:
            raise ConfigurationError(f"a price must be above 0, not {self.max_price}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a machine of this kind for this slot."""

    slot: Slot
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End this machine."""

    machine: Machine
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Leave this slot empty for a while: its machine was gone soon after its start."""

    slot: Slot
    lived_seconds: float
    seconds: float


Action = Start | End | Rest


@dataclass(slots=True)
class _Place:
    """What is known of one slot beside the provider's list."""

    started_at: float | None = None  # of the machine that fills it, where this runner started it
    seen_at: float = 0.0
    started_id: str = ""
    rests_until: float = 0.0
    num_failed: int = 0
    next_kind: int = 0


class Supervision:
    """Compares the provider's list with the slots."""

    def __init__(self, slots: Sequence[Slot], config: SupervisionConfig) -> None:
        """Begin with nothing known; machines of an earlier runner are found in the provider's list."""
        self.slots = list(slots)
        self.config = config
        self._places = {slot.name: _Place() for slot in slots}

    def decide(self, machines: Iterable[Machine], now: float, prices: dict[str, float]) -> list[Action]:
        """Return what to do; call `started` or `failed` for each Start."""
        actions: list[Action] = []
        filled: dict[str, Machine] = {}
        for machine in sorted(machines, key=lambda each: (each.started_at, each.id)):
            if machine.state == "ending":
                continue
            if machine.slot not in self._places:
                actions.append(End(machine=machine, why=f"no slot is called {machine.slot or '(none)'}"))
            elif machine.slot in filled:
                actions.append(End(machine=machine, why=f"{filled[machine.slot].id} is {machine.slot} already"))
            else:
                filled[machine.slot] = machine
        num_starts = 0
        # Aux peers first: others rely on them, and workers that find no capacity would use up the starts.
        for slot in sorted(self.slots, key=lambda slot: slot.role != "aux"):
            place = self._places[slot.name]
            if slot.name in filled:
                if place.started_id == filled[slot.name].id:  # seen: from now on its absence means that it is gone
                    place.started_id, place.rests_until = "", 0.0
                if place.started_at is None or now - place.started_at >= self.config.short_life_seconds:
                    place.num_failed, place.started_at = 0, None
                place.seen_at = now
                continue
            if (lived_seconds := self._short_life(place, now)) is not None:
                actions.append(Rest(slot=slot, lived_seconds=lived_seconds, seconds=self._rest(place, now)))
            kind = self.config.affordable(slot, prices, place.next_kind)
            if now < place.rests_until or kind is None or num_starts >= self.config.starts_at_once:
                continue
            num_starts += 1
            actions.append(Start(slot=slot, kind=kind))
        return actions

    def started(self, start: Start, machine: Machine, now: float) -> None:
        """The provider has started a machine."""
        place = self._places[start.slot.name]
        place.started_id, place.rests_until = machine.id, now + self.config.settle_seconds
        place.started_at = now
        place.next_kind = self.config.of(start.slot).index(start.kind)

    def failed(self, start: Start, now: float, *, other_kind: bool) -> float:
        """The provider could not start it; returns for how long the slot waits."""
        place = self._places[start.slot.name]
        wait = self._rest(place, now)
        if other_kind:
            kinds = self.config.of(start.slot)
            place.next_kind = (kinds.index(start.kind) + 1) % len(kinds)
        return wait

    def _short_life(self, place: _Place, now: float) -> float | None:
        """How long the machine lived that filled an empty slot, if that was too short; None too while it may come."""
        is_gone = not place.started_id or now >= place.rests_until
        if place.started_at is None or not self.config.short_life_seconds or not is_gone:
            return None
        lived_seconds = max(0.0, place.seen_at - place.started_at)
        place.started_id, place.started_at = "", None
        return lived_seconds

    def _rest(self, place: _Place, now: float) -> float:
        wait = min(self.config.first_wait_seconds * 2.0**place.num_failed, self.config.longest_wait_seconds)
        place.num_failed += 1
        place.rests_until = now + wait
        return wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How many machines there are against how many there should be, and what they cost."""

    num_workers: int
    wanted_workers: int
    num_aux: int
    wanted_aux: int
    dollars_per_hour: float | None  # None where a price is not known

    @property
    def is_full(self) -> bool:
        """Whether every slot has a machine."""
        return self.num_workers == self.wanted_workers and self.num_aux == self.wanted_aux


def standing(slots: Sequence[Slot], machines: Iterable[Machine], prices: dict[str, float]) -> Standing:
    """Count slots that have a machine: aux peers are never counted as workers, nor a slot twice."""
    roles = {slot.name: slot.role for slot in slots}
    there = [machine for machine in machines if machine.state != "ending"]
    filled = {machine.slot for machine in there if machine.slot in roles}
    known = all(machine.kind in prices for machine in there)
    return Standing(
        num_workers=sum(roles[name] == "worker" for name in filled),
        wanted_workers=sum(role == "worker" for role in roles.values()),
        num_aux=sum(roles[name] == "aux" for name in filled),
        wanted_aux=sum(role == "aux" for role in roles.values()),
        dollars_per_hour=sum(prices[machine.kind] for machine in there) if known else None,
    )
