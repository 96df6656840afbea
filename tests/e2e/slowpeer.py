"""`potluck` on a machine that takes its time: a step of a built-in recipe lasts as long as a larger model's would.

Else a trainer of a test computes without end, at many epochs a second, and takes a core from all tests beside it.
"""

from __future__ import annotations

import time
from typing import Any

from potluck.cli.main import main
from potluck.recipes.digits import Digits
from potluck.recipes.stdlib_lm import StdlibLM

STEP_SECONDS = 0.04


def slow_down(recipe: type[Any]) -> None:
    quick = recipe.loss

    def loss(self: Any, model: Any, batch: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return quick(self, model, batch)

    recipe.loss = loss


if __name__ == "__main__":
    for each in (Digits, StdlibLM):
        slow_down(each)
    main()
