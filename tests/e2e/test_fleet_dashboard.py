"""A fleet's pages in a real browser: machines, jobs, their curves and logs, queues, the pooled value network.

With POTLUCK_SCREENSHOTS set to a folder, the picture of the documentation is written there.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
from browser import Visit, open_browser
from commandline import Terminal, until_event
from fleetkitchen import Kitchen, end_jobs, job
from playwright.sync_api import expect

from potluck.testing.processes import Children

pytestmark = [pytest.mark.xdist_group("dashboard"), pytest.mark.timeout(300)]
PICTURES = os.environ.get("POTLUCK_SCREENSHOTS", "")
PATIENCE_MILLISECONDS = 100_000


def see_queues(kitchen: Kitchen, visit: Visit) -> None:
    """Two queues of which one has a dead letter, and a value network that two laptops feed."""
    run = functools.partial(kitchen.terminal.run, "queue")
    run("add", "experience", "--when-full", "drop", "--tries", "1", "--lease-seconds", "1", *kitchen.place)
    run("add", "value", "--topic", *kitchen.place)
    for number in range(3):
        run("put", "experience", json.dumps({"number": number}), *kitchen.place)
    errors = {"error/anna/cartpole/mlp": 0.21, "error/bert/acrobot/gru": 0.84}
    heads = {name.removeprefix("error/"): {"num_fragments": 7} for name in errors}
    statistics = {**errors, "fragments/learnt": 14.0, "fragments/too_old": 1.0, "fragments/staleness": 15.0}
    for number in range(1 if PICTURES else 7, 8):  # a picture has curves that fall
        falling = {name: round(error * (2.2 - 1.2 * number / 7), 3) for name, error in errors.items()}
        version = {"number": number, "heads": heads, "statistics": {**statistics, **falling}}
        run("put", "value", json.dumps(version), *kitchen.place)
    page = visit.see("/queues")
    page.wait_for_selector(".item-title:text-is('experience')", timeout=PATIENCE_MILLISECONDS)
    page.wait_for_selector("text=3 of 100,000 items", timeout=PATIENCE_MILLISECONDS)
    page.wait_for_selector(".nav-link.here:text-is('Queues')")
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / "dashboard-queues.png", full_page=True)
    page = visit.see("/value")
    page.wait_for_selector(".item-title:text-is('bert/acrobot/gru')", timeout=PATIENCE_MILLISECONDS)
    page.wait_for_selector("text=7 fragments · loss 0.840", timeout=PATIENCE_MILLISECONDS)
    page.wait_for_selector("text=1.0 versions behind on average")
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / "dashboard-value.png", full_page=True)


def see_log(token: str, visit: Visit) -> None:
    """Only organisers see what a job writes, and they see it live."""
    visit.page.goto(f"{visit.url}/fleet/log/cartpole")
    assert visit.page.url.endswith("/login")
    visit.log_in(token)
    page = visit.see("/fleet")
    page.locator(".item", has=page.locator(".item-title:text-is('cartpole')")).get_by_text("log", exact=True).click()
    page.wait_for_selector("text=hello from cartpole with 1", timeout=PATIENCE_MILLISECONDS)
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / "dashboard-log.png", full_page=True)


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
            expect(figures).not_to_have_text(before, timeout=PATIENCE_MILLISECONDS)
            if PICTURES:
                page.wait_for_timeout(20_000)  # so that there is something to see of the curves
                page.screenshot(path=Path(PICTURES) / "dashboard-fleet.png", full_page=True)
            see_queues(kitchen, visit)
            see_log(until_event(kitchen.host, "dashboard")["token"], visit)
            assert visit.complaints == []
    finally:
        children.close()
        end_jobs(terminal.folder / "machines")
