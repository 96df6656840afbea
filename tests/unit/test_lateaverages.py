"""Averages of past epochs, given to peers that missed them."""

from __future__ import annotations

import pytest
import torch
from roundlab import ELEMENTS, Lab, Member, assert_same_average, lab, mean_of

from potluck.errors import StateUnavailableError
from potluck.link.stream import Stream
from potluck.round.audit.auditcore import AuditConfig
from potluck.round.codecs import CodecChoice
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.member import lateaverages
from potluck.round.member.lateaverages import FetchAverages
from potluck.round.plan.messages import Restoration
from potluck.sim.virtualloop import in_virtual_time

KINDS = [GatherConfig(audit=AuditConfig(chunks_per_reducer=0)), GatherConfig(audit=AuditConfig(chunks_per_reducer=2))]
each_kind = pytest.mark.parametrize("gather", KINDS, ids=["plain", "audited"])


async def hear(member: Member, epoch: int) -> torch.Tensor:
    """The averages of a past epoch, as this member gets them afterwards."""
    values = torch.zeros(ELEMENTS)
    await member.averager.hear_late({"w": values}, epoch=epoch)
    return values


async def miss_one(there: Lab) -> Member:
    """Two of three make the first epoch; returns the third."""
    *early, late = there.members
    await there.average(early)
    return late


@each_kind
@in_virtual_time
async def test_who_missed_an_epoch_gets_the_same_bits_afterwards(gather: GatherConfig) -> None:
    async with lab(3, gather=gather, choice=CodecChoice()) as there:
        late = await miss_one(there)
        assert torch.equal(await hear(late, 1), there.members[0].values)
        assert late.averager.statistics()["late_averages"] == 1
        await there.average()
        assert_same_average(there.members)


@in_virtual_time
async def test_an_aux_peer_gives_them_before_any_trainer() -> None:
    async with lab(2) as there:
        aux = await there.join(role="aux")
        late = await there.join()
        await there.average(there.members[:3])
        assert torch.equal(await hear(late, 1), mean_of(there.members[:2]))
        assert aux.averager.statistics()["late_served"] == 1


@each_kind
@in_virtual_time
async def test_what_is_not_what_was_committed_is_not_taken(gather: GatherConfig) -> None:
    async with lab(2, gather=gather) as there:
        liar = await there.join(role="aux")  # asked first
        late = await there.join()
        await there.average(there.members[:3])
        lies = 0

        async def lie(stream: Stream) -> None:
            nonlocal lies
            lies += 1
            for start in range(0, ELEMENTS, 1 << 19):
                await stream.send([bytes(4 * min(1 << 19, ELEMENTS - start))], timeout_seconds=10.0)
            await stream.finish()

        liar.peer.links.unhandle(FetchAverages)
        liar.links.handle_stream(FetchAverages, lie)
        assert torch.equal(await hear(late, 1), mean_of(there.members[:2]))
        assert lies == 1


@in_virtual_time
async def test_a_holder_that_dies_is_not_waited_for_when_another_has_them() -> None:
    async with lab(3) as there:
        late = await miss_one(there)
        wanted = there.members[0].values.clone()
        await there.kill(there.members[1])
        assert torch.equal(await hear(late, 1), wanted)


@in_virtual_time
async def test_an_epoch_that_nobody_has_any_more_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateaverages, "KEPT_BYTES", {"trainer": 3 * ELEMENTS})  # less than one epoch in float32
    async with lab(3) as there:
        late = await miss_one(there)
        await there.average(there.members[:2])
        with pytest.raises(StateUnavailableError, match="nobody gave"):
            await hear(late, 1)
        assert torch.equal(await hear(late, 2), there.members[0].values)
        with pytest.raises(StateUnavailableError, match="has not heard"):
            await hear(late, 3)


@in_virtual_time
async def test_what_one_trainer_made_alone_is_not_kept() -> None:
    async with lab(choice=CodecChoice.everything("uniform8")) as there:
        await there.join(role="aux", coordinates=True)
        trainer = await there.join()
        await there.average()
        late = await there.join()
        await there.average([trainer], epoch=2)  # so that the newcomer has seen a commit
        with pytest.raises(StateUnavailableError):
            await hear(late, 2)


@in_virtual_time
async def test_an_epoch_in_which_the_run_went_back_has_no_averages() -> None:
    async with lab(3) as there:
        late = await miss_one(there)
        await there.members[0].averager.restore(Restoration(order=1, epoch=0, digest="d"))
        for epoch in (1, 2):
            with pytest.raises(StateUnavailableError):
                await hear(late, epoch)


@in_virtual_time
async def test_other_tensors_are_not_written() -> None:
    async with lab(3) as there:
        late = await miss_one(there)
        values = torch.zeros(7)
        with pytest.raises(StateUnavailableError, match="other tensors"):
            await late.averager.hear_late({"w": values}, epoch=1)
        assert not values.any()
