"""A pretend accelerator: a second torch device on the CPU, for tests on machines without a GPU.

    accelerator = accelerator.install()        # once per process, which keeps it: use a process of its own
    model.to("pretend")
    accelerator.counts.synchronisations        # and transfers, in both directions

Its tensors do not mix with the CPU's: an operation that gets both raises, as on CUDA, where only a number (a tensor of
no dimensions) may come from the CPU. Kernels of the CPU do the arithmetic, so results have the CPU's bits. What a GPU
would wait for is counted: `.item()`, a blocking copy in either direction, a copy to memory that is not pinned, and
`synchronize()`.

How it works: a device tensor's storage points to memory of the CPU, and holds the CPU storage that owns it. Each
operation is carried out on tensors of the CPU that share this memory (torch's Python backend for `PrivateUse1`, with a
fallback for all operations). A result that shares memory with an argument becomes a view of that argument.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

NAME = "pretend"
DEVICE_BYTES = 1 << 34  # that it pretends to have
# Operations that wait on a GPU, since the size of their result depends on values, or since they return a number.
WAITING = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_local_scalar_dense", "bincount"})
FUSED = "_fused_"
HALF_OPERATIONS = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "conv2d", "convolution")

_torch: Any = torch._C  # the parts of torch without types that a backend is made of
_library: Any = torch.library.Library
_CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of both devices."""


@dataclass(slots=True)
class Counts:
    """What the device has done since the last `clear`."""

    to_device: int = 0
    to_host: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    synchronisations: int = 0
    events: int = 0
    operations: int = 0

    def clear(self) -> None:
        """Begin anew."""
        for name in asdict(self):
            setattr(self, name, 0)


class Stream:
    """An order of work. All work is done at once here, so only the order of waits is recorded."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        """Go on after what the other has to do now."""
        self.waited_for.append(other)

    def wait_event(self, event: Event) -> None:
        """Go on after the event."""
        self.waited_for.append(event)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark this moment."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for all of it."""
        the_device().counts.synchronisations += 1


class Event:
    """A moment in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.stream: Stream | None = None
        self.waited_by: list[str] = []
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark this moment."""
        self.stream = stream or the_device().current_stream()
        self._at = time.perf_counter()
        the_device().counts.events += 1

    def query(self) -> bool:
        """Whether it is past."""
        return True

    def synchronize(self) -> None:
        """Wait for it: in a worker that costs training nothing, so only the name of the thread is kept."""
        self.waited_by.append(threading.current_thread().name)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds between the two."""
        return (later._at - self._at) * 1000.0


class Accelerator:
    """The module `torch.pretend`, by which torch and programs ask for what is not an operation on tensors."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.allows_transfers = True
        """Whether copies between the devices are allowed; see `forbid_transfers`."""
        self.memory_limit_bytes = DEVICE_BYTES
        """An allocation beyond it raises torch.OutOfMemoryError."""
        self._allocated = 0
        self._streams = threading.local()
        self._default = Stream()
        self.Stream, self.Event = Stream, Event  # as torch.cuda has them

    # What torch asks for

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    # What programs ask for

    def synchronize(self, device: object = None) -> None:
        """Wait for all work."""
        self.counts.synchronisations += 1

    def current_stream(self, device: object = None) -> Stream:
        """The stream of this thread."""
        found: Stream = getattr(self._streams, "current", self._default)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Work goes into that stream."""
        before, self._streams.current = self.current_stream(), stream
        try:
            yield
        finally:
            self._streams.current = before

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Free and total bytes."""
        return self.memory_limit_bytes - self._allocated, self.memory_limit_bytes

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """What is known of the device."""
        return SimpleNamespace(name=NAME, total_memory=DEVICE_BYTES)

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        """Allow no more than this share. As with CUDA, the device must have an index."""
        if device.index is None:
            raise ValueError(f"expected a torch.device with a specified index, but got {device}")
        self.memory_limit_bytes = int(fraction * DEVICE_BYTES)

    def memory_reserved(self, device: object = None) -> int:
        """Bytes in use."""
        return self._allocated

    memory_allocated = memory_reserved

    def empty_cache(self) -> None:
        """There is none."""

    @contextmanager
    def forbid_transfers(self) -> Iterator[None]:
        """An error for each copy between the devices meanwhile."""
        self.allows_transfers = False
        try:
            yield
        finally:
            self.allows_transfers = True

    # Memory

    def _allocate(self, num_bytes: int) -> None:
        if self._allocated + num_bytes > self.memory_limit_bytes:
            raise torch.OutOfMemoryError(f"{NAME} is out of memory: {num_bytes} bytes asked for")
        self._allocated += num_bytes

    def _free(self, num_bytes: int) -> None:
        self._allocated -= num_bytes


_installed: Accelerator | None = None
_libraries: list[Any] = []


def the_device() -> Accelerator:
    """The one that was installed."""
    assert _installed is not None, "install() comes first"
    return _installed


def install() -> Accelerator:
    """Register the device with torch; idempotent. It cannot be taken back."""
    global _installed
    if _installed is not None:
        return _installed
    _installed = Accelerator()
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_installed)
    everything = _library("_", "IMPL")
    everything.fallback(_on_host, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = _library("aten", "IMPL", "PrivateUse1")
    own.impl("empty.memory_format", _empty)
    own.impl("empty_strided", _empty_strided)
    own.impl("copy_", _copy)
    own.impl("set_.source_Storage_storage_offset", _set)
    own.impl("set_.source_Storage", _set_whole)
    own.impl("convolution_overrideable", _convolution)
    own.impl("convolution_backward_overrideable", _convolution_backward)
    for name in _made_of_others():
        own.impl(name, functools.partial(_on_host, _operation(name)))
    host = _library("aten", "IMPL", "CPU")
    with _quietly():
        host.impl("is_pinned", lambda tensor, device=None: hasattr(tensor.untyped_storage(), "_is_pinned"))
        host.impl("_pin_memory", _pin)
    cast = _library("aten", "IMPL", "AutocastPrivateUse1")
    for name in HALF_OPERATIONS:
        cast.impl(name, _in_half(getattr(torch.ops.aten, name).default))
    _copy_storages_too()
    _libraries.extend([everything, own, host, cast])
    return _installed


def _copy_storages_too() -> None:
    """Torch has nothing by which a Python backend could say how to copy a storage, as `deepcopy` of a tensor does."""
    plain = torch.UntypedStorage.__deepcopy__

    def deepcopy(storage: Any, memo: dict[int, Any]) -> Any:
        if storage.device.type != NAME:
            return plain(storage, memo)  # type: ignore[no-untyped-call]
        if storage._cdata not in memo:
            memo[storage._cdata] = _storage_on(storage._owner.clone())
        return memo[storage._cdata]

    torch.UntypedStorage.__deepcopy__ = deepcopy  # type: ignore[method-assign]


def _made_of_others() -> list[str]:
    """Operations that torch would take apart for a device before its fallback is asked: the CPU has them whole."""
    composite = "CompositeExplicitAutogradNonFunctional"
    return [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, composite)
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    ]


def _operation(name: str) -> Any:
    short, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, short), overload or "default")


# Tensors of the one device on the memory of the other


def host_of(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor of the CPU."""
    raw: torch.UntypedStorage = tensor.untyped_storage()._owner  # type: ignore[attr-defined]
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(raw, tensor.storage_offset(), tensor.size(), tensor.stride())


def _placed(host: Tensor) -> Tensor:
    """The same memory, as a tensor of the device."""
    made = _torch._acc.create_empty_tensor([0], host.dtype)
    return _put(made, _storage_on(host.untyped_storage()), host)


def _put(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _CPU_KEY, tensor, storage, like.storage_offset(), like.size(), like.stride()
    )
    return tensor


class _Memory:
    """Gives a storage's bytes back when it goes."""

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = 0  # should there be no room
        the_device()._allocate(num_bytes)
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        the_device()._free(self.num_bytes)


def _storage_on(raw: torch.UntypedStorage) -> Any:
    memory = _Memory(raw.nbytes())
    storage: Any = _torch._construct_storage_from_data_pointer(raw.data_ptr(), torch.device(NAME, 0), raw.nbytes())
    storage._owner, storage._memory = raw, memory
    return storage


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# Operations


def _on_host(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: on the CPU, with the same memory."""
    device = the_device()
    device.counts.operations += 1
    name = operation._schema.name.removeprefix("aten::")
    if name in WAITING:
        device.counts.synchronisations += 1
        device.counts.to_host += name == "_local_scalar_dense"
    _check_mixed(name, args, kwargs)
    given: list[tuple[Tensor, Tensor]] = []  # tensors of the device, and the same on the CPU

    def to_host(value: Any) -> Any:
        if _is_on_device(value):
            for tensor, host in given:
                if tensor is value:
                    return host
            given.append((value, host_of(value)))
            return given[-1][1]
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    host_args, host_kwargs = pytree.tree_map(to_host, (args, kwargs))
    sizes = [host.untyped_storage().nbytes() for _, host in given]
    result = operation(*host_args, **host_kwargs)
    for (tensor, host), size in zip(given, sizes, strict=True):
        if host.untyped_storage().nbytes() != size or host.shape != tensor.shape:  # resized, as `out=` may be
            _put(tensor, _storage_on(host.untyped_storage()), host)

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for tensor, host in given:
            if value is host:
                return tensor
        for tensor, host in given:
            if value.untyped_storage()._cdata == host.untyped_storage()._cdata:
                view = _torch._acc.create_empty_tensor([0], value.dtype)
                return _put(view, tensor.untyped_storage(), value)
        return _placed(value)

    return pytree.tree_map(to_device, result)


def _check_mixed(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    flat = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if all(_is_on_device(tensor) for tensor in flat):
        return
    for tensor in flat:
        # Operators take a number from the CPU, and so does the index of a row. A fused kernel reads only its device.
        if not _is_on_device(tensor) and (tensor.dim() or name.startswith(FUSED)) and not name.startswith("index"):
            raise MixedDevicesError(
                f"aten::{name} got tensors on {NAME} and on {tensor.device}: expected all on one device"
            )


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: object = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return _placed(torch.empty(tuple(size), dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: object = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return _placed(torch.empty_strided(tuple(size), tuple(stride), dtype=dtype))


def _set(tensor: Tensor, storage: Any, offset: int, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU_KEY, tensor, storage, offset, size, stride)
    return tensor


def _set_whole(tensor: Tensor, storage: Any) -> Tensor:
    return _set(tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    device = the_device()
    to_device, from_device = _is_on_device(target), _is_on_device(source)
    if to_device != from_device:
        if not device.allows_transfers:
            raise MixedDevicesError(f"a copy from {source.device} to {target.device} of {source.nbytes} bytes")
        if to_device:
            device.counts.to_device += 1
            device.counts.to_device_bytes += target.nbytes
        else:
            device.counts.to_host += 1
            device.counts.to_host_bytes += target.nbytes
        on_host = source if to_device else target
        # A copy to memory that is not pinned is waited for in any case, one from there is put aside first.
        device.counts.synchronisations += not non_blocking or (from_device and not on_host.is_pinned())
    there = host_of(target) if to_device else target
    there.copy_(host_of(source) if from_device else source)
    return target


def _convolution(*args: Any) -> Any:
    return _on_host(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, seen: Tensor, weight: Tensor, *settings: Any) -> Any:
    bias_sizes = [gradient.shape[1]]
    return _on_host(torch.ops.aten.convolution_backward.default, gradient, seen, weight, bias_sizes, *settings)


def _pin(tensor: Tensor, device: object = None) -> Tensor:
    pinned = torch.empty_like(tensor)
    pinned.untyped_storage()._is_pinned = True  # type: ignore[attr-defined]
    return pinned.copy_(tensor)


def _in_half(operation: Any) -> Callable[..., Any]:
    """What autocast does with this operation: floating-point arguments in half precision."""
    without_autocast = torch._C.DispatchKeySet(_torch.DispatchKey.AutocastPrivateUse1)

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(value: Any) -> Any:
            return value.to(dtype) if _is_on_device(value) and value.is_floating_point() else value

        with torch._C._ExcludeDispatchKeyGuard(without_autocast):
            return operation(*pytree.tree_map(lower, args), **pytree.tree_map(lower, kwargs))

    return cast


@contextmanager
def _quietly() -> Iterator[None]:
    """Torch warns when a kernel of the CPU is replaced; here that is meant."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
