"""The copy of a state that training goes on with: made by a worker. The thread that changes the tensors waits for it.

Forward and backward passes only read what is published; it changes with the next step, which is mostly long after a
worker has copied it. So tensors are handed over as they are, and the one rule is: *who is about to change them calls
`before_change` first*. If the worker has not begun by then (it may be busy with the state before, or with a disk),
the copy is made there and then: nobody waits for anything but a copy that is being made.

What nobody promises to leave alone is copied at once, and what cannot be read later in another thread too.

Somebody may break the promise and change parameters by hand. torch counts the changes of each tensor, so that is seen:
if a count has moved before the state is hashed, and nobody had called `before_change`, the copy may be of two moments,
and is dropped (TornError). An operation counts when it ends, so one look at the end of the copy could be too early for
one that is under way; the look that decides comes after hashing, or in the thread that makes the next change, which is
done with what it did by hand. Changes by `tensor.data` or through numpy are not counted, and not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.run.calls import ThreadResult
from potluck.state.chunkpool import ChunkPool
from potluck.state.snapshot import Outline, Snapshot, Staged


class TornError(StateUnavailableError):
    """Tensors were changed while they were copied."""


class Copying:
    """One copy, made once, by the first thread that comes. Safe to use from any thread."""

    def __init__(
        self,
        outline: Outline,
        tensors: Mapping[str, Tensor],
        pool: ChunkPool,
        *,
        steady: Collection[str] = (),
        num_holders: int = 1,
    ) -> None:
        """`steady` names the tensors that do not change until `before_change` has returned.

        Each of the holders releases the copy once.
        """
        self._outline = outline
        self._pool = pool
        self._num_holders = num_holders
        self._owner: int | None = None  # the thread that makes the copy
        self._may_change = False  # by right
        self._is_torn = False
        self._copied: ThreadResult[Staged] = ThreadResult()
        self._lock = threading.Lock()
        live = {name: tensor.detach() for name, tensor in tensors.items()}
        later = {name for name in steady if _can_wait(live[name])}
        self._watched = tuple((live[name], live[name]._version) for name in later)
        self._tensors = {name: t if name in later or not later else t.clone() for name, t in live.items()}
        self._events = _events(self._tensors.values())
        if not later:
            self.before_change()
            self._copied.result()  # raises what went wrong

    @property
    def is_copied(self) -> bool:
        """Whether the copy is there, or will never be."""
        return self._copied.is_known

    def before_change(self) -> None:
        """The tensors are about to change: see to it that they are copied. What goes wrong is told to who hashes."""
        self._finish()
        self._look()
        self._may_change = True
        self._watched = ()

    def hashed(self, previous: Snapshot | None) -> Snapshot:
        """The snapshot, for a worker to make; raises what went wrong with the copy. The caller holds `previous`."""
        self._finish()
        staged = self._copied.result().shared()
        self._look()
        try:
            self._check()  # it would be hashed in vain
        except BaseException:
            staged.discard()
            raise
        snapshot = staged.hashed(previous)
        self._look()
        try:
            self._check()
        except BaseException:
            snapshot.release()
            raise
        return snapshot

    def tensors(self) -> dict[str, Tensor] | None:
        """The state as it was, on the CPU, for somebody who holds it; None where it could not be copied."""
        self.before_change()
        if self._is_torn or self._copied.error is not None:
            return None
        return self._copied.result().tensors()

    def release(self) -> None:
        """One holder is done with it. What nobody holds is not copied any more."""
        with self._lock:
            self._num_holders -= 1
            assert self._num_holders >= 0, "a copy was released once too often"
            if self._num_holders:
                return
            if self._owner is None:
                self._owner = threading.get_ident()
                self._copied.settle(error=StateUnavailableError("the state was passed over before it was copied"))
            is_there = self._copied.is_known and self._copied.error is None  # else who makes it lets it go
        self._tensors, self._watched = {}, ()
        if is_there:
            self._copied.result().discard()

    def _finish(self) -> None:
        """Make the copy, if nobody has begun; else wait for it. It is settled in the end, also if Ctrl-C comes."""
        me = threading.get_ident()
        try:
            if self._take_on(me):
                self._copy()
            else:
                self._copied.wait()
        finally:
            if self._owner == me and not self._copied.is_known:
                self._settle(error=StateUnavailableError("the copy of the state was interrupted"))

    def _take_on(self, thread: int) -> bool:
        with self._lock:
            if self._owner is not None:
                return False
            self._owner = thread
            return True

    def _copy(self) -> None:
        try:
            for event in self._events:
                event.synchronize()
            staged = self._outline.copied(self._tensors, self._pool)
        except Exception as error:  # noqa: BLE001 - raised by who hashes it, and told to who waits for the digest
            self._settle(error=error)
        else:
            self._settle(staged)

    def _settle(self, staged: Staged | None = None, error: Exception | None = None) -> None:
        with self._lock:
            self._copied.settle(staged, error)
            is_wanted = self._num_holders > 0
        self._tensors = {}
        if staged is not None and not is_wanted:
            staged.discard()

    def _look(self) -> None:
        # In this order: who changes tensors by right says so before, so that what is seen here was not, or is known.
        has_changed = any(tensor._version != version for tensor, version in self._watched)
        if has_changed and not self._may_change:
            self._is_torn = True

    def _check(self) -> None:
        if self._is_torn:
            raise TornError(
                "tensors of the state were changed while it was copied, by other means than the optimizer's step: "
                "this state is not kept"
            )


def _can_wait(tensor: Tensor) -> bool:
    """Whether a tensor can be read later in another thread, and its changes are counted."""
    return tensor.device.type in ("cpu", "cuda") and not tensor.is_inference()


def _events(tensors: Collection[Tensor]) -> list[torch.cuda.Event]:
    """What the GPUs have to be done with before the tensors are what they should be: streams are each thread's own."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return [torch.cuda.current_stream(device).record_event() for device in devices]
