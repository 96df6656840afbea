"""Start a program that ends when its parent does. A script of its own: it imports nothing of Potluck.

    python -I -S launcher.py PARENT_PID PROGRAM ARGUMENTS…

The kernel sends SIGTERM to this process when its parent dies, however it dies, and keeps that promise across exec. To
ask for it between fork and exec of the parent (`preexec_fn`) is not safe in a process with threads; here it is plain
code in a process of its own, which then becomes the program. Only Linux has this; elsewhere the program is started all
the same, and folderlock.py stops what was left behind at the next start.

For the kernel the parent is the thread that started us: the hub lives as long as the event loop's thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, program: str, *arguments: str) -> None:
    """Become the program, with the promise made."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            sys.stderr.write(f"no signal at the parent's death: {os.strerror(ctypes.get_errno())}\n")
    # It may have died before we asked to be told.
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended already")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would hand that on
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
