"""Words that only the coordinator may speak: plans, aborts and commits, signed with its identity.

The hub lets a member publish only in its own name, but only members who may coordinate can publish here at all, and of
these only one holds the lease. So every word carries the lease's fencing token and the sender's signature; a receiver
checks both (see LeaseView.accepts). The signature covers the run's name: a word from one run means nothing in another.
"""

from __future__ import annotations

from potluck.errors import ProtocolError
from potluck.hub.keys import verify
from potluck.messages import Message, decode, encode
from potluck.peer.identity import Identity
from potluck.round.plan.messages import Abort, Commit, Plan

Word = Plan | Abort


class Signed(Message, frozen=True, kw_only=True):
    """A message and the signature of its sender."""

    body: bytes
    signature: bytes


def sign_word(word: Word, identity: Identity, run: str) -> bytes:
    """A plan or an abort, as the coordinator publishes it."""
    return encode(_sign(encode(word), identity, run, "word"))


def read_word(data: bytes, sender: str, run: str) -> Word:
    """The plan or abort in `data`; ProtocolError unless `sender` signed it for this run."""
    body = _verified(decode(Signed, data), sender, run, "word")
    word: Word = decode(Plan | Abort, body)  # type: ignore[arg-type]  # a union is not a type to mypy
    return word


def sign_commit(commit: Commit, identity: Identity, run: str) -> Signed:
    """A commit, as it stands in the lineage."""
    return _sign(encode(commit), identity, run, "commit")


def read_commit(signed: Signed, run: str) -> Commit:
    """The commit, or ProtocolError unless the coordinator that it names signed it for this run."""
    commit = decode(Commit, signed.body)
    _verified(signed, commit.coordinator, run, "commit")
    return commit


def _sign(body: bytes, identity: Identity, run: str, purpose: str) -> Signed:
    return Signed(body=body, signature=identity.sign(_context(run, purpose) + body))


def _verified(signed: Signed, sender: str, run: str, purpose: str) -> bytes:
    if not verify(sender, _context(run, purpose) + signed.body, signed.signature):
        raise ProtocolError(f"{sender} did not sign this {purpose} of run {run}: ignored")
    return signed.body


def _context(run: str, purpose: str) -> bytes:
    return f"potluck {purpose} {run}\0".encode()
