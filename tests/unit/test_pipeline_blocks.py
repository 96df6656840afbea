"""Blocks: cut, ties, BatchNorm, dropout; a stage's arithmetic against one process; activations on the wire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from potluck.errors import ConfigurationError, ProtocolError
from potluck.pipeline.blocks import State, check_blocks, cut, run_blocks, ties_of, unit_parameters, units_of
from potluck.pipeline.blueprint import Blueprint
from potluck.pipeline.compute import Recompute, StageCompute
from potluck.pipeline.layout import Layout
from potluck.pipeline.unitstate import Optimizing, UnitState
from potluck.pipeline.wire import (
    ACTIVATION_CODECS,
    TensorSpec,
    decode_tensors,
    encode_gradients,
    encode_tensors,
    pack,
    unpack,
)

CPU = torch.device("cpu")


def loss(model: nn.Module, batch: State) -> Tensor:
    return functional.mse_loss(model(batch[0] * 2), batch[1])


def sequential(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout))
    return nn.Sequential(inner, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(size: int = 6) -> State:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 2, generator=generator)


def test_a_sequential_model_is_cut_into_its_layers_and_gives_the_same_loss() -> None:
    model = sequential()
    blocks = cut(model, loss)
    assert len(blocks) == 7
    (found,) = run_blocks(dict(enumerate(blocks)), range(7), batch(), (0, 0, 0))
    assert torch.equal(found, loss(model, batch()))


def test_what_cannot_be_cut_says_the_remedy() -> None:
    class Own(nn.Sequential):
        def forward(self, value: Tensor) -> Tensor:
            return value

    for model in (nn.Linear(2, 2), Own(nn.Linear(2, 2))):
        with pytest.raises(ConfigurationError, match=r"give the recipe a blocks\(\)"):
            cut(model, loss)
    deaf = cut(sequential(), lambda model, batch: batch[0].sum())
    with pytest.raises(ConfigurationError, match="does not call the model"):
        deaf[0](*batch())


def test_batch_norm_is_refused_unless_frozen() -> None:
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ConfigurationError, match=r"block 1 has BatchNorm1d at 0: .* Use nn.GroupNorm, or freeze it"):
        check_blocks([nn.Linear(4, 4), nn.Sequential(norm)])
    norm.eval()
    check_blocks([nn.Linear(4, 4), nn.Sequential(norm)])
    with pytest.raises(ConfigurationError, match="one at least"):
        check_blocks([])


def test_parameters_that_stages_share_are_a_unit_of_their_own() -> None:
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    blocks = [first, middle, last]
    ties = ties_of(blocks)
    assert [tie.blocks for tie in ties] == [(0, 2)]
    three = Layout.even(3, 3).stages
    assert units_of(three, ties) == ((0,), (1,), (2,), (0, 2))
    assert units_of([range(3)], ties) == ((0,), (0,), (0,), (0,)), "the same units, whatever the layout"
    numbered = dict(enumerate(blocks))
    assert unit_parameters(numbered, ties, [0], 3) == {3: {"0.weight": first.weight}, 0: {"0.bias": first.bias}}
    assert unit_parameters(numbered, ties, [2], 3) == {3: {"0.weight": first.weight}, 2: {"2.bias": last.bias}}
    whole = unit_parameters(numbered, ties, range(3), 3)
    assert [len(whole[unit]) for unit in sorted(whole)] == [1, 2, 1, 1]


def test_a_blueprint_makes_only_the_blocks_that_are_wanted() -> None:
    made: list[torch.device] = []

    def build() -> Iterator[nn.Module]:
        for _ in range(4):
            block = nn.Linear(3, 3)
            made.append(block.weight.device)
            yield block

    blueprint = Blueprint.of(build, seed=5)
    assert {device.type for device in made} == {"meta"}
    assert blueprint.num_values == (12, 12, 12, 12)
    made.clear()
    (second,) = blueprint.make([1]).values()
    assert [device.type for device in made] == ["meta", "cpu", "meta", "meta"]
    again = blueprint.make(range(4))[1]
    assert torch.equal(second.weight, again.weight), "the same wherever it is made"  # type: ignore[arg-type]


def test_a_unit_is_what_it_was_on_another_machine() -> None:
    first, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizing = Optimizing(lambda named: torch.optim.AdamW(named.values(), lr=0.1))
    one, two = (UnitState(dict(model.named_parameters()), optimizing) for model in (first, other))
    one.apply(torch.arange(12.0), 0.5, 0)
    specs, whole = pack(one.tensors())
    two.load(unpack(specs, whole))
    for state in (one, two):
        state.apply(torch.ones(12), 1.0, 1)
    assert torch.equal(first.weight, other.weight)
    with pytest.raises(ProtocolError, match="another model"):
        two.load({"parameter/weight": torch.zeros(2)})
    with pytest.raises(ProtocolError, match="too soon"):
        unpack(specs, whole[:-1])


def computes(blocks: list[nn.Module], num_stages: int, recompute: Recompute = "auto") -> list[StageCompute]:
    stages, ties = Layout.even(len(blocks), num_stages).stages, ties_of(blocks)
    return [
        StageCompute(
            stage=stage,
            stages=stages,
            blocks=dict(enumerate(blocks)),
            ties=ties,
            num_blocks=len(blocks),
            run_seed=3,
            recompute=recompute,
        )
        for stage in range(num_stages)
    ]


def through(stages: list[StageCompute], micro: int, data: State, *, adds: bool = True, attempt: int = 1) -> None:
    """One micro-batch forward and backward, with what travels detached as it is on the wire."""
    state, key = data, (attempt, micro)
    for stage in stages:
        specs, frames = encode_tensors(state, "raw")
        tensors = decode_tensors(specs, frames, CPU)
        state = tuple(t.requires_grad_(spec.needs_grad) for t, spec in zip(tensors, specs, strict=True))
        found = stage.forward(0, key, state)
        assert found is not None
        state = found
    gradients: tuple[Tensor, ...] = (torch.ones(()),)
    for stage in reversed(stages):
        back = stage.backward(0, key, gradients, weight=float(len(data[0])), adds=adds)
        assert back is not None
        gradients = back


@pytest.mark.parametrize("recompute", ["auto", "always", "never"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_sum_to_the_gradient_of_the_large_batch(num_stages: int, recompute: Recompute) -> None:
    model = sequential()
    stages = computes(cut(model, loss), num_stages, recompute)
    data = batch(7)
    for stage in stages:
        assert stage.fence(0, 1) == {}
    for micro, rows in enumerate([slice(0, 3), slice(3, 6), slice(6, 7)]):
        through(stages, micro, tuple(tensor[rows] for tensor in data))
    through(stages, 1, tuple(tensor[3:6] for tensor in data))  # a replay: computed, not added
    through(stages, 5, tuple(tensor[3:6] for tensor in data), adds=False)
    expected = torch.autograd.grad(loss(model, data), list(model.parameters()))
    sums = [stage.contribution(unit)[0] / 7 for stage in stages for unit in sorted(stage.units)]
    assert torch.allclose(torch.cat(sums), torch.cat([g.reshape(-1) for g in expected]), rtol=1e-5, atol=1e-7)
    assert all(stage.contribution(unit)[1] == (0, 1, 2) for stage in stages for unit in stage.units)
    if recompute == "always" and num_stages > 1:
        assert stages[0].num_recomputed == 5
    assert all(stage.num_kept == 0 for stage in stages)


def test_what_is_computed_again_takes_no_room_until_then() -> None:
    stage, last = computes(cut(sequential(), loss), 2)
    data = batch(3)
    for each in (stage, last):
        each.fence(0, 1)
    through([stage, last], 0, data)
    (graph_bytes,) = stage._graph_bytes.values()
    stage.keep_bytes = 2 * graph_bytes
    for micro in range(1, 7):
        stage.forward(0, (1, micro), data)
    assert [kept.outputs is not None for kept in stage._kept.values()] == [True] * 2 + [False] * 4
    stage._kept.pop((1, 1))
    stage.forward(0, (1, 7), data)
    assert stage._kept[1, 7].outputs is not None, "one of the two that take room is gone"


def test_after_a_fence_an_older_attempt_adds_nothing() -> None:
    (stage,) = computes(cut(sequential(), loss), 1)
    stage.fence(0, 1)
    stage.forward(0, (1, 0), batch())
    through([stage], 1, batch())
    assert list(stage.fence(0, 2)) == [1]
    assert stage.backward(0, (1, 0), (torch.ones(()),), weight=1.0, adds=True) is None
    assert stage.forward(0, (1, 2), batch()) is None
    assert list(stage.fence(0, 3)) == [1], "sums stay within the step"
    assert stage.fence(1, 1) == {}, "and go with it"
    assert stage.contribution(0)[0].abs().sum() == 0


def test_dropout_is_the_same_wherever_and_whenever_a_micro_batch_is_computed() -> None:
    blocks = dict(enumerate(cut(sequential(dropout=0.5), loss)))

    def run(micro: int, *, step: int = 0) -> Tensor:
        return run_blocks(blocks, range(7), batch(), (9, step, micro))[0]

    first = run(4)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert torch.equal(run(4), first)
    assert torch.equal(torch.get_rng_state(), before), "the program's own randomness is left alone"
    assert not torch.equal(run(5), first)
    assert not torch.equal(run(4, step=1), first)
    stages = computes(cut(sequential(dropout=0.5), loss), 2, "always")
    kept = computes(cut(sequential(dropout=0.5), loss), 2, "never")
    for found in (stages, kept):
        for stage in found:
            stage.fence(0, 1)
        through(found, 0, batch())
    assert torch.equal(stages[0].contribution(0)[0], kept[0].contribution(0)[0])


tensors = st.one_of(
    st.lists(st.floats(-1e4, 1e4, width=32), max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32)),
    st.lists(st.integers(-1000, 1000), max_size=40).map(lambda values: torch.tensor(values, dtype=torch.int64)),
    st.lists(st.booleans(), max_size=8).map(lambda values: torch.tensor(values, dtype=torch.bool)),
)


@given(st.lists(tensors, max_size=4), st.sampled_from(ACTIVATION_CODECS))
def test_tensors_come_back_from_the_wire(values: list[Tensor], codec: str) -> None:
    specs, frames = encode_tensors(values, codec)
    back = decode_tensors(specs, [memoryview(bytes(frame)) for frame in frames], CPU)
    for value, found in zip(values, back, strict=True):
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        if codec == "raw" or not value.is_floating_point():
            assert torch.equal(found, value)
        elif value.numel():
            assert (found - value).abs().max() <= 0.01 * value.abs().max() + 1e-6


@pytest.mark.parametrize("codec", ACTIVATION_CODECS)
def test_small_gradients_survive_their_way(codec: str) -> None:
    """Of a mean over many tokens: float16 alone would make zeros of them."""
    gradients = 1e-9 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (back,) = decode_tensors(*encode_gradients([gradients], codec), CPU)
    assert (back - gradients).norm() < 0.02 * gradients.norm()


def test_what_a_codec_cannot_carry_travels_raw() -> None:
    specs, frames = encode_tensors([torch.tensor([1.0, float("nan")])], "float16")
    assert specs[0].codec == "raw"
    assert torch.isnan(decode_tensors(specs, frames, CPU)[0][1])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(dtype="float32", shape=(3,)),
        TensorSpec(dtype="object", shape=(2,)),
        TensorSpec(dtype="float32", shape=(2,), codec="sparse2"),
        TensorSpec(dtype="float32", shape=(1 << 20, 1 << 20)),
        TensorSpec(dtype="float32", shape=(2,), codec="float16"),
    ],
)
def test_frames_that_are_not_what_they_claim_are_refused(spec: TensorSpec) -> None:
    with pytest.raises(ProtocolError):
        decode_tensors([spec], [memoryview(bytes(8))], CPU)
    with pytest.raises(ProtocolError, match="frames for"):
        decode_tensors([spec, spec], [memoryview(bytes(8))], CPU)
