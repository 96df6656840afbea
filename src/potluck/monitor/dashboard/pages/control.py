"""Steering the run: pause, resume, what may change, roll back. For organisers only; all asks first and is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from nicegui import ui

from potluck.errors import PotluckError
from potluck.monitor import figures
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Items, box, button, card, confirm, words
from potluck.training.manifest.changes import Value, described, values_of
from potluck.training.manifest.manifest import Change, Settings, SyncSettings

if TYPE_CHECKING:
    from potluck.state.backupfile import BackupInfo

EVERY_SECONDS = 2.0
SHOWN = 60
DATA = "data."
SETTINGS = {
    "optimizer.learning_rate": "Learning rate",
    "optimizer.weight_decay": "Weight decay",
    "training.target_batch_size": "Samples that make an epoch",
    "end_epoch": "Done after epoch (0: never)",
    "schedule.kind": "Schedule: constant, linear or cosine",
    "schedule.warmup_epochs": "Epochs of warm-up",
    "schedule.total_epochs": "Epochs until the schedule ends",
    "schedule.final_share": "Share of the rate that is left then",
}


class ControlPage:
    """The helm."""

    def __init__(self, page: Page) -> None:
        self._page = page
        assert page.dashboard.organising is not None
        self._helm = page.dashboard.organising.helm
        self._folder = page.dashboard.organising.folder
        self._follower = page.dashboard.follower
        self._shown: object = None
        self._fields: dict[str, ui.input] = {}
        with box("grid two"):
            with box("stack"):
                with card("Training"):
                    self._state = words("", "quiet")
                    with box("buttons left"):
                        self._pause = button("Pause", self._pause_run, kind="danger")
                        self._resume = button("Resume", self._resume_run, kind="main")
                with card("Go back", "to the state of an earlier epoch, of which this machine has a backup"):
                    self._backups = ui.select({}, label="Epoch").props("outlined dense")
                    with box("buttons left"):
                        button("Roll back", self._roll_back, kind="danger")
            with card("What may change while the run trains", "it counts from two epochs later on, for all peers"):
                self._settings = box("fields")
                with box("buttons left"):
                    button("Change", self._change, kind="main")
        with card("What was done", "signed by the organisers, and told to everybody in the run"):
            self._changes = Items("Nothing yet.")
        with card("By way of this dashboard", "also what came to nothing"):
            self._log = Items("Nothing yet.")
        self._make_fields()
        ui.timer(EVERY_SECONDS, self.refresh, immediate=True)

    async def refresh(self) -> None:
        """Show how it is now, if this is still an organiser's page."""
        dashboard, organising = self._page.dashboard, self._page.dashboard.organising
        assert organising is not None
        if dashboard.visitor(self._page.session) is None:
            ui.navigate.to("/login")
            return
        settings = self._follower.settings
        is_paused = settings is not None and settings.paused
        self._state.text = (
            "Nothing is trained: the host was started without a run.toml." if settings is None
            else "Paused: all trainers wait, and keep what they have computed." if is_paused
            else f"Trainers train, at epoch {self._follower.view.epoch:,}."
        )  # fmt: skip
        self._pause.set_visibility(settings is not None and not is_paused)
        self._resume.set_visibility(is_paused)
        found = await asyncio.to_thread(self._find_backups)
        choices = {info.epoch: f"epoch {info.epoch:,}, saved {figures.clock(info.saved_at)}" for info in found}
        if choices != self._backups.options:
            self._backups.set_options(choices)
        if not self._fields:
            self._make_fields()
        manifest, done = self._follower.manifest, organising.log.recent()
        version = (manifest.revision if manifest is not None else 0, len(done), done[:1])
        if version != self._shown:
            self._shown = version
            self._show_log()

    def _make_fields(self) -> None:
        settings = self._follower.settings
        if settings is None:
            return
        known = changeable(settings)
        with self._settings:
            for name, value in known.items():
                label = SETTINGS.get(name) or f"Data: {name.removeprefix(DATA)}"
                self._fields[name] = ui.input(label, value=_as_text(value)).props("outlined dense")

    def _show_log(self) -> None:
        manifest, organising = self._follower.manifest, self._page.dashboard.organising
        assert organising is not None
        changes = manifest.history if manifest is not None else ()
        self._changes.show([(change.what, _circumstances(change)) for change in reversed(changes)])
        self._log.show(
            [
                (action.what, f"{action.who} ({action.address}) · {figures.clock(action.at)} · {action.outcome}")
                for action in organising.log.recent()[:SHOWN]
            ]
        )

    def _find_backups(self) -> list[BackupInfo]:
        from potluck.state.backups import Backups  # needs torch, which a dashboard elsewhere need not have

        return Backups(self._folder / "states" / "backups", run=self._page.dashboard.run).infos()

    # What can be done

    @property
    def _name(self) -> str:
        return self._page.visitor.name if self._page.visitor is not None else ""

    async def _do(self, what: str, work: Awaitable[object]) -> None:
        try:
            await self._page.dashboard.act(self._page.session, what, work)
        except PotluckError as error:
            ui.notify(str(error), type="negative")
        else:
            ui.notify("Done.", type="positive")
        await self.refresh()

    async def _pause_run(self) -> None:
        if await confirm("Pause the run?", "All trainers wait until you have them go on.", "Pause", dangerous=True):
            await self._do("pause", self._helm.pause(by=self._name))

    async def _resume_run(self) -> None:
        if await confirm("Resume the run?", "All trainers go on.", "Resume"):
            await self._do("resume", self._helm.resume(by=self._name))

    async def _change(self) -> None:
        settings = self._follower.settings
        if settings is None:
            return
        known = changeable(settings)
        told = {name: str(field.value or "").strip() for name, field in self._fields.items()}
        wanted: dict[str, Value] = {name: text for name, text in told.items() if text != _as_text(known[name])}
        if not wanted:
            ui.notify("Nothing has changed.")
            return
        text = "All peers follow, from the same epoch on."
        if await confirm(f"Change {described(wanted)}?", text, "Change"):
            await self._do(f"change {described(wanted)}", self._helm.change(wanted, by=self._name))

    async def _roll_back(self) -> None:
        chosen = next((info for info in self._find_backups() if info.epoch == self._backups.value), None)
        if chosen is None:
            gone = "That backup has made room for a newer one: pause the run, and choose again."
            ui.notify(gone if self._backups.value is not None else "Choose an epoch first.")
            return
        text = "What was learned since then is dropped by everybody. Epochs go on counting."
        if await confirm(f"Go back to epoch {chosen.epoch:,}?", text, "Roll back", dangerous=True):
            await self._do(f"back to epoch {chosen.epoch}", self._helm.roll_back(chosen, by=self._name))


def _circumstances(change: Change) -> str:
    reason = f" · {change.reason}" if change.reason else ""
    return f"{change.by} · {figures.clock(change.at)}, from epoch {change.from_epoch:,}{reason}"


def changeable(settings: Settings) -> dict[str, Value]:
    """What may change while a run trains, by name."""
    known = values_of(settings)
    values = {name: known[name] for name in SETTINGS if name in known}
    if not isinstance(settings.training, SyncSettings):
        values.pop("training.target_batch_size", None)
    return values | {name: value for name, value in known.items() if name.startswith(DATA)}


def _as_text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
