"""Lightning's Trainer in a run: `Trainer(strategy=PotluckStrategy(target_batch_size=8192))`.

strategy.py   the strategy: when the run is joined, what a step is, how it is left
batches.py    how many samples a step stands for
checks.py     what a strategy of ours cannot do, and what to do instead

Importing this registers the names "potluck" and "potluck_diloco": `Trainer(strategy="potluck")` takes its link and its
target from the environment.
"""

from __future__ import annotations

from potluck.integrations.extras import require

require("lightning.pytorch", "lightning")

from potluck.integrations.lightning.strategy import PotluckStrategy, register  # noqa: E402

__all__ = ["PotluckStrategy"]

register()
