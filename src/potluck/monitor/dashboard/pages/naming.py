"""Name the model: what has been proposed, and by how many it is wanted."""

from __future__ import annotations

from nicegui import ui

from potluck.errors import PotluckError
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Bars, box, button, card, words
from potluck.training.books.ballot import LONGEST_MODEL_NAME, send_vote

EVERY_SECONDS = 1.0


class NamingPage:
    """The ballot; on a volunteer's own dashboard also the vote."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        with card("What shall the model be called?") as sheet:
            with sheet.default_slot.children[0]:
                self._note = words("", "card-note")
            self._bars = Bars("No name has been proposed yet.")
        with card("Your vote"):
            if page.dashboard.voter is not None:
                words(
                    "Propose a name, or vote for one of the others. You have one vote; the last one counts.",
                    "quiet",
                )
                with box("fields").style("margin-top: 12px"):
                    self._name = ui.input("Name").props(f"outlined dense maxlength={LONGEST_MODEL_NAME}")
                    with box("buttons").style("margin-top: 0; justify-content: flex-start"):
                        button("Vote", self._vote, kind="main")
            else:
                words("Everybody who takes part in the run has one vote. On the machine where your peer runs:", "quiet")
                words("potluck vote 'potluck://…' 'Sourdough'", "linkbox mono")
                words("or start the dashboard there, by the run's link, and vote on this page.", "quiet")
        page.live(self.refresh, EVERY_SECONDS)

    def refresh(self) -> None:
        """Show how it is now."""
        counted = self._dashboard.follower.ballot.counted()
        most = counted[0][1] if counted else 1
        votes = sum(count for _, count in counted)
        self._note.text = f"{votes} {'vote' if votes == 1 else 'votes'}" if votes else ""
        self._bars.show([(name, count / most, str(count)) for name, count in counted[:50]])

    async def _vote(self) -> None:
        assert self._dashboard.voter is not None
        try:
            await send_vote(self._dashboard.follower.session, str(self._name.value or ""), self._dashboard.voter)
        except PotluckError as error:
            ui.notify(str(error), type="negative")
        else:
            ui.notify("Your vote is on its way; it counts while your peer is in the run.", type="positive")
