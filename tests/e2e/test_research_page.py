"""docs/research.md: its program as it stands there, on four machines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Terminal, until_event
from organiser import LONG_SECONDS, ONE_THREAD, Organiser, end, until_epoch

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

PAGE = Path(__file__).resolve().parents[2] / "docs" / "research.md"


def last_line(process: ManagedProcess) -> dict[str, Any]:
    """What a program says at its end."""

    def find() -> dict[str, Any] | None:
        lines = [line for line in process.output().splitlines() if line.startswith("{") and '"epoch"' in line]
        assert lines or process.exit_code is None, process.output()
        return dict(json.loads(lines[-1])) if lines else None

    return poll_until_sync(find, 2 * LONG_SECONDS, lambda: f"{process.name}: {process.output()[-2000:]}")


@pytest.mark.timeout(500)
def test_the_program_on_the_page_trains_on_four_machines(terminal: Terminal) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    place = ("--run", "study", "--folder", terminal.folder / "hub", "--listen", "127.0.0.1", "--no-dashboard", "--json")
    host = terminal.start("host", *place, **ONE_THREAD)
    link = until_event(host, "ready")["link"]
    machines = []
    for number in range(4):
        folder = terminal.folder / f"machine{number}"
        folder.mkdir()
        (folder / "study.py").write_text(program.replace('"model.pt"', repr(str(folder / "model.pt"))))
        machines.append(
            terminal.start(
                folder / "study.py",
                link,
                name=f"machine{number}",
                program=(sys.executable,),
                POTLUCK_IDENTITY=str(folder / "key.nkey"),
                **ONE_THREAD,
            )
        )
    said = [last_line(machine) for machine in machines]
    for machine in machines:
        assert machine.wait(LONG_SECONDS) == 0, machine.output()
    assert all(each["epoch"] >= 5 for each in said)
    by_epoch: dict[int, set[float]] = {}
    for each in said:
        by_epoch.setdefault(each["epoch"], set()).add(each["weights"])
    assert all(len(weights) == 1 for weights in by_epoch.values()), f"the shared weights differ: {said}"
    assert any(sum(each["epoch"] == epoch for each in said) > 1 for epoch in by_epoch), "two at least at one epoch"
    assert all((terminal.folder / f"machine{number}" / "model.pt").exists() for number in range(4))
    end(host)


OWN_PROGRAM = """
import sys, json, torch, potluck
with potluck.join(sys.argv[1]) as run:
    try:
        run.recipe()
    except potluck.PotluckError as error:
        print(json.dumps({"event": "refused", "text": str(error)}), flush=True)
    recipe = run.recipe(yes=True)
    model = recipe.model()
    optimizer = potluck.Optimizer(run, torch.optim.AdamW(model.named_parameters()))
    for batch in run.batches(recipe, batch_size=16):
        recipe.loss(model, batch).backward()
        optimizer.step(batch_size=16)
        optimizer.zero_grad()
        if optimizer.epoch >= 3:
            break
    print(json.dumps({"event": "done", "epoch": optimizer.epoch}), flush=True)
"""


@pytest.mark.timeout(500)
def test_a_program_gets_the_run_s_own_model_and_data(terminal: Terminal, tmp_path: Path) -> None:
    organiser = Organiser(terminal)
    host, link = organiser.host()
    ada = organiser.join(link, "ada", "--batch-size", "16")
    until_epoch(ada, 1)
    (tmp_path / "own.py").write_text(OWN_PROGRAM)
    own = terminal.start(
        tmp_path / "own.py",
        link,
        name="own",
        program=(sys.executable,),
        POTLUCK_IDENTITY=str(tmp_path / "own.nkey"),
        POTLUCK_DATA=str(tmp_path / "data"),
        **ONE_THREAD,
    )
    assert "run.recipe(yes=True)" in until_event(own, "refused")["text"]
    assert last_line(own)["epoch"] >= 3
    assert own.wait(LONG_SECONDS) == 0, own.output()
    end(ada)
    end(host)
