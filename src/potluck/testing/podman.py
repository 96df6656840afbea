"""A container engine for tests: Podman's service on a socket of its own, with an image made of busybox alone.

Needs root, `podman`, `runc` and a static `busybox` (scripts/test installs them). No registry is asked for anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from potluck.testing.polling import poll_until_sync

IMAGE = "localhost/potluck-test-box:1"
START_SECONDS = 60.0


def why_no_engine() -> str:
    """Why no engine can be started here; empty where one can."""
    missing = [name for name in ("podman", "runc", "busybox") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (scripts/test installs them, as root on Debian)"
    if os.getuid() != 0:
        return "containers in tests need root"
    return ""


@contextmanager
def podman_service(*, with_image: bool = True) -> Iterator[str]:
    """The URL of a running engine; it has IMAGE, or nothing. All that it made is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="potluck-podman-"))
    socket = folder / "engine.sock"
    podman = [
        "podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc", "--storage-driver", "vfs",
        "--root", str(folder / "root"), "--runroot", str(folder / "runroot"), "--tmpdir", str(folder / "tmp"),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(
            [*podman, "system", "service", "--time", "0", f"unix://{socket}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            cwd=folder,  # conmon leaves a file `oom` where it is
        )  # fmt: skip
    try:
        if with_image:
            imported = [*podman, "import", str(box_archive(folder)), IMAGE]
            said = subprocess.run(imported, capture_output=True, text=True, timeout=120)
            assert said.returncode == 0, said.stderr

        def listens() -> bool:
            assert service.poll() is None, (folder / "log").read_text()
            return socket.exists()

        poll_until_sync(listens, START_SECONDS, "Podman's socket")
        yield f"unix://{socket}"
    finally:
        subprocess.run([*podman, "rm", "--all", "--force", "--time", "0"], capture_output=True, timeout=120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(service.pid, signal.SIGKILL)
        service.wait()
        subprocess.run(["umount", "-l", str(folder / "root" / "vfs")], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def box_archive(folder: Path) -> Path:
    """A root file system of one static program that is many."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    path = folder / "box.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(os.path.realpath(busybox), "bin/busybox")
        for name in ("sh", "sleep", "echo", "cat", "id", "tail", "ls", "true", "env", "touch", "trap", "wc"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for name, mode in (("tmp", 0o1777), ("work", 0o777), ("potluck", 0o777), ("proc", 0o755), ("etc", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
    return path
