"""A participant: from the manifest to the samples handed in, with events for whoever presents it."""

from __future__ import annotations

import threading

import msgspec
import pytest
from trainlab import train_lab

from potluck.errors import ConfigurationError, StoppedError
from potluck.recipes.reference import RecipeRef
from potluck.training import participant as events
from potluck.training.manifest.manifest import Manifest, Settings, SyncSettings
from potluck.training.participant import Participant
from potluck.training.trainer.config import TrainConfig

TRAINING = SyncSettings(target_batch_size=8, matchmaking_seconds=0.0)
CONFIG = TrainConfig(batch_size=4, num_threads=1)


def manifest(end_epoch: int) -> Manifest:
    return Manifest(
        run="test", recipe=RecipeRef(name="digits"), settings=(Settings(training=TRAINING, end_epoch=end_epoch),)
    )


def test_from_the_manifest_to_the_end_and_whoever_comes_later_is_told_that_it_is_over() -> None:
    told: list[events.Event] = []
    prepared: list[Manifest] = []
    with train_lab() as lab:
        lab.put_up(manifest(end_epoch=2))
        ada = Participant(lab.join("Ada"), lambda _manifest: CONFIG, tell=told.append, prepare=prepared.append)
        last = ada.take_part(threading.Event())
        assert last is not None
        assert (last.epoch, last.given) == (2, 16)
        assert [entry.recipe.name for entry in prepared] == ["digits"]
        steps = [event for event in told if not isinstance(event, events.Progressed | events.StateLoading)]
        began = events.TrainingBegan("digits", 4, ("cpu",), "float32", 1)
        assert steps[:4] == [events.Prepared("manifest"), events.Prepared("torch"), events.Prepared("model"), began]
        assert any(isinstance(event, events.Progressed) for event in told)

        told.clear()
        bob = Participant(lab.join("Bob"), lambda _manifest: CONFIG, tell=told.append)
        assert bob.take_part(threading.Event()) is None
        assert told == [events.Prepared("manifest"), events.RunIsOver(2)]


def test_whoever_is_told_to_stop_does_not_wait_for_a_manifest() -> None:
    told: list[events.Event] = []
    stop = threading.Event()

    def tell(event: events.Event) -> None:
        told.append(event)
        stop.set()

    with train_lab() as lab, pytest.raises(StoppedError):
        Participant(lab.join("Ada"), lambda _manifest: CONFIG, tell=tell).take_part(stop)
    assert told == [events.ManifestAwaited()]


def test_a_recipe_that_was_not_approved_is_refused_before_anything_is_loaded() -> None:
    told: list[events.Event] = []
    own = msgspec.structs.replace(manifest(end_epoch=2), recipe=RecipeRef(name="own", digest="0" * 64))
    with train_lab() as lab:
        lab.put_up(own)
        participant = Participant(lab.join("Ada"), lambda _manifest: CONFIG, tell=told.append)
        with pytest.raises(ConfigurationError, match="own"):
            participant.take_part(threading.Event())
    assert told == [events.Prepared("manifest")]
