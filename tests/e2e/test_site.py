"""The documentation site as a reader has it: built by its script, opened from disk in a browser, without a network.

POTLUCK_SCREENSHOTS=FOLDER scripts/test tests/e2e/test_site.py    # keeps pictures of it
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import PATIENCE_MILLISECONDS, open_browser
from playwright.sync_api import Browser, Page

from potluck.testing.polling import poll_until_sync

ROOT = Path(__file__).resolve().parents[2]
PICTURES = os.environ.get("POTLUCK_SCREENSHOTS")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, away from the tree that it was built from."""
    built = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return shutil.copytree(ROOT / "build" / "site", tmp_path_factory.mktemp("site") / "pages")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def open_page(browser: Browser, path: Path, asked: list[str], **options: object) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE_MILLISECONDS)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    return page


def keep(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def search(page: Page, words: str) -> None:
    """Open the search, as soon as the page's script listens to keys, and type."""
    box = page.get_by_placeholder("Search")

    def opened() -> bool:
        page.keyboard.press("Control+k")
        page.wait_for_timeout(1000)
        return box.count() > 0 and box.last.is_visible()

    poll_until_sync(opened, 100, "the search to open", every_seconds=0.1)
    box.last.fill(words)


@pytest.mark.timeout(300)
def test_a_reader_opens_the_site_from_disk_searches_it_and_loads_nothing_from_elsewhere(
    site: Path, browser: Browser
) -> None:
    asked: list[str] = []
    page = open_page(browser, site / "index.html", asked, viewport={"width": 1280, "height": 900})
    assert "Potluck" in page.title()
    page.get_by_role("link", name="Take part from a notebook").click()
    page.wait_for_url("**/volunteers.html")
    keep(page, "site-volunteers")
    page.goto((site / "index.html").as_uri())
    keep(page, "site-home")
    search(page, "dial-back")
    page.get_by_text("who can be dialled").first.wait_for()
    keep(page, "site-search")
    elsewhere = [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not elsewhere
    page.context.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_by_day_and_by_night(site: Path, browser: Browser, scheme: str) -> None:
    colours = set()
    for name in ("index", "organisers", "api", "training", "tutorials/nat"):
        page = open_page(
            browser, site / f"{name}.html", [], viewport={"width": 390, "height": 844}, color_scheme=scheme
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        keep(page, f"site-phone-{scheme}-{name.replace('/', '-')}")
        page.context.close()
    [colour] = colours
    brightness = sum(float(part) for part in colour[colour.index("(") + 1 :].rstrip(")").split(",")[:3])
    assert (brightness > 384) == (scheme == "light"), colour


def test_the_reference_names_what_the_package_has(site: Path) -> None:
    import potluck

    shown = (site / "api.html").read_text()
    for name in set(potluck.__all__) - {"__version__"}:
        assert f'id="potluck.{name}"' in shown, name
