"""Checkpoints uploaded to a folder elsewhere and to a server that behaves like the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingfacerepos import READER, TOKEN, Repositories, repositories
from runhouse import open_run

from potluck.cli.hosting import Backing, state_config
from potluck.errors import AccessError, ConfigurationError, RetryableError
from potluck.optim.auxiliary import AuxiliaryPeer
from potluck.state.backupfile import BackupInfo
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.config import StateConfig
from potluck.state.snapshot import Snapshot, stage
from potluck.state.uploads import UploadConfig, Uploads
from potluck.state.uploadtargets import FolderTarget, HuggingFaceTarget, target_of
from potluck.testing.polling import poll_until

# huggingface_hub 2.4 hands files to its HTTP client in a way that the client has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

PATIENCE_SECONDS = 60.0


def state(epoch: int) -> Snapshot:
    return stage({"w": torch.arange(100_000.0) + epoch}, {"epoch": epoch}, ChunkPool()).hashed()


def saved(folder: Path, epoch: int) -> BackupInfo:
    return Backups(folder).save(state(epoch), epoch=epoch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repositories]:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else the library starts one thread for the whole process
    with repositories() as server:
        yield server
        huggingface_hub.close_session()


def target(hub: Repositories, token: str = TOKEN, **options: str) -> HuggingFaceTarget:
    return HuggingFaceTarget("bakers/bread", token=token, endpoint=hub.url, **options)


def restored(files: dict[str, bytes], folder: Path, prefix: str = "") -> int | None:
    """What a folder of uploaded files is good for."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name.removeprefix(prefix)).write_bytes(data)
    found = Backups(folder).restore()
    if found is None:
        return None
    assert found.snapshot.digest == state(found.info.epoch).digest
    return found.info.epoch


def test_the_hub_holds_the_last_checkpoint_and_it_can_be_restored(hub: Repositories, tmp_path: Path) -> None:
    there = target(hub, folder="checkpoints")
    for epoch in (1, 2):
        there.upload(saved(tmp_path / "backups", epoch))
    files = hub.files["bakers/bread"]
    assert len(files) == 2
    assert hub.commits == ["Epoch 1", "Epoch 2"]
    assert restored(files, tmp_path / "copy", "checkpoints/") == 2


def test_a_model_is_uploaded_as_it_was_exported(hub: Repositories, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, data in (("README.md", b"# bread"), ("config.json", b"{}"), ("model.safetensors", b"x" * 100_000)):
        (tmp_path / "out" / name).write_bytes(data)
    target(hub).upload_folder(tmp_path / "out", "Epoch 7")
    there = FolderTarget(str(tmp_path / "elsewhere"))
    there.upload_folder(tmp_path / "out", "Epoch 7")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "elsewhere").iterdir()}
    assert (
        hub.files["bakers/bread"] == copies == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    )
    assert hub.commits == ["Epoch 7"]
    with pytest.raises(AccessError, match="may write"):
        target(hub, READER).upload_folder(tmp_path / "out", "Epoch 8")


def test_other_files_of_the_repository_are_left_alone(hub: Repositories, tmp_path: Path) -> None:
    hub.files["bakers/bread"] = {"README.md": b"hello", "other/epoch-1.json": b"{}"}
    target(hub).upload(saved(tmp_path, 1))
    assert {"README.md", "other/epoch-1.json"} < set(hub.files["bakers/bread"])
    assert len(hub.files["bakers/bread"]) == 4


@pytest.mark.parametrize("part", ["preupload", "batch", "objects/", "commit"])
@pytest.mark.parametrize("status", [429, 500])
def test_a_bad_moment_of_the_server_is_survived(hub: Repositories, tmp_path: Path, part: str, status: int) -> None:
    info = saved(tmp_path / "backups", 1)
    hub.fail(part, status)
    there = target(hub)
    try:
        there.upload(info)
    except RetryableError:  # what the library does not try again by itself, whoever called does
        there.upload(info)
    assert hub.bad_days == []
    assert restored(hub.files["bakers/bread"], tmp_path / "copy") == 1


def test_what_is_there_is_not_sent_again(hub: Repositories, tmp_path: Path) -> None:
    info = saved(tmp_path / "backups", 1)
    hub.fail("commit/main", 400)
    there = target(hub)
    with pytest.raises(ConfigurationError):
        there.upload(info)
    assert (hub.num_uploads, hub.commits) == (1, [])
    target(hub).upload(info)
    assert (hub.num_uploads, hub.commits) == (1, ["Epoch 1"])


@pytest.mark.parametrize("token", [READER, "hf_wrong"])
def test_a_token_that_may_not_write_is_named_as_the_reason(hub: Repositories, tmp_path: Path, token: str) -> None:
    with pytest.raises(AccessError, match="token that may write"):
        target(hub, token).upload(saved(tmp_path, 1))
    assert hub.files.get("bakers/bread", {}) == {}


def test_a_folder_elsewhere_is_a_folder_of_backups(tmp_path: Path) -> None:
    there = FolderTarget(f"file://{tmp_path}/elsewhere", keep_last=2)
    for epoch in (1, 2, 3):
        there.upload(saved(tmp_path / "backups", epoch))
    elsewhere = Backups(tmp_path / "elsewhere")
    assert elsewhere.epochs() == [3, 2]
    found = elsewhere.restore()
    assert found is not None
    assert found.snapshot.digest == state(3).digest
    assert len(list((tmp_path / "elsewhere").iterdir())) == 4


def test_any_file_system_that_fsspec_knows_will_do(tmp_path: Path) -> None:
    there = FolderTarget("memory://run/checkpoints")
    there.upload(saved(tmp_path, 1))
    names = [Path(name).name for name in there._system.ls("/run/checkpoints", detail=False)]
    assert sorted(name.rpartition(".")[2] for name in names) == ["json", "safetensors"]


def test_a_folder_upload_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    info = saved(tmp_path / "backups", 1)
    there = FolderTarget(str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    remote = tmp_path / "elsewhere" / info.tensors_path.name
    remote.write_bytes(info.tensors_path.read_bytes())
    before = remote.stat().st_mtime_ns
    there.upload(info)
    assert remote.stat().st_mtime_ns == before
    remote.write_bytes(b"torn")
    there.upload(info)
    assert remote.read_bytes() == info.tensors_path.read_bytes()


def test_an_address_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nonsense"):
        FolderTarget("nonsense://bucket/run")


async def test_backups_are_uploaded_in_the_background_until_it_works(hub: Repositories, tmp_path: Path) -> None:
    config = UploadConfig(first_pause_seconds=0.05, longest_pause_seconds=0.1)
    uploads = Uploads(target(hub), config)
    uploads.start()
    try:
        hub.fail("api/repos/create", 500, 500, 503)
        uploads.offer(saved(tmp_path / "backups", 1))
        await poll_until(lambda: uploads.last_epoch == 1, PATIENCE_SECONDS, "epoch 1 to be uploaded")
        assert uploads.counts["uploaded"] == 1
        assert uploads.last_error == ""
    finally:
        await uploads.close(timeout_seconds=5.0)


async def test_only_the_newest_waits(tmp_path: Path) -> None:
    class Slow:
        name = "slow"
        uploaded: list[int] = []

        def upload(self, info: BackupInfo) -> None:
            self.uploaded.append(info.epoch)
            if len(self.uploaded) == 1:
                raise RetryableError("busy")

    slow = Slow()
    uploads = Uploads(slow, UploadConfig(first_pause_seconds=0.05, longest_pause_seconds=0.05))
    for epoch in range(1, 6):
        uploads.offer(saved(tmp_path, epoch))
    uploads.start()
    await uploads.close(timeout_seconds=PATIENCE_SECONDS)
    assert slow.uploaded == [5, 5]
    assert uploads.statistics()["passed_over"] == 4


async def test_what_cannot_work_is_said_once_and_the_next_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        name = "broken"
        errors: list[Exception] = [AccessError("no rights"), ZeroDivisionError("a bug in a library")]

        def upload(self, info: BackupInfo) -> None:
            if self.errors:
                raise self.errors.pop(0)

    uploads = Uploads(Broken())
    uploads.start()
    try:
        for epoch in (1, 2, 3):
            uploads.offer(saved(tmp_path, epoch))
            await poll_until(lambda: uploads._is_idle.is_set(), PATIENCE_SECONDS, "the upload to be over")
        assert uploads.last_epoch == 3
        assert uploads.counts["failed"] == 2
        assert "no rights" in caplog.text
    finally:
        await uploads.close()


async def test_a_host_uploads_each_of_its_backups(
    hub: Repositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("POTLUCK_HF_ENDPOINT", hub.url)
    async with open_run(tmp_path) as house:
        backing = Backing(every_epochs=1, keep_last=1, keep_every=0, upload_to="hf://bakers/bread")
        helper = await AuxiliaryPeer.of(house.own_peer, num_threads=1, state=state_config(house.host, backing))
        keeper = helper.collaboration.keeper
        assert keeper is not None
        try:
            for epoch in (1, 2):
                keeper.publish({"w": torch.arange(100_000.0) + epoch}, {"epoch": epoch}, epoch)
                await poll_until(
                    lambda n=epoch: keeper.archive.upload_counts["uploaded"] == n, PATIENCE_SECONDS, "an upload"
                )
        finally:
            await helper.close()
    assert hub.commits == ["Epoch 1", "Epoch 2"]
    assert restored(hub.files["bakers/bread"], tmp_path / "copy") == 2


def test_without_backups_there_is_nothing_to_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({}, {"folder": Path("states"), "backups": None}):
        with pytest.raises(ConfigurationError, match="upload_to"):
            StateConfig(upload_to="s3://bucket/run", **wrong)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="HF_TOKEN"):
        target_of("hf://bakers/bread", keep_last=1)
