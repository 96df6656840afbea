"""Secrets on their way to one machine: sealed to the key that its agent is known by.

An identity is an Ed25519 key; the same key in its X25519 form opens what was sealed to its public half. The hub and
all other members see bytes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping

import msgspec
import nacl.exceptions
import nacl.public
import nacl.signing
import nkeys

from potluck.errors import ProtocolError


def seal(secrets: Mapping[str, str], machine: str) -> bytes:
    """The secrets, for the holder of this peer id alone."""
    public = nacl.signing.VerifyKey(base64.b32decode(machine)[1:-2]).to_curve25519_public_key()
    return nacl.public.SealedBox(public).encrypt(msgspec.json.encode(dict(secrets)))


def unseal(sealed: bytes, seed: bytes) -> dict[str, str]:
    """The secrets; ProtocolError when they were sealed for somebody else."""
    if not sealed:
        return {}
    _prefix, raw = nkeys.decode_seed(seed)
    box = nacl.public.SealedBox(nacl.signing.SigningKey(bytes(raw)).to_curve25519_private_key())
    try:
        return msgspec.json.decode(box.decrypt(sealed), type=dict[str, str])
    except (nacl.exceptions.CryptoError, msgspec.MsgspecError) as error:
        raise ProtocolError("its secrets were not sealed for this machine: run `potluck fleet up` again") from error


def mark(secrets: Mapping[str, str], organiser_seed: bytes) -> str:
    """Tells whether secrets have changed, to the organiser; to anybody else it says nothing about them."""
    if not secrets:
        return ""
    key = hashlib.sha256(b"potluck fleet secrets\0" + organiser_seed).digest()
    return hmac.digest(key, msgspec.json.encode(dict(sorted(secrets.items()))), "sha256").hex()[:32]
