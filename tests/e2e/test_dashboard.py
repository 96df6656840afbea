"""The dashboard in a real browser, of a real run with real trainers.

With POTLUCK_SCREENSHOTS set to a folder, the pictures of the documentation are written there.
"""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from browser import Visit, open_browser
from commandline import PATIENCE_SECONDS, SLOW_POTLUCK, Terminal, events, until_event
from playwright.sync_api import Browser, Locator

from potluck.hub.joinlink import JoinLink
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.login import TRIES
from potluck.testing.faults import Faults
from potluck.testing.polling import poll_until_sync
from potluck.testing.processes import Children, ManagedProcess

pytestmark = [pytest.mark.xdist_group("dashboard"), pytest.mark.timeout(300)]

SCRIPT = "<script>alert('Mallory')</script>"
PICTURES = os.environ.get("POTLUCK_SCREENSHOTS", "")
PUBLIC_PAGES = ("/", "/rounds", "/peers", "/leaderboard", "/preview", "/name")


@dataclass
class Bakery:
    """A run that trains, with its dashboard."""

    terminal: Terminal
    host: ManagedProcess
    link: JoinLink
    url: str
    token: str
    trainers: dict[str, ManagedProcess]
    browser: Browser

    def join(
        self, name: str, link: JoinLink, *options: str, program: tuple[str, ...] = SLOW_POTLUCK, **environment: str
    ) -> ManagedProcess:
        key = self.terminal.folder / f"{re.sub(r'[^a-zA-Z]', '', name)}.nkey"
        who = ("--name", name, "--identity-path", key, "--batch-size", "8", "--json")
        environment = {"OMP_NUM_THREADS": "1", **environment}
        return self.terminal.start("join", str(link), *who, *options, name=key.stem, program=program, **environment)

    def visit(self, **options: object) -> Visit:
        return Visit(self.browser, self.url, **options)


@pytest.fixture(scope="module")
def bakery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bakery]:
    folder = tmp_path_factory.mktemp("bakery")
    with Children(log_folder=folder) as children, open_browser() as browser:
        terminal = Terminal(folder, children)
        terminal.run("init", folder / "bakery", "--recipe", "digits")
        toml = folder / "bakery" / "run.toml"
        toml.write_text(toml.read_text().replace("target_batch_size = 256", "target_batch_size = 400"))
        where = (
            "--folder",
            folder / "run",
            "--listen",
            "127.0.0.1",
            "--dashboard-port",
            "0",
            "--backup-every",
            "1",
            "--json",
        )
        host = terminal.start("host", folder / "bakery", *where, POTLUCK_NO_DASHBOARD="", OMP_NUM_THREADS="1")
        link = JoinLink.parse(until_event(host, "ready")["link"])
        made = Bakery(terminal, host, link, "", "", {}, browser)
        for name in ("Ada", "Ken" if PICTURES else SCRIPT):
            made.trainers[name] = made.join(name, link)
        shown = until_event(host, "dashboard")
        made.url, made.token = shown["url"], shown["token"]
        for process in made.trainers.values():
            until_event(process, "progress")
        yield made


@pytest.fixture(scope="module")
def elsewhere(bakery: Bakery) -> str:
    """The address of a dashboard that somebody started with the link alone."""
    started = bakery.terminal.start("dashboard", str(bakery.link), "--port", "0", "--json", name="elsewhere")
    return str(until_event(started, "dashboard")["url"])


def test_pages_load_without_a_complaint_and_show_names_as_text(bakery: Bakery) -> None:
    with bakery.visit() as visit:
        for path in PUBLIC_PAGES:
            visit.see(path)
        visit.see("/leaderboard").wait_for_selector(f".item-title:text-is({SCRIPT[:24]!r})")
        page = visit.see("/peers")
        page.wait_for_selector(f"td a:text-is({SCRIPT!r})".replace("'Mallory'", "\\'Mallory\\'"))
        assert page.locator("td script").count() == 0
        page.click("td a:text-is('Ada')")
        page.wait_for_selector(".page-title:text-is('Ada')")
        assert visit.complaints == []


def test_numbers_change_while_the_run_trains(bakery: Bakery) -> None:
    with bakery.visit() as visit:
        page = visit.see("/")
        epoch = page.locator(".figure.hero .figure-value")

        def number() -> int:
            return int(epoch.inner_text().replace(",", ""))

        before = number()
        poll_until_sync(lambda: number() >= before + 2 or None, PATIENCE_SECONDS, "another epoch on the page")
        assert float(page.locator(".figure-value").nth(1).inner_text()) > 0  # the loss
        assert visit.complaints == []
    assert _epoch(bakery) >= before + 2


def test_a_stranger_cannot_control(bakery: Bakery) -> None:
    with bakery.visit() as visit:
        for path in ("/members", "/control"):
            visit.page.goto(bakery.url + path)
            assert visit.page.url == f"{bakery.url}/login"
        assert visit.see("/").locator("a[href='/members']").count() == 0
        visit.page.goto(f"{bakery.url}/login#{'x' * 32}")
        visit.page.fill("input[name=name]", "Mallory")
        visit.page.click("button[type=submit]")
        visit.page.wait_for_selector("p.wrong:has-text('not the organiser')")
        assert visit.context.cookies() == []
    for path in ("/login", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"):
        foreign = urllib.request.Request(bakery.url + path, b"token=x", {"Origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(foreign, timeout=PATIENCE_SECONDS)
    headers, _ = _get(bakery.url + "/")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_wrong_tokens_are_limited_and_the_right_one_still_works(bakery: Bakery) -> None:
    def log_in(token: str, **headers: str) -> int:
        form = {"token": token, "name": "Olga"}
        return httpx.post(f"{bakery.url}/login", data=form, headers=headers, timeout=PATIENCE_SECONDS).status_code

    assert [log_in("x" * 32) for _ in range(TRIES + 1)][-1] == 429
    for number in range(TRIES):  # no header makes a guesser somebody else, nor a plain connection a private one
        forwarded = {"X-Forwarded-For": f"192.0.2.{number}", "X-Forwarded-Proto": "https"}
        assert log_in(bakery.token, **forwarded) == 403
    assert log_in("x" * 32) == 429
    assert log_in(bakery.token) == 303


def test_who_is_dropped_from_a_round_is_seen_at_once_and_why(bakery: Bakery) -> None:
    faults = Faults(bakery.terminal.folder / "fired.jsonl")
    faults.add("round.planned", action="kill", skip=2)
    with bakery.visit() as visit:
        page = visit.see("/rounds")
        eve = bakery.join("Eve", bakery.link, program=tuple(faults.argv("-m", "potluck.cli")), **faults.environment())
        fired = faults.wait_until_fired(deadline_seconds=PATIENCE_SECONDS)
        assert eve.wait(PATIENCE_SECONDS) == -signal.SIGKILL
        trouble = page.locator(".card", has_text="What went wrong")
        told = trouble.locator(".item", has_text=f"Epoch {int(fired.labels['epoch']):,}")
        told.filter(has_text=re.compile(r"Eve: .+; revised")).first.wait_for()  # on the open page
        left_out = page.locator(".figure", has_text="Left out").locator(".figure-value")
        assert int(left_out.inner_text()) >= 1
        assert visit.complaints == []


def test_an_organiser_lets_a_waiting_peer_in(bakery: Bakery) -> None:
    ben = bakery.join("Ben", replace(bakery.link, invite=""), "--message", "may I?", "--role", "observer")
    until_event(ben, "waiting")
    with bakery.visit() as visit:
        visit.log_in(bakery.token)
        [cookie] = visit.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        request = visit.page.locator(".request", has_text="Ben")
        assert "may I?" in request.inner_text()
        visit.page.wait_for_selector("a.nav-link:has-text('Members (1)')")  # on every page of an organiser
        request.get_by_text("Approve").click()
        visit.confirm()
        until_event(ben, "joined")
        visit.page.click("text=New invite")
        visit.page.click("text=Make it")
        link = visit.page.locator(".invite-link").inner_text()
        assert JoinLink.parse(link).run == "bakery"
        assert visit.page.locator("img").count() >= 1  # its QR code
        assert visit.complaints == []
    log = (bakery.terminal.folder / "run" / "organisers.log").read_text()
    assert re.search(r'"who":"Olga".*approve Ben', log)


def test_an_organiser_pauses_the_run_and_has_it_go_on(bakery: Bakery) -> None:
    ada = bakery.trainers["Ada"]
    with bakery.visit() as visit:
        visit.log_in(bakery.token)
        page = visit.see("/control")
        page.get_by_text("Pause", exact=True).click()
        visit.confirm()
        page.wait_for_selector(".pill:text-is('paused')")
        until_event(ada, "progress", paused=True)
        page.get_by_text("Resume", exact=True).click()
        visit.confirm()
        page.wait_for_selector(".pill:text-is('training')")
        paused_at = len(events(ada))
        poll_until_sync(
            lambda: any(e["event"] == "progress" and not e["paused"] for e in events(ada)[paused_at:]) or None,
            PATIENCE_SECONDS,
            "training again",
        )
        page.get_by_label("Learning rate").fill("0.002")
        page.get_by_text("Change", exact=True).click()
        visit.confirm()
        page.wait_for_selector(".item-title:has-text('optimizer.learning_rate = 0.002') >> nth=0")
        assert "Olga" in page.locator(".list").first.inner_text()
        assert visit.complaints == []


def test_an_organiser_has_the_run_go_back(bakery: Bakery) -> None:
    log = bakery.terminal.folder / "run" / "organisers.log"
    poll_until_sync(lambda: _has_backup(bakery) or None, PATIENCE_SECONDS, "a backup")
    with bakery.visit() as visit:
        visit.log_in(bakery.token)
        page = visit.see("/control")
        page.get_by_text("Pause", exact=True).click()  # so that no newer backup takes the place of the oldest
        visit.confirm()
        page.wait_for_selector(".pill:text-is('paused')")

        def ask() -> str:
            page.locator(".q-select").click()
            oldest = page.locator(".q-menu .q-item", has_text="epoch").last
            oldest.wait_for()
            found = re.search(r"epoch (\d+(?:,\d{3})*)", oldest.inner_text())
            assert found is not None
            oldest.click()
            page.get_by_role("button", name="Roll back").click()
            page.wait_for_selector(f".dialog .card-title:text-is('Go back to epoch {found.group(1)}?')")
            return found.group(1)

        ask()
        page.get_by_role("button", name="Cancel").click()
        page.wait_for_selector(".dialog", state="hidden")
        assert "back to epoch" not in log.read_text()
        epoch = ask()
        visit.confirm()
        told = f"back to epoch {epoch.replace(',', '')}"
        page.wait_for_selector(f".item-title:text-is('{told}') >> nth=0")
        assert "Olga" in page.locator(".item", has_text=told).first.inner_text()
        poll_until_sync(
            lambda: re.search(rf'"who":"Olga".*{told}.*"done"', log.read_text()), PATIENCE_SECONDS, "who did it"
        )
        page.get_by_text("Resume", exact=True).click()
        visit.confirm()
        visit.see("/rounds").wait_for_selector(f".item-note:has-text('the run went back to epoch {epoch}')")
        visit.page.wait_for_selector(".pill:text-is('training')")
        assert visit.complaints == []


def _has_backup(bakery: Bakery) -> bool:
    return any((bakery.terminal.folder / "run" / "states" / "backups").glob("epoch-*.json"))


def test_what_the_model_says_is_seen_from_any_machine(bakery: Bakery, elsewhere: str) -> None:
    with Visit(bakery.browser, elsewhere) as visit:
        page = visit.see("/preview")
        page.wait_for_selector(".preview:has-text('seen')")
        page.wait_for_selector(".card-note:has-text('at epoch')")
        assert visit.see("/").locator("a[href='/login']").count() == 0  # there are no organisers' pages here
        assert visit.complaints == []


def test_on_a_phone_one_sees_where_one_is(bakery: Bakery) -> None:
    with bakery.visit(viewport={"width": 390, "height": 844}) as visit:
        visit.log_in(bakery.token)
        for path in (*PUBLIC_PAGES, "/members", "/control"):
            here = visit.see(path).locator(".nav-link.here")
            poll_until_sync(lambda here=here: _is_in_sight(here) or None, PATIENCE_SECONDS, f"the tab of {path}")
            wide = visit.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, f"{path} is {wide} pixels wide"
        shown = [visit.page.evaluate(f"({charts.COMPACT})({value})") for value in ("12", "2e4", "5e17", "3e30")]
        assert shown == ["12", "20k", "500P", "3.00e+30"], "what an axis says of large values stays short"
        assert visit.complaints == []


def _is_in_sight(element: Locator) -> bool:
    box = element.bounding_box()
    return box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_everybody_who_helps_has_a_vote(bakery: Bakery) -> None:
    key = bakery.terminal.folder / "Ada.nkey"
    told = bakery.terminal.ask("vote", str(bakery.link), "Sourdough", "--identity-path", key)
    assert told["names"]["Sourdough"] == 1
    with bakery.visit() as visit:
        visit.see("/name").wait_for_selector(".bar-name:text-is('Sourdough')")


def _get(url: str) -> tuple[dict[str, str], str]:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        return {name.lower(): value for name, value in answer.headers.items()}, answer.read().decode()


@pytest.mark.skipif(not PICTURES, reason="pictures are written on request")
@pytest.mark.timeout(900)
def test_pictures(bakery: Bakery) -> None:
    folder = Path(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, options in (
        ("Grace", "16", ["--client-mode"]),
        ("Edsger", "4", []),
        ("Barbara", "12", ["--client-mode"]),
    ):
        place = {"KAGGLE_KERNEL_RUN_TYPE": "batch"} if name == "Grace" else {}
        bakery.trainers[name] = bakery.join(name, bakery.link, "--batch-size", size, *options, **place)
    alan = bakery.join("Alan", replace(bakery.link, invite=""), "--message", "I have a GPU that is bored at night")
    until_event(alan, "waiting")
    for name in ("Grace", "Edsger", "Barbara"):
        until_event(bakery.trainers[name], "progress")
    for name, wish in (("Grace", "Sourdough"), ("Edsger", "Brioche")):
        bakery.terminal.ask("vote", str(bakery.link), wish, "--identity-path", bakery.terminal.folder / f"{name}.nkey")
    wanted = _epoch(bakery) + 30
    poll_until_sync(lambda: _epoch(bakery) >= wanted or None, 400, "thirty more epochs")
    bakery.trainers["Barbara"].kill()
    wanted = _epoch(bakery) + 6
    poll_until_sync(lambda: _epoch(bakery) >= wanted or None, 400, "some more")
    for path, name, theme in (
        ("/", "overview", "light"),
        ("/", "overview-dark", "dark"),
        ("/rounds", "rounds", "dark"),
        ("/peers", "peers", "light"),
        ("/preview", "preview", "light"),
        ("/members", "members", "light"),
        ("/control", "control", "dark"),
    ):
        _take(bakery, path, folder / f"dashboard-{name}.png", color_scheme=theme)
    for path, name, theme in (("/", "phone", "light"), ("/members", "phone-members", "dark")):
        phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
        _take(bakery, path, folder / f"dashboard-{name}.png", color_scheme=theme, **phone)


def _take(bakery: Bakery, path: str, file: Path, **options: object) -> None:
    with bakery.visit(**options) as visit:
        if path in ("/members", "/control"):
            visit.log_in(bakery.token)
        page = visit.see(path)
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(3000)  # charts are drawn when their size is known
        whole = "device_scale_factor" not in options  # of phones, what one sees at once
        file.write_bytes(page.screenshot(full_page=whole))
        assert visit.complaints == []


def _epoch(bakery: Bakery) -> int:
    found = re.search(r'^potluck_epoch{run="bakery"} (\S+)', _get(f"{bakery.url}/metrics")[1], re.MULTILINE)
    return int(float(found.group(1))) if found is not None else 0


def test_a_host_without_a_dashboard_has_the_model_speak_all_the_same(bakery: Bakery, elsewhere: str) -> None:
    """The last test: the run goes on without the dashboard that the others look at."""
    bakery.host.interrupt()
    assert bakery.host.wait(PATIENCE_SECONDS) == 0, bakery.host.tail()
    folder = bakery.terminal.folder
    where = ("--folder", folder / "run", "--listen", "127.0.0.1", "--no-dashboard", "--backup-every", "1", "--json")
    bakery.host = bakery.terminal.start("host", folder / "bakery", *where, name="host-again", OMP_NUM_THREADS="1")
    until_event(bakery.host, "ready")
    before = max(each["epoch"] for each in events(bakery.trainers["Ada"]) if each["event"] == "progress")
    with Visit(bakery.browser, elsewhere) as visit:
        note = visit.see("/preview").locator(".card", has_text="What the model says").locator(".card-note")

        def spoken_at() -> int:
            found = re.search(r"at epoch ([\d,]+)", note.inner_text())
            return int(found.group(1).replace(",", "")) if found is not None else 0

        long_seconds = 2 * PATIENCE_SECONDS  # the host looks for backups every quarter of a minute
        poll_until_sync(lambda: spoken_at() > before or None, long_seconds, lambda: f"a preview: {spoken_at()}")
        assert "seen" in visit.page.locator(".preview").inner_text()
        assert visit.complaints == []
    assert not [each for each in events(bakery.host) if each["event"] == "dashboard"]
