"""The rounds: how long each took and what for, who was slow, who was dropped and why, what was repaired or failed."""

from __future__ import annotations

from statistics import median

from nicegui import events, ui

from potluck.monitor import figures
from potluck.monitor.dashboard import charts
from potluck.monitor.dashboard.frame import Page
from potluck.monitor.dashboard.parts import Chart, Figure, Items, box, card, words
from potluck.training.books.history import FailureRecord, RoundRecord

DRAWN = 60
LISTED = 12
NAMED = 6  # members of a round that failed


class RoundsPage:
    """The newest rounds, and one of them in detail."""

    def __init__(self, page: Page) -> None:
        self._dashboard = page.dashboard
        self._chosen: int | None = None  # an epoch; None: the newest
        self._shown: object = None
        with box("grid five"):
            self._median = Figure("A round takes")
            self._share = Figure("Training, not exchanging")
            self._repaired = Figure("Repaired")
            self._dropped = Figure("Left out")
            self._failed = Figure("Given up")
        with card("Rounds", "in seconds; click one to see its members") as sheet:
            with sheet.default_slot.children[0]:
                self._with_training = ui.toggle(["Rounds alone", "With training"], value="Rounds alone")
                self._with_training.props("unelevated no-caps dense toggle-color=primary")
                self._with_training.on_value_change(self.refresh)
            self._chart = Chart({})
            self._chart.element.on_point_click(self._clicked)
        with box("grid two"):
            with card() as sheet:
                with box("card-head"):
                    self._title = words("", "card-title")
                    self._note = words("", "card-note")
                words("seconds until each had all averages", "card-note")
                self._members = Chart({}, "chart")
                self._detail = Items()
            self._sheet = sheet
            with card("What went wrong", f"in the newest {DRAWN} rounds, and in attempts at them"):
                self._trouble = Items("Nothing. Every round went as planned.")
        page.live(self.refresh)

    def refresh(self) -> None:
        """Show how it is now."""
        past = self._dashboard.follower.past
        rounds = past.rounds(DRAWN)
        failures = [record for record in past.failures() if not rounds or record.epoch >= rounds[0].epoch]
        with_training = self._with_training.value == "With training"
        version = (rounds[-1].epoch if rounds else 0, with_training, failures[-1].failed_at if failures else 0.0)
        if self._shown == (version, self._chosen):
            return
        self._shown = (version, self._chosen)
        options = self._dashboard.shared(
            f"rounds, with training: {with_training}",
            version,
            lambda: charts.round_phases(rounds, failures, with_training=with_training),
        )
        self._chart.show(options, version)
        self._show_figures(rounds)
        self._failed.show(str(len(failures)), "attempts, done again")
        chosen = [record for record in rounds if record.epoch == self._chosen] or rounds[-1:]
        if chosen:
            self._show_one(chosen[0])
        self._show_trouble(rounds, failures)

    def _clicked(self, event: events.EChartPointClickEventArguments) -> None:
        rounds = self._dashboard.follower.past.rounds(DRAWN)
        if 0 <= event.data_index < len(rounds) and event.series_type == "bar":
            self._chosen = rounds[event.data_index].epoch
            self.refresh()

    def _show_figures(self, rounds: list[RoundRecord]) -> None:
        if not rounds:
            return
        self._median.show(figures.duration(median(record.seconds for record in rounds)), "from plan to commit, median")
        newest = rounds[-1].epoch
        phases = self._dashboard.shared("phases", newest, lambda: [charts.phases_of(record) for record in rounds])
        total = sum(sum(phase) for phase in phases)
        share = sum(phase[0] for phase in phases) / total if total else 0.0
        self._share.show(f"{100 * share:.0f}%", f"of the time of {len(rounds)} rounds")
        repairs = sum(record.repairs for record in rounds)
        self._repaired.show(str(repairs), "plans that were revised")
        self._dropped.show(str(sum(len(record.left_out) for record in rounds)), "members, in all")

    def _show_one(self, record: RoundRecord) -> None:
        self._title.text = f"Epoch {record.epoch:,}"
        when = figures.clock(record.committed_at)
        self._note.text = f"{len(record.members)} members, {figures.duration(record.seconds)}, {when}"
        self._members.show(charts.member_seconds(record), record.epoch)
        height = 60 + 24 * max(1, min(len(record.members), 24))
        self._members.element.style(replace=f"height: {height}px")
        lines = [(f"{name} was left out", reason) for name, reason in record.left_out.items()]
        lines += [(f"{name} was slow", f"{seconds:.2f} s") for name, seconds in slow_members(record)]
        if record.went_back_to is not None:
            lines.append((f"The run went back to epoch {record.went_back_to:,}", "by an organiser's order"))
        if record.repairs:
            lines.append((f"The plan was revised {times(record.repairs)}", "only missing parts moved again"))
        if record.audited:
            chunks = "1 chunk was" if record.audited == 1 else f"{record.audited} chunks were"
            lines.append((f"{chunks} recomputed", "as every round among strangers is audited"))
        self._detail.show(lines or [("All went as planned", f"coordinated by {record.coordinator}")])

    def _show_trouble(self, rounds: list[RoundRecord], failures: list[FailureRecord]) -> None:
        failed = {record.epoch for record in failures}  # whose attempts are told one by one
        told = [
            (record.committed_at, f"Epoch {record.epoch:,}", what)
            for record in rounds
            if (what := trouble_of(record, with_attempts=record.epoch not in failed))
        ]
        told += [(record.failed_at, title_of_failure(record), failure_of(record)) for record in failures]
        told.sort(key=lambda entry: -entry[0])
        self._trouble.show([(title, what) for _, title, what in told[:LISTED]])


def trouble_of(record: RoundRecord, *, with_attempts: bool = True) -> str:
    """What did not go as planned, in a line; empty if nothing."""
    went_back = record.went_back_to
    what = [f"the run went back to epoch {went_back:,}, by an organiser's order"] if went_back is not None else []
    what += [f"{name}: {reason}" for name, reason in record.left_out.items()]
    what += [f"revised {times(record.repairs)}"] if record.repairs else []
    what += [f"{record.attempts} attempts"] if with_attempts and record.attempts > 1 else []
    return "; ".join(what)


def title_of_failure(record: FailureRecord) -> str:
    """Which attempt it was."""
    return f"Epoch {record.epoch:,}, attempt {record.attempt} was given up"


def failure_of(record: FailureRecord) -> str:
    """Why an attempt came to nothing: phase, reason, who was in it, and what members said of their own trouble."""
    when = f" after {figures.duration(record.seconds)}" if record.seconds else ""
    others = len(record.members) - NAMED
    names = ", ".join(record.members[:NAMED]) + (f" and {others} more" if others > 0 else "")
    among = f" · members: {names}" if names else ""
    said = [f"{name}: {trouble}" for name, trouble in record.troubles.items()]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    trouble = f" · trouble: {'; '.join(said[:NAMED])}{more}" if said else ""
    return f"{record.phase}{when}: {record.reason}{among}{trouble}"


def slow_members(record: RoundRecord) -> list[tuple[str, float]]:
    """Members that took much longer than most to have all averages, the slowest first."""
    seconds = [(member.name, member.seconds) for member in record.members if member.holds]
    typical = median(taken for _, taken in seconds) if seconds else 0.0
    slow = [(name, taken) for name, taken in seconds if taken > 1.5 * typical and taken > typical + 0.1]
    return sorted(slow, key=lambda pair: -pair[1])


def times(count: int) -> str:
    """Once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
