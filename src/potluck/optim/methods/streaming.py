"""Streaming: a model in fragments, each synchronised on its own, in turn; overlapped with training, and mixed in.

P fragments share H inner steps: every Δh = max(1, round(H/P)) steps one fragment starts to synchronise. At step t > 0
with Δh | t that is fragment ⌊(t mod P·Δh)/Δh⌋, so P = 4, H = 12 gives fragments 1, 2, 3, 0 at t = 3, 6, 9, 12. Its
result is applied τ steps later, mixed with what the peer has done since:

    θ_local ← α·θ_local + (1 − α)·θ_global          α = 0: take the result; α = 1: keep the local values

Mixing at α = 0 throws the work of those τ steps away, and at α > 0 keeps some of what was just shared as if it had not
been. With `keeps_overlap` it is put on top of the result instead, as late work is: θ_local ← θ_global + (θ_local − what
θ_local was when the synchronisation began). Then a result is applied as soon as it comes, and τ says only how long that
may take before the peer waits. With τ = Δh − 1 it hardly ever waits.

Fragments lower the peak of traffic by P, not its sum. They are made of whole layers, and strided: neighbours fall into
different fragments, so that each of them has a bit of the whole depth of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSchedule:
    """Which fragment synchronises when."""

    inner_steps: int
    """H: steps between two synchronisations of the same fragment, nearly."""

    num_fragments: int = 1
    """P."""

    overlap_steps: int = 0
    """τ: steps from the start of a synchronisation until its result is applied."""

    mixing: float = 0.0
    """How much of the local values stays when a result is applied."""

    keeps_overlap: bool = False
    """What was done in the τ steps is put on top of the result, rather than mixed with it."""

    def __post_init__(self) -> None:
        if self.inner_steps < 1 or self.num_fragments < 1:
            raise ConfigurationError("inner_steps and num_fragments must be 1 or more")
        if not 0 <= self.overlap_steps < self.steps_per_round:
            raise ConfigurationError(
                f"overlap_steps={self.overlap_steps}: a result must be applied before the next synchronisation "
                f"starts, {self.steps_per_round} steps later"
            )
        if not 0.0 <= self.mixing <= 1.0:
            raise ConfigurationError(f"mixing={self.mixing}: it must be from 0 to 1")
        if self.keeps_overlap and self.mixing:
            raise ConfigurationError("keep_overlap_work puts local steps on top of the result: leave mixing at 0")

    @property
    def steps_per_round(self) -> int:
        """Δh: inner steps from one synchronisation, of whichever fragment, to the next."""
        return max(1, round(self.inner_steps / self.num_fragments))

    def fragment_at(self, step: int) -> int | None:
        """The fragment that starts to synchronise after so many inner steps; None: none does."""
        every = self.steps_per_round
        if step <= 0 or step % every:
            return None
        return (step % (self.num_fragments * every)) // every

    def fragment_of_epoch(self, epoch: int) -> int:
        """The fragment that an epoch synchronises: epochs count synchronisations."""
        return epoch % self.num_fragments


def split(names: Sequence[str], num_fragments: int) -> list[list[str]]:
    """Parameters by fragment: whole layers, strided. Fragments that would be empty are an error."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    if num_fragments > len(layers):
        raise ConfigurationError(
            f"num_fragments={num_fragments}, and the model has {len(layers)} layers: take at most as many as there are "
            "layers"
        )
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    for number, members in enumerate(layers.values()):
        fragments[number % num_fragments] += members
    return fragments


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or else its module."""
    found = re.match(r"(.*?\d+)(?:\.|$)", name)
    return found.group(1) if found is not None else name.rpartition(".")[0] or name


@torch.no_grad()
def mix(local: Mapping[str, Tensor], shared: Mapping[str, Tensor], names: Iterable[str], mixing: float) -> None:
    """θ_local ← α·θ_local + (1 − α)·θ_global, for these parameters; exactly one of the two at α = 0 and α = 1."""
    for name in names:
        if mixing == 0.0:
            local[name].copy_(shared[name])
        elif mixing < 1.0:
            local[name].lerp_(shared[name].to(local[name].device, local[name].dtype), 1.0 - mixing)
