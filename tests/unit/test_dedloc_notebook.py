"""The notebook that shows DeDLOC's experiment in miniature: its cells run, and what they say is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "dedloc.ipynb"


def test_adaptive_averaging_is_worth_it_where_lines_are_unequal() -> None:
    found: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), found)
    hours: dict[str, list[float]] = found["hours"]
    assert hours["equal lines"][0] <= 1.01 * hours["equal lines"][1]
    assert hours["equal lines, 4 aux peers"][0] < hours["equal lines"][0]
    assert hours["tiers"][0] < 0.85 * hours["tiers"][1]
    assert hours["tiers, 4 aux peers, churn"][0] > 1.05 * hours["tiers, 4 aux peers"][0]
