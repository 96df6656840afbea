"""The chain of committed epochs, in the hub.

One key, `head`, holds the newest commit. A coordinator commits by compare-and-set on the head that its round started
from, so of two coordinators, two halves of a cluster, or one coordinator and its own delayed message, one wins and the
others learn that they lost. Each commit is signed and names the digest of the one before it: the lineage is a chain
that anybody can check.

The head also holds the *term*: the fencing token of the lease under which it was last written. A coordinator opens its
term, by rewriting the head as it is, before it plans anything. From then on the compare-and-set of every earlier
coordinator fails, however late it wakes up, and a round of an earlier term can only be committed by the present one.

The hub lets everybody who may coordinate write the head; that it *held the lease* is for the readers to know. A commit
counts unless the lease is known to have been somebody else's then. If its term is newer than anything that was heard
of the lease, it waits for that news, which comes another way. A term that nobody was given does not shut anybody out:
a coordinator whose lease was renewed after it had heard of a later term knows that there was none.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from potluck.errors import ProtocolError, RetryableError, RevisionConflictError
from potluck.hub.connection import Entry, Store, Subscription
from potluck.messages import Message, decode, encode
from potluck.peer.identity import Identity
from potluck.peer.lease import Lease
from potluck.round.plan.messages import Commit
from potluck.round.plan.signing import Signed, read_commit, sign_commit

logger = logging.getLogger(__name__)

HEAD = "head"
NO_PARENT = ""


class Head(Message, frozen=True, kw_only=True):
    """What stands in the store."""

    term: int
    commit: Signed | None = None  # None before the first epoch


class Lineage:
    """Follows the head of a run, and moves it."""

    def __init__(
        self,
        store: Store,
        run: str,
        on_commit: Callable[[Commit], None] | None = None,
        *,
        lease: Lease | None = None,
    ) -> None:
        """`lease` knows who coordinated when; an onlooker, who does not follow it, believes all who may coordinate."""
        self.head: Commit | None = None
        self.term = 0
        self.bad_heads = 0
        self._signed: Signed | None = None
        self._revision = 0
        self._store = store
        self._run = run
        self._lease = lease
        self._term_heard_at = 0.0  # by the lease's clock
        self._waiting: Head | None = None  # the newest head, while the lease of its commit is not known yet
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
        """Stop following. Idempotent."""
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None

    async def open_term(self, token: int) -> None:
        """Shut out every coordinator with a smaller token; RevisionConflictError if a later one came first."""
        await self._refresh()
        self._check_not_over(token)
        await self._write(Head(term=token, commit=self._signed))

    async def commit(self, commit: Commit, identity: Identity) -> None:
        """Make `commit` the head. RevisionConflictError if the term is over or another commit came first.

        After any other RetryableError it is not known whether the hub took it, or whether the term is over; calling
        again is safe, and returns if the head is this very commit.
        """
        signed = sign_commit(commit, identity, self._run)
        if self._signed == signed:
            return
        if commit.epoch != self.epoch + 1 or commit.parent != self.parent_digest():
            raise RevisionConflictError(f"epoch {commit.epoch} does not follow epoch {self.epoch}: another came first")
        if commit.term > self.term:
            raise RevisionConflictError(f"term {commit.term} is not open, {self.term} is: nothing was committed")
        self._check_not_over(commit.term)
        try:
            await self._write(Head(term=commit.term, commit=signed))
        except RetryableError:
            await self._refresh()
            if self._signed != signed:
                raise

    def parent_digest(self) -> str:
        """What the next commit must name as its parent."""
        return _digest(self._signed) if self._signed is not None else NO_PARENT

    def lease_changed(self) -> None:
        """There is news of the lease: look again at a head that waits for it."""
        head, self._waiting = self._waiting, None
        if head is not None:
            self._judge(head)

    def _check_not_over(self, token: int) -> None:
        """RevisionConflictError if a later term than this is open, RetryableError while that is in doubt."""
        if self.term <= token:
            return
        if self._lease is None or self._lease.token != token:
            raise RevisionConflictError(f"the lineage is in term {self.term} already: a lease of term {token} is over")
        if self._lease.proven_at <= self._term_heard_at:
            raise RetryableError(f"term {self.term} is said to be open: our lease {token}, once renewed, disproves it")
        if self._waiting is not None and self.head is None:
            raise RetryableError("what stands in the lineage is in doubt, and we know nothing better to put there")
        self.bad_heads += 1
        logger.warning("term %d of the lineage is passed over: nobody has a later lease than %d", self.term, token)

    async def _write(self, head: Head) -> None:
        revision = await self._store.put(HEAD, encode(head), expected=self._revision)
        if revision >= self._revision:
            self.term = head.term  # whatever was claimed before
        if revision > self._revision:
            self._take(head, revision, is_ours=True)

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

    def _take(self, head: Head, revision: int, *, is_ours: bool = False) -> None:
        self._revision = revision
        self._waiting = None
        if head.term > self.term:
            self.term = head.term
            self._term_heard_at = self._lease.clock.monotonic() if self._lease is not None else 0.0
        if head.commit is not None and head.commit != self._signed:
            self._judge(head, is_ours=is_ours)

    def _judge(self, head: Head, *, is_ours: bool = False) -> None:
        """Take in the commit of the newest head, unless something speaks against it."""
        assert head.commit is not None, "there is something to judge"
        try:
            commit = read_commit(head.commit, self._run)
            self._check_follows(commit)
            if not is_ours:
                self._check_term(commit, head.term)
        except ProtocolError as error:
            self.bad_heads += 1
            logger.warning("the head of the lineage is passed over, epoch %d stays: %s", self.epoch, error)
            return
        if not is_ours and self._lease is not None and commit.term > self._lease.view.newest_revision > 0:
            self._waiting = head
            return
        self.head, self._signed = commit, head.commit
        self._on_commit(commit)

    def _check_term(self, commit: Commit, opened: int) -> None:
        if commit.term > opened:
            raise ProtocolError(f"epoch {commit.epoch} was committed in term {commit.term}, which was never opened")
        if self._lease is None:
            return
        view = self._lease.view
        if view.was_held(commit.coordinator, commit.term) is False:
            raise ProtocolError(f"{commit.coordinator} did not hold lease {commit.term}: epoch {commit.epoch} is void")
        if self.head is not None and commit.term < self.head.term <= view.newest_revision:
            raise ProtocolError(f"epoch {commit.epoch} was committed after its term {commit.term} was over")

    def _check_follows(self, commit: Commit) -> None:
        if commit.epoch <= self.epoch:
            raise ProtocolError(f"epoch {commit.epoch} was committed again")
        if commit.epoch == self.epoch + 1 and commit.parent != self.parent_digest():
            raise ProtocolError(f"epoch {commit.epoch} does not continue the epoch {self.epoch} that is known here")

    def _pass_over(self, what: str, entry: Entry) -> None:
        # The revision is noted all the same: the next coordinator's term restores the head that is known.
        self.bad_heads += 1
        self._revision, self._waiting = entry.revision, None
        logger.warning("the head of the lineage %s and is passed over: epoch %d stays", what, self.epoch)


def _digest(signed: Signed) -> str:
    return hashlib.sha256(signed.body).hexdigest()
