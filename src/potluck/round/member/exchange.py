"""One member's book-keeping in a round (pure): which chunk is where, and what has to happen next.

Every member runs one `Exchange`. It knows numbers only: the driver moves and averages the bytes, tells what arrived,
and carries out the actions. Each chunk has one reducer at a time:

    sender ──SendContribution──▶ reducer: has all that can still come? ──Reduce──▶ driver averages and encodes
                                 reducer ──SendAverage──▶ every receiver, itself included

When a plan is revised, two things can change. A member that no longer *sends* is not waited for; what it sent before
is used. A chunk of a higher *generation* starts over: everybody sends it again, to the new reducer, and an average of
the older generation is forgotten. So after any sequence of revisions all survivors use the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from potluck.round.plan.messages import Plan


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Encode our values of a chunk and send them to its reducer."""

    chunk: int
    generation: int
    to: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Average a chunk from these members' contributions, in this order, and encode the result."""

    chunk: int
    generation: int
    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendAverage:
    """Send the encoded average of a chunk to these members."""

    chunk: int
    generation: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Free all that is kept of a chunk's older generation."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All averages are here."""


Action = SendContribution | Reduce | SendAverage | Discard | Complete


@dataclass(slots=True)
class _Chunk:
    """What one member knows of one chunk."""

    reducer: int
    generation: int
    arrived: set[int] = field(default_factory=set)  # contributors, where this member is the reducer
    refused: set[int] = field(default_factory=set)  # contributors whose values could not be used
    reducing: bool = False
    held: bool = False  # its average is here


class Exchange:
    """One member's part in one round."""

    def __init__(self, plan: Plan, me: int) -> None:
        self.plan = plan
        self.me = me
        self._chunks: list[_Chunk] = [
            _Chunk(part.reducer, part.generation) for part in plan.parts for _ in range(part.start, part.stop)
        ]
        self._expected = _senders(plan)
        self._num_held = 0
        self._complete = False

    @property
    def is_complete(self) -> bool:
        """Whether all averages are here."""
        return self._num_held == len(self._chunks)

    @property
    def held(self) -> set[int]:
        """The chunks whose averages are here."""
        return {number for number, chunk in enumerate(self._chunks) if chunk.held}

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Senders that hold this member up, as a reducer.

        Everybody sends a reducer's chunks in order and only so far ahead of its averages. So a peer that lacks in the
        first chunk that is not complete is to blame; who lacks only in later ones may just be held back by that. Chunks
        that are done again come in no order, and nobody is held back with them.
        """
        missing: set[int] = set()
        in_order = True
        for chunk in self._own():
            if not chunk.held and not chunk.reducing and (in_order or chunk.generation):
                missing |= self._expected - chunk.arrived - chunk.refused
                in_order = in_order and chunk.generation > 0
        return tuple(sorted(missing))

    @property
    def missing_from(self) -> tuple[int, ...]:
        """Other reducers whose averages have not all come."""
        return tuple(sorted({chunk.reducer for chunk in self._chunks if not chunk.held and chunk.reducer != self.me}))

    def generation(self, chunk: int) -> int:
        """The generation that counts now."""
        return self._chunks[chunk].generation

    def start(self) -> list[Action]:
        """Everything this member can do at once."""
        actions = self._send(range(len(self._chunks)))
        return actions + self._contribute_to_myself(range(len(self._chunks))) + self._finish()

    def revise(self, plan: Plan) -> list[Action]:
        """Take in a newer plan of the same round."""
        if plan.key != self.plan.key or plan.revision <= self.plan.revision:
            return []
        self.plan = plan
        self._expected = _senders(plan)
        actions: list[Action] = []
        again: list[int] = []
        for part in plan.parts:
            for number in range(part.start, part.stop):
                chunk = self._chunks[number]
                if part.generation > chunk.generation:
                    self._num_held -= chunk.held
                    self._chunks[number] = _Chunk(part.reducer, part.generation)
                    actions.append(Discard(number))
                    again.append(number)
        self._complete = self._complete and not again
        actions += self._send(again) + self._contribute_to_myself(again)
        actions += [action for number in range(len(self._chunks)) for action in self._reduce_if_ready(number)]
        return actions + self._finish()

    def contribution_arrived(self, sender: int, number: int, generation: int) -> list[Action]:
        """A member's values for a chunk are here. Nothing happens when they are not wanted (any more)."""
        if not self.wants_contribution(sender, number, generation):
            return []
        self._chunks[number].arrived.add(sender)
        return self._reduce_if_ready(number)

    def wants_contribution(self, sender: int, number: int, generation: int) -> bool:
        """Whether these values are for us, of the right generation, and not here yet."""
        if not 0 <= number < len(self._chunks) or not 0 <= sender < len(self.plan.members):
            return False
        chunk = self._chunks[number]
        return (
            chunk.reducer == self.me
            and chunk.generation == generation
            and not chunk.reducing
            and not chunk.held
            and sender not in chunk.arrived
            and sender not in chunk.refused
            and self.plan.members[sender].weight > 0
        )

    def contributions_refused(self, senders: Collection[int], number: int, generation: int) -> list[Action]:
        """These members' values cannot be used (not finite, not decodable): go on without all of them."""
        chunk = self._chunks[number]
        if chunk.generation != generation or chunk.reducer != self.me:
            return []
        chunk.arrived.difference_update(senders)
        chunk.refused.update(senders)
        chunk.reducing = False
        return self._reduce_if_ready(number)

    def reduced(self, number: int, generation: int) -> list[Action]:
        """The driver has averaged and encoded a chunk of ours."""
        chunk = self._chunks[number]
        if chunk.generation != generation or chunk.reducer != self.me or chunk.held:
            return []
        self._hold(chunk)
        others = tuple(i for i, member in enumerate(self.plan.members) if member.receives and i != self.me)
        actions: list[Action] = [SendAverage(number, generation, others)] if others else []
        return actions + self._finish()

    def wants_average(self, sender: int, number: int, generation: int) -> bool:
        """Whether this average is from the chunk's reducer, of the right generation, and not here yet."""
        if not 0 <= number < len(self._chunks) or not 0 <= sender < len(self.plan.members):
            return False
        chunk = self._chunks[number]
        return chunk.reducer == sender and chunk.generation == generation and not chunk.held

    def average_arrived(self, sender: int, number: int, generation: int) -> list[Action]:
        """The encoded average of a chunk is here."""
        if not self.wants_average(sender, number, generation):
            return []
        self._hold(self._chunks[number])
        return self._finish()

    def _hold(self, chunk: _Chunk) -> None:
        chunk.held = True
        self._num_held += 1

    def _own(self) -> list[_Chunk]:
        return [chunk for chunk in self._chunks if chunk.reducer == self.me]

    def _send(self, numbers: range | list[int]) -> list[Action]:
        """Contributions to other reducers, one chunk for each in turn, starting with the one after us.

        So every reducer has something to do from the first moment, and not all members start with the same one.
        """
        if not self.plan.members[self.me].sends:
            return []
        queues: dict[int, list[int]] = {}
        for number in numbers:
            reducer = self._chunks[number].reducer
            if reducer != self.me:
                queues.setdefault(reducer, []).append(number)
        count = len(self.plan.members)
        order = sorted(queues, key=lambda reducer: (reducer - self.me) % count)
        actions: list[Action] = []
        for turn in range(max((len(queue) for queue in queues.values()), default=0)):
            for reducer in order:
                if turn < len(queues[reducer]):
                    number = queues[reducer][turn]
                    actions.append(SendContribution(number, self._chunks[number].generation, reducer))
        return actions

    def _contribute_to_myself(self, numbers: range | list[int]) -> list[Action]:
        actions: list[Action] = []
        for number in numbers:
            chunk = self._chunks[number]
            if chunk.reducer == self.me:
                if self.plan.members[self.me].sends:
                    chunk.arrived.add(self.me)
                actions += self._reduce_if_ready(number)
        return actions

    def _reduce_if_ready(self, number: int) -> list[Action]:
        chunk = self._chunks[number]
        if chunk.reducer != self.me or chunk.reducing or chunk.held:
            return []
        if self._expected - chunk.arrived - chunk.refused:
            return []
        if not chunk.arrived:
            return []  # an average of nobody: only the coordinator can end this, and will
        chunk.reducing = True
        return [Reduce(number, chunk.generation, tuple(sorted(chunk.arrived)))]

    def _finish(self) -> list[Action]:
        if self._complete or not self.is_complete:
            return []
        self._complete = True
        return [Complete()]


def _senders(plan: Plan) -> frozenset[int]:
    """Members that reducers still wait for."""
    return frozenset(index for index, member in enumerate(plan.members) if member.sends and member.receives)
