"""`potluck.DiLoCo` and its relatives among peers in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from trainlab import (
    DEVICE,
    PATIENCE_SECONDS,
    TrainLab,
    loss_of,
    make_batch,
    make_model,
    parameters_of,
    quality_of,
    together,
    train_lab,
)

from potluck.errors import ConfigurationError
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.optim.diloco import DiLoCo, DiLoCoConfig
from potluck.optim.methods.delayed import DelayedNesterov
from potluck.optim.methods.outer import Nesterov, OuterSGD
from potluck.optim.methods.powersgd import PowerSGD
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.progress.pace import Pace
from potluck.optim.progress.progresskeeper import ProgressKeeper
from potluck.optim.progress.tracker import RunProgress
from potluck.round.codecs import CodecChoice, CodecSpec
from potluck.state.config import StateConfig

EXACT = CodecChoice.everything("float32")
FOUR_BITS = CodecChoice.everything("e3m0")


class Worker:
    """One peer with its inner optimizer."""

    def __init__(self, lab: TrainLab, number: int, *, batch_size: int = 16, run: Any = None, **options: Any) -> None:
        self.number = number
        self.run = lab.join(f"worker {number}", **(run or {}))
        self.model = (options.pop("model", None) or make_model()).to(DEVICE)
        inner = torch.optim.AdamW(self.model.named_parameters(), lr=0.02)
        # On a problem as small as this one, DiLoCo's momentum of 0.9 swings for a hundred epochs.
        options = {"outer": Nesterov(0.7, 0.5), "codecs": EXACT, "inner_steps": 4, **options}
        options = {"num_threads": 1, "source": lab.states, **options}
        self.optimizer = DiLoCo(self.run, inner, **options)
        self.batch_size = batch_size
        self.position = 0

    def step(self) -> None:
        loss_of(self.model, make_batch(1000 * self.number + self.position, self.batch_size)).backward()
        self.optimizer.step(batch_size=self.batch_size)
        self.optimizer.zero_grad()
        self.position += 1

    def train(self, num_epochs: int) -> None:
        while self.optimizer.epoch < num_epochs:
            self.step()


def train_all(workers: list[Worker], num_epochs: int) -> None:
    together(*(lambda w=w: w.train(num_epochs) for w in workers))


def shared_equal(workers: list[Worker]) -> bool:
    first, *others = (worker.optimizer.method.shared for worker in workers)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_no_number_of_samples_is_said_to_make_an_epoch() -> None:
    with train_lab() as lab:
        worker = Worker(lab, 0)
        worker.train(2)
        worker.step()
        progress = worker.optimizer.collaboration.progress
        said = lab.loop.call(_summary_of(progress))
        assert (said.target, said.due_in_seconds, said.is_due) == (0, None, False)
        assert " of " not in said.describe()


async def _summary_of(progress: ProgressKeeper) -> RunProgress:
    return progress._tracker.summary(progress._session.clock.monotonic())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_inner_optimizer_keeps_full_precision_behind_the_model(dtype: torch.dtype) -> None:
    def run(offload: bool, source: torch.dtype) -> Worker:
        with train_lab() as lab:
            worker = Worker(lab, 0, model=make_model().to(source), offload_optimizer=offload, inner_steps=2)
            inputs, targets = make_batch(1)
            for _ in range(6):
                torch.nn.functional.mse_loss(worker.model(inputs.to(source)), targets.to(source)).backward()
                worker.optimizer.step(batch_size=4)
            assert worker.optimizer.epoch == 3
            return worker

    offloaded = run(True, dtype)
    state = offloaded.optimizer.method.state
    assert all(parameter.dtype == torch.float32 for parameter in state.parameters.values())
    for name, parameter in state.model.items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter.cpu(), state.parameters[name].to(dtype))
    if dtype == torch.float32:
        for got, wanted in zip(parameters_of(offloaded.model), parameters_of(run(False, dtype).model), strict=True):
            assert torch.equal(got, wanted)


def test_a_gradient_scaler() -> None:
    with train_lab() as lab:
        scaled, plain = Worker(lab, 0), make_model()
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1000)
        inner = torch.optim.AdamW(plain.parameters(), lr=0.02)
        for number in range(3):
            scaler.scale(loss_of(scaled.model, make_batch(number))).backward()
            if number == 1:  # an overflow
                next(scaled.model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaled.optimizer.step(batch_size=4, grad_scaler=scaler)
            scaler.update()
            if number != 1:
                loss_of(plain, make_batch(number)).backward()
                inner.step()
                inner.zero_grad()
        assert scaler.get_scale() == 512.0
        assert scaled.optimizer.statistics()["bad_batches"] == 1
        for got, wanted in zip(parameters_of(scaled.model), parameters_of(plain), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_peers_hold_the_same_and_learn() -> None:
    with train_lab() as lab:
        workers = [Worker(lab, number, steps_by_speed=False) for number in range(3)]
        before = quality_of(workers[0].model)
        train_all(workers, 8)
        assert {worker.position for worker in workers} == {32}  # 4 inner steps an epoch, nobody more
        assert shared_equal(workers)
        for worker in workers:
            for parameter, shared in zip(
                worker.model.parameters(), worker.optimizer.method.shared.values(), strict=True
            ):
                assert torch.equal(parameter.detach(), shared)
        assert quality_of(workers[0].model) < 0.5 * before


@pytest.mark.parametrize(
    "options",
    [
        {"num_fragments": 2, "inner_steps": 8},
        {"num_fragments": 2, "inner_steps": 8, "overlap_steps": 2, "mixing": 0.5},
        {"overlap_steps": 1, "mixing": 0.25},
        {"overlap_steps": 2, "keep_overlap_work": True},
        {"codecs": FOUR_BITS, "transform": lambda: Quantised(FOUR_BITS)},
        {"outer": lambda: OuterSGD(0.8), "transform": lambda: SparseLoCo(k=16)},
        {"weighting": "tokens", "min_peers": 2},
        {"steps_by_speed": True},
    ],
    ids=["fragments", "streaming", "overlap", "kept overlap", "4 bits", "sparseloco", "decoupled", "dylu"],
)
def test_relatives_learn_too(options: dict[str, Any]) -> None:
    with train_lab() as lab:
        workers = []
        for number in range(2):
            made = {k: v() if callable(v) else v for k, v in options.items()}
            workers.append(Worker(lab, number, **made))
        before = quality_of(workers[0].model)
        train_all(workers, 12)
        for worker in workers:
            worker.optimizer.driver.land()
            assert worker.optimizer.statistics()["local_epoch"] >= 12
        lab.states.check_alike(at_least=6)
        assert quality_of(workers[0].model) < 0.7 * before
        for worker in workers:
            worker.optimizer.shutdown()


def test_sparseloco_travels_in_its_own_codec() -> None:
    with train_lab() as lab:
        workers = [Worker(lab, number, outer=OuterSGD(0.8), transform=SparseLoCo(k=16)) for number in range(2)]
        train_all(workers, 2)
        for worker in workers:
            result = worker.optimizer.driver.last_result
            assert result is not None
            assert [run.codec for run in result.commit.runs] == [CodecSpec(name="sparse2", keep=16)]


def join_host(lab: TrainLab) -> None:
    """A peer as a host has it: it coordinates, and knows nothing of how the trainers were set up."""
    run = lab.join("host", role="aux")
    helper = lab.loop.call(AuxiliaryPeer.of(run.peer, num_threads=1, state=StateConfig(keep="never")))
    run.attach(helper.close)


@pytest.mark.parametrize("is_hosted", [False, True], ids=["a trainer coordinates", "the host coordinates"])
def test_asynchronous_peers_wait_for_nobody(is_hosted: bool) -> None:
    with train_lab() as lab:
        if is_hosted:
            join_host(lab)
        workers = [
            Worker(lab, number, asynchronous=True, outer=DelayedNesterov(delay=2), inner_steps=1) for number in range(2)
        ]
        train_all(workers, 2)
        busy, waited = workers[0], []
        for _ in range(5):  # the other one is in the middle of a long step
            busy.step()
            result = busy.optimizer.driver.last_result
            assert result is not None
            waited.append(result.seconds.gathering)
        assert busy.optimizer.statistics()["epochs"] >= 5
        assert min(waited) < 1.0  # of a host that was told nothing, 3 s at least


def test_a_host_waits_for_as_many_as_the_trainers_say() -> None:
    with train_lab() as lab:
        join_host(lab)
        options = {"min_peers": 3, "inner_steps": 1, "averaging_timeout_seconds": 2.0}
        workers = [Worker(lab, number, **options) for number in range(2)]
        together(*(worker.step for worker in workers))
        assert {worker.optimizer.epoch for worker in workers} == {0}  # two would have been enough for it
        workers.append(Worker(lab, 2, **options))
        train_all(workers, 1)
        result = workers[0].optimizer.driver.last_result
        assert result is not None
        assert len([member for member in result.commit.members if member.weight]) == 3


def test_late_work_of_asynchronous_peers_counts() -> None:
    with train_lab() as lab:
        workers = [
            Worker(lab, number, asynchronous=True, outer=DelayedNesterov(momentum=0.5, delay=2), inner_steps=steps)
            for number, steps in enumerate((3, 7))
        ]
        before = quality_of(workers[0].model)
        train_all(workers, 30)
        contributed = [worker.optimizer.statistics()["epochs"] for worker in workers]
        assert min(contributed) >= 1
        assert sum(contributed) >= 30  # each change is an epoch, unless two came at once
        newest = lab.states.newest
        assert newest is not None
        with torch.no_grad():
            for name, parameter in workers[0].optimizer.method.state.model.items():
                parameter.copy_(newest.tensors[f"parameter/{name}"])
        assert quality_of(workers[0].model) < 0.7 * before


class FixedPace(Pace):
    """Of a machine that is always as fast as this."""

    def __init__(self, steps_per_second: float) -> None:
        super().__init__()
        self._seconds_per_step = 1.0 / steps_per_second

    def step_done(self, num_samples: int, now: float) -> None:
        pass


def test_slow_peers_take_fewer_steps_so_that_all_are_ready_at_the_same_time() -> None:
    with train_lab() as lab:
        workers = [Worker(lab, number, steps_by_speed=True, inner_steps=8) for number in range(2)]
        for worker, pace in zip(workers, (80.0, 20.0), strict=True):
            worker.optimizer._stride.pace = FixedPace(pace)
        train_all(workers, 2)  # by then each has said how fast it is
        positions = [worker.position for worker in workers]
        assert [worker.optimizer.steps_per_round for worker in workers] == [8, 2]
        train_all(workers, 6)
        fast, slow = (worker.position - before for worker, before in zip(workers, positions, strict=True))
        assert (fast, slow) == (4 * 8, 4 * 2)  # as many seconds at their speeds


@pytest.mark.parametrize(
    ("weighting", "weights"), [("samples", (64.0, 16.0)), ("equal", (1.0, 1.0)), ("tokens", (1024.0, 64.0))]
)
def test_what_a_change_weighs(weighting: str, weights: tuple[float, float]) -> None:
    with train_lab() as lab:
        workers = [Worker(lab, n, batch_size=size, weighting=weighting) for n, size in enumerate((16, 4))]
        train_all(workers, 1)
        result = workers[0].optimizer.driver.last_result
        assert result is not None
        found = {member.peer: member.weight for member in result.commit.members}
        assert found == {worker.run.peer_id: weight for worker, weight in zip(workers, weights, strict=True)}
        change = weighted_change(workers, weights)
        for name, shared in workers[0].optimizer.method.shared.items():
            start = dict(make_model().named_parameters())[name].detach()
            torch.testing.assert_close(shared, start - 0.7 * 1.5 * change[name], rtol=1e-4, atol=1e-6)


def weighted_change(workers: list[Worker], weights: tuple[float, float]) -> dict[str, torch.Tensor]:
    """The mean over the workers, by hand, of what their first four steps come to."""
    changes = []
    for worker in workers:
        model = make_model()
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        for position in range(4):
            inner.zero_grad()
            loss_of(model, make_batch(1000 * worker.number + position, worker.batch_size)).backward()
            inner.step()
        start = dict(make_model().named_parameters())
        changes.append({name: (start[name] - p).detach() for name, p in model.named_parameters()})
    shares = [weight / sum(weights) for weight in weights]
    return {name: sum(share * each[name] for share, each in zip(shares, changes, strict=True)) for name in changes[0]}


def test_a_straggler_is_left_behind_once_and_its_work_is_kept() -> None:
    with train_lab() as lab:
        quick, slow = (Worker(lab, number, grace_seconds=0.1) for number in range(2))
        for _ in range(3):
            slow.step()
        quick.train(1)  # without the other one
        change = [a - b for a, b in zip(slow.optimizer.method.shared.values(), slow.model.parameters(), strict=True)]
        slow.step()  # its fourth: the round is over
        assert (slow.optimizer.epoch, slow.optimizer.statistics()["caught_up"]) == (1, 1)
        assert shared_equal([quick, slow])
        assert all(float(c.detach().abs().max()) > 0 for c in change)
        kept = [a - b for a, b in zip(slow.optimizer.method.shared.values(), slow.model.parameters(), strict=True)]
        assert all(float(k.detach().abs().max()) > 0 for k in kept)
        assert slow.optimizer.method.samples == 4 * 16


@pytest.mark.parametrize("transform", [None, SparseLoCo(k=16)])
def test_local_steps_that_end_in_nan_cost_no_more_than_themselves(transform: Any) -> None:
    with train_lab() as lab:
        worker = Worker(lab, 0, transform=transform)
        worker.train(1)
        for bad_step in (1, 3):  # 3: just before the exchange, where no bad batch tells of it
            for step in range(4):
                worker.optimizer.param_groups[0]["lr"] = float("inf") if step == bad_step else 0.02
                worker.step()
            assert all(parameter.isfinite().all() for parameter in worker.model.parameters())
        worker.optimizer.param_groups[0]["lr"] = 0.02
        worker.train(4)
        statistics = worker.optimizer.statistics()
        assert statistics["spoilt"] == 2
        assert "rolled_back" not in statistics


def test_a_newcomer_takes_over_the_outer_state() -> None:
    with train_lab() as lab:
        first = Worker(lab, 0)
        first.train(3)
        late = Worker(lab, 1, model=make_model(seed=4))
        assert late.optimizer.epoch == 3
        for one, other in zip(parameters_of(first.model), parameters_of(late.model), strict=True):
            assert torch.equal(one, other)
        train_all([first, late], 6)
        assert shared_equal([first, late])


def test_what_was_saved_goes_on_bit_for_bit() -> None:
    with train_lab() as lab:
        whole = Worker(lab, 0)
        for _ in range(10):
            whole.step()
    with train_lab() as lab:
        first = Worker(lab, 0)
        for _ in range(6):
            first.step()
        saved = first.optimizer.state_dict()
        first.run.close()
        again = Worker(lab, 1, model=make_model(seed=8), run={"coordinates": True})
        again.optimizer.load_state_dict(saved)
        again.number, again.position = 0, 6
        for _ in range(4):
            again.step()
        assert again.optimizer.epoch == whole.optimizer.epoch == 2
        for got, wanted in zip(parameters_of(again.model), parameters_of(whole.model), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("began_at", [0, 2])
@pytest.mark.parametrize("transform", [lambda: None, lambda: PowerSGD(1, min_compression=1.0)], ids=["", "powersgd"])
def test_fragments_that_were_saved_in_the_middle_of_a_turn_go_on_in_another_run(transform: Any, began_at: int) -> None:
    def make(lab: TrainLab, number: int, seed: int) -> Worker:
        options = {"inner_steps": 6, "num_fragments": 3, "overlap_steps": 1, "mixing": 0.25}
        return Worker(lab, number, model=three_layers(seed), transform=transform(), **options)

    with train_lab() as lab:
        whole = make(lab, 0, seed=0)
        for _ in range(9):
            whole.step()
        assert not whole.optimizer.driver.is_busy  # so that saving changes nothing
        saved = whole.optimizer.state_dict()
        assert saved["epoch"] == 4
        for _ in range(10):
            whole.step()
        wanted = parameters_of(whole.model)
    with train_lab() as lab:
        again = make(lab, 0, seed=8)
        again.train(began_at)
        again.optimizer.load_state_dict(saved)
        assert again.optimizer.epoch == began_at
        again.position = 9
        for _ in range(10):
            again.step()
        for one, other in zip(parameters_of(again.model), wanted, strict=True):
            assert torch.equal(one, other)
        late = make(lab, 1, seed=5)
        epoch = again.optimizer.epoch
        assert epoch == began_at + 5
        assert late.optimizer.epoch == epoch
        for later in range(epoch + 1, epoch + 4):
            offers = [worker.optimizer.method.blank(later).tensors for worker in (again, late)]
            assert offers[0].keys() == offers[1].keys()
        train_all([again, late], epoch + 4)
        assert late.optimizer.statistics()["epochs"] >= 1
        assert shared_equal([again, late])


def three_layers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def test_an_exchange_in_the_background_is_landed_before_saving() -> None:
    with train_lab() as lab:
        worker = Worker(lab, 0, overlap_steps=2)
        for _ in range(4):
            worker.step()
        assert worker.optimizer.driver.is_busy
        saved = worker.optimizer.state_dict()
        assert not worker.optimizer.driver.is_busy
        assert (saved["epoch"], saved["method"]["samples"], saved["steps_since_offer"]) == (1, 0, 0)
        for name, shared in saved["method"]["shared"].items():
            assert torch.equal(shared, worker.optimizer.method.shared[name])
        for _ in range(4):
            worker.step()
        worker.optimizer.driver.land()
        assert worker.optimizer.epoch == 2


@pytest.mark.parametrize("keeps", [True, False])
def test_a_result_counts_as_soon_as_it_comes_where_overlapping_work_is_kept(keeps: bool) -> None:
    with train_lab() as lab:
        worker = Worker(lab, 0, overlap_steps=3, keep_overlap_work=keeps)
        for _ in range(4):
            worker.step()
        pending = worker.optimizer.driver._pending
        assert pending is not None
        assert pending.last.wait(PATIENCE_SECONDS)
        worker.step()
        assert worker.optimizer.driver.is_busy is not keeps
        for _ in range(2):
            worker.step()
        assert not worker.optimizer.driver.is_busy, "then it is waited for"
        assert worker.optimizer.epoch == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"inner_steps": 0},
        {"overlap_steps": 4},
        {"min_peers": 0},
        {"asynchronous": True, "num_fragments": 2},
        {"averaging_timeout_seconds": -1.0},
    ],
    ids=str,
)
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        DiLoCoConfig(**{"inner_steps": 4, **wrong})
