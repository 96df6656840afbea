"""`python -m potluck.cli` is the `potluck` command. Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Import what the command line needs, and run it."""
    try:
        from potluck.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # with torch, searching all of it for garbage takes seconds, and all of it goes now


if __name__ == "__main__":
    main()
