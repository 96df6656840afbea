"""`potluck` with one thing changed: this peer negates its gradients, and says that they are of a billion samples."""

from __future__ import annotations

from potluck.cli.main import main
from potluck.optim.accumulator import GradientAccumulator, MeanGradients

BILLION = 10**9


class LyingAccumulator(GradientAccumulator):
    """Counts as nobody can."""

    def add(self, batch_size: int, *, is_checked: bool = False) -> bool:
        is_good = super().add(batch_size, is_checked=is_checked)
        self.samples = BILLION
        return is_good

    def take(self) -> MeanGradients:
        taken = super().take()
        for tensor in taken.tensors.values():
            tensor.neg_()
        return taken


if __name__ == "__main__":
    from potluck.optim import targetbatch

    targetbatch.GradientAccumulator = LyingAccumulator  # type: ignore[misc]
    main()
