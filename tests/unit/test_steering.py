"""An organiser's orders: settings by name, what run.toml changes, and revisions of the manifest in the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from potluck.errors import ConfigurationError, RevisionConflictError
from potluck.hub.access.organise import Done, Failure, PutUpManifest
from potluck.hub.connection import Delivery
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.messages import PROTOCOL_VERSION, decode, encode
from potluck.recipes.reference import RecipeRef
from potluck.round.plan.messages import Commit, Restoration, RoundKey
from potluck.sim.memoryhub import MemoryHub
from potluck.training.manifest import noticeboard, steering
from potluck.training.manifest.changes import described, differences, full_name, values_of, with_values
from potluck.training.manifest.earlier import EarlierState
from potluck.training.manifest.manifest import (
    DiLoCoSettings,
    Manifest,
    OptimizerSpec,
    Rollback,
    Settings,
    SyncSettings,
)
from potluck.training.manifest.organising import taken_over
from potluck.training.manifest.rollback import pending
from potluck.training.manifest.steering import Steering

DIGEST = "ab" * 32


def manifest(*settings: Settings, **changes: Any) -> Manifest:
    fields = {"recipe": RecipeRef(name="digits"), "settings": settings or (Settings(),), **changes}
    return Manifest(run="bakery", **fields)


# Settings by name


def test_settings_are_known_by_the_end_of_their_names() -> None:
    settings = Settings()
    assert full_name("learning_rate", settings) == full_name("optimizer.learning_rate", settings)
    assert full_name("end_epoch", settings) == "end_epoch"
    for wrong in ("paused", "from_epoch", "inner_steps", "outer.learning_rate"):
        with pytest.raises(ConfigurationError, match="no setting"):
            full_name(wrong, settings)
    with pytest.raises(ConfigurationError, match="did you mean learning_rate"):
        full_name("lerning_rate", settings)


def test_values_are_read_as_what_they_are() -> None:
    changed = with_values(Settings(), {"optimizer.learning_rate": "1e-4", "training.target_batch_size": "512"})
    assert changed.optimizer.learning_rate == 1e-4
    assert changed.training == SyncSettings(target_batch_size=512)
    assert differences(Settings(), changed) == {"training.target_batch_size": 512, "optimizer.learning_rate": 1e-4}
    assert described({"end_epoch": 7}) == "end_epoch = 7"
    assert with_values(Settings(), values_of(changed)) == changed


def test_data_stay_what_they_are() -> None:
    settings = Settings(data={"context": 32, "noise": 1.0, "corpus": "7"})
    assert full_name("context", settings) == "data.context"
    changed = with_values(settings, {"data.context": "64", "data.noise": "2", "data.corpus": "8"})
    assert changed.data == {"context": 64, "noise": 2.0, "corpus": "8"}
    assert differences(settings, changed) == {"data.context": 64, "data.noise": 2.0, "data.corpus": "8"}
    with pytest.raises(ConfigurationError, match=r"data\.context=long cannot be"):
        with_values(settings, {"data.context": "long"})
    with pytest.raises(ConfigurationError, match="no setting"):
        full_name("contxt", Settings(data={"other": 1}))


@pytest.mark.parametrize(
    "values",
    [{"optimizer.learning_rate": "-1"}, {"optimizer.learning_rate": "fast"}, {"training.target_batch_size": "0"}],
)
def test_values_that_cannot_be(values: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be"):
        with_values(Settings(), values)


# run.toml


def test_a_command_outlives_a_restart_and_run_toml_says_only_what_is_new() -> None:
    written = Settings(optimizer=OptimizerSpec(learning_rate=0.1))
    present = manifest(with_values(written, {"optimizer.learning_rate": 0.01}), written=(written,))
    assert taken_over(present, manifest(written), epoch=7, by="", at=0.0) is None
    wanted = with_values(written, {"training.target_batch_size": 99})
    found = taken_over(present, manifest(wanted), epoch=7, by="Ada", at=5.0)
    assert found is not None
    assert found.at(8) == present.newest
    assert (found.newest.training, found.newest.optimizer.learning_rate) == (SyncSettings(target_batch_size=99), 0.01)
    assert found.written == (wanted,)
    [change] = found.history
    assert (change.by, change.at, change.from_epoch) == ("Ada", 5.0, 9)
    assert "target_batch_size = 99" in change.what


def stage(from_epoch: int, **values: Any) -> Settings:
    return with_values(
        Settings(from_epoch=from_epoch, data={"context": 8}), {f"data.{k}": v for k, v in values.items()}
    )


def test_run_toml_may_plan_anew_what_has_not_come_yet() -> None:
    first = manifest(stage(0), stage(10, context=16), stage(20, context=32))
    present = msgspec.structs.replace(first, written=first.settings)
    assert taken_over(present, first, epoch=12, by="", at=0.0) is None
    present = present.amended(
        lambda settings: with_values(settings, {"optimizer.learning_rate": 0.5}), from_epoch=15, epoch=12
    )
    wanted = manifest(stage(0), stage(10, context=24), stage(30, context=32), stage(40, context=64))
    found = taken_over(present, wanted, epoch=12, by="", at=0.0)
    assert found is not None
    counting = {each: found.at(each) for each in (12, 13, 14, 15, 20, 29, 30, 40)}
    assert [settings.data["context"] for settings in counting.values()] == [16, 16, 24, 24, 24, 24, 32, 64]
    rates = [settings.optimizer.learning_rate for settings in counting.values()]
    assert rates == [3e-4] * 3 + [0.5] * 5  # by command, and none of run.toml's business
    [change] = found.history
    assert change.what == "run.toml: data.context = 24; from epoch 40 on data.context = 64"
    assert taken_over(found, wanted, epoch=14, by="", at=0.0) is None


def test_a_stage_that_is_taken_out_of_run_toml_does_not_come() -> None:
    first = manifest(stage(0), stage(10, context=16))
    found = taken_over(msgspec.structs.replace(first, written=first.settings), manifest(stage(0)), epoch=2, by="", at=0)
    assert found is not None
    assert {found.at(each).data["context"] for each in range(50)} == {8}


def test_a_newer_potluck_goes_on_with_its_runs() -> None:
    def made_by(version: str, **changes: Any) -> Manifest:
        return manifest(recipe=RecipeRef(name="digits", version=version), **changes)

    present, wanted = made_by("0.1.0", written=(Settings(),)), made_by("0.2.0", protocol=PROTOCOL_VERSION + 1)
    found = taken_over(present, wanted, epoch=7, by="", at=0.0)
    assert found is not None
    assert (found.recipe.version, found.protocol, found.revision) == ("0.2.0", PROTOCOL_VERSION + 1, 2)
    assert found.settings == present.settings
    assert taken_over(found, wanted, epoch=8, by="", at=0.0) is None


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (manifest(recipe=RecipeRef(name="other")), "recipe"),
        (manifest(recipe=RecipeRef(name="digits", digest="ab")), "recipe"),
        (manifest(seed=3), "seed"),
        (manifest(Settings(training=DiLoCoSettings())), "training.algorithm"),
    ],
)
def test_run_toml_cannot_change_what_is_fixed(wanted: Manifest, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        taken_over(manifest(), wanted, epoch=0, by="", at=0.0)


# In the hub


class Guard:
    """Puts up manifests as the guard does; may lose to another organiser first."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.store = hub.connect("guard").store("manifest")
        self.others: list[bytes] = []

    async def asked(self, delivery: Delivery) -> None:
        request = decode(PutUpManifest, delivery.payload)
        if self.others:
            await self.store.put(MANIFEST_KEY, self.others.pop())
        try:
            await self.store.put(MANIFEST_KEY, request.signed, expected=request.replaces)
        except RevisionConflictError as error:
            await delivery.respond(encode(Failure(kind="later", message=str(error))))
        else:
            await delivery.respond(encode(Done()))


@asynccontextmanager
async def helm_of(first: Manifest | None, epoch: int = 4) -> AsyncIterator[tuple[Steering, Guard, Signer]]:
    hub, signer = MemoryHub(), Signer(new_seed("user"))
    guard = Guard(hub)
    connection = hub.connect("guard")
    await connection.subscribe(hub.subjects.organise("*", "manifest"), guard.asked)
    if first is not None:
        await guard.store.put(MANIFEST_KEY, noticeboard.sign(first, signer))
    run = hub.subjects.run
    helm = Steering(hub.connect(signer.public_key), run, signer, wall=lambda: 1000.0)
    head = commit(epoch)

    async def at_epoch() -> Commit | None:
        return head

    helm.head = at_epoch  # type: ignore[method-assign]  # commits are the lineage's own tests' matter
    yield helm, guard, signer


def commit(epoch: int, **changes: Any) -> Commit:
    key = RoundKey(epoch=epoch, token=1, attempt=0)
    fields = {"term": 1, "coordinator": "", "members": (), "digest": "", "parent": "", "layout": ""}
    return Commit(**{"epoch": epoch, "key": key, **fields, **changes})


@pytest.fixture
def run_manifest() -> Manifest:
    return msgspec.structs.replace(manifest(), run=MemoryHub().subjects.run)


async def test_pause_counts_at_once_and_is_written_down(run_manifest: Manifest) -> None:
    async with helm_of(run_manifest) as (helm, _guard, _signer):
        paused = await helm.pause(by="Ada", reason="the loss rises")
        assert paused.at(4).paused
        assert not paused.at(3).paused
        assert await helm.pause(by="Grace") == paused  # it is already
        resumed = await helm.resume(by="Grace")
        assert not resumed.at(4).paused
        assert await helm.manifest() == resumed
        told = [(change.by, change.what, change.reason, change.at, change.from_epoch) for change in resumed.history]
        assert told == [("Ada", "paused", "the loss rises", 1000.0, 4), ("Grace", "resumed", "", 1000.0, 4)]


async def test_settings_count_from_an_epoch_that_all_hear_of(run_manifest: Manifest) -> None:
    async with helm_of(run_manifest) as (helm, _guard, _signer):
        changed = await helm.change({"learning_rate": "0.5"}, by="Ada")
        assert [changed.at(epoch).optimizer.learning_rate for epoch in (5, 6)] == [3e-4, 0.5]
        assert await helm.change({"learning_rate": "0.5"}, by="Ada") == changed
        later = await helm.change({"learning_rate": "0.1"}, by="Ada", from_epoch=50)
        assert [later.at(epoch).optimizer.learning_rate for epoch in (5, 6, 49, 50)] == [3e-4, 0.5, 0.5, 0.1]
        with pytest.raises(ConfigurationError, match="name epoch 6"):
            await helm.change({"learning_rate": "0.5"}, by="Ada", from_epoch=5)
        with pytest.raises(ConfigurationError, match="cannot change"):
            await helm.change({"optimizer.name": "sgd"}, by="Ada")


async def test_an_end_that_lies_behind_is_refused(run_manifest: Manifest) -> None:
    async with helm_of(run_manifest) as (helm, _guard, _signer):
        with pytest.raises(ConfigurationError, match="end_epoch=5 lies behind: the change counts from epoch 6 on"):
            await helm.change({"end_epoch": "5"}, by="Ada")
        assert (await helm.change({"end_epoch": "6"}, by="Ada")).is_over(6)


async def test_a_run_that_is_over_goes_on_when_its_end_is_changed(run_manifest: Manifest) -> None:
    done = run_manifest.amended(lambda entry: with_values(entry, {"end_epoch": 4}), from_epoch=0, epoch=0)
    async with helm_of(done) as (helm, _guard, _signer):
        assert not (await helm.change({"end_epoch": "0"}, by="Ada")).is_over(4)
    said = Settings(end_epoch=4)
    wanted = manifest(Settings(end_epoch=9))
    again = taken_over(manifest(said, written=(said,)), wanted, epoch=4, by="", at=0.0)
    assert again is not None
    assert not again.is_over(4), "with another end in run.toml too: no epoch would come by which it could count"


async def test_of_two_organisers_the_second_changes_what_the_first_made(
    run_manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "RETRY_SECONDS", 0.0)
    async with helm_of(run_manifest) as (helm, guard, signer):
        theirs = run_manifest.recorded("end_epoch = 9", by="Grace", at=0.0, from_epoch=0)
        guard.others.append(noticeboard.sign(theirs, signer))
        paused = await helm.pause(by="Ada")
        assert paused.revision == 3
        assert [change.by for change in paused.history] == ["Grace", "Ada"]


async def test_nothing_can_be_steered_without_a_manifest() -> None:
    async with helm_of(None) as (helm, _guard, _signer):
        for order in (helm.pause(by=""), helm.resume(by=""), helm.manifest()):
            with pytest.raises(ConfigurationError, match="has no manifest"):
                await order


async def test_orders_to_go_back_are_numbered(run_manifest: Manifest) -> None:
    async with helm_of(run_manifest) as (helm, _guard, _signer):
        state = EarlierState(epoch=2, digest=DIGEST, num_bytes=1, keepers=("Ada",))
        for number in (1, 2):
            ordered = await helm.roll_back(state, by="Ada")
            assert ordered.rollback == Rollback(number=number, to_epoch=2, digest=DIGEST, given_at_epoch=4)
        with pytest.raises(ConfigurationError, match="has not reached"):
            await helm.roll_back(dataclasses.replace(state, epoch=9), by="Ada")


def test_an_order_is_pending_until_the_lineage_says_that_it_is_done(tmp_path: Path) -> None:
    order = Rollback(number=2, to_epoch=3, digest=DIGEST, given_at_epoch=8)
    ordered = manifest(rollback=order)
    done = Restoration(order=2, epoch=3, digest=DIGEST)
    assert pending(ordered, commit(8, num_restored=1)) == order
    assert pending(ordered, commit(9)) == order
    assert pending(ordered, commit(9, restored=done, num_restored=2)) is None
    assert pending(ordered, commit(7)) is None  # another lineage
    assert pending(ordered, None) is None
    assert pending(manifest(), commit(9)) is None
    assert pending(None, commit(9)) is None
