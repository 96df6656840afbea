"""A pipeline with the real commands: `potluck host`, `join`, `join --feed`, `pipeline`; a server is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import Visit, open_browser
from commandline import PATIENCE_SECONDS, POTLUCK, Terminal, until_event
from safetensors.torch import load_file

from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import ManagedProcess

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PICTURES = os.environ.get("POTLUCK_SCREENSHOTS", "")
LYING_SERVER = (sys.executable, str(Path(__file__).with_name("lyingserver.py")))
RUN = """\
name = "bakery"
recipe = "stdlib-lm"

[model]
width = 16
layers = 2
heads = 2
context = 16

[training]
algorithm = "sync"
target_batch_size = 16

[optimizer]
learning_rate = 1e-2

[schedule]
warmup_epochs = 0

[pipeline]
stages = 2
check_rate = 1.0
"""


def steps(process: ManagedProcess) -> list[dict[str, Any]]:
    lines = [line for line in process.output().splitlines() if line.startswith('{"event":"pipeline step"')]
    return [json.loads(line) for line in lines]


def until_steps(process: ManagedProcess, count: int) -> None:
    poll_until_sync(lambda: len(steps(process)) >= count, PATIENCE_SECONDS, f"{count} steps")


@pytest.mark.timeout(500)
def test_two_stages_train_lose_a_server_and_go_on(terminal: Terminal) -> None:
    folder = terminal.folder / "bakery"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    hub = terminal.folder / "hub"
    host = terminal.start(
        "host", folder, "--folder", hub, "--listen", "127.0.0.1", "--dashboard-port", "0", "--backup-every", "4",
        "--json", POTLUCK_NO_DASHBOARD="", **ONE_THREAD,
    )  # fmt: skip
    link = until_event(host, "ready")["link"]
    until_event(host, "pipeline conducting")

    def join(name: str, *options: str, program: tuple[str, ...] = POTLUCK) -> ManagedProcess:
        place = ("--identity-path", terminal.folder / f"{name}.key")
        return terminal.start(
            "join", link, "--json", "--yes", "--name", name, *options, *place, name=name, program=program, **ONE_THREAD
        )

    ada, bob, feeder = join("ada"), join("bob"), join("carl", "--feed")
    stages = [until_event(process, "stage") for process in (ada, bob)]
    assert all(event["why"] for event in stages)
    until_event(feeder, "feeding")
    until_steps(host, 12)
    shown = terminal.ask("pipeline", link)
    served = sorted(stage for peer in shown["peers"].values() for stage in peer["serves"])
    assert served == [0, 1]
    assert shown["stages"] == 2

    see_the_page(until_event(host, "dashboard")["url"])
    assert until_event(host, "pipeline evaluated")["evaluation_loss"] > 0

    os.kill(bob.pid, signal.SIGKILL)
    bob.wait(PATIENCE_SECONDS)
    until_event(host, "pipeline gone")
    before = len(steps(host))
    until_steps(host, before + 4)
    dora = join("dora")
    until_event(dora, "stage")
    until_steps(host, len(steps(host)) + 4)
    refuse_a_stage_that_is_not_there(terminal, link)
    mallory = join("mallory", program=LYING_SERVER)
    until_event(mallory, "stage")
    named = until_event(host, "pipeline excluded")
    assert "differs" in named["reason"]
    assert mallory.wait(PATIENCE_SECONDS) != 0, "it is told, and ends"
    assert "excluded from this pipeline" in mallory.output()
    until_steps(host, len(steps(host)) + 2)
    losses = [step["loss"] for step in steps(host)]
    numbers = [step["step"] for step in steps(host)]
    assert numbers == list(range(len(numbers))), "no step is lost, and none is taken twice"
    assert losses[-1] < losses[0] - 0.5

    for process in (ada, feeder, dora):
        os.kill(process.pid, signal.SIGINT)
    for process in (ada, feeder, dora):
        assert process.wait(PATIENCE_SECONDS) == 0, process.output()
    os.kill(host.pid, signal.SIGINT)
    assert host.wait(PATIENCE_SECONDS) == 0, host.output()
    look_at_the_whole_model(terminal, folder, hub)


def see_the_page(url: str) -> None:
    """Stages, servers and what flows between them, on a page that changes by itself."""
    with open_browser() as browser, Visit(browser, url) as visit:
        page = visit.see("/pipeline")
        page.wait_for_selector("a.nav-link.here:text-is('Pipeline')")
        page.wait_for_selector(".figure-value:text-is('2 stages')")
        # From the feeder to stage 0, and on to stage 1.
        page.wait_for_function("document.querySelectorAll('svg.flow path.flow-line').length >= 2")
        names = page.locator("svg.flow .flow-name").all_text_contents()
        assert {"ada", "bob", "carl"} <= set(names)  # the host holds stages that have one server
        step = page.locator(".figure.hero .figure-value")
        before = int(step.inner_text())
        poll_until_sync(lambda: int(step.inner_text()) > before or None, PATIENCE_SECONDS, "another step on the page")
        assert page.locator(".item", has_text="serves stage 0").count() == 1
        if PICTURES:
            page.screenshot(path=f"{PICTURES}/pipeline.png", full_page=True)
        assert visit.complaints == []


def refuse_a_stage_that_is_not_there(terminal: Terminal, link: str) -> None:
    key = terminal.folder / "eve.key"
    said = terminal.refuse("join", link, "--yes", "--stage", "7", "--identity-path", key, code=2, **ONE_THREAD)
    assert "there are stages 0 to 1" in said


def look_at_the_whole_model(terminal: Terminal, folder: Path, hub: Path) -> None:
    said = terminal.ask("pipeline", "generate", folder, "--folder", hub, **ONE_THREAD)
    assert said["step"] >= 4
    assert said["evaluation_loss"] > 0
    file = terminal.folder / "model.safetensors"
    terminal.run("pipeline", "export", folder, "--folder", hub, "--to", file)
    assert load_file(file)["bytes.weight"].shape == (256, 16)
