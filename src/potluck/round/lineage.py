"""The chain of committed epochs, in the hub.

One key, `head`, holds the newest commit. A coordinator commits by compare-and-set on the head that its round started
from, so of two coordinators, two halves of a cluster, or one coordinator and its own delayed message, one wins and the
others learn that they lost. Each commit is signed and names the digest of the one before it: the lineage is a chain
that anybody can check.

The head also holds the *term*: the fencing token of the lease under which it was last written. A coordinator opens its
term, by rewriting the head as it is, before it plans anything. From then on the compare-and-set of every earlier
coordinator fails, however late it wakes up, and a round of an earlier term can only be committed by the present one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from potluck.errors import ProtocolError, RetryableError, RevisionConflictError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.messages import Message, decode, encode
from potluck.peer.identity import Identity
from potluck.round.plan import Commit
from potluck.round.signing import Signed, read_commit, sign_commit

logger = logging.getLogger(__name__)

HEAD = "head"
NO_PARENT = ""


class Head(Message, frozen=True, kw_only=True):
    """What stands in the store."""

    term: int
    commit: Signed | None = None  # None before the first epoch


class Lineage:
    """Follows the head of a run, and moves it."""

    def __init__(self, store: Store, run: str, on_commit: Callable[[Commit], None] | None = None) -> None:
        self.head: Commit | None = None
        self.term = 0
        self.bad_heads = 0
        self._signed: Signed | None = None
        self._revision = 0
        self._store = store
        self._run = run
        self._on_commit = on_commit or (lambda _commit: None)
        self._watch: Subscription | None = None

    @property
    def epoch(self) -> int:
        """How many updates are committed."""
        return self.head.epoch if self.head is not None else 0

    async def start(self) -> None:
        """Read the head and follow it."""
        self._watch = await self._store.watch(self._changed)

    async def close(self) -> None:
        """Stop following. Calling it twice does no harm."""
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None

    async def open_term(self, token: int) -> None:
        """Shut out every coordinator with a smaller token; RevisionConflictError if a later one came first."""
        await self._refresh()
        if self.term > token:
            raise RevisionConflictError(f"the lineage is in term {self.term} already: a lease of term {token} is over")
        await self._write(Head(term=token, commit=self._signed))

    async def commit(self, commit: Commit, identity: Identity) -> None:
        """Make `commit` the head. RevisionConflictError if the term is over or another commit came first.

        After any other RetryableError it is not known whether the hub took it; calling again is safe, and returns if
        the head is this very commit.
        """
        signed = sign_commit(commit, identity, self._run)
        if self._signed == signed:
            return
        if commit.epoch != self.epoch + 1 or commit.parent != self.parent_digest():
            raise RevisionConflictError(f"epoch {commit.epoch} does not follow epoch {self.epoch}: another came first")
        if commit.term != self.term:
            raise RevisionConflictError(f"term {commit.term} is not open, {self.term} is: nothing was committed")
        try:
            await self._write(Head(term=self.term, commit=signed))
        except RetryableError:
            await self._refresh()
            if self._signed != signed:
                raise

    def parent_digest(self) -> str:
        """What the next commit must name as its parent."""
        return _digest(self._signed) if self._signed is not None else NO_PARENT

    async def _write(self, head: Head) -> None:
        revision = await self._store.put(HEAD, encode(head), expected=self._revision)
        self._take(head, revision)

    async def _refresh(self) -> None:
        entry = await self._store.get(HEAD)
        if entry is not None:
            self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        if entry.key != HEAD or entry.revision <= self._revision:
            return
        if entry.value is None:
            self._pass_over("was deleted", entry)
            return
        try:
            head = decode(Head, entry.value)
        except ProtocolError as error:
            self._pass_over(f"cannot be read ({error})", entry)
            return
        self._take(head, entry.revision)

    def _take(self, head: Head, revision: int) -> None:
        if revision <= self._revision:
            return
        self._revision = revision
        self.term = max(self.term, head.term)
        if head.commit is None or head.commit == self._signed:
            return
        try:
            commit = read_commit(head.commit, self._run)
            self._check_follows(commit)
        except ProtocolError as error:
            self.bad_heads += 1
            logger.warning("the head of the lineage is passed over, epoch %d stays: %s", self.epoch, error)
            return
        self.head, self._signed = commit, head.commit
        self._on_commit(commit)

    def _check_follows(self, commit: Commit) -> None:
        if commit.epoch <= self.epoch:
            raise ProtocolError(f"epoch {commit.epoch} was committed again")
        if commit.epoch == self.epoch + 1 and commit.parent != self.parent_digest():
            raise ProtocolError(f"epoch {commit.epoch} does not continue the epoch {self.epoch} that is known here")

    def _pass_over(self, what: str, entry: Entry) -> None:
        # The revision is noted all the same: the next coordinator's term restores the head that is known.
        self.bad_heads += 1
        self._revision = entry.revision
        logger.warning("the head of the lineage %s and is passed over: epoch %d stays", what, self.epoch)


def _digest(signed: Signed) -> str:
    return hashlib.sha256(signed.body).hexdigest()
