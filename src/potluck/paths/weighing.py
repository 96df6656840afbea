"""What a path's change weighs in the outer step of a module (pure).

    Δ_m = √P_m · Σ_{i∋m} α_i · (θ_m − θ_{i,m})

    normalised   α_i = |D_i| / Σ_{j∋m} |D_j|    the weights of a module's paths sum to 1
    raw          α_i = |D_i| / |D|              the paper's sum: a module that few paths use takes a smaller step

|D_i| are the tokens of path i. The mean of P changes that have little in common is √P times shorter than one of them;
the factor √P_m undoes that.

A round brings the changes of the phases that are in it, mostly of all P paths through a module. It averages them with
their |D_i| as weights. So what is left to do is a factor that all members know from the commit: the sum of the weights
in the round, and how many phases they stand for. Where some paths are missing, P is the number that are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from potluck.paths.grid import Grid, Path

Alpha = Literal["normalised", "raw"]


def alphas(grid: Grid, tokens: Mapping[Path, float], module: str, kind: Alpha = "normalised") -> dict[Path, float]:
    """The weights of the paths through a module, as the formula has them."""
    through = grid.paths_through(module)
    whole = sum(tokens[path] for path in (through if kind == "normalised" else grid.paths))
    return {path: tokens[path] / whole for path in through}


def step_factor(*, phases: float, round_weight: float, all_tokens: float, kind: Alpha = "normalised") -> float:
    """By what the mean of a round is to be multiplied: √P, and with raw weights the round's share of all tokens."""
    factor = math.sqrt(phases) if phases > 1.0 else 1.0
    return factor if kind == "normalised" or all_tokens <= 0 else factor * round_weight / all_tokens
