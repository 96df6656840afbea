"""A fleet's page in a real browser: machines, jobs, their curves.

With POTLUCK_SCREENSHOTS set to a folder, the picture of the documentation is written there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser import Visit, open_browser
from commandline import Terminal, until_event
from fleetkitchen import Kitchen, end_jobs, job

from potluck.testing.processes import Children

pytestmark = [pytest.mark.xdist_group("dashboard"), pytest.mark.timeout(300)]
PICTURES = os.environ.get("POTLUCK_SCREENSHOTS", "")
PATIENCE_MILLISECONDS = 100_000


def test_machines_and_jobs_are_shown_live(terminal: Terminal, children: Children) -> None:
    try:
        kitchen = Kitchen(terminal, "--dashboard-port", "0", POTLUCK_NO_DASHBOARD="")
        for name in ("annas-laptop", "berts-desktop"):
            until_event(kitchen.agent(name), "connected")
        short = "[jobs.missing]\ncommand = 'no-such-program'\nmachine = 'berts-desktop'\nrestart = 'never'\n"
        kitchen.up(job("cartpole", "annas-laptop") + job("acrobot", "berts-desktop") + short)
        kitchen.until_started("annas-laptop", "cartpole")
        url = until_event(kitchen.host, "dashboard")["url"]
        with open_browser() as browser, Visit(browser, url) as visit:
            page = visit.see("/fleet")
            for title in ("annas-laptop", "berts-desktop", "cartpole", "acrobot", "missing"):
                page.wait_for_selector(f".item-title:text-is('{title}')", timeout=PATIENCE_MILLISECONDS)
            page.wait_for_selector("text=there is no program no-such-program", timeout=PATIENCE_MILLISECONDS)
            page.wait_for_selector(".card-title:text-is('reward')", timeout=PATIENCE_MILLISECONDS)
            page.wait_for_selector(".nav-link.here:text-is('Fleet')")
            figures = page.locator(".item", has=page.locator(".item-title:text-is('cartpole')")).locator(".bar-figure")
            before = figures.inner_text()
            page.wait_for_function(
                "([before]) => ![...document.querySelectorAll('.bar-figure')].some(e => e.innerText === before)",
                arg=[before],
                timeout=PATIENCE_MILLISECONDS,
            )
            assert visit.complaints == []
            if PICTURES:
                page.wait_for_timeout(20_000)  # so that there is something to see of the curves
                page.screenshot(path=Path(PICTURES) / "dashboard-fleet.png", full_page=True)
    finally:
        children.close()
        end_jobs(terminal.folder / "machines")
