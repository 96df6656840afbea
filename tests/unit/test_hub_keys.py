from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.hub.keys import HubKeys, Signer, new_seed, public_key, verify
from potluck.hub.privatefiles import make_private_folder, read_private, write_private
from potluck.hub.subjects import PEER_ID

USER_SEED = new_seed("user")


def test_seeds_carry_their_kind() -> None:
    assert new_seed("user").startswith(b"SU")
    assert new_seed("account").startswith(b"SA")
    assert new_seed("user") != new_seed("user")
    assert PEER_ID.fullmatch(public_key(new_seed("user")))
    assert public_key(new_seed("account")).startswith("A")


@given(st.integers(0, len(USER_SEED) - 1), st.sampled_from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_seed_with_one_wrong_character_is_refused_and_not_shown(position: int, character: int) -> None:
    damaged = bytearray(USER_SEED)
    damaged[position] = character
    if damaged == USER_SEED:
        assert public_key(bytes(damaged)) == public_key(USER_SEED)
        return
    with pytest.raises(ConfigurationError) as caught:
        public_key(bytes(damaged))
    assert damaged.decode() not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"SU", USER_SEED[:-1], USER_SEED + b"A", USER_SEED.lower(), b"\xff" * 58],
    ids=["empty", "short", "cut", "longer", "lower case", "not ASCII"],
)
def test_what_is_no_seed_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigurationError):
        public_key(text)


def test_a_signature_holds_for_its_key_and_its_data_only() -> None:
    signer = Signer(USER_SEED)
    signature = signer.sign(b"data")
    assert verify(signer.public_key, b"data", signature)
    assert not verify(signer.public_key, b"other", signature)
    assert not verify(public_key(new_seed("user")), b"data", signature)
    assert USER_SEED.decode() not in repr(signer)


MISSPELT = public_key(USER_SEED)[:-1] + ("B" if public_key(USER_SEED).endswith("A") else "A")


@given(st.text(max_size=60) | st.just(MISSPELT), st.binary(max_size=70))
def test_hostile_keys_and_signatures_are_just_wrong(public: str, signature: bytes) -> None:
    assert not verify(public, b"data", signature)
    assert not verify(public_key(USER_SEED), b"data", signature)
    assert not verify(public, b"data", Signer(USER_SEED).sign(b"data"))


def test_keys_are_made_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "identity"
    keys = HubKeys.load_or_create(folder)
    assert HubKeys.load_or_create(folder) == keys
    assert stat.S_IMODE((folder / "keys.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["keys.json"]
    assert len({keys.guard_public, keys.system_public, keys.organiser_public, keys.account_public}) == 4


def test_the_secrets_do_not_show(tmp_path: Path) -> None:
    keys = HubKeys.load_or_create(tmp_path)
    for seed in (keys.account_seed, keys.guard_seed, keys.system_seed, keys.organiser_seed):
        assert seed.decode() not in repr(keys)


def test_a_key_of_the_wrong_kind_is_refused() -> None:
    user, account = new_seed("user"), new_seed("account")
    with pytest.raises(ConfigurationError, match="not an account's key"):
        HubKeys(account_seed=user, guard_seed=user, system_seed=user, organiser_seed=user)
    with pytest.raises(ConfigurationError, match="not a user's key"):
        HubKeys(account_seed=account, guard_seed=user, system_seed=account, organiser_seed=user)


def _without(text: str, name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != name})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "not json",
        lambda text: "[1]",
        lambda text: _without(text, "guard_seed"),
        lambda text: text.replace("SU", "SX"),
        lambda text: text.replace(json.loads(text)["system_seed"], json.loads(text)["account_seed"]),
        lambda text: text.replace(json.loads(text)["system_seed"], "é"),
    ],
    ids=["empty", "cut", "no json", "a list", "one missing", "no seed", "wrong kind", "not ASCII"],
)
def test_damaged_keys_are_an_error_that_names_file_and_remedy(tmp_path: Path, damage) -> None:
    HubKeys.load_or_create(tmp_path)
    path = tmp_path / "keys.json"
    damaged = damage(path.read_text())
    path.write_text(damaged)
    with pytest.raises(ConfigurationError) as caught:
        HubKeys.load_or_create(tmp_path)
    assert str(path) in str(caught.value)
    assert "backup" in str(caught.value)
    assert path.read_text() == damaged, "damaged keys must not be replaced: members belong to them"


def test_bytes_that_are_no_text_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"keys\.json.*backup"):
        HubKeys.load_or_create(tmp_path)


def test_a_folder_that_cannot_be_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="another folder"):
        HubKeys.load_or_create(tmp_path / "file" / "identity")


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = HubKeys.load_or_create(tmp_path)
    (tmp_path / "keys.json").chmod(0o644)
    assert HubKeys.load_or_create(tmp_path) == keys
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600
    assert "644" in caplog.text


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigurationError, match="No space left"):
        write_private(path, "new")
    assert read_private(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_mode_of_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
