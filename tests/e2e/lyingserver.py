"""`potluck` with one thing changed: as a pipeline's server, this peer hands on other outputs than it computed."""

from __future__ import annotations

from typing import Any

from potluck.cli.main import main
from potluck.pipeline.compute import StageCompute


class LyingCompute(StageCompute):
    """Doubles what it gives."""

    def forward(self, *given: Any) -> Any:
        outputs = super().forward(*given)
        return outputs and tuple(o * 2 if o.is_floating_point() and not self.is_last else o for o in outputs)

    def contribution(self, unit: int) -> Any:
        total, ids = super().contribution(unit)
        return total * -1, ids


if __name__ == "__main__":
    from potluck.pipeline import serving

    serving.StageCompute = LyingCompute  # type: ignore[misc]
    main()
