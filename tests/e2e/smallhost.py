"""`potluck` on a machine that has no room for a whole model: a pipeline's held-out data go through its servers."""

from __future__ import annotations

from potluck.cli.main import main
from potluck.training.staged import previews

previews.MEMORY_SHARE = 0.0

if __name__ == "__main__":
    main()
