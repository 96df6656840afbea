"""Backups on disk: whole or not there, whatever happens to the process, the files or the disk."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roundlab import at_point
from test_state_snapshot import bits, some_tensor

from potluck.errors import BackupError, ConfigurationError
from potluck.hub.server.diskspace import DiskSpace
from potluck.state.backupfile import BackupInfo, read_info
from potluck.state.backups import SPARE_BYTES, BackupConfig, Backups, superfluous
from potluck.state.chunkpool import ChunkPool
from potluck.state.inventory import ITEM_BYTES
from potluck.state.snapshot import DTYPES, Snapshot, stage

POOL = ChunkPool(4096)


def state(epoch: int) -> Snapshot:
    tensors = {"w": torch.arange(5000.0) + epoch, "n": torch.tensor(epoch, dtype=torch.uint8), "e": torch.empty(0, 2)}
    return stage(tensors, {"epoch": epoch, "best": float("inf")}, POOL).hashed()


def backups(folder: Path, **config: int) -> Backups:
    return Backups(folder, BackupConfig(**{"every_epochs": 1, **config}), run="kitchen", pool=POOL)


def restored_epoch(folder: Path) -> int | None:
    restored = backups(folder).restore()
    if restored is None:
        return None
    expected = state(restored.info.epoch)
    assert restored.snapshot.digest == expected.digest
    assert torch.equal(restored.snapshot.tensors()["w"], expected.tensors()["w"])
    assert restored.snapshot.metadata == expected.metadata
    return restored.info.epoch


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert backups(folder).restore() is None
    assert backups(folder).latest() is None
    info = backups(folder).save(state(3), epoch=3)
    assert (info.epoch, info.made_at, info.run) == (3, 3, "kitchen")
    assert restored_epoch(folder) == 3
    latest = backups(folder).latest()
    assert latest is not None
    assert latest.digest == state(3).digest
    assert sorted(path.name for path in folder.iterdir()) == [
        f"epoch-00000003-{info.digest[:12]}.safetensors",
        "epoch-00000003.json",
    ]


def test_values_are_as_long_as_torch_has_them() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
    assert [str(dtype) for dtype in DTYPES.values()] == [f"torch.{name}" for name in ITEM_BYTES]


def test_what_there_is_can_be_listed_without_torch(tmp_path: Path) -> None:
    digest = backups(tmp_path).save(state(3), epoch=3).digest
    code = (
        "import sys; sys.modules['torch'] = None; from potluck.cli.main import app; "
        f"app(['checkpoint', 'list', '--path', {str(tmp_path)!r}, '--json'])"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert listed.returncode == 0, listed.stderr
    assert [(row["epoch"], row["digest"]) for row in json.loads(listed.stdout)] == [(3, digest)]


def test_other_tools_can_read_the_files(tmp_path: Path) -> None:
    tensors = {name: some_tensor(name, name, (3, 5)) for name in DTYPES if name != "complex128"}
    tensors["empty"] = torch.empty(0, 7)
    tensors["scalar"] = torch.tensor(2.5)
    snapshot = stage(tensors, {}, POOL).hashed()
    info = backups(tmp_path).save(snapshot, epoch=1)
    loaded = safetensors.torch.load_file(info.tensors_path)
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in tensors.items()
    }
    described = json.loads(info.record_path.read_text())
    assert described["epoch"] == 1
    assert described["metadata"] == {}


def test_a_type_without_a_name_there_is_written_as_pairs_and_comes_back(tmp_path: Path) -> None:
    values = torch.randn(3, 2, dtype=torch.complex128)
    info = backups(tmp_path).save(stage({"c": values}, {}, POOL).hashed(), epoch=1)
    assert torch.equal(safetensors.torch.load_file(info.tensors_path)["c"], torch.view_as_real(values))
    restored = backups(tmp_path).restore()
    assert restored is not None
    assert torch.equal(restored.snapshot.tensors()["c"], values)


def two_saved(folder: Path) -> tuple[Path, Path]:
    """Two backups, and the files of the newer one."""
    there = backups(folder)
    there.save(state(1), epoch=1)
    info = there.save(state(2), epoch=2)
    return info.tensors_path, info.record_path


@pytest.mark.parametrize("which", ["tensors", "record"])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 4096, 0.5, -4097, -1])
def test_a_torn_file_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str, length: float
) -> None:
    tensors, record = two_saved(tmp_path)
    path = tensors if which == "tensors" else record
    size = path.stat().st_size
    cut = int(size * length) if isinstance(length, float) else (length if length >= 0 else size + length)
    os.truncate(path, max(min(cut, size - 1), 0))
    assert restored_epoch(tmp_path) == 1
    assert "epoch 2 cannot be used" in caplog.text


@pytest.mark.parametrize("extra", [b"\0", b"x" * 5000])
def test_a_file_that_is_too_long_is_noticed(tmp_path: Path, extra: bytes) -> None:
    tensors, _ = two_saved(tmp_path)
    with tensors.open("ab") as file:
        file.write(extra)
    assert restored_epoch(tmp_path) == 1


@given(st.data())
@settings(max_examples=60)
def test_a_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flip")
    tensors, record = two_saved(folder)
    path = data.draw(st.sampled_from([tensors, record]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, 10**6)) % len(content)
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    header_bytes = 8 + int.from_bytes(tensors.read_bytes()[:8], "little")
    before = path.read_bytes()
    path.write_bytes(content)
    # The header of the tensors is for other tools. The JSON may say the same: a blank more, or another last digit.
    is_harmless = place < header_bytes if path == tensors else _says_the_same(before, content)
    assert restored_epoch(folder) == 1 or is_harmless


def _says_the_same(one: bytes, other: bytes) -> bool:
    with contextlib.suppress(ValueError):
        return bool(json.loads(one) == json.loads(other))
    return False


def test_a_missing_or_swapped_file_is_noticed(tmp_path: Path) -> None:
    tensors, record = two_saved(tmp_path)
    tensors.unlink()
    assert restored_epoch(tmp_path) == 1
    record.write_bytes((tmp_path / "epoch-00000001.json").read_bytes())
    assert restored_epoch(tmp_path) == 1
    (tmp_path / "epoch-00000001.json").unlink()
    assert restored_epoch(tmp_path) is None


def test_a_backup_of_another_run_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Backups(tmp_path, run="garden", pool=POOL).save(state(9), epoch=9)
    assert backups(tmp_path).restore() is None
    assert "garden" in caplog.text


def test_a_record_cannot_point_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    info = backups(folder).save(state(1), epoch=1)
    info.tensors_path.rename(tmp_path / info.tensors_path.name)
    text = info.record_path.read_text().replace(info.tensors_path.name, f"../{info.tensors_path.name}")
    info.record_path.write_text(text)
    with pytest.raises(BackupError):
        read_info(info.record_path)


@given(st.sets(st.integers(0, 300)), st.integers(1, 5), st.integers(0, 20))
def test_the_last_and_every_so_many_th_stay(epochs: set[int], keep_last: int, keep_every: int) -> None:
    sizes = dict.fromkeys(epochs, 1)
    gone = set(superfluous(sizes, BackupConfig(keep_last=keep_last, keep_every=keep_every, spread=0)))
    left = epochs - gone
    assert set(sorted(epochs)[-keep_last:]) <= left
    older = left - set(sorted(epochs)[-keep_last:])
    assert all(keep_every and epoch % keep_every == 0 for epoch in older)
    assert all(not keep_every or epoch % keep_every for epoch in gone)


def kept_after(num_epochs: int, every: int, config: BackupConfig, num_bytes: int = 1) -> list[int]:
    """The ages, in epochs, of what is left when a backup is written every so many."""
    kept: dict[int, int] = {}
    for epoch in range(every, num_epochs + 1, every):
        kept[epoch] = num_bytes
        for gone in superfluous(kept, config):
            del kept[gone]
    return sorted(num_epochs - epoch for epoch in kept)


def test_a_run_can_go_back_far_by_backups_ever_wider_apart() -> None:
    """By default it went back 30 epochs, whatever they took: 50 s in a run of short ones."""
    ages = kept_after(20_000, 10, BackupConfig())
    assert len(ages) == 19
    assert ages[:3] == [0, 10, 20]
    assert ages[-1] == 20_000 - 10, "the first of all stays"
    factors = [later / earlier for earlier, later in pairwise(ages[2:])]
    assert max(factors) <= 4.0, "wherever one wants to go back to, there is one not far from it"


@settings(max_examples=60)
@given(
    every=st.integers(1, 7),
    num_backups=st.integers(1, 300),
    most_bytes=st.integers(0, 40),
    keep_last=st.integers(1, 4),
    spread=st.integers(0, 20),
)
def test_backups_stay_within_their_budget(
    every: int, num_backups: int, most_bytes: int, keep_last: int, spread: int
) -> None:
    config = BackupConfig(keep_last=keep_last, spread=spread, most_bytes=most_bytes)
    ages = kept_after(every * num_backups, every, config)
    assert len(ages) == min(num_backups, max(keep_last, min(keep_last + spread, most_bytes)))
    assert ages[:keep_last] == [every * number for number in range(min(keep_last, num_backups))]


def test_the_spread_makes_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = backups(tmp_path, keep_last=2)
    for epoch in range(1, 9):
        there.save(state(epoch), epoch=epoch)
    assert len(there.epochs()) == 8
    largest = 4 * state(1).inventory.num_bytes + SPARE_BYTES

    def space(folder: Path) -> DiskSpace:
        used = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return DiskSpace(free_bytes=max(0, largest - used), total_bytes=0)

    monkeypatch.setattr("potluck.state.backups.measure", space)
    there.save(state(9), epoch=9)
    assert there.epochs() == [9, 8, 7], "all but the newest are gone"


def test_old_backups_go_and_nothing_else_does(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    there = backups(tmp_path, keep_last=2, keep_every=5, spread=0)
    for epoch in range(1, 13):
        there.save(state(epoch), epoch=epoch)
    assert there.epochs() == [12, 11, 10, 5]
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_backups_are_due_every_so_many_epochs(tmp_path: Path) -> None:
    there = backups(tmp_path, every_epochs=10)
    assert there.is_due(1)
    there.save(state(1), epoch=1)
    assert [epoch for epoch in range(2, 25) if there.is_due(epoch)] == list(range(11, 25))
    again = backups(tmp_path, every_epochs=10)
    assert again.restore() is not None
    assert not again.is_due(5)


def test_saving_one_epoch_twice_keeps_the_newer(tmp_path: Path) -> None:
    there = backups(tmp_path)
    there.save(state(4), epoch=4)
    there.save(state(7), epoch=4, made_at=7)
    restored = there.restore()
    assert restored is not None
    assert (restored.info.epoch, restored.info.made_at, restored.snapshot.digest) == (4, 7, state(7).digest)


def test_backups_of_a_lineage_that_was_left_are_put_aside_and_not_lost(tmp_path: Path) -> None:
    there = backups(tmp_path)
    there.save(state(120), epoch=120)
    there.save(state(1), epoch=1)
    assert restored_epoch(tmp_path) == 1
    aside = sorted(path.name for path in tmp_path.iterdir() if "abandoned" in path.name)
    assert len(aside) == 2
    for name in aside:
        (tmp_path / name).rename(tmp_path / name.removesuffix(".abandoned-at-1"))
    assert restored_epoch(tmp_path) == 120


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
import torch
from potluck.state import backupfile
from potluck.state.backups import Backups
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import stage

torch.set_num_threads(1)
def killing(original):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    return call
backupfile.os = type("os", (), {**vars(os), "write": killing(os.write), "fsync": killing(os.fsync)})

def save(folder, epoch, calls):
    global left
    left = calls
    tensors = {"w": torch.arange(5000.0) + epoch, "n": torch.tensor(epoch, dtype=torch.uint8), "e": torch.empty(0, 2)}
    snapshot = stage(tensors, {"epoch": epoch, "best": float("inf")}, ChunkPool(4096)).hashed()
    Backups(folder, run="kitchen").save(snapshot, epoch=epoch)

for calls in range(int(sys.argv[2])):
    folder = Path(sys.argv[1]) / str(calls)
    save(folder, 1, 1000)
    child = os.fork()
    if child == 0:
        save(folder, 2, calls)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_killed_at_any_moment_leaves_a_good_backup(tmp_path: Path) -> None:
    """Killed before the first, the second, … call that writes or syncs."""
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), "16"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    codes = [int(line) for line in out.stdout.split()]
    assert codes[0] == -9
    assert codes[-1] == 0
    for calls, code in enumerate(codes):
        folder = tmp_path / str(calls)
        assert restored_epoch(folder) in ((2,) if code == 0 else (1, 2))
        backups(folder).save(state(3), epoch=3)
        assert restored_epoch(folder) == 3
    assert codes.count(-9) >= 10, "every step of writing was tried"


def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel refuses to write beyond a limit, in the middle of a file."""
    there = backups(tmp_path)
    there.save(state(1), epoch=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(BackupError, match=r"Make room there, or choose another folder$"):
            there.save(state(2), epoch=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert there.counts == {"saved": 1, "failed": 1}
    assert there.statistics()["last_error"]
    assert len(list(tmp_path.iterdir())) == 2
    assert restored_epoch(tmp_path) == 1
    there.save(state(3), epoch=3)
    assert there.last_error == ""
    assert restored_epoch(tmp_path) == 3


def test_a_disk_without_room_is_not_filled_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = backups(tmp_path)
    space = DiskSpace(total_bytes=100_000_000, free_bytes=1_900_000)  # of which 2 MB are for others
    monkeypatch.setattr("potluck.state.backups.measure", lambda _folder: space)
    with pytest.raises(BackupError, match=r"the disk is too full, 1\.9 MB of 100\.0 MB free"):
        there.save(state(1), epoch=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BackupError):
        backups(tmp_path / "file" / "backups").save(state(1), epoch=1)


def test_restoring_while_another_saves_and_clears_away(tmp_path: Path) -> None:
    there = backups(tmp_path, keep_last=2)
    there.save(state(1), epoch=1)
    over = threading.Event()
    found: list[int | None] = []

    def restore() -> None:
        while not over.is_set():
            found.append(restored_epoch(tmp_path))

    readers = [threading.Thread(target=restore) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for epoch in range(2, 30):
            there.save(state(epoch), epoch=epoch)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert found
    assert None not in found
    assert found.count(1) < len(found)


def test_a_backup_that_is_cleared_away_while_it_is_read_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = backups(tmp_path)
    for epoch in (1, 2):
        there.save(state(epoch), epoch=epoch)
    read = Backups.read

    def clearing(self: Backups, info: BackupInfo) -> Snapshot:
        if info.epoch == 2:
            info.record_path.unlink()
            info.tensors_path.unlink()
        return read(self, info)

    monkeypatch.setattr(Backups, "read", clearing)
    restored = there.restore()
    assert restored is not None
    assert restored.info.epoch == 1
    assert there.counts["broken"] == 0


def test_the_fault_point_says_when_a_backup_is_there(tmp_path: Path) -> None:
    with at_point("state.backup_saved", lambda: None, epoch=4) as reached:
        backups(tmp_path).save(state(4), epoch=4)
    assert reached


@pytest.mark.parametrize("config", [{"every_epochs": -1}, {"keep_last": 0}, {"keep_every": -1}])
def test_a_configuration_that_makes_no_sense_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        BackupConfig(**config)


def test_parts_of_cuts_stay_by_the_numbers_of_the_cuts_whatever_their_epochs(tmp_path: Path) -> None:
    config = {"keep_last": 2, "spread": 0}
    quick, slow = backups(tmp_path / "quick", **config), backups(tmp_path / "slow", **config)
    for cut, (quick_epoch, slow_epoch) in enumerate([(10, 1), (20, 1), (30, 2), (40, 2), (50, 3)], start=1):
        quick.save(state(quick_epoch), epoch=quick_epoch, cut=cut)
        slow.save(state(slow_epoch), epoch=slow_epoch, cut=cut)
    assert {info.epoch: info.cuts for info in quick.infos()} == {50: (5,), 40: (4,)}
    assert {info.epoch: info.cuts for info in slow.infos()} == {3: (5,), 2: (3, 4)}, "the same cuts, 4 and 5"


def test_a_part_of_a_cut_is_saved_beside_later_backups_and_a_backup_becomes_one(tmp_path: Path) -> None:
    there = backups(tmp_path)
    for epoch in (1, 2, 3):
        there.save(state(epoch), epoch=epoch)
    tensors = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    info = there.save(state(2), epoch=2, cut=7)
    assert info.cuts == (7,)
    assert there.epochs() == [3, 2, 1], "the later one is not put aside"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")} == tensors
    assert [(each.epoch, each.cut) for each in there.announced()] == [(3, 0), (2, 7), (1, 0)]
    assert restored_epoch(tmp_path) == 3


def test_the_newest_part_of_a_cut_is_announced_however_many_backups_are_newer(tmp_path: Path) -> None:
    there = backups(tmp_path, keep_last=30)
    there.save(state(0), epoch=0, cut=4)
    for epoch in range(1, 25):
        there.save(state(epoch), epoch=epoch)
    told = there.announced()
    assert len(told) == 16
    assert told[-1].cut == 4


def test_a_record_without_a_cut_is_as_it_was_before_there_were_cuts(tmp_path: Path) -> None:
    info = backups(tmp_path).save(state(1), epoch=1)
    assert "cuts" not in json.loads(info.record_path.read_text())
