"""What `potluck join` does in a pipeline: serves the stage that the run needs most, or feeds data."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck.cli.optiongroups import TrainOptions
    from potluck.pipeline.messages import Assignment, Begin
    from potluck.run.peer import Peer
    from potluck.training.manifest.manifest import Manifest
    from potluck.training.manifest.noticeboard import NoticeBoard

LEAVE_SECONDS = 2.5


async def take_stage(
    peer: Peer,
    board: NoticeBoard,
    first: Manifest,
    options: TrainOptions,
    stop: asyncio.Event,
    as_json: bool,
    *,
    only_listens: bool = False,
) -> None:
    """Serve, or feed, until `stop`, the end of the run, or of our membership; then hand over, and leave.

    `only_listens`: hold the stages that have one server, as an aux peer does.
    """
    from potluck.cli import console
    from potluck.cli.joining import until_ended
    from potluck.optim.cores import share_cores
    from potluck.pipeline.member import Part
    from potluck.recipes.catalogue import open_recipe
    from potluck.training.staged.hosting import has_data, newest_of
    from potluck.training.staged.part import PipelinePart, Role
    from potluck.training.trainer.machine import find_devices

    share_cores(options.threads)
    recipe = open_recipe(first.recipe, first.model, options.recipe, first.files)
    stages = (options.stage,) if options.stage is not None else ()
    role = Role(
        part=Part(
            serves=not options.feed and not only_listens,
            stages=stages,
            feeds=options.feed,
            listens=options.feed or only_listens,
            room_bytes=options.max_memory_bytes or 0,
        ),
        has_data=not only_listens and has_data(recipe),
        device=find_devices(options.device)[0],
    )
    part = PipelinePart(peer, newest_of(board, first), recipe, role, lambda event, about: tell(event, about, as_json))
    teller = _Teller(part.blueprint.num_blocks, as_json)
    part.member.on_assigned = teller.assigned
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    part.member.on_refused = lambda error: _refuse(refused, error)
    part.member.on_step = teller.step
    await part.start()
    teller.began("feeding" if options.feed else "listening" if only_listens else "enlisted")
    try:
        await console.unless_stopped(_either(until_ended(peer), refused), stop)
        if stop.is_set():
            seconds = options.notice if options.notice is not None else LEAVE_SECONDS
            teller.leaving(seconds)
            teller.left(await part.member.leave(seconds))
    finally:
        if refused.done():
            refused.exception()  # heard of, also where the session ended first
        await part.close()


def _refuse(refused: asyncio.Future[None], error: PotluckError) -> None:
    if not refused.done():
        refused.set_exception(error)


async def _either(ended: Coroutine[Any, Any, None], refused: asyncio.Future[None]) -> None:
    """Wait for the end of the session, or for the conductor's refusal, and raise why."""
    ending = asyncio.ensure_future(ended)
    try:
        await asyncio.wait((ending, refused), return_when=asyncio.FIRST_COMPLETED)
        (refused if refused.done() else ending).result()
    finally:
        ending.cancel()


class _Teller:
    """For people and programs."""

    def __init__(self, num_blocks: int, as_json: bool) -> None:
        self._num_blocks = num_blocks
        self._as_json = as_json

    def _say(self, text: str, **about: Any) -> None:
        from potluck.cli import console

        if self._as_json:
            console.print_json(about)
        else:
            console.out.print(text, markup=False, highlight=False)

    def began(self, event: str) -> None:
        what = {
            "feeding": "Feeding data into the pipeline.",
            "listening": "This run is a pipeline: holding the stages that have one server.",
            "enlisted": "Waiting for a stage to serve.",
        }[event]
        self._say(f"{what} Ctrl-C hands over, and leaves.", event=event)

    def assigned(self, assignment: Assignment) -> None:
        num_stages, blocks = len(assignment.starts), assignment.blocks
        figures = {"stages": list(assignment.stages), "of": num_stages, "blocks": list(blocks), "why": assignment.why}
        if not assignment.stages:
            held = f"Holding {len(blocks)} blocks for others." if blocks else "Nothing to hold now."
            self._say(held, event="listening", **figures)
            return
        stages = " and ".join(map(str, assignment.stages))
        self._say(
            f"Serving stage {stages} of {num_stages} (blocks {min(blocks)} to {max(blocks)} of {self._num_blocks}): "
            f"{assignment.why}.",
            event="stage",
            **figures,
        )

    def step(self, begin: Begin) -> None:
        if begin.step:
            self._say(f"step {begin.step}: loss {begin.loss:.4f}", event="progress", epoch=begin.step, loss=begin.loss)

    def leaving(self, seconds: float) -> None:
        self._say(f"Handing over, for {seconds:g} s at most.", event="handing over", seconds=seconds)

    def left(self, handed_over: bool) -> None:
        text = "Handed over." if handed_over else "Nobody took over in time: the run goes on from its other holders."
        self._say(text, event="left", handed_over=handed_over)


def tell(event: str, about: Mapping[str, Any], as_json: bool) -> None:
    """What the conductor says."""
    from potluck.cli import console

    if as_json:
        console.print_json({"event": f"pipeline {event}", **about})
        return
    text = words(event, about)
    if text:
        console.out.print(text, markup=False, highlight=False)


def words(event: str, about: Mapping[str, Any]) -> str:
    """One line for people; empty for what they need not read."""
    if event == "step":
        again = f", {about['replayed']} micro-batches again" if about["replayed"] else ""
        return f"step {about['step'] + 1}: loss {about['loss']:.4f}, {about['seconds']:.2f} s{again}"
    if event == "waiting":
        return f"The pipeline waits: {about['reason']}."
    if event == "morph":
        return f"From step {about['step']} on: {about['stages']} stages, {about['servers']} servers."
    if event == "move":
        return f"{about['peer'][:8]} moves to stage {about['stage']}: {about['reason']}."
    if event == "gone":
        return f"{about['peer'][:8]} is gone ({about['reason']})."
    if event == "restored":
        return (
            f"Nobody has block {about['blocks']} any more: the run goes back from step {about['from']} to "
            f"{about['to']}. {about['lost_steps']} steps are lost; their data come again."
        )
    if event == "saved":
        return f"Step {about['step']} is saved ({about['bytes'] / 1e6:,.1f} MB)."
    if event == "not saved":
        return f"Step {about['step']} is not saved: {about['reason']}"
    if event == "evaluated":
        figures = ", ".join(f"{name} {value:.4f}" for name, value in about.items() if name != "step")
        return f"Step {about['step']} on held-out data: {figures or 'the recipe has no figures'}."
    if event == "not evaluated":
        return f"Step {about['step']} is not evaluated: {about['reason']}"
    if event == "failed":
        return f"Step {about['step']} fails: {about['reason']}"
    if event == "check failed":
        return f"Step {about['step']} begins anew without {about['peer'][:8]}: {about['reason']}."
    if event == "excluded":
        return f"{about['peer'][:8]} is excluded from the run: {about['reason']}."
    if event == "conducting":
        return "This peer conducts the pipeline."
    return ""
