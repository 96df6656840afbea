"""What is told at the end of a demo: figures, promises, the model's own text, a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from potluck.cli import console
from potluck.cli.demo.promises import Promise, check
from potluck.cli.demo.record import DemoRecord, samples_per_second
from potluck.monitor.lossplot import Mark, plot_loss

if TYPE_CHECKING:
    from potluck.training.trainer.resultpreview import ResultPreview

PLOT_FILE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All that a demo came to."""

    record: DemoRecord
    promises: list[Promise]
    preview: ResultPreview | None
    plot: Path
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return all(promise.kept for promise in self.promises)


def conclude(record: DemoRecord, preview: ResultPreview | None, folder: Path, seconds: float) -> DemoResult:
    """Judge, and draw the plot."""
    path = folder / PLOT_FILE
    path.write_bytes(_plot(record))
    return DemoResult(record=record, promises=check(record), preview=preview, plot=path, seconds=seconds)


def as_json(outcome: DemoResult) -> dict[str, Any]:
    """For a program."""
    record, preview = outcome.record, outcome.preview
    alone, together = samples_per_second(record.alone()), samples_per_second(record.together())
    return {
        "ok": outcome.ok,
        "broken": [promise.promise for promise in outcome.promises if not promise.kept],
        "promises": [asdict(promise) for promise in outcome.promises],
        "seconds": outcome.seconds,
        "loss_before": record.loss_before,
        "loss_after": record.loss_after,
        "samples_per_second_alone": alone,
        "samples_per_second_together": together,
        "ratio": together / alone if alone and together else None,
        "epochs": record.epoch,
        "rounds": len(record.commits),
        "sent_bytes": record.sent_bytes,
        "incidents": [
            {"kind": i.kind, "who": i.who, "recovery_seconds": i.recovery_seconds(record.commits)}
            for i in record.incidents
        ],
        "checkpoint": str(preview.checkpoint) if preview is not None else None,
        "checkpoint_epoch": record.checkpoint_epoch,
        "text": preview.text if preview is not None else "",
        "plot": str(outcome.plot),
    }


def show(outcome: DemoResult) -> None:
    """For a person."""
    found = as_json(outcome)
    for name, value in _rows(found):
        console.out.print(Text.assemble((f"{name:>14}  ", "dim"), value), soft_wrap=True)
    if outcome.preview is not None:
        console.out.print(Text("\nPython, as the model writes it now:", "dim"))
        console.out.print(Text(_printable(outcome.preview.text), "cyan"), soft_wrap=True)
    show_promises(outcome.promises)
    console.out.print("Now your own run: [bold]potluck init my-run[/bold]", highlight=False)


def show_promises(promises: list[Promise]) -> None:
    """Each with a mark, and the verdict."""
    table = Table(show_header=False, box=None)
    for promise in promises:
        mark = Text("✓", "green") if promise.kept else Text("✗", "bold red")
        table.add_row(mark, Text(promise.promise), Text(promise.found, "dim"))
    console.out.print()
    console.out.print(table)
    broken = "; ".join(promise.promise for promise in promises if not promise.kept)
    if broken:
        console.out.print(Text(f"\nBroken: {broken}", "bold red"), soft_wrap=True)
    else:
        console.out.print("\n[green]All promises were kept.[/green]", highlight=False)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("loss", f"{_number(found['loss_before'], '.3f')} → {_number(found['loss_after'], '.3f')}"),
        (
            "samples/s",
            f"{_number(found['samples_per_second_together'], '.0f')} together, "
            f"{_number(found['samples_per_second_alone'], '.0f')} one peer alone "
            f"({_number(found['ratio'], '.1f')} times as fast, on the same machine)",
        ),
        ("rounds", f"{found['rounds']} committed, up to epoch {found['epochs']}"),
        ("sent in rounds", f"{found['sent_bytes'] / 1e6:.1f} MB by all peers"),
        *(
            (incident["kind"], f"{incident['who']}: {_number(incident['recovery_seconds'], '.1f')} s")
            for incident in found["incidents"]
        ),
        ("checkpoint", f"{found['checkpoint']} (epoch {found['checkpoint_epoch']})"),
        ("plot", found["plot"]),
        ("took", f"{found['seconds']:.0f} s"),
    ]


def _plot(record: DemoRecord) -> bytes:
    points = [(seen.at_seconds, seen.loss) for seen in record.losses]
    marks = [
        Mark(i.at_seconds, f"{i.who} joins" if i.kind == "newcomer" else f"{i.who} killed") for i in record.incidents
    ]
    return plot_loss(points, marks, title="training loss, all peers together", x_label="seconds")


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
