"""Run a Python program with the faults that its environment asks for.

    python -m potluck.testing.faulty -m potluck.cli.main join LINK
    python -m potluck.testing.faulty script.py ARGUMENT

The plan is read once, before the program starts; see `potluck.testing.faults`.
"""

from __future__ import annotations

import runpy
import sys

from potluck.errors import ConfigurationError
from potluck.testing.faults import install_from_environment


def main() -> None:
    """Install the plan and become the program."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        raise ConfigurationError("say what to run: `-m module …` or `script.py …`")
    install_from_environment()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
