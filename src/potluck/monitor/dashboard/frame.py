"""What every page has around it: the head with the run's name and state, the way to the other pages, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nicegui import ui
from starlette.requests import Request

from potluck.errors import PotluckError
from potluck.monitor.dashboard.login import Visitor
from potluck.monitor.dashboard.parts import box, words

if TYPE_CHECKING:
    from potluck.monitor.dashboard.state import Dashboard

COOKIE = "potluck-organiser"
THEME_COOKIE = "potluck-theme"
EVERY_SECONDS = 1.0
WAITING_EVERY_SECONDS = 5.0
PAGES = (
    ("/", "Overview"),
    ("/rounds", "Rounds"),
    ("/peers", "Peers"),
    ("/leaderboard", "Leaderboard"),
    ("/preview", "Preview"),
    ("/name", "Name it"),
)
FLEET_PAGES = (("/fleet", "Fleet"), ("/queues", "Queues"), ("/value", "Value network"))
PATHS_PAGES = (("/paths", "Paths"),)  # where the model has paths
PIPELINE_PAGES = (("/pipeline", "Pipeline"),)  # where the model is cut into stages
ORGANISER_PAGES = (("/members", "Members"), ("/control", "Control"))
TOGGLE_THEME = f"""() => {{
    const dark = !document.body.classList.contains('body--dark');
    Quasar.Dark.set(dark);
    document.cookie = '{THEME_COOKIE}=' + (dark ? 'dark' : 'light') + ';path=/;max-age=31536000;samesite=lax';
}}"""


# Where the way to the other pages is wider than a phone, the page one is on has to be in sight.
SHOW_WHERE = """
    const here = document.querySelector('.nav-link.here');
    if (here) here.parentElement.scrollLeft = here.offsetLeft - (here.parentElement.clientWidth - here.clientWidth) / 2;
"""


@dataclass(slots=True)
class Page:
    """One open page."""

    dashboard: Dashboard
    visitor: Visitor | None
    session: str | None  # the organiser's, if it is one

    def live(self, refresh: Callable[[], None], every_seconds: float = EVERY_SECONDS) -> None:
        """Call `refresh` now, and again and again while the page is open."""
        refresh()
        ui.timer(every_seconds, refresh, immediate=False)


def _count_waiting(dashboard: Dashboard, link: ui.link) -> None:
    """Have an organiser see on every page that somebody waits to be let in."""

    async def count() -> None:
        with suppress(PotluckError):  # the hub is away, which the head of the page says
            waiting = await dashboard.num_waiting()
            link.text = f"Members ({waiting})" if waiting else "Members"

    ui.timer(WAITING_EVERY_SECONDS, count, immediate=True)


@contextmanager
def frame(dashboard: Dashboard, request: Request, here: str, title: str) -> Iterator[Page]:
    """The page around what the caller puts in it. Where only organisers may look, the server has seen to that."""
    session = request.cookies.get(COOKIE)
    visitor = dashboard.visitor(session)
    ui.page_title(f"{title} · {dashboard.run}")
    ui.colors(primary="#d9480f", dark="#221f1c", positive="#2f8a51", negative="#c92a2a", warning="#b8860b")
    ui.dark_mode({"dark": True, "light": False}.get(request.cookies.get(THEME_COOKIE, "")))
    with box("top", "header"):
        with box("top-row"):
            with ui.link(target="/").classes("brand"):
                box("brand-mark")
                words(dashboard.run, "brand-name")
            pill = words("", "pill")
            box("spacer")
            if dashboard.organising is not None:
                if visitor is not None:
                    with box("", "form").props("method=post action=/logout"), box("icon-link", "button") as leave:
                        leave.props("type=submit").tooltip(f"{visitor.name}: log out")
                        ui.icon("logout")
                else:
                    with ui.link(target="/login").classes("icon-link").tooltip("For organisers"):
                        ui.icon("key")
            with box("icon-link", "button").tooltip("Light or dark") as theme:
                ui.icon("contrast")
            theme.props('type=button aria-label="light or dark"').on("click", js_handler=TOGGLE_THEME)
        with box("nav", "nav"):
            fleet = FLEET_PAGES if dashboard.has_fleet or here in dict(FLEET_PAGES) else ()
            manifest = dashboard.follower.manifest
            paths = PATHS_PAGES if manifest is not None and manifest.paths is not None else ()
            staged = PIPELINE_PAGES if manifest is not None and manifest.pipeline is not None else ()
            for target, name in (*PAGES, *paths, *staged, *fleet, *(ORGANISER_PAGES if visitor is not None else ())):
                link = ui.link(name, target).classes("nav-link here" if target == here else "nav-link")
                if target == "/members":
                    _count_waiting(dashboard, link)
    ui.run_javascript(SHOW_WHERE)
    page = Page(dashboard, visitor, session)

    def refresh() -> None:
        word, tone = dashboard.status()
        pill.text = word
        pill.classes(replace=f"pill {tone}")

    with box("page", "main"):
        yield page
    page.live(refresh)
