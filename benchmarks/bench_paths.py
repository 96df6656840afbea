"""What paths (DiPaCo) cost in a run, and what they are worth beside dense models.

    scripts/bench paths [--json] [--only run|separable|separable_words|natural] [--seeds 3] [--seconds 40] [--repeats 3]

`run` is a run in processes, over a real hub (pathrun.py): the share of time outside inner steps, bytes per path and
outer step, and how long the run misses a killed trainer or coordinator.

`separable` and `natural` are losses on four made-up languages and on the standard library's source. They are trained in
one process, by the outer step, feed, router and shards of a run (`ModuleLoop`, `PathFeed`, …), without hub and links:
what travels there is averaged here at once. All ways take the same number of inner steps per path. `dense` has the
inference cost of one path and the tokens of one path; `dense, all tokens` is DiLoCo with as many peers as there are
paths, and so has seen all tokens. `independent` models share nothing. `shuffled` routes by chance. The tokens that
documents are routed by are not scored.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness import parser, report, say
from pathrun import own_modules, recoveries, shares
from potluck.optim.methods.outer import Nesterov
from potluck.optim.modelstate import ModelState
from potluck.paths.cutting import cut
from potluck.paths.features import bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid
from potluck.paths.moduleloop import Change, ModuleLoop
from potluck.paths.pathfeed import PathFeed, TokenLosses, document_losses, mean_loss
from potluck.paths.pathstate import PathState, capture, restore
from potluck.paths.router import fit_kmeans
from potluck.paths.sharding import Routing, Shards
from potluck.paths.weighing import Alpha, step_factor
from potluck.recipes.stdlib_lm import EVALUATION_SHARE, SMALLEST_DOCUMENT, Config, StdlibLM
from potluck.testing.languages import WordModel, languages, word_losses

NUM_PATHS = 4
TRANSFORMER = Config(layers=2, width=64, heads=4, context=64)
VALIDATION_SHARE = 11  # one document in so many is not trained on; prime, so that all languages are among them


@dataclass(frozen=True, kw_only=True)
class Task:
    """Data and a model to train on them."""

    documents: Sequence[Tensor]
    make: Callable[[], nn.Module]
    losses: TokenLosses
    phases: int
    learning_rate: float
    window: int = 64
    prefix: int = 32
    inner_steps: int = 20
    batch_size: int = 8


def shards_of(grid: Grid, task: Task, paths: list[int]) -> Shards:
    """Documents by path; those for validation are the same for all ways, however documents are routed."""
    lengths = [len(document) for document in task.documents]
    routing = Routing(levels=grid.levels, prefix=task.prefix, documents="", paths=paths, lengths=lengths)
    shards = Shards(grid, routing)
    for number in range(grid.num_paths):
        own = [document for document, path in enumerate(paths) if path == number]
        shards.training[number] = [document for document in own if document % VALIDATION_SHARE]
        shards.validation[number] = [document for document in own if not document % VALIDATION_SHARE]
    return shards


def train(task: Task, shards: Shards, seed: int, *, alpha: Alpha = "normalised", workers: int = 1) -> float:
    """The loss on all validation documents, each by its own path, after so many phases of each path."""
    grid = shards.grid
    torch.manual_seed(seed)
    model = task.make()
    inner = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.01)
    state = ModelState(inner, named=list(model.named_parameters()))
    parts = cut(model, len(grid.levels))
    names = {module: [n for part in grid.parts_of(module) for n in parts[part]] for module in grid.modules}
    tokens = [float(shards.tokens(number)) for number in range(grid.num_paths)]
    loops = {
        module: ModuleLoop({name: state.parameters[name] for name in names[module]}, Nesterov())
        for module in grid.modules
    }
    for module, loop in loops.items():
        through = [grid.number_of(path) for path in grid.paths_through(module)]
        weight = sum(tokens[number] for number in through) / sum(tokens)
        # Workers of one path share its phases, so they count for one.
        factor = step_factor(phases=len(through), round_weight=weight, num_paths=len(through), kind=alpha)
        loop.factor = lambda _epoch, factor=factor: factor  # type: ignore[misc]
    feed = PathFeed(task.documents, shards, task.window, seed)
    kept: dict[tuple[int, int], PathState] = {}

    def put_together(path: tuple[int, ...]) -> dict[str, Tensor]:
        with torch.no_grad():
            for module in grid.modules_of(path):
                for name, value in loops[module].shared.items():
                    state.parameters[name].copy_(value)
        return {name: value.detach().clone() for name, value in state.parameters.items()}

    for phase in range(task.phases):
        for number, path in enumerate(grid.paths):
            for worker in range(workers):
                began = put_together(path)
                restore(kept.get((number, worker), PathState()), state)
                batches = feed.batches(number, phase, task.batch_size, worker)
                for _ in range(task.inner_steps):
                    inner.zero_grad()
                    task.losses(model, next(batches)).mean().backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    inner.step()
                kept[number, worker] = capture(PathState(), state, phase)
                for module in grid.modules_of(path):
                    delta = {n: began[n] - state.parameters[n].detach() for n in names[module]}
                    loops[module].add(Change(delta, tokens[number] / workers, 1 / workers))
        for loop in loops.values():
            loop.accept(loop.offer(phase + 1), epoch=phase + 1, alone=True)
    sums, counts = [], []
    for number, path in enumerate(grid.paths):
        put_together(path)
        held_out = [task.documents[d] for d in shards.validation[number]]
        found = document_losses(model, held_out, task.losses, window=task.window, prefix=task.prefix)
        sums.append(found[0])
        counts.append(found[1])
    return mean_loss(torch.cat(sums), torch.cat(counts))


def ways(task: Task, routes: dict[str, list[int]], seed: int) -> dict[str, float]:
    """All ways on one task, scored on the same documents."""
    square, flat, one = Grid((2, 2)), Grid((NUM_PATHS,), ()), Grid((1,))
    everywhere = [0] * len(task.documents)
    found = {}
    for name, route in routes.items():
        shards = shards_of(square, task, route)
        found[f"paths 2×2, {name}"] = train(task, shards, seed)
        found[f"paths 2×2, {name}, raw α"] = train(task, shards, seed, alpha="raw")
    first = next(iter(routes.values()))
    found["4 independent models"] = train(task, shards_of(flat, task, first), seed)
    shuffled = random.Random(seed).choices(range(NUM_PATHS), k=len(task.documents))
    found["paths 2×2, shuffled"] = train(task, shards_of(square, task, shuffled), seed)
    found["dense, tokens of one path"] = train(task, shards_of(one, task, everywhere), seed)
    found["dense, all tokens"] = train(task, shards_of(one, task, everywhere), seed, workers=NUM_PATHS)
    return found


def transformer_task(recipe: StdlibLM, documents: Sequence[Tensor], *, phases: int) -> Task:
    """A small transformer on these documents."""
    return Task(documents=documents, make=recipe.model, losses=recipe.token_losses, phases=phases, learning_rate=3e-3)


def separable(seed: int) -> tuple[Task, dict[str, list[int]]]:
    """Four languages with the same words, and a transformer: the words before tell it which language it reads."""
    documents, _ = languages(4000, seed=seed, length=65)
    task = transformer_task(StdlibLM(TRANSFORMER), documents, phases=16)
    return task, {"k-means": routes_by_kmeans(task, seed)}


def separable_words(seed: int) -> tuple[Task, dict[str, list[int]]]:
    """The same languages, and a model that sees one word alone: it cannot know the language by itself."""
    documents, _ = languages(2000, seed=seed, length=65)
    task = Task(
        documents=documents,
        make=lambda: WordModel(32),
        losses=word_losses,
        phases=16,
        learning_rate=1e-2,
    )
    return task, {"k-means": routes_by_kmeans(task, seed)}


def natural(seed: int) -> tuple[Task, dict[str, list[int]]]:
    """The standard library's source."""
    recipe = StdlibLM(TRANSFORMER)
    documents = recipe.documents()
    task = transformer_task(recipe, documents, phases=10)
    files = [path for number, path in enumerate(recipe._files) if number % EVALUATION_SHARE]
    files = [path for path in files if path.stat().st_size >= SMALLEST_DOCUMENT]
    sizes: dict[str, int] = {}
    for path, document in zip(files, documents, strict=True):
        sizes[path.parent.name] = sizes.get(path.parent.name, 0) + len(document)
    loads, place = [0] * NUM_PATHS, {}
    for package in sorted(sizes, key=lambda name: -sizes[name]):
        place[package] = min(range(NUM_PATHS), key=lambda number: loads[number])
        loads[place[package]] += sizes[package]
    by_package = [place[path.parent.name] for path in files]
    kinds = [_kind(path.name, document) for path, document in zip(files, documents, strict=True)]
    return task, {"k-means": routes_by_kmeans(task, seed), "by package": by_package, "by kind of file": kinds}


def _kind(name: str, document: Tensor) -> int:
    """Package files, private modules, short and long public ones."""
    if name == "__init__.py":
        return 0
    return 1 if name.startswith("_") else 2 if len(document) < 12_000 else 3


def routes_by_kmeans(task: Task, seed: int) -> list[int]:
    """As `potluck paths prepare` does."""
    features = bag_of_tokens(prefixes_of(task.documents, task.prefix))
    return [int(number) for number in fit_kmeans(features, NUM_PATHS, seed).route(features)]


def measure(make: Callable[[int], tuple[Task, dict[str, list[int]]]], seeds: range, **length: int) -> dict[str, Any]:
    """Means over seeds, with the lowest and the highest, and the tokens of each path."""
    found: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for seed in seeds:
        task, routes = make(seed)
        task = replace(task, **length)
        for name, loss in ways(task, routes, seed).items():
            found.setdefault(name, []).append(loss)
        for name, route in routes.items():
            shards = shards_of(Grid((2, 2)), task, route)
            tokens[name] = [shards.tokens(number) for number in range(NUM_PATHS)]
    rows = {
        name: {"loss": statistics.mean(losses), "lowest": min(losses), "highest": max(losses)}
        for name, losses in found.items()
    }
    trained = task.phases * task.inner_steps * task.batch_size * task.window
    return {"ways": rows, "tokens_trained_per_path": trained, "tokens_of_each_path": tokens}


def main() -> None:
    """Print losses by way."""
    options = parser(__doc__, repeats=3)
    options.add_argument("--seeds", type=int, default=3, help="for losses")
    options.add_argument("--first-seed", type=int, default=0, help="… from this one on")
    options.add_argument("--inner-steps", type=int, help="of a phase, other than usual; for losses")
    options.add_argument("--phases", type=int, help="the same")
    options.add_argument("--seconds", type=float, default=40.0, help="of the run whose time is shared out")
    tasks = {"separable": separable, "separable_words": separable_words, "natural": natural}
    options.add_argument("--only", choices=["run", *tasks])
    chosen = options.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if chosen.only in (None, "run"):
        found |= recoveries(chosen.repeats, inner_steps=10) | own_modules(inner_steps=10)
        say(str(found))
        found |= shares(chosen.seconds, inner_steps=150)
    length = {name: getattr(chosen, name) for name in ("inner_steps", "phases") if getattr(chosen, name)}
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    found |= {name: measure(make, seeds, **length) for name, make in tasks.items() if chosen.only in (None, name)}
    report(found, as_json=chosen.json, title="paths")


if __name__ == "__main__":
    main()
