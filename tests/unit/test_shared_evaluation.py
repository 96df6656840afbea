"""Evaluation shared out among trusted trainers: whose part is which, and what they come to together."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from trainlab import together, train_lab

from potluck.hub.presence import Card, Presence
from potluck.recipes.catalogue import open_recipe
from potluck.recipes.reference import RecipeRef
from potluck.testing.polling import poll_until_sync
from potluck.training.books.evaluations import EvaluatedPart, EvaluationDesk, combined, part_of, readers_of
from potluck.training.manifest.manifest import DiLoCoSettings, Evaluation, Manifest, Settings
from potluck.training.trainer.config import TrainConfig
from potluck.training.trainer.models import load
from potluck.training.trainer.trainer import Trainer


def part(number: int, count: int, samples: int, loss: float, epoch: int = 5) -> EvaluatedPart:
    return EvaluatedPart(epoch=epoch, part=number, num_parts=count, samples=samples, figures={"evaluation_loss": loss})


def test_parts_come_to_the_mean_over_all_samples() -> None:
    assert combined([part(0, 2, 3, 1.0), part(1, 2, 1, 5.0)]) == {"evaluation_loss": 2.0}
    assert combined([part(0, 1, 3, 1.0)]) == {"evaluation_loss": 1.0}
    empty = EvaluatedPart(epoch=5, part=1, num_parts=2, samples=0)
    assert combined([part(0, 2, 3, 1.0), empty]) == {"evaluation_loss": 1.0}, "there may be fewer samples than peers"


@pytest.mark.parametrize(
    "parts", [[], [part(0, 2, 3, 1.0)], [part(0, 2, 3, 1.0), part(1, 3, 3, 1.0)], [part(2, 2, 3, 1.0)]]
)
def test_parts_that_do_not_add_up_do_not_count(parts: list[EvaluatedPart]) -> None:
    assert combined(parts) is None


def test_the_parts_of_a_recipe_come_to_the_whole() -> None:
    digits = open_recipe(RecipeRef(name="digits"), {})
    model = digits.model()
    with torch.no_grad():
        whole = digits.evaluate(model)
        found = [digits.evaluate_part(model, number, 3) for number in range(3)]
    told = [
        EvaluatedPart(epoch=1, part=number, num_parts=3, samples=samples, figures=dict(figures))
        for number, (figures, samples) in enumerate(found)
    ]
    assert combined(told) == pytest.approx(whole, rel=1e-5)


def present(peer: str, role: Any, trusted: bool) -> Presence:
    card = Card(session="s", role=role, name=peer)
    return Presence(peer=peer, card=card, state="alive", host="", person=peer, trusted=trusted)


def test_only_trusted_trainers_have_a_part() -> None:
    roster = [
        present("C", "trainer", True),
        present("A", "trainer", True),
        present("B", "trainer", False),
        present("H", "aux", True),
        present("X", "aux", False),
    ]
    assert [part_of(name, roster) for name in "ABCH"] == [(0, 2), None, (1, 2), None]
    assert readers_of(roster) == ["H"]


def test_two_trusted_trainers_evaluate_what_they_share() -> None:
    """And not what each has by its own local steps."""
    settings = Settings(training=DiLoCoSettings(inner_steps=3, min_peers=2, grace_seconds=20.0), end_epoch=4)
    manifest = Manifest(
        run="test", recipe=RecipeRef(name="digits"), settings=(settings,), evaluation=Evaluation(every_epochs=2)
    )
    with train_lab() as lab:
        runs = [lab.join(name) for name in ("Ada", "Bob")]
        host = lab.join("host", role="aux")

        async def opened() -> EvaluationDesk:
            return EvaluationDesk(host.peer)

        desk = host.call(opened())
        trainers = [
            Trainer(run, lambda: manifest, open_recipe(manifest.recipe, {}), TrainConfig(batch_size=8, num_threads=1))
            for run in runs
        ]
        together(*(partial(each.train, threading.Event()) for each in trainers))
        one = trainers[0]
        assert one.optimizer.epoch == 4
        assert all(each.optimizer.driver.seconds_waiting > 0 for each in trainers), "an exchange of two without overlap"
        found = poll_until_sync(lambda: desk.figures_at(4), 30.0, lambda: f"the figures of epoch 4: {desk.counts}")

        # The same as one peer that looks at all of it, with the weights that all share.
        recipe = open_recipe(manifest.recipe, {})
        model = recipe.model()
        load(model, one.optimizer.method.tensors())
        with torch.no_grad():
            assert found == pytest.approx(dict(recipe.evaluate(model)), rel=1e-4)
        assert {each.num_parts for each in desk._parts[4].values()} == {2}

        # A stranger's figures do not count. (It comes only now: before, rounds would wait for it.)
        stranger = lab.join("Eve", trusted=False)
        wrong = EvaluatedPart(epoch=4, part=0, num_parts=1, samples=1, figures={"evaluation_loss": 0.0})

        async def lie() -> None:
            await stranger.peer.links.send(host.peer_id, wrong, timeout_seconds=5.0)

        stranger.call(lie())
        poll_until_sync(lambda: desk.counts["passed_over"], 30.0, lambda: "the lie was heard")
        assert desk.figures_at(4) == found
