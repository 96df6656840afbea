"""A member under audit: answers the coordinator about a chunk of the round that it has completed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from potluck.errors import ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.links import Incoming, Links
from potluck.round.exchanger import Exchanger
from potluck.round.merkle import NOTHING, merkle_path
from potluck.round.messenger import Audience
from potluck.round.plan import RoundKey
from potluck.round.reduction import encode_values
from potluck.round.tensorwork import SealedWork
from potluck.round.testimony import Challenge, Holdings, Input, Inventory, Testimony
from potluck.round.workers import Workers


class Witness:
    """Testifies in the round that this peer is in."""

    def __init__(self, links: Links, workers: Workers, audience: Callable[[], Audience | None]) -> None:
        """`audience` is the round and its coordinator, to whom alone we answer."""
        self.counts: Counter[str] = Counter()
        self._workers = workers
        self._audience = audience
        links.handle(Challenge, self._challenged)
        links.handle(Inventory, self._inventoried)

    def _exchanger(self, sender: str, key: RoundKey) -> Exchanger:
        """The round that we are asked about; ProtocolError unless we have completed it, for whoever asks."""
        audience = self._audience()
        if audience is None or sender != audience.coordinator or key != audience.exchanger.key:
            self.counts["foreign_challenges"] += 1
            raise ProtocolError(f"{key} is not a round in which this peer answers to {sender}")
        if not audience.exchanger.digest:
            raise ProtocolError(f"this peer lacks averages of {key}")
        self.counts["challenges"] += 1
        return audience.exchanger

    async def _challenged(self, incoming: Incoming[Challenge]) -> tuple[Testimony, Sequence[Buffer]]:
        return await self._testify(self._exchanger(incoming.sender, incoming.message.key), incoming.message)

    def _inventoried(self, incoming: Incoming[Inventory]) -> tuple[Holdings, Sequence[Buffer]]:
        exchanger = self._exchanger(incoming.sender, incoming.message.key)
        work, generation = exchanger.work, exchanger.exchange.generation
        if not isinstance(work, SealedWork):
            raise ProtocolError(f"{incoming.message.key} is not audited")
        seals = (work.average_seals[number, generation(number)] for number in range(len(exchanger.grid)))
        return Holdings(), (b"".join(exchanger.averages.hashes), b"".join(seals))

    async def _testify(self, exchanger: Exchanger, challenge: Challenge) -> tuple[Testimony, Sequence[Buffer]]:
        work, number = exchanger.work, challenge.chunk
        if (
            not isinstance(work, SealedWork)
            or number >= len(exchanger.grid)
            or exchanger.exchange.generation(number) != challenge.generation
        ):
            raise ProtocolError(f"chunk {number} of {challenge.key} is not one that this peer can testify to")
        hashes, committed = exchanger.averages.hashes, work.committed
        testimony = Testimony(
            average=hashes[number],
            average_path=merkle_path(hashes, number),
            contribution=committed[number],
            contribution_path=merkle_path(committed, number),
            inputs=tuple(
                Input(member=exchanger.index_by_peer[peer], frame_hash=given.frame_hash, seal=given.seal)
                for peer, given in work.inputs.get((number, challenge.generation), {}).items()
            ),
        )
        tensors = exchanger.tensors
        if testimony.contribution == NOTHING or tensors is None:
            return testimony, ()
        chunk = exchanger.grid.chunks[number]
        frame = await self._workers.run(lambda: encode_values(chunk, tensors))
        return testimony, (frame,)
