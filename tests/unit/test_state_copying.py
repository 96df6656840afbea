"""States that are copied while training goes on: no bit of a later moment gets into them, and nobody waits in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from potluck.errors import StateUnavailableError
from potluck.state.chunkpool import Chunk, ChunkPool
from potluck.state.copying import Copying, TornError
from potluck.state.snapshot import Snapshot, outline_of

PATIENCE_SECONDS = 60.0


class HeldPool(ChunkPool):
    """Memory that one thread gets only when the test says so."""

    def __init__(self) -> None:
        super().__init__(chunk_bytes=64)
        self.held_thread: threading.Thread | None = None
        self.has_begun = threading.Event()
        self.gate = threading.Event()
        self.error: BaseException | None = None

    def take(self, num_bytes: int) -> Chunk:
        if self.error is not None:
            raise self.error
        if threading.current_thread() is self.held_thread:
            self.has_begun.set()
            assert self.gate.wait(PATIENCE_SECONDS)
        return super().take(num_bytes)

    @property
    def num_used(self) -> int:
        return self.statistics()["chunk_bytes_used"] // self.chunk_bytes


class Model:
    """Some tensors, and how they were when they were published."""

    def __init__(self, *volatile: str) -> None:
        names = ("weight", "bias", "running")
        self.tensors: dict[str, Tensor] = {name: torch.randn(100, requires_grad=name == "weight") for name in names}
        self.before = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.pool = HeldPool()
        self.copying = Copying(
            outline_of(self.tensors, {}), self.tensors, self.pool, steady=self.tensors.keys() - set(volatile)
        )

    def change(self, *names: str) -> None:
        with torch.no_grad():
            for name in names or self.tensors:
                self.tensors[name].add_(1.0)

    def hash_in_worker(self) -> Callable[[], Snapshot | BaseException]:
        """Have a worker copy and hash it, held up at the gate; returns how to wait for what it makes."""
        made: list[Snapshot | BaseException] = []

        def work() -> None:
            try:
                made.append(self.copying.hashed(None))
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                made.append(error)

        thread = self.pool.held_thread = threading.Thread(target=work, name="worker")
        thread.start()
        assert self.pool.has_begun.wait(PATIENCE_SECONDS)

        def end() -> Snapshot | BaseException:
            thread.join(PATIENCE_SECONDS)
            return made[0]

        return end

    def open_when_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The copy goes on when somebody waits for it, and not before."""
        waiting = self.copying._copied.wait

        def wait(timeout_seconds: float | None = None) -> bool:
            self.pool.gate.set()
            return waiting(timeout_seconds)

        monkeypatch.setattr(self.copying._copied, "wait", wait)

    def assert_as_before(self, snapshot: object) -> None:
        assert isinstance(snapshot, Snapshot), snapshot
        assert all(torch.equal(tensor, self.before[name]) for name, tensor in snapshot.tensors().items())


def test_who_changes_tensors_waits_for_the_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    end = model.hash_in_worker()
    assert not model.copying.is_copied
    model.open_when_waited_for(monkeypatch)
    model.copying.before_change()
    assert model.copying.is_copied
    model.change()
    model.assert_as_before(end())
    model.copying.before_change()  # once more does no harm
    model.copying.release()


def test_what_nobody_leaves_alone_is_copied_at_once() -> None:
    model = Model("running")
    end = model.hash_in_worker()
    model.change("running")  # as a forward pass does, without asking
    model.pool.gate.set()
    model.assert_as_before(end())
    everything = Model("weight", "bias", "running")
    assert everything.copying.is_copied
    everything.change()
    model.assert_as_before(model.copying.hashed(None))
    everything.assert_as_before(everything.copying.hashed(None))


def test_a_copy_that_has_not_begun_is_made_by_who_would_have_to_wait_for_it() -> None:
    model = Model()
    model.copying.before_change()
    model.change()
    model.assert_as_before(model.copying.hashed(None))


@pytest.mark.parametrize("when", ["while it is copied", "after the copy", "after the copy, seen by the next change"])
def test_a_change_by_hand_is_noticed(when: str) -> None:
    model = Model()
    if when == "while it is copied":
        end = model.hash_in_worker()
        model.change("bias")
        model.pool.gate.set()
        error = end()
    else:
        model.copying._finish()
        model.change("bias")
        if when.endswith("change"):
            model.copying.before_change()
        with pytest.raises(TornError) as raised:
            model.copying.hashed(None)
        error = raised.value
    assert isinstance(error, TornError)
    assert model.copying.tensors() is None
    model.copying.release()
    assert model.pool.num_used == 0


def test_what_is_passed_over_before_it_is_copied_costs_nothing() -> None:
    model = Model()
    model.copying.release()
    model.pool.error = AssertionError("nobody wants it")
    model.copying.before_change()
    with pytest.raises(StateUnavailableError, match="passed over"):
        model.copying.hashed(None)


def test_what_is_passed_over_while_it_is_copied_is_let_go() -> None:
    model = Model()
    end = model.hash_in_worker()
    model.copying.release()
    model.pool.gate.set()
    end()
    assert model.pool.num_used == 0


def test_who_holds_a_state_has_it_back_until_it_is_released() -> None:
    model = Model()
    held = Copying(outline_of(model.tensors, {}), model.tensors, model.pool, steady=model.tensors, num_holders=2)
    held.before_change()
    model.change()
    snapshot = held.hashed(None)
    held.release()
    snapshot.release()
    tensors = held.tensors()
    assert tensors is not None
    assert all(torch.equal(tensor, model.before[name]) for name, tensor in tensors.items())
    held.release()
    assert model.pool.num_used == 0


def test_errors_reach_who_hashes_and_nobody_else() -> None:
    model = Model()
    model.pool.error = MemoryError("no room")
    model.copying.before_change()
    with pytest.raises(MemoryError, match="no room"):
        model.copying.hashed(None)
    assert model.copying.tensors() is None
    with pytest.raises(MemoryError, match="no room"):  # where the copy is made at once, it is who publishes
        Copying(outline_of(model.tensors, {}), model.tensors, model.pool)


def test_ctrl_c_in_the_middle_of_a_copy_leaves_nobody_waiting() -> None:
    model = Model()
    model.pool.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model.copying.before_change()
    with pytest.raises(StateUnavailableError, match="interrupted"):
        model.copying.hashed(None)


def test_ctrl_c_while_a_copy_is_waited_for_leaves_the_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    end = model.hash_in_worker()

    def interrupted(timeout_seconds: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.copying._copied, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.copying.before_change()
    model.open_when_waited_for(monkeypatch)
    model.copying.before_change()
    model.change()
    model.assert_as_before(end())
