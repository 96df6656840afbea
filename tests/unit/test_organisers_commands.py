"""What an organiser's commands answer, without a run: `potluck init`, `run set`, `members …`, `monitor`, `demo`."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from potluck.cli import console, members, run
from potluck.cli.demo import command, summary
from potluck.cli.demo.promises import Promise
from potluck.cli.demo.record import DemoRecord
from potluck.cli.folders import asking_host, hosted_run
from potluck.cli.main import app
from potluck.cli.monitor import Screen, picture
from potluck.errors import ConfigurationError, HubUnavailableError
from potluck.hub.access.member import AccessRequest, Ban, Member, Scopes
from potluck.hub.access.organise import MemberState
from potluck.monitor.alarms import Alarm
from potluck.monitor.view import Overview, PeerRow
from potluck.recipes.reference import RecipeRef
from potluck.run.hostrecord import HostRecord, write_record
from potluck.training.manifest.changes import full_name, with_values
from potluck.training.manifest.manifest import Manifest


class Helm:
    """Steers a run that is nowhere."""

    def __init__(self) -> None:
        self.shown = Manifest(run="bakery", recipe=RecipeRef(name="digits")).recorded(
            "paused", by="Grace", at=0.0, from_epoch=3
        )

    async def manifest(self) -> Manifest:
        return self.shown

    async def change(self, values: dict[str, Any], **_: Any) -> Manifest:
        named = {full_name(name, self.shown.newest): value for name, value in values.items()}
        amended = self.shown.amended(lambda settings: with_values(settings, named), from_epoch=9, epoch=7)
        if amended.newest.optimizer != self.shown.newest.optimizer:
            self.shown = amended.recorded("it", by="Ada", at=0.0, from_epoch=9)
        return self.shown


def test_a_change_is_told_with_its_epoch_and_none_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    helm = Helm()
    monkeypatch.setattr(run, "steer", lambda _run, _folder, work: asyncio.run(work(helm, Path())))

    def change(*options: str) -> str:
        return CliRunner().invoke(app, ["run", "set", "learning_rate=0.5", *options]).output

    assert change() == "From epoch 9 on: learning_rate=0.5.\n"
    assert change() == "Nothing has changed: learning_rate=0.5 already.\n"
    assert json.loads(change("--json")) == {"revision": 3, "paused": False, "from_epoch": None}
    helm = Helm()
    assert json.loads(change("--json"))["from_epoch"] == 9


def test_init_answers_in_json_and_writes_over_files_only_if_told(tmp_path: Path) -> None:
    folder = tmp_path / "bakery"
    told = json.loads(CliRunner().invoke(app, ["init", str(folder), "--json"]).output)
    assert told == {
        "run": "bakery",
        "folder": str(folder),
        "files": [str(folder / "run.toml"), str(folder / "recipe.py")],
    }
    (folder / "recipe.py").write_text("mine")
    assert isinstance(CliRunner().invoke(app, ["init", str(folder)]).exception, ConfigurationError)
    assert (folder / "recipe.py").read_text() == "mine"
    assert CliRunner().invoke(app, ["init", str(folder), "--force"]).exit_code == 0
    assert (folder / "recipe.py").read_text() != "mine"


def test_a_demo_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path / "file" / "demo")])
    assert isinstance(result.exception, ConfigurationError)
    assert "cannot be written" in str(result.exception)


@pytest.mark.parametrize("ok", [True, False])
def test_a_broken_promise_is_an_exit_code(ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def perform(*_: Any, **__: Any) -> Any:
        promise = Promise(promise="it trains", kept=ok, found="")
        return summary.DemoResult(
            record=DemoRecord(), promises=[promise], preview=None, plot=tmp_path / "plot.png", seconds=1.0
        )

    monkeypatch.setattr(command, "_perform", perform)
    monkeypatch.setattr(console, "run", asyncio.run)  # the fastest loop leaves a pipe in the process, for good
    monkeypatch.setattr(summary, "as_json", lambda outcome: {"ok": outcome.ok})
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path), "--json"])
    assert (result.exit_code, json.loads(result.output)) == (0 if ok else 1, {"ok": ok})


ADA = Member(peer="UADA", person="guest:ada", scopes=Scopes(), name="Ada")
LISTED: dict[str, Any] = {
    "list_requests": AccessRequest(peer="UADA", person="guest:ada", role="trainer", name="Ada"),
    "list_members": MemberState(member=ADA, state="alive", host="192.0.2.1"),
    "list_bans": Ban(target="UADA"),
}


class Desk:
    """An organiser of a run that is nowhere."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: Any) -> Any:
            return [LISTED[name]] if name in LISTED else 2

        return answer


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("revoke", "3fk2"), {"revoked": "3fk2"}),
        (("approve", "UAD"), {"approved": "UADA"}),
        (("approve", "ada"), {"approved": "UADA"}),
        (("deny", "UAD"), {"denied": "UADA"}),
        (("ban", "UAD"), {"banned": "UADA", "connections": 2}),
        (("ban", "Ada"), {"banned": "UADA", "connections": 2}),
        (("unban", "UAD"), {"unbanned": "UADA"}),
        (("unban", "Ada"), {"unbanned": "UADA"}),
        (("pardon", "UAD"), {"pardoned": "UADA"}),
    ],
)
def test_what_was_done_about_members_is_told_in_json_too(
    arguments: tuple[str, ...], told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_ask", lambda _run, _folder, work: asyncio.run(work(Desk(), None)))
    assert json.loads(CliRunner().invoke(app, ["members", *arguments, "--json"]).output) == told
    [who] = [value for value in told.values() if isinstance(value, str)]
    assert who in CliRunner().invoke(app, ["members", *arguments]).output


@pytest.mark.parametrize(
    ("arguments", "listing"),
    [
        (("approve", "UXY"), "potluck members requests"),
        (("deny", "UXY"), "potluck members requests"),
        (("ban", "UXY"), "potluck members list"),
        (("unban", "UXY"), "potluck members bans"),
        (("pardon", "UXY"), "potluck members list"),
    ],
)
def test_whoever_names_nobody_is_told_where_names_are_listed(
    arguments: tuple[str, ...], listing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_ask", lambda _run, _folder, work: asyncio.run(work(Desk(), None)))
    refused = CliRunner().invoke(app, ["members", *arguments]).exception
    assert isinstance(refused, ConfigurationError)
    assert f"no peer listed is called 'UXY' or has an id that starts so: the list ({listing})" in str(refused)


@pytest.mark.parametrize("width", [20, 48, 70, 80, 98, 124])
def test_the_monitor_leaves_columns_out_rather_than_cut_them_short(width: int) -> None:
    row = PeerRow("UADA", "Ada", "observer", "kaggle", "suspect", "client", 12345, 40960, 8192.0, 2.5, 2e8, 3e8)
    overview = Overview("bakery", 7, 40, 0, 8.0, 2.5, 12.0, None, 1, 2, 3_000_000, "host")
    paper = Console(width=width, color_system=None)
    with paper.capture() as captured:
        paper.print(picture(overview, [row], width=width))
    shown = captured.get()
    assert "Ada" in shown
    assert "…" not in shown or width == 20
    assert ("MB/s" in shown) == (width >= 124)
    assert ("observer" in shown) == (width >= 70)


def test_without_a_terminal_the_monitor_says_what_is_new_line_by_line() -> None:
    paper = Console(width=80, color_system=None, file=io.StringIO(), force_terminal=False)
    with Screen(paper, is_live=True) as screen:
        for text, news in (("first", 1), ("again", 1), ("second", 2)):
            screen.show(text, news)
            if text == "first":
                assert paper.file.getvalue() == "first\n"  # type: ignore[attr-defined]
    assert paper.file.getvalue() == "first\nsecond\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "filled"), [(100, "samples 40 of 100   "), (0, "samples 40   ")])
def test_the_monitor_shows_a_line_of_figures_and_a_row_for_each_peer(target: int, filled: str) -> None:
    row = PeerRow("UADA", "Ada", "trainer", "kaggle", "alive", "client", 7, 40, 8.0, 2.5, 1e6, None)
    due_in_seconds = 7.5 if target else None
    overview = Overview("bakery", 7, 40, target, 8.0, 2.5, 12.0, due_in_seconds, 1, 2, 3_000_000, "host")
    alarm = Alarm("standstill", "no epoch for 99 s", 0.0)
    paper = Console(width=300, color_system=None)
    with paper.capture() as captured:
        paper.print(picture(overview, [row], [alarm], pause="paused by Grace (to look at it)"))
    head, *table = captured.get().splitlines()
    assert head.startswith("bakery   paused by Grace (to look at it)   epoch 7   loss 2.5000")
    assert filled in head
    assert f"next epoch in {'7.5 s' if target else '-'}   an epoch takes 12.0 s   traffic per epoch 3.0 MB" in head
    [shown] = [line for line in table if "Ada" in line]
    cells = [cell.strip() for cell in shown.strip("│").split("│")]
    assert cells == ["Ada", "trainer", "kaggle", "client", "7", "40", "8.0", "2.5000", "1.0 MB/s", "-", "alive"]
    assert table[-1].strip() == "! no epoch for 99 s"


def test_the_monitor_tells_two_of_the_same_name_apart() -> None:
    rows = [
        PeerRow(peer, "Ada", "trainer", "local", "alive", "full", 7, 4, 8.0, 2.5, None, None) for peer in ("U1", "U2")
    ]
    overview = Overview("bakery", 7, 40, 0, 8.0, 2.5, 12.0, None, 2, 2, 0, "host")
    paper = Console(width=300, color_system=None)
    with paper.capture() as captured:
        paper.print(picture(overview, rows, []))
    assert "Ada (U1)" in captured.get()
    assert "Ada (U2)" in captured.get()


def test_a_run_that_is_not_here_is_told_with_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bakery = tmp_path / "potluck" / "runs" / "bakery"
    bakery.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="my-first-run: start one"):
        hosted_run("", None)
    write_record(bakery, HostRecord(run="bakery", servers=(), ca_pem="", link=""))
    with pytest.raises(ConfigurationError, match="This machine hosts bakery: name it with --run"):
        hosted_run("brewery", None)
    assert hosted_run("", None)[1].run == "bakery", "the only one"
    dairy = bakery.with_name("dairy")
    dairy.mkdir()
    write_record(dairy, HostRecord(run="dairy", servers=(), ca_pem="", link=""))
    with pytest.raises(ConfigurationError, match="This machine hosts bakery, dairy: name it with --run"):
        hosted_run("", None)


def test_a_host_that_does_not_run_is_told_with_how_to_start_it() -> None:
    with pytest.raises(HubUnavailableError, match="start it with `potluck host`"), asking_host("bakery"):
        raise HubUnavailableError("nothing answers")
