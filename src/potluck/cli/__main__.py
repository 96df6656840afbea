"""`python -m potluck.cli` is the `potluck` command."""

from potluck.cli.main import main

main()
