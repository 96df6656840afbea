"""A process that has imported torch and Potluck, and becomes others by forking; `forkserver.py` starts it and asks.

    python -m potluck.testing.forktemplate LISTENER PARENT ROOM

LISTENER is the descriptor of a Unix socket on which orders come: to fork a child that runs a program, or to say how a
child ended. PARENT is the process that this one must not outlive; ROOM is a long word, as in the environment, whose
place in memory the children's own words take.

A child is what a fresh interpreter would be, but for the time that it takes. It has a session, streams, environment
and folder of its own, and a `__main__` of its own; it ends as any interpreter ends, since what runs it is the last
thing that this program does. Nothing has happened here before that could tell: no thread was started, no tensor
computed. (The seed of hashes is the template's: `forkserver.py` keeps several, so that peers of a run differ in it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import select
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import potluck

# What children import sooner or later: `torch.optim` imports the compiler's front end when the first optimizer is made.
HEAVY = ("numpy.random", "torch", "torch._dynamo", "torch.utils.data", "uvloop", "PIL.Image", "rich.live", "typer")
OPTIONAL = ("typer._adapters",)  # which newer versions import, with much else, when a command runs
# Integrations and the dashboard stand on frameworks that few children use; a command's console looks at the environment
# when it is imported; tests' tools are not the product.
LEFT_OUT = ("potluck.integrations", "potluck.monitor.dashboard", "potluck.cli", "potluck.testing")
CLONE_NEWNET = 0x40000000
MAX_ORDER_BYTES = 1 << 22
ARGUMENTS_START_FIELD = 45  # of /proc/self/stat, counted after the command's name


def import_all() -> None:
    """Import what is heavy, and all of the product that needs nothing optional."""
    for name in HEAVY:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for module in pkgutil.walk_packages(potluck.__path__, "potluck."):
        if not module.name.startswith(LEFT_OUT):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # so that no collection in a child copies the pages of all this


def serve(listener: socket.socket, parent: int) -> dict[str, Any] | None:
    """Take orders until the parent has ended (None); returns in a forked child, with what it is to run."""
    parent_handle = os.pidfd_open(parent)
    ready = select.poll()
    for descriptor in (listener.fileno(), parent_handle):
        ready.register(descriptor, select.POLLIN)
    while os.getppid() == parent:
        if not any(descriptor == listener.fileno() for descriptor, _ in ready.poll()):
            continue
        connection, _ = listener.accept()
        with connection:
            order, streams = _receive(connection)
            if not order:  # somebody looked whether this process is ready
                continue
            if "reap" in order:
                _, status = os.waitpid(order["reap"], 0)
                _answer(connection, code=os.waitstatus_to_exitcode(status))
            elif _fork() == 0:
                listener.close()
                os.close(parent_handle)
                return order if _prepared(connection, order, streams) else None
            for stream in streams:
                os.close(stream)
    return None


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while more := connection.recv(1 << 16):
        data += more
        if len(data) > MAX_ORDER_BYTES:
            raise ValueError(f"an order of more than {MAX_ORDER_BYTES} bytes")
    return json.loads(data or b"{}"), streams


def _answer(connection: socket.socket, **answer: Any) -> None:
    connection.sendall(json.dumps(answer).encode())


def _fork() -> int:
    tasks = os.listdir("/proc/self/task")  # noqa: PTH208 - one system call, and nothing but numbers
    if len(tasks) != 1:
        raise RuntimeError(f"a template with {len(tasks)} threads cannot be forked: an import has started some")
    return os.fork()


def _prepared(connection: socket.socket, order: dict[str, Any], streams: list[int]) -> bool:
    """Become a process of one's own, and only then tell its id: from now on it can be signalled like any other."""
    try:
        os.setsid()
        if order["network"]:
            _enter_network(order["network"])
        os.chdir(order["cwd"])
    except OSError as error:
        _answer(connection, pid=os.getpid(), errno=error.errno, text=error.strerror, path=error.filename)
        return False
    _take_environment(order["env"], order["argv"])
    stdin, output = streams
    for stream, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    _answer(connection, pid=os.getpid())
    return True


def _enter_network(path: str) -> None:
    """As `ip netns exec` does, except for /sys, which nothing of ours reads."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), path)
    finally:
        os.close(descriptor)


def _take_environment(environment: dict[str, str], argv: list[str]) -> None:
    """Have the environment, and let others see it and the command line in /proc, where they look for processes."""
    os.environ.clear()
    os.environ.update(environment)  # these are copies: what the kernel put into memory is free for the lines below
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments_start, arguments_end, environment_start, environment_end = map(int, fields[ARGUMENTS_START_FIELD:][:4])
    _overwrite(arguments_start, arguments_end, argv)
    _overwrite(environment_start, environment_end, [f"{name}={value}" for name, value in environment.items()])


def _overwrite(start: int, end: int, words: list[str]) -> None:
    room = end - start
    content = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
    ctypes.memmove(start, content.ljust(room, b"\0"), room)


def become(argv: list[str]) -> None:
    """Run the program of a command line `python -m module …` or `python script …` as `__main__`."""
    import numpy as np
    import torch

    np.random.seed()  # what `random` does by itself: no two children draw the same
    torch.default_generator.seed()
    sys.orig_argv[:] = argv
    main = ModuleType("__main__")
    if argv[1] == "-m":
        name, place = argv[2], str(Path.cwd())
        sys.argv[:] = argv[2:]
    else:
        name, place = argv[1], str(Path(argv[1]).resolve().parent)
        sys.argv[:] = argv[1:]
    sys.path[0] = place
    importlib.invalidate_caches()
    sys.modules["__main__"] = main
    code = _module_code(main, name) if argv[1] == "-m" else _script_code(main, name)
    exec(code, main.__dict__)


def _module_code(main: ModuleType, name: str) -> Any:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    main.__spec__, main.__loader__, main.__package__, main.__file__ = spec, spec.loader, spec.parent, spec.origin
    sys.argv[0] = str(spec.origin)
    return spec.loader.get_code(spec.name)  # type: ignore[attr-defined]  # loaders of modules have it


def _script_code(main: ModuleType, path: str) -> Any:
    main.__file__ = path
    return compile(Path(path).read_bytes(), path, "exec")


def _main() -> None:
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    import_all()
    listener.listen(64)  # only now: who asks earlier is refused at once, and starts its child in the plain way
    order = serve(listener, parent)
    if order is not None:
        become(order["argv"])


if __name__ == "__main__":
    _main()
