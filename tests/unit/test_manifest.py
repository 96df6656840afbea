"""What a run trains: run.toml, the manifest, its settings by epoch, its signature, and following it in the hub."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError, DeadlineExceededError, ProtocolError
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.messages import decode, encode
from potluck.optim.diloco import DiLoCoConfig
from potluck.optim.options import OptimizerConfig
from potluck.recipes.reference import RecipeRef
from potluck.sim.memoryhub import MemoryHub
from potluck.testing.polling import poll_until
from potluck.training.manifest import noticeboard
from potluck.training.manifest.manifest import (
    MAX_HISTORY,
    DiLoCoSettings,
    ExchangeSettings,
    Manifest,
    OptimizerSpec,
    ScheduleSpec,
    Settings,
    SyncSettings,
)
from potluck.training.manifest.noticeboard import NoticeBoard, SignedManifest
from potluck.training.manifest.runfile import manifest_of, read_run_file
from potluck.training.manifest.skeleton import files_of_a_run
from potluck.training.trainer.optimizers import coordinating, gathering, learning_rate

RUN = "bakery"
ORGANISER = Signer(new_seed("user"))


def manifest(*settings: Settings, **changes: object) -> Manifest:
    return Manifest(run=RUN, recipe=RecipeRef(name="digits"), settings=settings or (Settings(),), **changes)  # type: ignore[arg-type]


# Settings


def test_settings_count_from_their_epoch_on() -> None:
    found = manifest(Settings(), Settings(from_epoch=10, paused=True), Settings(from_epoch=12, end_epoch=20))
    assert [found.at(epoch).from_epoch for epoch in (0, 9, 10, 11, 12, 1000)] == [0, 0, 10, 10, 12, 12]
    assert found.newest.end_epoch == 20


def paused(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, paused=True)


def test_a_change_counts_for_what_is_planned_later_too() -> None:
    first = manifest(Settings(), Settings(from_epoch=5, end_epoch=5), Settings(from_epoch=9, end_epoch=9))
    second = first.amended(paused, from_epoch=7, epoch=6)
    assert [(e.from_epoch, e.end_epoch, e.paused) for e in second.settings] == [
        (5, 5, False),
        (7, 5, True),
        (9, 9, True),
    ]
    assert second.at(6) == first.at(6)


def test_what_is_changed_back_leaves_nothing() -> None:
    first = manifest(Settings(), Settings(from_epoch=9, end_epoch=9))
    back = first.amended(paused, from_epoch=3, epoch=3).amended(
        lambda settings: msgspec.structs.replace(settings, paused=False), from_epoch=3, epoch=3
    )
    assert back.settings == (msgspec.structs.replace(first.settings[0], from_epoch=3), first.settings[1])


@given(st.lists(st.integers(0, 50), unique=True, min_size=1, max_size=8), st.integers(0, 50), st.integers(0, 10))
def test_a_change_changes_nothing_before_its_epoch_and_one_thing_after(
    epochs: list[int], epoch: int, ahead: int
) -> None:
    before = manifest(*(Settings(from_epoch=each, end_epoch=each + 1) for each in sorted(epochs)))
    after = before.amended(paused, from_epoch=epoch + ahead, epoch=epoch)
    for each in range(epoch, 70):
        assert after.at(each).end_epoch == before.at(each).end_epoch
        assert after.at(each).paused == (each >= epoch + ahead)


def test_what_was_done_is_written_down_and_the_oldest_forgotten() -> None:
    found = manifest()
    for number in range(MAX_HISTORY + 3):
        found = found.recorded("paused", by="Ada" * 200, at=float(number), from_epoch=number, reason="it burns")
    assert found.revision == MAX_HISTORY + 4
    assert [change.revision for change in found.history] == list(range(5, MAX_HISTORY + 5))
    assert len(found.history[-1].by) == 300
    assert noticeboard.read(noticeboard.sign(found, ORGANISER), RUN)[0] == found


def test_a_manifest_that_nobody_would_read_is_not_signed() -> None:
    planned = manifest(*(Settings(from_epoch=each, end_epoch=each + 1) for each in range(200)))
    with pytest.raises(ConfigurationError, match="plan fewer"):
        noticeboard.sign(planned, ORGANISER)


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(Settings(end_epoch=-1)),
        manifest(Settings(optimizer=OptimizerSpec(learning_rate=-1.0))),
        manifest(model={"width": 2**70}),
        manifest(model={"corpus": "\ud800"}),
    ],
)
def test_a_manifest_that_nobody_could_read_is_not_signed(wrong: Manifest) -> None:
    with pytest.raises(ConfigurationError, match="Choose other values"):
        noticeboard.sign(wrong, ORGANISER)


@pytest.mark.parametrize(
    "settings",
    [
        (Settings(from_epoch=3), Settings(from_epoch=3)),
        (Settings(from_epoch=4), Settings(from_epoch=3)),
        (Settings(), Settings(from_epoch=3, training=DiLoCoSettings())),
        (Settings(training=DiLoCoSettings()), Settings(from_epoch=3, training=DiLoCoSettings(inner_steps=7))),
        (Settings(), Settings(from_epoch=3, training=SyncSettings(delay_averaging=True))),
        (Settings(), Settings(from_epoch=3, optimizer=OptimizerSpec(name="sgd"))),
        (Settings(), Settings(from_epoch=3, optimizer=OptimizerSpec(max_grad_norm=7.0))),
    ],
)
def test_settings_that_a_run_cannot_follow(settings: tuple[Settings, ...]) -> None:
    with pytest.raises(ConfigurationError):
        manifest(*settings)


def test_the_target_batch_may_change() -> None:
    found = manifest(Settings(), Settings(from_epoch=3, training=SyncSettings(target_batch_size=999)))
    assert found.at(3).training == SyncSettings(target_batch_size=999)


@pytest.mark.parametrize("values", [{"codec": "float17"}, {"aggregator": "mode"}])
def test_what_the_exchange_does_not_know(values: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"choose|there is no"):
        ExchangeSettings(**values)


def test_whoever_coordinates_plans_as_the_manifest_says() -> None:
    found = manifest(exchange=ExchangeSettings(aggregator="median", reducers="trusted"))
    gather = coordinating(found).gather
    assert (gather.aggregator.name, gather.trusted_reducers) == ("median", True)
    assert gather.batch_weight == found.newest.training.target_batch_size  # type: ignore[union-attr]
    assert OptimizerConfig(target_batch_size=8, gather=gathering(found)).coordinator().gather == gather
    for asynchronous in (False, True):
        assert DiLoCoConfig(asynchronous=asynchronous, gather=gathering(found)).coordinator().gather == gather


# The learning rate


@pytest.mark.parametrize(
    ("schedule", "epoch", "share"),
    [
        (ScheduleSpec(), 0, 1.0),
        (ScheduleSpec(), 10**6, 1.0),
        (ScheduleSpec(warmup_epochs=3), 0, 0.25),
        (ScheduleSpec(warmup_epochs=3), 2, 0.75),
        (ScheduleSpec(warmup_epochs=3), 3, 1.0),
        (ScheduleSpec(kind="linear", total_epochs=10), 0, 1.0),
        (ScheduleSpec(kind="linear", total_epochs=10, final_share=0.0), 5, 0.5),
        (ScheduleSpec(kind="cosine", total_epochs=10, final_share=0.0), 5, 0.5),
        (ScheduleSpec(kind="cosine", total_epochs=10, final_share=0.2), 10, 0.2),
        (ScheduleSpec(kind="cosine", total_epochs=10, final_share=0.2), 99, 0.2),
    ],
)
def test_the_learning_rate_of_an_epoch(schedule: ScheduleSpec, epoch: int, share: float) -> None:
    settings = Settings(optimizer=OptimizerSpec(learning_rate=0.5), schedule=schedule)
    assert learning_rate(settings, epoch) == pytest.approx(0.5 * share)


def test_a_schedule_that_falls_needs_an_end() -> None:
    with pytest.raises(ConfigurationError, match="total_epochs"):
        ScheduleSpec(kind="cosine", warmup_epochs=5, total_epochs=5)


# run.toml


@pytest.mark.parametrize("recipe", ["own", "digits", "stdlib-lm"])
def test_what_init_writes_can_be_used_as_it_is(tmp_path: Path, recipe: str) -> None:
    for name, text in files_of_a_run(RUN, recipe).items():
        (tmp_path / name).write_text(text)
    found = manifest_of(read_run_file(tmp_path), tmp_path)
    assert found.run == RUN
    assert bool(found.recipe.digest) == (recipe == "own")
    assert decode(Manifest, encode(found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "a b"', "name"),
        ('nam = "x"', "nam"),
        ("name = ", "wrong"),
        ("\xff", "wrong"),
        ('name = "x"\nrecipe = "no-such"', "neither built in"),
        ('name = "x"\n[model]\nlayer = 3', "layer"),
        ('name = "x"\n[model]\nwidth = "wide"', "width"),
        ('name = "x"\n[training]\nalgorithm = "magic"', "magic"),
        ('name = "x"\n[training]\nalgorithm = "sync"\ntarget_batch_size = 0', "target_batch_size"),
        ('name = "x"\n[optimizer]\nlearning_rate = -1.0', "learning_rate"),
        ('name = "x"\n[exchange]\ncodec = "float17"', "float17"),
        ('name = "x"\nend_epoch = -1', "end_epoch"),
        ('name = "x"\n[data]\ncontxt = 3', r"\[data\].*context"),
        ('name = "x"\n[data]\ncontext = 999', "context=999"),
        ('name = "x"\n[[curriculum]]\ndata.context = 3', "from_epoch"),
        ('name = "x"\n[[curriculum]]\nfrom_epoch = 9\ndata.contxt = 3', "did you mean"),
        ('name = "x"\n[[curriculum]]\nfrom_epoch = 9\ndata.context = 999', "context=999"),
        ('name = "x"\n[[curriculum]]\nfrom_epoch = 9\npaused = true', "paused"),
        ('name = "x"\n[[curriculum]]\nfrom_epoch = 9\nalgorithm = "diloco"', "algorithm"),
        ('name = "x"\n' + "[[curriculum]]\nfrom_epoch = 9\nend_epoch = 7\n" * 2, "in order"),
        ('name = "x"\nseed = 9223372036854775808', "seed"),
        ('name = "x"\n[optimizer]\nlearning_rate = inf', "learning_rate"),
        ('name = "x"\n[optimizer]\nmax_grad_norm = inf', "max_grad_norm"),
        ('name = "x"\n[groups]\n"a b" = "all"', "cannot name a group"),
        ('name = "x"\n[groups]\ncritic = "some"', "some"),
        ('name = "x"\n[groups]\nmain = "all"', "every run has the group main"),
        ('name = "x"\n[groups]\ncritic = "all"\n[pipeline]\nstages = 2', r"\[groups\] are those of programs"),
    ],
)
def test_a_run_file_that_is_wrong_says_where(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        manifest_of(read_run_file(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("training", "left", "algorithm"),
    [
        ('algorithm = "diloco"\ntarget_batch_size = 256', "target_batch_size", "sync"),
        ('algorithm = "diloco"\ninner_steps = 7\ndelay_averaging = true', "delay_averaging", "sync"),
        ('algorithm = "sync"\ninner_steps = 7', "inner_steps", "diloco"),
    ],
)
def test_what_another_algorithm_left_in_run_toml_is_passed_over_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, training: str, left: str, algorithm: str
) -> None:
    (tmp_path / "run.toml").write_text(f'name = "x"\n[training]\n{training}\n')
    read_run_file(tmp_path)
    found = read_run_file(tmp_path)
    assert not hasattr(found.training, left)
    assert getattr(found.training, "inner_steps", 7) in (7, 100)
    [record] = caplog.records
    assert f"{left} works only with {algorithm}, and is ignored" in record.getMessage()


def test_groups_are_declared_by_the_organiser_or_by_the_modules_of_paths(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\n[groups]\ncritic = "invited"')
    assert read_run_file(tmp_path).declared_groups() == {"critic": "invited"}
    (tmp_path / "run.toml").write_text('name = "x"\n[paths]\nlevels = [2]\nshared = ["embedding", "head"]')
    assert read_run_file(tmp_path).declared_groups() == dict.fromkeys(["shared", "level-0-0", "level-0-1"], "all")


def test_what_no_algorithm_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\n[training]\nalgorithm = "diloco"\nsteps = 3')
    with pytest.raises(ConfigurationError, match="steps"):
        read_run_file(tmp_path)


CURRICULUM = """
name = "bakery"
recipe = "stdlib-lm"
[model]
context = 64
[data]
context = 16
[[curriculum]]
from_epoch = 100
data.context = 32
learning_rate = 1e-4
[[curriculum]]
from_epoch = 200
[curriculum.data]
context = 0
[curriculum.training]
target_batch_size = 999
"""


def test_stages_are_planned_in_run_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CURRICULUM)
    found = manifest_of(read_run_file(tmp_path), tmp_path)
    assert [entry.from_epoch for entry in found.settings] == [0, 100, 200]
    assert [entry.data for entry in found.settings] == [{"context": 16}, {"context": 32}, {"context": 0}]
    assert [entry.optimizer.learning_rate for entry in found.settings] == [3e-4, 1e-4, 1e-4]
    assert [entry.training for entry in found.settings] == [
        SyncSettings(),
        SyncSettings(),
        SyncSettings(target_batch_size=999),
    ]
    assert noticeboard.read(noticeboard.sign(found, ORGANISER), RUN)[0] == found


@pytest.mark.parametrize("recipe", ["own", "digits", "stdlib-lm"])
def test_the_stage_that_init_explains_can_be_used(tmp_path: Path, recipe: str) -> None:
    for name, text in files_of_a_run(RUN, recipe).items():
        before, sign, stage = text.partition("# [[curriculum]]")
        (tmp_path / name).write_text(before + (sign + stage).replace("# ", "") if name == "run.toml" else text)
    found = manifest_of(read_run_file(tmp_path), tmp_path)
    assert [entry.from_epoch for entry in found.settings] == [0, 1000]
    assert found.settings[0].data == (
        {"noise": 0.05} if recipe == "own" else {"context": 0} if recipe != "digits" else {}
    )


def test_a_run_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="potluck init"):
        read_run_file(tmp_path)


# The signature


def test_a_signed_manifest_is_read_again() -> None:
    assert noticeboard.read(noticeboard.sign(manifest(), ORGANISER), RUN) == (manifest(), ORGANISER.public_key)


@pytest.mark.parametrize("field", ["body", "organiser", "signature"])
def test_a_changed_manifest_is_refused(field: str) -> None:
    signed = decode(SignedManifest, noticeboard.sign(manifest(), ORGANISER))
    others = decode(SignedManifest, noticeboard.sign(manifest(seed=1), Signer(new_seed("user"))))
    forged = msgspec.structs.replace(signed, **{field: getattr(others, field)})
    with pytest.raises(ProtocolError):
        noticeboard.read(encode(forged), RUN)


def test_a_manifest_of_another_run_is_refused() -> None:
    with pytest.raises(ProtocolError):
        noticeboard.read(noticeboard.sign(manifest(), ORGANISER), "brewery")


@given(st.binary(max_size=300))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        noticeboard.read(data, RUN)


# In the hub


async def test_the_board_follows_newer_manifests_of_the_same_organiser() -> None:
    hub = MemoryHub()
    guard = hub.connect("guard")
    store, board, heard = guard.store("manifest"), NoticeBoard(guard, RUN), []
    board.listen(heard.append)
    await board.start()
    with pytest.raises(DeadlineExceededError, match="not said yet"):
        await board.first(0.01)
    first = manifest()
    second = first.amended(paused, from_epoch=4, epoch=2).recorded("paused", by="Ada", at=0.0, from_epoch=4)
    await store.put(MANIFEST_KEY, noticeboard.sign(first, ORGANISER))
    assert await board.first(1.0) == first
    await store.put(MANIFEST_KEY, noticeboard.sign(second, Signer(new_seed("user"))))
    await store.put(MANIFEST_KEY, b"scribble")
    await store.put("other", noticeboard.sign(second, ORGANISER))
    await poll_until(lambda: board.bad_manifests == 2, 10.0, "two that are passed over")
    assert board.manifest == first
    await store.put(MANIFEST_KEY, noticeboard.sign(second, ORGANISER))
    await store.put(MANIFEST_KEY, noticeboard.sign(first, ORGANISER))
    await store.put(MANIFEST_KEY, b"scribble")
    await poll_until(lambda: board.bad_manifests == 3, 10.0, "all changes")
    assert board.manifest == second
    assert heard == [first, second]
    await board.close()
