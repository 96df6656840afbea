from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.keys import new_seed, verify
from potluck.hub.subjects import PEER_ID
from potluck.peer import identity as module
from potluck.peer.identity import Identity, default_folder
from potluck.testing.processes import Children


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_once_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "ada.nkey"
    first = Identity.open(path)
    first.close()
    again = Identity.open(path)
    again.close()
    assert PEER_ID.fullmatch(first.peer_id)
    assert again.peer_id == first.peer_id
    assert again.seed == first.seed
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert path.read_bytes() == first.seed + b"\n"


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "ada.nkey"
    path.write_bytes(new_seed("user") + b"\n")
    path.chmod(0o644)
    Identity.open(path).close()
    assert mode(path) == 0o600


def test_it_signs(tmp_path: Path) -> None:
    identity = Identity.temporary()
    assert verify(identity.peer_id, b"words", identity.sign(b"words"))
    assert not verify(identity.peer_id, b"other words", identity.sign(b"words"))
    assert Identity.temporary().peer_id != identity.peer_id


def test_its_seed_is_never_shown() -> None:
    identity = Identity.temporary()
    assert identity.seed.decode() not in repr(identity)
    assert identity.peer_id in repr(identity)


def test_it_is_locked_while_open(tmp_path: Path) -> None:
    path = tmp_path / "ada.nkey"
    holder = Identity.open(path)
    with pytest.raises(ConfigurationError, match="another peer on this machine"):
        Identity.open(path)
    holder.close()
    holder.close()
    Identity.open(path).close()


HOLDER = "import sys, pathlib; from potluck.peer.identity import Identity; " \
    "i = Identity.open(pathlib.Path(sys.argv[1])); print(i.peer_id, flush=True); sys.stdin.read()"  # fmt: skip


def test_it_is_locked_for_other_processes_and_free_when_one_is_killed(tmp_path: Path, children: Children) -> None:
    path = tmp_path / "ada.nkey"
    process = children.spawn([sys.executable, "-c", HOLDER, path], stdin=True)
    peer_id = process.wait_for_line(r"U\w+").group()
    with pytest.raises(ConfigurationError, match="--identity-path"):
        Identity.open(path)
    process.kill()
    identity = Identity.open(path)
    identity.close()
    assert identity.peer_id == peer_id


def test_the_default_is_the_next_one_that_is_free(tmp_path: Path) -> None:
    first, second = Identity.open_default(tmp_path), Identity.open_default(tmp_path)
    assert first.peer_id != second.peer_id
    first.close()
    third = Identity.open_default(tmp_path)
    assert third.peer_id == first.peer_id
    third.close()
    second.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["identity-0.nkey", "identity-1.nkey"]


def test_there_is_an_end_to_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEFAULT_IDENTITIES", 2)
    held = [Identity.open_default(tmp_path) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="all 2 identities"):
        Identity.open_default(tmp_path)
    for identity in held:
        identity.close()


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "potluck" / "identities"
    identity = Identity.open_default()
    identity.close()
    assert (default_folder() / "identity-0.nkey").exists()


@pytest.mark.parametrize("text", [b"", b"\n", b"  \n"])
def test_an_empty_file_after_a_crash_is_filled(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ada.nkey"
    path.write_bytes(text)
    first = Identity.open(path)
    first.close()
    again = Identity.open(path)
    again.close()
    assert again.peer_id == first.peer_id
    assert mode(path) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        b"hello\n",
        new_seed("user")[:-1],  # cut short
        new_seed("user")[:-1] + b"!",
        new_seed("account"),  # a key, but of an account
        b"\0" * 58,  # what some file systems leave after a power failure
        new_seed("user") + b"\n" + new_seed("user"),
        b"\xff\xfe" * 40,
    ],
    ids=["words", "cut", "altered", "account", "zeros", "two", "binary"],
)
def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ada.nkey"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match="is not an identity") as caught:
        Identity.open(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == text
    with pytest.raises(ConfigurationError, match="is not an identity"):  # not "in use": nothing holds the lock
        Identity.open(path)


@given(st.binary(min_size=1, max_size=200))
def test_no_content_does_anything_but_open_or_be_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("identities") / "x.nkey"
    path.write_bytes(text)
    try:
        identity = Identity.open(path)
    except ConfigurationError:
        assert text.strip()
    else:
        identity.close()
        assert not text.strip()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="cannot use the identity file") as caught:
        Identity.open(tmp_path / "file" / "ada.nkey")
    assert "--identity-path" in str(caught.value)
    with pytest.raises(ConfigurationError, match="Is a directory"):
        Identity.open(tmp_path)


def test_a_place_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(module.os, "open", refuse)  # root may write everywhere, so modes alone prove nothing
    with pytest.raises(ConfigurationError, match="Permission denied"):
        Identity.open(tmp_path / "ada.nkey")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigurationError, match="No locks available"):
        Identity.open(tmp_path / "ada.nkey")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "ada.nkey"
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "fsync", full)
        with pytest.raises(ConfigurationError, match="No space left"):
            Identity.open(path)
    Identity.open(path).close()  # nothing is held, and nothing half-written is in the way
