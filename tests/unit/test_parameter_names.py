"""Peers of a run whose optimizers were made with and without names agree on the names of their parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from potluck.errors import ConfigurationError
from potluck.optim.method import Method
from potluck.optim.methods.outer import Nesterov
from potluck.optim.methods.streaming import FragmentSchedule
from potluck.optim.modelstate import ModelState
from potluck.optim.outerloop import OuterLoop
from potluck.optim.parameters import MAX_ORDERED, buffers_of, in_order, is_named, order_of
from potluck.optim.targetbatch import TargetBatch

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "10.weight"]


def a_model() -> nn.Sequential:
    layers = [
        nn.Linear(3, 3),
        nn.Tanh(),
        nn.Linear(3, 3),
        *(nn.Identity() for _ in range(7)),
        nn.Linear(3, 2, bias=False),
    ]
    return nn.Sequential(*layers)


def sync(state: ModelState) -> TargetBatch:
    return TargetBatch(state)


def diloco(state: ModelState) -> OuterLoop:
    return OuterLoop(state, Nesterov(), FragmentSchedule(inner_steps=2, num_fragments=2))


def method_of(make: Any, model: nn.Module, *, named: bool, offload: bool = False, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), **options)
    return make(ModelState(inner, offload=offload))


def names_in(method: Method) -> list[str]:
    return [name.removeprefix("parameter/") for name in method.tensors() if name.startswith("parameter/")]


@pytest.mark.parametrize("make", [sync, diloco])
@pytest.mark.parametrize("offload", [False, True])
def test_without_names_a_peer_takes_the_run_s(make: Any, offload: bool) -> None:
    model = a_model()
    run, late = method_of(make, a_model(), named=True), method_of(make, model, named=False, offload=offload)
    assert names_in(late) == ["0-0", "0-1", "0-2", "0-3", "0-4"]
    late.load(run.tensors(), run.metadata())
    assert names_in(late) == NAMES
    assert late.metadata() == run.metadata()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, run.tensors()[f"parameter/{name}"])
    # It offers what the others do, and takes part in their averages.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if make is sync:
        late.gradients.add(4)
    assert list(late.offer(1).tensors) == list(run.blank(1).tensors)


@pytest.mark.parametrize("make", [sync, diloco])
def test_with_names_a_peer_takes_positions_in_a_run_that_began_without(make: Any) -> None:
    run, late = method_of(make, a_model(), named=False), method_of(make, a_model(), named=True)
    late.load(run.tensors(), run.metadata())
    assert names_in(late) == names_in(run) == ["0-0", "0-1", "0-2", "0-3", "0-4"]


@pytest.mark.parametrize("make", [sync, diloco])
def test_another_order_or_shape_is_refused_with_what_to_write(make: Any) -> None:
    run = method_of(make, a_model(), named=True)
    turned = make(ModelState(torch.optim.AdamW(list(a_model().parameters())[::-1])))
    with pytest.raises(ConfigurationError, match=r"have no names.*AdamW\(model.named_parameters\(\)\)"):
        turned.load(run.tensors(), run.metadata())
    other = method_of(make, nn.Linear(3, 3), named=False)
    with pytest.raises(ConfigurationError, match=r"the 2 parameters here have no names, and are not like the run's 5"):
        other.load(run.tensors(), run.metadata())
    named = method_of(make, nn.Linear(3, 3), named=True)
    with pytest.raises(ConfigurationError, match=r"'weight' is missing in the run's state.*trains another model"):
        named.load(run.tensors(), run.metadata())


@pytest.mark.parametrize("order", [None, "x", [0, 1], [0, 1, 2, 3, 3], [1, 2, 3, 4, 5], [[0], 1, 2, 3, 4], {"a": 1}])
def test_a_state_that_does_not_say_its_order_needs_names(order: object) -> None:
    run, late = method_of(sync, a_model(), named=True), method_of(sync, a_model(), named=False)
    with pytest.raises(ConfigurationError, match="named_parameters"):
        late.load(run.tensors(), {**run.metadata(), "order": order})


def test_peers_with_the_same_names_in_another_order_have_the_same_metadata() -> None:
    run, late = method_of(sync, a_model(), named=True), a_model()
    inner = torch.optim.AdamW(list(late.named_parameters())[::-1])
    turned = sync(ModelState(inner))
    turned.load(run.tensors(), run.metadata())
    assert turned.metadata() == run.metadata()


def test_an_order_is_that_of_the_names_by_the_alphabet() -> None:
    assert order_of(NAMES) == [1, 0, 4, 3, 2]
    assert in_order(reversed(NAMES), [1, 0, 4, 3, 2]) == NAMES
    assert order_of(map(str, range(MAX_ORDERED + 1))) is None
    assert not is_named(["0-0", "1-10"])
    assert is_named(["0-0", "weight"])


def test_a_run_with_buffers_asks_a_peer_of_diloco_for_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    inner = torch.optim.AdamW(model.named_parameters())
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    run = diloco(ModelState(inner, extra_tensors=buffers))
    late = method_of(diloco, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), named=False)
    with pytest.raises(ConfigurationError, match=r"extra_tensors=dict\(model.named_buffers\(\)\)"):
        late.load(run.tensors(), run.metadata())


def test_the_state_has_the_buffers_that_a_model_saves_and_no_others() -> None:
    """One rule for all: trainers of the command line and programs with a loop of their own take part in one run."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    model.register_buffer("scale", torch.ones(2))
    assert set(buffers_of(model)) == {"1.running_mean", "1.running_var", "scale"}, "no counter, and no constant"
