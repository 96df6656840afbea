"""One peer for bench_paths.py: trains paths of the standard library's source, or leases phases and coordinates.

    python path_member.py '{"link": …, "role": "trainer" | "aux", "levels": [2, 2], "shared": […], "inner_steps": …}'

A trainer says {"path": NUMBER, "phase": …} when it begins a phase, and about twice a second where its seconds went and
what its rounds have sent: {"inner": …, "outside": …, "phases": …, "sent": …, "wire": …}. An aux peer says {"commit":
MODULE, …} for every outer step, and {"leads": …} whether it leases phases. Times are those of the wall clock, which all
processes of one machine share. It ends with its input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

import potluck
from potluck.optim.methods.outer import Nesterov
from potluck.optim.optimizer import Optimizer
from potluck.paths.cutting import cut
from potluck.paths.grid import Grid
from potluck.paths.modulepart import ModuleConfig, coordinating_module
from potluck.paths.pathhost import PathHost
from potluck.paths.pathkeeping import PathKeeper
from potluck.paths.pathtrainer import PathConfig, PathProgress, PathTrainer
from potluck.paths.phasedesk import PhaseLeases
from potluck.paths.sharding import Routing, Shards, digest_of
from potluck.peer.identity import Identity
from potluck.recipes.stdlib_lm import Config, StdlibLM
from potluck.round.coordinator.gathering import GatherConfig
from potluck.round.plan.messages import Commit
from potluck.run.joined import Joined
from potluck.state.config import StateConfig

PREFIX = 32
GRACE_SECONDS = 10.0
BATCH_SIZE = 8
MOST_DOCUMENTS = 400
TELL_EVERY_SECONDS = 0.2


telling = threading.Lock()


def tell(**what: Any) -> None:
    with telling:
        print(json.dumps({**what, "at": time.time()}), flush=True)


def help_out(run: Joined, grid: Grid) -> None:
    """Lease phases and coordinate."""
    main = Optimizer(run, None, target_batch_size=1, auxiliary=True, num_threads=1)
    group = run.group()

    async def start() -> PathHost:
        return await PathHost.start(
            run.peer,
            group,
            main.collaboration.averager.lease,
            grid,
            coordinating=lambda name: coordinating_module(
                GatherConfig(), len(grid.paths_through(name)), 1, GRACE_SECONDS
            ),
            state=StateConfig(),
        )

    host = run.call(start())
    run.attach(host.close)

    def listen(name: str) -> None:
        def committed(commit: Commit) -> None:
            sent = sum(member.sent_bytes for member in commit.members)
            tell(commit=name, epoch=commit.epoch, coordinator=commit.coordinator, sent=sent)

        host.helpers[name].collaboration.averager.listen(committed)

    for name in grid.modules:
        listen(name)
    tell(event="in", peer=run.peer_id)
    stop = until_end_of_input()
    while not stop.wait(TELL_EVERY_SECONDS):
        tell(leads=bool(main.collaboration.averager.lease.token))


def until_end_of_input() -> threading.Event:
    """Set when nobody wants this process any more."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    return stop


def train(run: Joined, grid: Grid, arguments: dict[str, Any]) -> None:
    """Train paths until the input ends."""
    recipe = StdlibLM(Config(**arguments["model"]))
    documents = recipe.documents()[:MOST_DOCUMENTS]
    lengths = [len(document) for document in documents]
    paths = [number % grid.num_paths for number in range(len(documents))]
    digest = digest_of(documents)
    shards = Shards(grid, Routing(levels=grid.levels, prefix=PREFIX, documents=digest, paths=paths, lengths=lengths))
    torch.manual_seed(0)
    model = recipe.model()
    begun: tuple[int, int] | None = None
    rounds: dict[tuple[str, int], int] = {}  # what each has sent of this peer's

    def progressed(progress: PathProgress) -> None:
        nonlocal begun
        if progress.path is not None and begun != (grid.number_of(progress.path), progress.phase):
            begun = (grid.number_of(progress.path), progress.phase)
            tell(path=begun[0], phase=begun[1])
        for name, part in trainer.modules.items():
            result = part.driver.last_result
            if result is not None:
                rounds[name, result.commit.epoch] = result.sent_bytes
        tell(
            inner=progress.seconds_inner,
            outside=progress.seconds_outside,
            phases=progress.phases,
            sent=sum(rounds.values()),
            wire=run.peer.links.statistics().total.bytes_sent,
        )

    trainer = PathTrainer(
        run,
        grid,
        model=model,
        parts=cut(model, len(grid.levels)),
        inner=torch.optim.AdamW(model.parameters(), lr=1e-3),
        outer=Nesterov,
        module_config=lambda name: ModuleConfig(
            group=name, num_paths=len(grid.paths_through(name)), grace_seconds=GRACE_SECONDS, num_threads=1
        ),
        leases=PhaseLeases.open(run, grid),
        keeper=PathKeeper.open(run, grid),
        documents=documents,
        shards=lambda _phase: shards,
        token_losses=recipe.token_losses,
        config=PathConfig(
            inner_steps=arguments["inner_steps"],
            batch_size=BATCH_SIZE,
            window=recipe.document_window,
            prefix=PREFIX,
            grace_seconds=GRACE_SECONDS,
        ),
        on_progress=progressed,
    )
    stop = until_end_of_input()
    run.is_leaving = stop.is_set
    tell(event="in", peer=run.peer_id, parameters=sum(p.numel() for p in model.parameters()))
    trainer.train(stop)


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    grid = Grid(tuple(arguments["levels"]), tuple(arguments["shared"]))
    options = {"role": arguments["role"], "name": arguments["name"], "listen": ("tcp://127.0.0.1:0",)}
    with potluck.join(arguments["link"], identity=Identity.temporary(), **options) as run:
        if arguments["role"] == "aux":
            help_out(run, grid)
        else:
            train(run, grid, arguments)


if __name__ == "__main__":
    main()
