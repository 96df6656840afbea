"""Paths trained together: leases, rounds of modules, kills; real threads, a hub and links in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from keptlab import EXACT
from pathlab import LENGTH, PathLab, make_model
from torch import Tensor
from trainlab import PATIENCE_SECONDS, together, train_lab

from potluck.errors import ConfigurationError, ProtocolError
from potluck.optim.diloco import DiLoCo
from potluck.optim.methods.outer import OuterSGD
from potluck.optim.methods.quantised import Quantised
from potluck.optim.methods.sparseloco import SparseLoCo
from potluck.optim.methods.transform import ErrorFeedback, Transform
from potluck.paths.cutting import cut
from potluck.paths.evaluating import evaluate
from potluck.paths.features import bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid
from potluck.paths.moduleloop import Change, ModuleLoop
from potluck.paths.pathfeed import PathFeed
from potluck.paths.pathmodel import PathModel
from potluck.paths.pathstate import PathState, read_state
from potluck.paths.pathtrainer import PathConfig
from potluck.paths.router import fit_kmeans
from potluck.paths.sharding import Shards, routed
from potluck.paths.weighing import step_factor
from potluck.round.codecs import CodecChoice
from potluck.state.backups import BackupConfig, Backups, backup_folder
from potluck.state.keeper import StateKeeper
from potluck.testing.languages import languages, word_losses
from potluck.testing.polling import poll_until_sync

COARSE = CodecChoice.everything("blockwise8")


def test_three_peers_train_four_paths_in_turn() -> None:
    with train_lab() as lab:
        paths = PathLab(lab)
        paths.open_host()
        found = [paths.add_trainer(name) for name in ("alice", "bob", "carol")]
        done = together(*(lambda t=t, s=s: t.train(s) for t, s in found))
        assert sum(progress.phases for progress in done) == 4 * paths.end
        assert sum(trainer.counts.shares for trainer, _ in found) == 4 * paths.end
        shared = [trainer.modules["shared"] for trainer, _ in found]
        for part in shared:
            part.catch_up()  # the last round may have been of one peer alone
        # On a busy machine a round may begin without a phase, which counts in the next.
        assert min(part.epoch for part in shared) == max(part.epoch for part in shared) >= paths.end
        alike = [part.loop.shared["head.weight"] for part in shared]
        assert all(torch.equal(alike[0], other) for other in alike)


def train_with_diloco(
    documents: list[Tensor], shards: Shards, config: PathConfig, num_phases: int
) -> dict[str, Tensor]:
    """The same phases by `potluck.DiLoCo`, in a run of one peer."""
    with train_lab() as lab:
        run = lab.join("alone", coordinates=True)
        model = make_model()
        optimizer = DiLoCo(
            run,
            torch.optim.AdamW(model.named_parameters(), lr=1e-2),
            inner_steps=config.inner_steps,
            max_grad_norm=config.max_grad_norm,
            codecs=EXACT,
            num_threads=1,
            steps_by_speed=False,
        )
        feed = PathFeed(documents, shards, config.window, config.seed)
        for phase in range(num_phases):
            batches = feed.batches(0, phase, config.batch_size)
            for _ in range(config.inner_steps):
                word_losses(model, next(batches)).mean().backward()
                optimizer.step(batch_size=config.batch_size)
        assert optimizer.epoch == num_phases
        return {name: value.clone() for name, value in optimizer.method.shared.items()}


def test_one_level_with_one_module_is_diloco_to_the_last_bit() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (1,))
        paths.end = 3
        paths.open_host()
        trainer, stop = paths.add_trainer("alone")
        trainer.train(stop)
        found = {name: value for part in trainer.modules.values() for name, value in part.loop.shared.items()}
        assert {part.epoch for part in trainer.modules.values()} == {3}
    expected = train_with_diloco(paths.documents, paths.shards, paths.config, 3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_one_step_phases_of_sgd_shared_by_two_peers_are_data_parallel() -> None:
    """H = 1, outer SGD of 1: two peers share the only path, and their mean gradient is one step."""
    model = make_model()
    loops = [ModuleLoop(dict(model.named_parameters()), OuterSGD(1.0)) for _ in range(2)]
    rows = [languages(4, seed=seed)[0] for seed in (1, 2)]
    batches = [torch.stack(found) for found in rows]
    for loop, batch in zip(loops, batches, strict=True):
        peer = make_model()
        inner = torch.optim.SGD(peer.parameters(), lr=0.1)
        word_losses(peer, batch).mean().backward()
        inner.step()
        now = dict(peer.named_parameters())
        delta = {name: value - now[name].detach() for name, value in loop.shared.items()}
        loop.add(Change(delta, 0.5, 0.5))
    offers = [loop.offer(1) for loop in loops]
    for name in offers[0].tensors:
        mean = (offers[0].tensors[name] + offers[1].tensors[name]) / 2  # as a round makes it of equal weights
        for offer in offers:
            offer.tensors[name].copy_(mean)
    for loop, offer in zip(loops, offers, strict=True):
        loop.factor = lambda _epoch: step_factor(phases=1.0, round_weight=1.0, num_paths=1)
        loop.accept(offer, epoch=1, alone=False)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    word_losses(model, torch.cat(batches)).mean().backward()
    whole.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(loops[0].shared[name], parameter, atol=1e-7)
        assert torch.equal(loops[0].shared[name], loops[1].shared[name])


def test_a_peer_that_carries_several_paths_gives_their_weighted_mean() -> None:
    like = {"w": torch.zeros(3)}
    loop = ModuleLoop(like, OuterSGD(1.0), factor=lambda _epoch: step_factor(phases=2, round_weight=0.5, num_paths=2))
    one, two = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])
    loop.add(Change({"w": one}, 1.0))
    loop.add(Change({"w": two}, 3.0))
    offer = loop.offer(1)
    assert (offer.weight, offer.phases) == (4.0, 2.0)
    loop.withdraw(offer)
    assert loop.phases == 2.0, "a round that failed loses nothing"
    loop.accept(loop.offer(1), epoch=1, alone=True)
    assert torch.allclose(loop.shared["w"], -math.sqrt(2) * (0.25 * one + 0.75 * two))
    assert loop.phases == 0.0


def test_changes_that_come_late_count_in_the_next_round_and_spent_ones_do_not() -> None:
    loop = ModuleLoop({"w": torch.zeros(2)}, OuterSGD(1.0))
    loop.add(Change({"w": torch.ones(2)}, 1.0))
    loop.left_behind(loop.offer(1), contributed=0.2)
    assert loop.phases == 1.0
    loop.left_behind(loop.offer(1), contributed=1.0)
    assert loop.phases == 0.0
    loop.load({"parameter/w": torch.full((2,), 5.0)}, {})
    assert loop.shared["w"].tolist() == [5.0, 5.0]
    with pytest.raises(ConfigurationError, match="of another model"):
        loop.load({"parameter/w": torch.zeros(3)}, {})


@pytest.mark.parametrize("make", [lambda: SparseLoCo(k=3, decay=1.0), lambda: Quantised(COARSE)])
def test_what_a_compression_leaves_out_of_a_module_is_owed_to_that_module(make: Callable[[], ErrorFeedback]) -> None:
    loops = {name: ModuleLoop({"w": torch.zeros(100)}, OuterSGD(1.0), transform=make()) for name in ("one", "two")}
    whole = {name: torch.zeros(100) for name in loops}
    for phase in range(3):
        for number, (name, loop) in enumerate(loops.items()):
            delta = torch.randn(100, generator=torch.Generator().manual_seed(10 * phase + number))
            loop.add(Change({"w": delta}, 1.0))
            loop.withdraw(loop.offer(phase + 1))  # a round that failed: nothing is sent, and nothing owed twice
            loop.accept(loop.offer(phase + 1), epoch=phase + 1, alone=True)
            whole[name] -= delta
    for name, loop in loops.items():
        assert isinstance(loop.transform, ErrorFeedback)
        owed = loop.transform.error_of("w")
        assert owed is not None
        assert owed.abs().max() > 0, "the compression leaves something out"
        assert torch.allclose(loop.shared["w"] - owed, whole[name], atol=1e-5)


@pytest.mark.parametrize(
    ("codecs", "transform"),
    [
        (COARSE, lambda: Quantised(COARSE)),
        (EXACT, lambda: SparseLoCo(k=16)),
    ],
    ids=["error feedback", "sparseloco"],
)
def test_modules_are_exchanged_compressed(codecs: CodecChoice, transform: Callable[[], Transform | None]) -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (2,), codecs=codecs)
        paths.end = 3
        paths.open_host()
        found = [paths.add_trainer(name, transform=transform) for name in ("alice", "bob")]
        together(*(lambda t=t, s=s: t.train(s) for t, s in found))
        parts = [trainer.modules["shared"] for trainer, _ in found]
        for part in parts:
            part.catch_up()  # the last round may have been of one peer alone
        assert parts[0].epoch == parts[1].epoch >= paths.end
        for name, value in parts[0].loop.shared.items():
            assert torch.equal(value, parts[1].loop.shared[name])
            assert not torch.equal(value, dict(make_model().named_parameters())[name])
        for trainer, _ in found:
            for part in trainer.modules.values():
                memory = part.loop.transform.state_dict().get("error", {})
                assert memory.keys() <= part.loop.shared.keys(), "each module has a memory of its own"


def test_all_who_stop_at_once_leave_the_newest_modules_with_the_host(tmp_path: Path) -> None:
    with train_lab() as lab:
        paths = PathLab(lab)
        paths.end = 3
        paths.open_host(tmp_path, backups=BackupConfig(every_epochs=100))
        found = [paths.add_trainer(name) for name in ("alice", "bob")]
        together(*(lambda t=t, s=s: t.train(s) for t, s in found))
        newest = {
            name: max(t.modules[name].epoch for t, _ in found if name in t.modules) for name in paths.grid.modules
        }
        together(*(run.close for run in lab.runs))
    saved = {name: max(Backups(backup_folder(tmp_path, name)).epochs(), default=0) for name in paths.grid.modules}
    assert saved == newest
    assert min(newest.values()) >= paths.end


def test_a_module_of_one_path_never_changes_another() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (2,), shared=())
        paths.end = 2
        paths.open_host()
        trainer, stop = paths.add_trainer("alone")
        trainer.train(stop)
        assert set(trainer.modules) == {"level-0-0", "level-0-1", "own-0", "own-1"}
        apart = {name: {k: v.clone() for k, v in p.loop.shared.items()} for name, p in trainer.modules.items()}
    with train_lab() as lab:  # the other path trains on other documents: the first does not notice
        again = PathLab(lab, (2,), shared=())
        again.end = 2
        again.shards.training[1] = again.shards.training[1][::2]
        again.open_host()
        trainer, stop = again.add_trainer("alone")
        trainer.train(stop)
        for name in ("level-0-0", "own-0"):
            assert all(torch.equal(v, trainer.modules[name].loop.shared[k]) for k, v in apart[name].items())
        assert any(not torch.equal(v, trainer.modules["own-1"].loop.shared[k]) for k, v in apart["own-1"].items())


def test_a_slow_path_does_not_hold_up_modules_it_has_no_part_in() -> None:
    go_on = threading.Event()

    def slowly(*what: Any) -> Tensor:
        assert go_on.wait(PATIENCE_SECONDS)
        return word_losses(*what)

    with train_lab() as lab:
        paths = PathLab(lab, (2,), shared=(), grace_seconds=1000.0)  # who waits for the slow path does so for too long
        paths.open_host()
        slow, slow_stop = paths.add_trainer("slow", token_losses=slowly)
        quick, quick_stop = paths.add_trainer("quick")

        def train() -> None:
            poll_until_sync(lambda: slow.counts.phases or slow.modules, PATIENCE_SECONDS, "a lease of the slow one")
            quick.train(quick_stop)

        def look() -> None:
            steps = lambda: [part.epoch for name, part in quick.modules.items() if name.startswith("own")]  # noqa: E731
            poll_until_sync(lambda: steps() == [paths.end], PATIENCE_SECONDS, lambda: f"all outer steps, of {steps()}")
            assert slow.counts.phases == 0
            go_on.set()

        together(lambda: slow.train(slow_stop), train, look)
        assert slow.counts.phases + quick.counts.phases == 2 * paths.end


def test_the_inner_optimizer_of_a_path_survives_its_peer() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (1,))
        paths.end = 2
        paths.open_host()
        trainer, stop = paths.add_trainer("alice")
        trainer.train(stop)
        assert paths.host is not None
        host = paths.host

        def has_all() -> bool:
            """The path's last state, and each module's: what the host lacks when its only trainer dies is lost."""
            states = host.keeper.states([0])
            is_kept = 0 in states and states[0].phase == paths.end
            return is_kept and all((h.kept_epoch or 0) >= paths.end for h in host.helpers.values())

        poll_until_sync(has_all, PATIENCE_SECONDS, "the host to have the states of the path and its modules")
        kept = trainer._states[0]
        lab.kill(lab.runs[1])
        paths.end = 3
        heir, stop = paths.add_trainer("bob")
        heir.train(stop)
        assert heir.counts.phases == 1
        before, after = kept.inner["head.weight/step"], heir._states[0].inner["head.weight/step"]
        assert int(after) == int(before) + paths.config.inner_steps


def test_who_comes_after_lost_changes_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (3,), grace_seconds=1.0)
        paths.config = replace(paths.config, grace_seconds=1000.0)  # who waits for what is lost does so for too long
        paths.end = 1
        paths.open_host()
        trainer, stop = paths.add_trainer("alice")
        monkeypatch.setattr(trainer, "_flush", lambda: None)
        trainer.train(stop)  # dies with its changes, when its phases have been counted
        assert trainer.counts.phases == 3
        assert trainer.modules["shared"].run_epoch == 0
        assert paths.host is not None
        helpers = paths.host.helpers.values()
        has_all = lambda: all((h.kept_epoch or 0) >= h.collaboration.averager.epoch for h in helpers)  # noqa: E731
        poll_until_sync(has_all, PATIENCE_SECONDS, "the host to have the states of all modules")
        lab.kill(lab.runs[1])
        paths.end = 2
        heir, stop = paths.add_trainer("bob")
        heir.train(stop)
        assert heir.counts.phases == 3
        assert heir.modules["shared"].epoch == 1, "its three changes travelled together"


def test_an_outer_step_survives_the_only_trainer_that_had_a_change_for_it() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (2,), shared=("embedding",))
        paths.end = 1
        paths.open_host(keep="never")  # it has averages, and no states
        alice, stop = paths.add_trainer("alice")
        bob, _ = paths.add_trainer("bob")
        bob._part("shared")
        alice.train(stop)
        assert alice.counts.phases == 2
        made = {name: value.clone() for name, value in alice.modules["shared"].loop.shared.items()}
        lab.kill(lab.runs[1])
        part = bob.modules["shared"]

        def is_there() -> bool:
            part.poll()
            return part.epoch == part.run_epoch == alice.modules["shared"].epoch > 0

        poll_until_sync(is_there, PATIENCE_SECONDS, "bob to take the steps of the dead one")
        assert all(torch.equal(value, made[name]) for name, value in part.loop.shared.items())
        assert part.driver.statistics()["heard_late"] == part.epoch
        assert not part.is_awaited


def test_an_outer_step_survives_the_only_trainer_of_its_module() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (2,), shared=("embedding",))
        paths.end = 1
        paths.open_host()
        assert paths.host is not None
        heir = paths.host.heirs["shared"]
        alice, _ = paths.add_trainer("alice")
        part = alice._part("shared")
        helper = heir.helper
        poll_until_sync(lambda: helper.keeper.directory.verdict(0) is not None, PATIENCE_SECONDS, "epoch 0")
        lab.runs[0].call(take_first_state(helper.keeper))
        for epoch in range(1, 4):  # made by alice alone, and she dies before anybody has their states
            part.driver._recovery._source = None
            part.loop.add(Change({n: torch.full_like(p, 0.1 * epoch) for n, p in part.loop.shared.items()}, 1.0, 2.0))
            part.driver.begin_round(delay_step=False)
            assert part.driver.land()
        made = {name: value.clone() for name, value in part.loop.shared.items()}
        lab.kill(lab.runs[1])
        poll_until_sync(lambda: heir.counts["steps"] == 3, PATIENCE_SECONDS, "the host to take the steps")
        assert helper.kept_epoch == 3
        bob, _ = paths.add_trainer("bob")
        found = bob._part("shared")
        assert found.epoch == 3
        assert all(torch.equal(value, made[name]) for name, value in found.loop.shared.items())


async def take_first_state(keeper: StateKeeper) -> None:
    (await keeper.fetch(epoch=0, timeout_seconds=PATIENCE_SECONDS)).release()


def test_a_path_stops_when_its_validation_loss_does_not_fall() -> None:
    with train_lab() as lab:
        paths = PathLab(lab, (1,), patience_phases=2)
        paths.end = 0
        paths.open_host()
        trainer, stop = paths.add_trainer("alone", outer=lambda: OuterSGD(1e-9))
        done = trainer.train(stop)
        state = trainer._states[0]
        assert done.phases <= 5
        assert state.num_worse >= 2
        assert state.best_modules.keys() == dict(make_model().named_parameters()).keys()
        again = read_state(state.to_bytes())
        assert again.best == state.best
        assert all(torch.equal(v, again.best_modules[k]) for k, v in state.best_modules.items())


def test_what_is_no_state_of_a_path_is_refused() -> None:
    bad = PathState(inner={"head.weight/exp_avg": torch.tensor([math.nan])})
    for data, message in {b"": "no state", b"x" * 100: "no state", bad.to_bytes(): "not finite"}.items():
        with pytest.raises(ProtocolError, match=message):
            read_state(data)


def test_a_model_of_paths_loads_only_what_it_needs(tmp_path: Path) -> None:
    grid, (documents, _) = Grid((2, 2)), languages(80)
    router = fit_kmeans(bag_of_tokens(prefixes_of(documents, 8)), 4)
    routing = routed(grid, documents, router, prefix=8, kind="kmeans")
    parts, values = cut(make_model(), 2), dict(make_model(3).named_parameters())
    modules = {
        name: {p: values[p].detach() + number for part in grid.parts_of(name) for p in parts[part]}
        for number, name in enumerate(grid.modules)
    }
    PathModel(grid, make_model, modules.__getitem__).save(tmp_path, routing)
    model = PathModel.load(tmp_path, make_model)
    path = model.route(documents[0])
    assert grid.number_of(path) == routing.paths[0]
    plain = dict(model.path(path).named_parameters())
    assert model.loaded == set(grid.modules_of(path))
    for name in grid.modules_of(path):
        assert all(torch.equal(plain[p], value) for p, value in modules[name].items())
    found = evaluate(model, documents[:20], routing.paths[:20], word_losses, window=LENGTH - 1, reroute_every=8)
    assert found.tokens == 20 * (LENGTH - 8)
    assert sum(found.documents.values()) == 20
    assert found.rerouted is not None
    mixed = sum(found.by_path[p] * found.documents[p] for p in found.by_path) / 20
    assert found.mixture == pytest.approx(mixed, rel=1e-5)
    with pytest.raises(ConfigurationError, match="too short"):
        model.route(documents[0][:4])
    with pytest.raises(ConfigurationError, match=r"paths\.json"):
        PathModel.load(tmp_path / "elsewhere", make_model)
