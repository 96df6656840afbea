"""What a path's change weighs in the outer step of a module (pure).

    Δ_m = √P_m · Σ_{i∋m} α_i · (θ_m − θ_{i,m})

    normalised   α_i = |D_i| / Σ_{j∋m} |D_j|    the weights of a module's paths sum to 1
    raw          α_i = |D_i| / |D|              the paper's sum: a module that few paths use takes a smaller step

|D_i| are the tokens of path i. The mean of P changes that have little in common is √P times shorter than one of them;
the factor √P_m undoes that.

A round brings the changes of the phases that are in it, mostly of all P paths through a module. It averages them with
weights |D_i| / |D|. So what is left to do is a factor that all members know from the commit: the sum of the weights in
the round, and how many phases they stand for. Where some paths are missing, P is the number that are there.

Weights and phases are what members say of themselves. Paths differ in size as they like, so the cap on what others
usually give (round/plan/weights.py) has no place here. Instead nobody counts for more than all documents of the run
(`MOST_WEIGHT`), and no round steps further than one of all paths through the module would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from potluck.paths.grid import Grid, Path

Alpha = Literal["normalised", "raw"]

MOST_WEIGHT = 1.0 + 1e-6  # a phase of each path of the run, but for rounding


def alphas(grid: Grid, tokens: Mapping[Path, float], module: str, kind: Alpha = "normalised") -> dict[Path, float]:
    """The weights of the paths through a module, as the formula has them."""
    through = grid.paths_through(module)
    whole = sum(tokens[path] for path in (through if kind == "normalised" else grid.paths))
    return {path: tokens[path] / whole for path in through}


def phase_weight(tokens: float, all_tokens: float) -> float:
    """What a phase of a path weighs in the rounds of its modules: |D_i| / |D|."""
    return max(tokens, 1.0) / max(all_tokens, tokens, 1.0)


def step_factor(*, phases: float, round_weight: float, num_paths: int, kind: Alpha = "normalised") -> float:
    """By what the mean of a round is to be multiplied: √P, and with raw weights the round's share of all tokens."""
    factor = math.sqrt(max(1.0, min(phases, float(num_paths))))
    return factor if kind == "normalised" else factor * min(round_weight, MOST_WEIGHT)
