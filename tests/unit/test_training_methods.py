"""Methods of training together without a run: offers are averaged by hand, so that identities can be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from trainlab import loss_of, make_batch, make_model, parameters_of, quality_of

from potluck.errors import ConfigurationError
from potluck.optim.localupdates import LocalUpdates
from potluck.optim.method import Method
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.outer import Nesterov, OuterOptimizer, OuterSGD
from potluck.optim.methods.powersgd import PowerSGD
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.methods.transform import Transform
from potluck.optim.modelstate import ModelState
from potluck.optim.outerloop import OuterLoop
from potluck.optim.parameters import are_finite
from potluck.optim.targetbatch import TargetBatch
from potluck.round.codecs import CodecChoice

torch.set_num_threads(1)

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def average(methods: Sequence[Method], epoch: int) -> None:
    """One round, without a codec: the weighted mean, in place."""
    offers = [method.offer(epoch) for method in methods]
    total = sum(offer.weight for offer in offers)
    for name in offers[0].tensors:
        mean = sum(offer.weight * offer.tensors[name].double() for offer in offers) / total
        for offer in offers:
            offer.tensors[name].copy_(mean)
    for method, offer in zip(methods, offers, strict=True):
        method.accept(offer, epoch=epoch, alone=len(methods) == 1)
        method.land()


class Worker:
    """A model with a method."""

    def __init__(self, method: Callable[[ModelState], Any], make: Make = sgd) -> None:
        self.model = make_model()
        self.state = ModelState(make(self.model.parameters()), named=self.model.named_parameters())
        self.method = method(self.state)

    def backward(self, number: int, size: int = 4) -> None:
        loss_of(self.model, make_batch(number, size)).backward()

    def inner_step(self, number: int, size: int = 4) -> None:
        self.backward(number, size)
        self.method.local_step(size)


def outer_loop(outer: OuterOptimizer, **schedule: Any) -> Callable[[ModelState], OuterLoop]:
    return lambda state: OuterLoop(state, outer, FragmentSchedule(**{"inner_steps": 1, **schedule}))


def large_batch(batches: Sequence[Sequence[int]], make: Make) -> nn.Module:
    """Plain data parallel training: one step on the mean over the batches of each epoch."""
    model = make_model()
    optimizer = make(model.parameters())
    for numbers in batches:
        optimizer.zero_grad()
        for number in numbers:
            (loss_of(model, make_batch(number)) / len(numbers)).backward()
        optimizer.step()
    return model


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for got, wanted in zip(parameters_of(one), parameters_of(other), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for got, wanted in zip(parameters_of(one), parameters_of(other), strict=True):
        assert torch.equal(got, wanted)


def test_finite_is_what_has_no_nan_and_no_infinity() -> None:
    huge = torch.full((100,), 3e38)  # its length overflows, and it is finite all the same
    assert are_finite(
        [huge, torch.ones(3, dtype=torch.float16) * 60000, torch.empty(0), torch.ones(2, dtype=torch.int64)]
    )
    assert are_finite([])
    for bad in (float("nan"), float("inf"), -float("inf")):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            values = torch.ones(1000, dtype=dtype)
            values[777] = bad
            assert not are_finite([torch.ones(5), values])


# Large batches


@pytest.mark.parametrize("make", [sgd, adam])
def test_averaged_gradients_are_the_large_batch(make: Make) -> None:
    workers = [Worker(TargetBatch, make) for _ in range(3)]
    batches = [[10 * epoch + number for number in range(3)] for epoch in range(8)]
    for epoch, numbers in enumerate(batches, start=1):
        for worker, number in zip(workers, numbers, strict=True):
            worker.backward(number)
            assert worker.method.gradients.add(4)
        average([worker.method for worker in workers], epoch)
    # Adam divides by the root of tiny second moments, which magnifies the rounding of the mean
    assert_close(workers[0].model, large_batch(batches, make), 1e-4 if make is adam else 1e-5)
    assert_equal(workers[0].model, workers[1].model)


def test_batches_of_other_sizes_weigh_as_much_as_they_are_large() -> None:
    worker = Worker(TargetBatch)
    worker.backward(1, 3)
    worker.method.gradients.add(3)
    worker.backward(2, 5)
    worker.method.gradients.add(5)
    average([worker.method], 1)
    model, optimizer = (plain := make_model()), sgd(plain.parameters())
    (loss_of(model, make_batch(1, 3)) * 3 / 8 + loss_of(model, make_batch(2, 5)) * 5 / 8).backward()
    optimizer.step()
    assert_close(worker.model, model, 1e-6)


@pytest.mark.parametrize("reuse", [False, True])
def test_equal_batches_are_plain_accumulation_bit_for_bit(reuse: bool) -> None:
    worker = Worker(lambda state: TargetBatch(state, reuse_grad_buffers=reuse))
    for epoch in range(1, 4):
        for number in range(4):
            worker.backward(4 * epoch + number)
            worker.method.gradients.add(4)
        average([worker.method], epoch)
    model = make_model()
    optimizer = sgd(model.parameters())
    for epoch in range(1, 4):
        optimizer.zero_grad()
        for number in range(4):
            (loss_of(model, make_batch(4 * epoch + number)) / 4).backward()
        optimizer.step()
    assert_equal(worker.model, model)


# With reused buffers nothing is added while an offer is out.
@pytest.mark.parametrize(("reuse", "later"), [(False, 0), (False, 2), (True, 0)])
def test_a_withdrawn_offer_counts_again(reuse: bool, later: int) -> None:
    undisturbed = Worker(lambda state: TargetBatch(state, reuse_grad_buffers=reuse))
    disturbed = Worker(lambda state: TargetBatch(state, reuse_grad_buffers=reuse))
    for number in range(2):
        for worker in (undisturbed, disturbed):
            worker.backward(number)
            worker.method.gradients.add(4)
    offer = disturbed.method.offer(1)
    for number in range(later):
        for worker in (undisturbed, disturbed):
            worker.backward(100 + number)
            worker.method.gradients.add(4)
    disturbed.method.withdraw(offer)
    assert disturbed.method.gradients.samples == undisturbed.method.gradients.samples == 8 + 4 * later
    for worker in (undisturbed, disturbed):
        average([worker.method], 1)
    assert_close(disturbed.model, undisturbed.model, 1e-6)


def test_parameters_without_a_gradient_are_passed_over_when_alone() -> None:
    worker = Worker(lambda state: TargetBatch(state), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
    worker.backward(0)
    worker.model[2].bias.grad = None  # type: ignore[union-attr, operator]
    before = worker.model[2].bias.detach().clone()  # type: ignore[union-attr, operator]
    worker.method.gradients.add(4)
    average([worker.method], 1)
    assert torch.equal(worker.model[2].bias, before)  # type: ignore[union-attr, operator]


def test_the_averaged_gradient_is_clipped_not_each_peers_own() -> None:
    workers = [Worker(lambda state: TargetBatch(state, max_grad_norm=0.01)) for _ in range(2)]
    for number, worker in enumerate(workers):
        worker.backward(number)
        worker.method.gradients.add(4)
    average([worker.method for worker in workers], 1)
    model, optimizer = (plain := make_model()), sgd(plain.parameters())
    ((loss_of(model, make_batch(0)) + loss_of(model, make_batch(1))) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm > 0.02  # else the test shows nothing
    optimizer.step()
    assert_close(workers[0].model, model, 1e-6)


def test_states_that_drifted_apart_are_averaged_and_equal_after_the_step() -> None:
    def make(state: ModelState) -> TargetBatch:
        return TargetBatch(state, average_state_every=2, average_statistics=("exp_avg_sq", "exp_avg"))

    workers = [Worker(make, adam) for _ in range(2)]
    for epoch in (1, 2):
        for number, worker in enumerate(workers):
            worker.backward(10 * epoch + number)
            worker.method.gradients.add(4)
        if epoch == 2:
            with torch.no_grad():
                workers[1].model[0].weight.add_(0.01)  # type: ignore[union-attr, operator]
        average([worker.method for worker in workers], epoch)
    assert_equal(workers[0].model, workers[1].model)


def test_powersgd_trains_and_peers_stay_equal() -> None:
    workers = [Worker(lambda state: TargetBatch(state, transform=PowerSGD(1, min_compression=1.1))) for _ in range(2)]
    first = quality_of(workers[0].model)
    for epoch in range(1, 60):
        for number, worker in enumerate(workers):
            worker.backward(2 * epoch + number, 16)
            worker.method.gradients.add(16)
        average([worker.method for worker in workers], epoch)
    assert_equal(workers[0].model, workers[1].model)
    assert quality_of(workers[0].model) < 0.7 * first


# DiLoCo


def test_one_inner_step_of_sgd_and_outer_lr_1_is_data_parallel() -> None:
    workers = [Worker(outer_loop(OuterSGD(1.0))) for _ in range(3)]
    batches = [[10 * epoch + number for number in range(3)] for epoch in range(8)]
    for epoch, numbers in enumerate(batches, start=1):
        for worker, number in zip(workers, numbers, strict=True):
            worker.inner_step(number)
        average([worker.method for worker in workers], epoch)
    # θ − mean(θ − (θ − lr·g)) rounds where θ − lr·mean(g) does not: a few units in the last place per epoch
    assert_close(workers[0].model, large_batch(batches, sgd))
    assert_equal(workers[0].model, workers[2].model)


def test_outer_lr_1_without_momentum_is_fedavg() -> None:
    workers = [Worker(outer_loop(OuterSGD(1.0), inner_steps=5), adam) for _ in range(3)]
    for number, worker in enumerate(workers):
        for step in range(5):
            worker.inner_step(100 * number + step)
    local = [parameters_of(worker.model) for worker in workers]
    average([worker.method for worker in workers], 1)
    for got, *theirs in zip(parameters_of(workers[0].model), *local, strict=True):
        torch.testing.assert_close(got, torch.stack(theirs).mean(0), rtol=1e-6, atol=1e-6)


def test_one_fragment_without_overlap_and_mixing_is_diloco() -> None:
    """Against DiLoCo written down in a few lines."""
    workers = [Worker(outer_loop(Nesterov(), inner_steps=3, num_fragments=1, mixing=0.0), adam) for _ in range(2)]
    models = [make_model() for _ in range(2)]
    inner = [adam(model.parameters()) for model in models]
    shared = nn.ParameterList(parameters_of(make_model()))
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for epoch in range(1, 5):
        for step in range(3):
            for number in range(2):
                batch = 1000 * number + 10 * epoch + step
                workers[number].inner_step(batch)
                inner[number].zero_grad()
                loss_of(models[number], make_batch(batch)).backward()
                inner[number].step()
        average([worker.method for worker in workers], epoch)
        for index, parameter in enumerate(shared):
            changes = [parameter.detach() - list(model.parameters())[index].detach() for model in models]
            parameter.grad = (changes[0] + changes[1]) / 2
        outer.step()
        with torch.no_grad():
            for model in models:
                for mine, theirs in zip(model.parameters(), shared, strict=True):
                    mine.copy_(theirs)
    assert_close(workers[0].model, models[0], 1e-6)
    assert_equal(workers[0].model, workers[1].model)


def test_work_done_during_an_exchange_is_put_on_top_of_its_result() -> None:
    """Plain averaging among equals: nothing is lost, and nothing counts twice."""
    schedule = {"inner_steps": 4, "overlap_steps": 2, "keeps_overlap": True}
    worker, undisturbed = Worker(outer_loop(OuterSGD(1.0), **schedule), sgd), Worker(outer_loop(OuterSGD(1.0)), sgd)
    for epoch in range(1, 6):
        for step in range(2):
            for each in (worker, undisturbed):
                each.inner_step(10 * epoch + step)
        offer = worker.method.offer(epoch)
        for step in range(2, 4):
            for each in (worker, undisturbed):
                each.inner_step(10 * epoch + step)
        before = parameters_of(worker.model)
        worker.method.accept(offer, epoch=epoch, alone=True)
        worker.method.land()
        for got, wanted in zip(parameters_of(worker.model), before, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        assert not torch.equal(worker.method.shared["0.weight"], parameters_of(worker.model)[0])
    assert_close(worker.model, undisturbed.model, 1e-5)


def test_overlapping_work_is_either_kept_or_mixed() -> None:
    with pytest.raises(ConfigurationError, match="mixing"):
        FragmentSchedule(inner_steps=4, overlap_steps=2, keeps_overlap=True, mixing=0.5)


def test_full_mixing_leaves_local_weights_unchanged() -> None:
    workers = [Worker(outer_loop(Nesterov(), inner_steps=2, mixing=1.0)) for _ in range(2)]
    for number, worker in enumerate(workers):
        for step in range(2):
            worker.inner_step(10 * number + step)
    before = [parameters_of(worker.model) for worker in workers]
    average([worker.method for worker in workers], 1)
    for worker, kept in zip(workers, before, strict=True):
        assert all(torch.equal(got, was) for got, was in zip(parameters_of(worker.model), kept, strict=True))
    one, other = (worker.method.shared for worker in workers)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fragments_are_exchanged_in_turn_and_the_rest_stays() -> None:
    workers = [Worker(outer_loop(OuterSGD(1.0), inner_steps=2, num_fragments=2)) for _ in range(2)]
    first, second = workers[0].method.fragments
    for epoch, (exchanged, kept) in enumerate([(second, first), (first, second)], start=1):
        for number, worker in enumerate(workers):
            worker.inner_step(10 * epoch + number)
        average([worker.method for worker in workers], epoch)
        one, other = (worker.state.parameters for worker in workers)
        assert all(torch.equal(one[name], other[name]) for name in exchanged)
        assert not any(torch.equal(one[name], other[name]) for name in kept)


def test_late_work_is_put_on_top_of_the_new_state() -> None:
    early, late = (Worker(outer_loop(Nesterov(), inner_steps=2)) for _ in range(2))
    for step in range(2):
        early.inner_step(step)
        late.inner_step(50 + step)
    before = {name: late.method.shared[name] - late.state.parameters[name] for name in late.state.parameters}
    average([early.method], 1)
    late.method.discard()
    late.method.load(early.method.tensors(), early.method.metadata())
    for name, change in before.items():
        assert torch.equal(late.method.shared[name], early.method.shared[name])
        torch.testing.assert_close(
            late.method.shared[name] - late.state.parameters[name], change.detach(), rtol=1e-5, atol=1e-6
        )
    average([early.method, late.method], 2)
    assert_equal(early.model, late.model)


@pytest.mark.parametrize("keeps_overlap", [False, True])
@pytest.mark.parametrize("contributed", [0.25, 1.0])
def test_a_change_that_others_have_does_not_count_twice(contributed: float, keeps_overlap: bool) -> None:
    schedule = {"inner_steps": 4, "overlap_steps": 1, "keeps_overlap": keeps_overlap}
    early, late = (Worker(outer_loop(OuterSGD(1.0), **schedule)) for _ in range(2))
    for worker in (early, late):
        worker.inner_step(0)
    offer = late.method.offer(1)
    offered = parameters_of(late.model)
    if keeps_overlap:
        late.inner_step(2)
    done_since = [now - then for now, then in zip(parameters_of(late.model), offered, strict=True)]
    average([early.method], 1)
    late.method.left_behind(offer, contributed=contributed)
    assert late.method.samples == 4 * keeps_overlap + (4 if contributed < 0.5 else 0)
    late.method.discard()
    late.method.load(early.method.tensors(), early.method.metadata())
    on_top = [mine - theirs for mine, theirs in zip(parameters_of(late.model), parameters_of(early.model), strict=True)]
    change = [then - start for then, start in zip(offered, parameters_of(make_model()), strict=True)]
    for got, since, before in zip(on_top, done_since, change, strict=True):
        wanted = since + before if contributed < 0.5 else since
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_what_a_change_that_others_have_left_out_is_owed() -> None:
    worker = Worker(
        lambda state: OuterLoop(state, OuterSGD(1.0), FragmentSchedule(inner_steps=2), transform=SparseLoCo(k=4)), adam
    )
    worker.inner_step(0)
    change = worker.method.shared["0.weight"] - worker.state.parameters["0.weight"].detach()
    offer = worker.method.offer(1)
    sent = worker.method.transform.received("0.weight", offer.tensors["gradient/0.weight"])
    worker.method.left_behind(offer, contributed=1.0)
    torch.testing.assert_close(worker.method.transform.error_of("0.weight"), change - sent)
    assert_shared(worker)


def test_fragments_whose_turn_it_was_not_keep_their_work() -> None:
    early, late = (Worker(outer_loop(OuterSGD(1.0), inner_steps=2, num_fragments=2)) for _ in range(2))
    for worker in (early, late):
        worker.inner_step(0)
    offer = late.method.offer(1)
    average([early.method], 1)
    late.method.left_behind(offer, contributed=1.0)
    late.method.load(early.method.tensors(), early.method.metadata())
    assert_close(late.model, early.model, 1e-6)  # which has done the same


def test_what_is_owed_stays_owed_to_another_state() -> None:
    def make(state: ModelState) -> OuterLoop:
        return OuterLoop(state, Nesterov(), FragmentSchedule(inner_steps=2), transform=SparseLoCo(k=4))

    early, late = Worker(make), Worker(make)
    for worker in (early, late):
        worker.inner_step(0)
    average([early.method, late.method], 1)
    owed = late.method.transform.error_of("0.weight").clone()
    assert owed.any()
    early.inner_step(1)
    average([early.method], 2)
    late.method.discard()
    late.method.load(early.method.tensors(), early.method.metadata())
    assert torch.equal(late.method.transform.error_of("0.weight"), owed)
    late.method.forget()  # the run has gone back on purpose
    assert late.method.transform.error_of("0.weight") is None


def test_a_newcomer_without_work_takes_the_state_as_it_is() -> None:
    old, new = Worker(outer_loop(Nesterov())), Worker(outer_loop(Nesterov()))
    for epoch in (1, 2):
        old.inner_step(epoch)
        average([old.method], epoch)
    new.method.load(old.method.tensors(), old.method.metadata())
    assert_equal(new.model, old.model)
    for worker in (old, new):
        worker.inner_step(9)
    average([old.method, new.method], 3)
    assert_equal(new.model, old.model)


def test_a_state_of_another_model_is_refused() -> None:
    worker, other = Worker(TargetBatch), Worker(outer_loop(Nesterov()))
    for method in (worker.method, other.method):
        with pytest.raises(ConfigurationError, match="another model"):
            method.load({}, {})


def test_sparseloco_learns_with_a_fraction_of_the_bytes() -> None:
    def make(state: ModelState) -> OuterLoop:
        return OuterLoop(state, OuterSGD(0.8), FragmentSchedule(inner_steps=5), transform=SparseLoCo(k=8))

    workers = [Worker(make, adam) for _ in range(2)]
    first = quality_of(workers[0].model)
    for epoch in range(1, 30):
        for number, worker in enumerate(workers):
            for step in range(5):
                worker.inner_step(1000 * number + 10 * epoch + step, 16)
        average([worker.method for worker in workers], epoch)
    assert_equal(workers[0].model, workers[1].model)
    assert quality_of(workers[0].model) < 0.5 * first


def spoil(worker: Worker) -> None:
    """One step that makes everything infinite or NaN, out of gradients that are finite."""
    group = worker.state.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], float("inf")
    worker.inner_step(0)
    group["lr"] = rate
    assert not are_finite(worker.state.parameters.values())


def assert_goes_on(worker: Worker) -> None:
    assert_shared(worker)
    assert (worker.method.samples, worker.method.statistics()["spoilt"]) == (0, 1)
    assert not worker.state.optimizer.state
    for step in range(3):
        worker.inner_step(100 + step)
    assert worker.method.samples == 12
    assert are_finite(worker.state.parameters.values())


def assert_shared(worker: Worker) -> None:
    assert all(torch.equal(p, worker.method.shared[name]) for name, p in worker.state.model.items())


def test_a_bad_batch_shows_that_local_work_is_spoilt() -> None:
    worker = Worker(outer_loop(Nesterov(), inner_steps=8), adam)
    worker.inner_step(0)
    spoil(worker)
    worker.inner_step(1)  # its gradients are NaN
    assert_goes_on(worker)


@pytest.mark.parametrize("transform", [None, SparseLoCo(k=4), Quantised(CodecChoice.everything("e3m0"))])
def test_spoilt_work_is_not_offered(transform: Transform | None) -> None:
    worker = Worker(
        lambda state: OuterLoop(state, Nesterov(), FragmentSchedule(inner_steps=2), transform=transform), adam
    )
    worker.inner_step(0)
    spoil(worker)
    offer = worker.method.offer(1)
    assert offer.weight == 0
    assert are_finite(offer.tensors.values())
    worker.method.withdraw(offer)
    assert_goes_on(worker)


@pytest.mark.parametrize("schedule", [{"mixing": 0.5}, {"keeps_overlap": True}, {"num_fragments": 2}], ids=str)
def test_what_is_spoilt_during_an_exchange_is_left(schedule: dict[str, Any]) -> None:
    worker = Worker(outer_loop(OuterSGD(1.0), inner_steps=8, overlap_steps=2, **schedule), adam)
    worker.inner_step(0)
    offer = worker.method.offer(1)
    spoil(worker)
    worker.inner_step(1)
    assert not are_finite(worker.state.parameters.values())  # what is shared may be changing just now
    worker.method.accept(offer, epoch=1, alone=True)
    worker.method.land()
    assert_goes_on(worker)


def test_spoilt_work_is_not_put_on_top_of_another_state() -> None:
    one, other = (Worker(outer_loop(Nesterov(), inner_steps=2), adam) for _ in range(2))
    one.inner_step(0)
    average([one.method], 1)
    other.inner_step(1)
    spoil(other)
    other.method.discard()
    other.method.load(one.method.tensors(), one.method.metadata())
    assert_equal(one.model, other.model)
    assert_goes_on(other)


# Local updates


def test_spoilt_local_updates_are_offered_without_weight_and_replaced() -> None:
    workers = [Worker(LocalUpdates) for _ in range(2)]
    for number, worker in enumerate(workers):
        worker.backward(number)
        worker.method.local_step(4, True)
    with torch.no_grad():
        next(workers[0].model.parameters()).view(-1)[0] = float("nan")
    offers = [worker.method.offer(1) for worker in workers]
    assert [offer.weight for offer in offers] == [0.0, 4.0]
    for name, tensor in offers[0].tensors.items():
        tensor.copy_(offers[1].tensors[name])  # what came of the round
    workers[0].method.accept(offers[0], epoch=1, alone=False)
    assert_equal(workers[0].model, workers[1].model)


def test_local_updates_average_parameters_by_samples() -> None:
    workers = [Worker(LocalUpdates) for _ in range(2)]
    for number, (worker, size) in enumerate(zip(workers, (4, 12), strict=True)):
        worker.backward(number, size)
        worker.method.local_step(size, True)
    local = [parameters_of(worker.model) for worker in workers]
    average([worker.method for worker in workers], 1)
    for got, one, other in zip(parameters_of(workers[0].model), *local, strict=True):
        torch.testing.assert_close(got, 0.25 * one + 0.75 * other, rtol=1e-6, atol=1e-6)
    assert_equal(workers[0].model, workers[1].model)


def test_what_was_done_during_a_delayed_average_stays() -> None:
    worker = Worker(LocalUpdates)
    worker.backward(0)
    worker.method.local_step(4, True)
    offer = worker.method.offer(1)
    offered = {name: tensor.clone() for name, tensor in offer.tensors.items()}
    worker.backward(1)
    worker.method.local_step(4, True)
    live = {name: parameter.detach().clone() for name, parameter in worker.state.parameters.items()}
    for tensor in offer.tensors.values():
        tensor.add_(1.0)  # the round moved everything by one
    worker.method.accept(offer, epoch=1, alone=False)
    for name, parameter in worker.state.parameters.items():
        torch.testing.assert_close(parameter.detach(), live[name] + 1.0)
        assert not torch.equal(live[name], offered[f"parameter/{name}"])


# Optimizers and schedulers


def test_an_optimizer_that_computes_gradients_anew_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="LBFGS needs a closure"):
        ModelState(torch.optim.LBFGS(make_model().parameters()))


def test_a_scheduler_that_was_made_beforehand() -> None:
    inner = sgd(make_model().parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    state = ModelState(inner, scheduler=scheduler)
    state.step({name: torch.zeros_like(parameter) for name, parameter in state.parameters.items()})
    assert (state.scheduler, inner.param_groups[0]["lr"]) == (scheduler, 0.05)
    with pytest.raises(ConfigurationError, match="belongs to another optimizer"):
        ModelState(sgd(make_model().parameters()), scheduler=scheduler)


# Saved and loaded

METHODS: dict[str, Callable[[ModelState], Any]] = {
    "gradients": TargetBatch,
    "reused buffers": lambda state: TargetBatch(state, reuse_grad_buffers=True),
    "powersgd": lambda state: TargetBatch(state, transform=PowerSGD(1, min_compression=1.1)),
    "diloco": lambda state: OuterLoop(state, Nesterov(), FragmentSchedule(inner_steps=3)),
    "streaming": lambda state: OuterLoop(
        state, Nesterov(), FragmentSchedule(inner_steps=6, num_fragments=2, mixing=0.5)
    ),
    "asynchronous": lambda state: OuterLoop(state, DelayedNesterov(delay=3), FragmentSchedule(inner_steps=3)),
    "sparseloco": lambda state: OuterLoop(
        state, Nesterov(), FragmentSchedule(inner_steps=3), transform=SparseLoCo(k=4)
    ),
    "local updates": LocalUpdates,
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_what_was_saved_goes_on_bit_for_bit(make: Callable[[ModelState], Any]) -> None:
    def advance(worker: Worker, position: int) -> None:
        worker.backward(position)
        if isinstance(worker.method, TargetBatch):
            worker.method.gradients.add(4)
        elif isinstance(worker.method, LocalUpdates):
            worker.method.local_step(4, True)
        else:
            worker.method.local_step(4)
        if position % 3 == 2:
            average([worker.method], position // 3 + 1)

    one = Worker(make, adam)
    for position in range(8):  # in the middle of an epoch
        advance(one, position)
    saved = one.method.state_dict()
    other = Worker(make, adam)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.zero_()
    other.method.load_state_dict(saved)
    assert_equal(other.model, one.model)
    for position in range(8, 15):
        advance(one, position)
        advance(other, position)
        assert_equal(other.model, one.model)


TURNS: dict[str, Callable[[ModelState], Any]] = {
    "fragments": lambda state: OuterLoop(state, Nesterov(), FragmentSchedule(inner_steps=6, num_fragments=2)),
    "states": lambda state: TargetBatch(state, average_state_every=3),
}


@pytest.mark.parametrize("make", TURNS.values(), ids=TURNS.keys())
def test_whose_turn_it_is_belongs_to_the_state(make: Callable[[ModelState], Any]) -> None:
    def turns(method: Method, epoch: int) -> list[set[str]]:
        return [set(method.blank(later).tensors) for later in range(epoch + 1, epoch + 7)]

    one, other, newcomer, mended = (Worker(make, adam).method for _ in range(4))
    other.load_state_dict(one.state_dict())
    other.renumber(2 - 7)  # saved at epoch 7, in a run that is at epoch 2
    assert turns(other, 2) == turns(one, 7) != turns(one, 2)
    newcomer.load(other.tensors(), other.metadata())
    mended.load_numbers(other.metadata())
    assert turns(newcomer, 2) == turns(mended, 2) == turns(one, 7)
    mended.load_state_dict(newcomer.state_dict())
    mended.renumber(7 - 2)
    assert turns(mended, 7) == turns(one, 7)
    assert mended.metadata() == one.metadata()
