"""A real browser for tests: Debian's chromium, by playwright, with nothing fetched from anywhere else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MILLISECONDS = 60_000


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium; the test is skipped, with the remedy, where there is none."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("there is no chromium: apt-get install chromium (scripts/test does so where it may)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One visitor's window, that notes whatever is not as it should be."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.context: BrowserContext = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.context.set_default_timeout(PATIENCE_MILLISECONDS)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._asked)
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def see(self, path: str) -> Page:
        """Go there, and wait until the page lives."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector(".pill:not(:empty)")
        return self.page

    def log_in(self, token: str, name: str = "Olga") -> None:
        """Become an organiser, by the address that the host prints."""
        self.page.goto(f"{self.url}/login#{token}")
        self.page.fill("input[name=name]", name)
        self.page.click("button[type=submit]")
        self.page.wait_for_selector(".pill:not(:empty)")

    def confirm(self) -> None:
        """Say yes to what is asked."""
        self.page.click(".q-dialog .button.main, .q-dialog .button.danger")

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc and not request.url.startswith("data:"):
            self.complaints.append(f"asks elsewhere: {request.url}")
