"""What a job writes, live: for organisers alone, straight from its machine."""

from __future__ import annotations

from nicegui import background_tasks, ui

from potluck.errors import PotluckError
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import box, card, words
from potluck.plaintext import clean_lines

NUM_LINES = 200
MAX_LINES = 2000


class JobLogPage:
    """The end of a job's log, and what is added to it while the page is open."""

    def __init__(self, page: Page, job: str) -> None:
        self._dashboard = page.dashboard
        self._job = job
        with card(f"Log of {job}"):
            self._state = words("asking its machine …", "item-note")
            self._log = ui.log(max_lines=MAX_LINES).classes("log")
        with box("buttons"):
            ui.link("Back to the fleet", "/fleet").classes("nav-link")
        reading = background_tasks.create(self._read(), name=f"log of {job}")
        ui.context.client.on_disconnect(reading.cancel)

    async def _read(self) -> None:
        rest = ""
        try:
            async for data in self._dashboard.read_log(self._job, NUM_LINES):
                self._state.text = "live"
                *lines, rest = (rest + data.decode(errors="replace")).split("\n")
                for line in lines:
                    self._log.push(clean_lines(line))
        except PotluckError as error:
            self._state.text = str(error)
