"""The hub's own keys: made on first start, kept for the life of the run.

All are nkeys (Ed25519). The account key signs what the guard decides; the guard and system users are the only ones that
the server's configuration names; the organiser is an ordinary member that may do everything.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import nacl.bindings
import nacl.exceptions
import nacl.signing
import nkeys

from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import make_private_folder, read_private, write_private

KeyKind = Literal["account", "user"]
FILE_NAME = "keys.json"

_PREFIXES: dict[KeyKind, int] = {"account": nkeys.PREFIX_BYTE_ACCOUNT, "user": nkeys.PREFIX_BYTE_USER}
_PUBLIC_CHARACTERS = 56  # 1 byte for the kind, 32 for the key, 2 for the checksum, in base32


def new_seed(kind: KeyKind) -> bytes:
    """A fresh seed: SA… for an account, SU… for a user."""
    encoded: bytes = nkeys.encode_seed(os.urandom(32), _PREFIXES[kind])
    return encoded


def public_key(seed: bytes) -> str:
    """The public key of a seed; ConfigurationError when the seed is not one. The message never shows the seed."""
    return Signer(seed).public_key


class Signer:
    """A key pair that signs."""

    def __init__(self, seed: bytes) -> None:
        try:
            prefix, raw = nkeys.decode_seed(seed)
            # The library does not check the checksum at the end; encoding again does.
            intact = nkeys.encode_seed(raw, prefix) == seed
        except nkeys.NkeysError as error:
            raise ConfigurationError("not a key: an nkey seed starts with SU or SA and has 58 characters") from error
        if not intact:
            raise ConfigurationError("this key is damaged: its checksum does not match. Restore it from a backup")
        self._pair = nkeys.from_seed(seed)
        self.public_key: str = self._pair.public_key.decode("ascii")

    def sign(self, data: bytes) -> bytes:
        """The Ed25519 signature, 64 bytes."""
        signature: bytes = self._pair.sign(data)
        return signature

    def __repr__(self) -> str:
        return f"Signer({self.public_key})"


def verify(public: str, data: bytes, signature: bytes) -> bool:
    """Whether the holder of `public` signed `data`. False for whatever is not a key or a signature; never raises."""
    if len(public) != _PUBLIC_CHARACTERS or len(signature) != nacl.bindings.crypto_sign_BYTES:
        return False
    try:
        decoded = base64.b32decode(public)
    except (binascii.Error, ValueError):
        return False
    body, checksum = decoded[:-2], decoded[-2:]
    if nkeys.crc16(bytearray(body)).to_bytes(2, "little") != checksum:
        return False
    try:
        nacl.signing.VerifyKey(body[1:]).verify(data, signature)
    except (nacl.exceptions.BadSignatureError, nacl.exceptions.ValueError):
        return False
    return True


class _KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the keys lie on disk."""

    account_seed: str
    guard_seed: str
    system_seed: str
    organiser_seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HubKeys:
    """The secrets of one hub; all hubs of a cluster share them."""

    account_seed: bytes = field(repr=False)
    """Signs the guard's answers and the members' user tokens."""

    guard_seed: bytes = field(repr=False)
    """The guard's own connection in the run's account."""

    system_seed: bytes = field(repr=False)
    """The guard's connection in the system account: connect and disconnect events, kicks."""

    organiser_seed: bytes = field(repr=False)
    """Who set the run up, as a member."""

    def __post_init__(self) -> None:
        if not self.account_public.startswith("A"):
            raise ConfigurationError(f"{self.account_public} is not an account's key: its seed starts with SA")
        for public in (self.guard_public, self.system_public, self.organiser_public):
            if not public.startswith("U"):
                raise ConfigurationError(f"{public} is not a user's key: its seed starts with SU")

    @property
    def account_public(self) -> str:
        """The issuer that the server's auth callout trusts."""
        return public_key(self.account_seed)

    @property
    def guard_public(self) -> str:
        """The guard's user."""
        return public_key(self.guard_seed)

    @property
    def system_public(self) -> str:
        """The user of the system account."""
        return public_key(self.system_seed)

    @property
    def queues_seed(self) -> bytes:
        """The guard's connection in the account of the queues; made from the guard's own seed."""
        raw = hashlib.sha256(b"potluck queues\0" + self.guard_seed).digest()
        encoded: bytes = nkeys.encode_seed(raw, _PREFIXES["user"])
        return encoded

    @property
    def queues_public(self) -> str:
        """The user of the account of the queues."""
        return public_key(self.queues_seed)

    @property
    def organiser_public(self) -> str:
        """The organiser's peer id."""
        return public_key(self.organiser_seed)

    @classmethod
    def create(cls) -> HubKeys:
        """Fresh keys, not saved."""
        return cls(
            account_seed=new_seed("account"),
            guard_seed=new_seed("user"),
            system_seed=new_seed("user"),
            organiser_seed=new_seed("user"),
        )

    @classmethod
    def load_or_create(cls, folder: Path) -> HubKeys:
        """The keys in `folder`; made there when there are none. ConfigurationError when the file is damaged.

        Damaged keys are never replaced on our own: members and streams belong to them.
        """
        path = make_private_folder(folder) / FILE_NAME
        text = read_private(path)
        if text is None:
            keys = cls.create()
            write_private(path, keys._to_json())
            return keys
        try:
            saved = msgspec.json.decode(text, type=_KeysFile)
            return cls(**{name: seed.encode() for name, seed in msgspec.structs.asdict(saved).items()})
        except (msgspec.MsgspecError, ConfigurationError) as error:
            raise ConfigurationError(
                f"the hub's keys in {path} are damaged ({error}): restore the file from a backup, or delete it to make "
                "new keys, after which every member has to join again"
            ) from error

    def _to_json(self) -> str:
        saved = _KeysFile(
            account_seed=self.account_seed.decode("ascii"),
            guard_seed=self.guard_seed.decode("ascii"),
            system_seed=self.system_seed.decode("ascii"),
            organiser_seed=self.organiser_seed.decode("ascii"),
        )
        return msgspec.json.format(msgspec.json.encode(saved), indent=2).decode("ascii") + "\n"
