"""A member under audit: answers the coordinator about a chunk of the round that it has completed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from potluck.errors import ProtocolError
from potluck.link.carrier import Buffer
from potluck.link.grouplinks import GroupLinks
from potluck.link.links import Incoming
from potluck.round.audit.merkle import NOTHING, merkle_path
from potluck.round.audit.testimony import Challenge, Holdings, HoldingsRequest, Input, Testimony
from potluck.round.member.messenger import ReportTarget
from potluck.round.member.reduction import encode_values
from potluck.round.member.roundwork import RoundWork
from potluck.round.member.tensorwork import SealedWork
from potluck.round.member.workers import Workers
from potluck.round.plan.messages import RoundKey


class Witness:
    """Testifies in the round that this peer is in."""

    def __init__(self, links: GroupLinks, workers: Workers, target: Callable[[], ReportTarget | None]) -> None:
        """`target` is the round and its coordinator. We answer nobody else."""
        self.counts: Counter[str] = Counter()
        self._workers = workers
        self._target = target
        links.handle(Challenge, self._challenged)
        links.handle(HoldingsRequest, self._inventoried)

    def _round_work(self, sender: str, key: RoundKey) -> RoundWork:
        """The round that we are asked about; ProtocolError, for the asker, unless we have completed it."""
        target = self._target()
        if target is None or sender != target.coordinator or key != target.round_work.key:
            self.counts["foreign_challenges"] += 1
            raise ProtocolError(f"{key} is not a round in which this peer answers to {sender}")
        if not target.round_work.digest:
            raise ProtocolError(f"this peer lacks averages of {key}")
        self.counts["challenges"] += 1
        return target.round_work

    async def _challenged(self, incoming: Incoming[Challenge]) -> tuple[Testimony, Sequence[Buffer]]:
        return await self._testify(self._round_work(incoming.sender, incoming.message.key), incoming.message)

    def _inventoried(self, incoming: Incoming[HoldingsRequest]) -> tuple[Holdings, Sequence[Buffer]]:
        round_work = self._round_work(incoming.sender, incoming.message.key)
        work, generation = round_work.work, round_work.exchange.generation
        if not isinstance(work, SealedWork):
            raise ProtocolError(f"{incoming.message.key} is not audited")
        seals = (work.average_seals[number, generation(number)] for number in range(len(round_work.grid)))
        return Holdings(), (b"".join(round_work.averages.hashes), b"".join(seals))

    async def _testify(self, round_work: RoundWork, challenge: Challenge) -> tuple[Testimony, Sequence[Buffer]]:
        work, number = round_work.work, challenge.chunk
        if (
            not isinstance(work, SealedWork)
            or number >= len(round_work.grid)
            or round_work.exchange.generation(number) != challenge.generation
        ):
            raise ProtocolError(f"chunk {number} of {challenge.key} is not one that this peer can testify to")
        hashes, committed = round_work.averages.hashes, work.committed
        testimony = Testimony(
            average=hashes[number],
            average_path=merkle_path(hashes, number),
            contribution=committed[number],
            contribution_path=merkle_path(committed, number),
            inputs=tuple(
                Input(member=round_work.index_by_peer[peer], frame_hash=given.frame_hash, seal=given.seal)
                for peer, given in work.inputs.get((number, challenge.generation), {}).items()
            ),
        )
        tensors = round_work.tensors
        if testimony.contribution == NOTHING or tensors is None:
            return testimony, ()
        chunk = round_work.grid.chunks[number]
        frame = await self._workers.run(lambda: encode_values(chunk, tensors))
        return testimony, (frame,)
