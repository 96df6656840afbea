"""`python -m potluck.cli` is the `potluck` command. Ctrl-C ends it quietly from the first import on."""

from __future__ import annotations

import sys


def main() -> None:
    """Import what the command line needs, and run it."""
    try:
        from potluck.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
