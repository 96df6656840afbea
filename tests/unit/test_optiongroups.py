"""Groups of options: one value for the function, many options for whoever types them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from potluck.cli.optiongroups import BackupOptions, KeeperBackupOptions, NetworkOptions, TrainOptions, grouped
from potluck.errors import ConfigurationError

Got = list[tuple[str, object, object, bool]]


@pytest.fixture
def got() -> Got:
    return []


@pytest.fixture
def app(got: Got) -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @grouped
    def serve(
        dish: Annotated[str, typer.Argument(help="What is on the table.")],
        *,
        network: NetworkOptions,
        backups: KeeperBackupOptions,
        hot: Annotated[bool, typer.Option(help="Not cold.")] = False,
    ) -> None:
        """Serve it."""
        got.append((dish, network, backups, hot))

    return made


def test_a_group_arrives_as_one_value(app: typer.Typer, got: Got) -> None:
    line = ["soup", "--client-mode", "--listen", "tcp://a:1", "--listen", "tcp://b:2", "--state-path", "x", "--hot"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    [(dish, network, backups, hot)] = got
    assert (dish, hot) == ("soup", True)
    assert network == NetworkOptions(client_mode=True, listen=["tcp://a:1", "tcp://b:2"])
    assert backups == KeeperBackupOptions(backup_every_step=10, state_path=Path("x"))


def test_help_shows_each_option_under_the_title_of_its_group(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    before, network, backups = (shown.index(word) for word in ("--hot", "Network", "Backups"))
    assert before < network < shown.index("--relay-only") < backups < shown.index("--backup-every-step")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NetworkOptions(bandwidth="a lot"), "--bandwidth"),
        (lambda: BackupOptions(backup_every_step=-1), "--backup-every-step"),
        (lambda: BackupOptions(state_path=Path("x")), "not how often to write one: add --backup-every-step"),
        (lambda: TrainOptions(max_memory="much"), "--max-memory"),
        (lambda: TrainOptions(schedule="at night"), "22:00-07:00"),
    ],
)
def test_what_cannot_be_is_said_at_once(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError, match=says):
        make()
