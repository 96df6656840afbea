"""Documents by path: the routing file that the host prepares, and every trainer reads.

It names the path of each document, which of them are for validation, and the router, so that a text that is new goes
where its like went. It stands in the manifest by its digest; so all train on the same shards. It also says of which
documents it speaks: a recipe whose data differ here is refused.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated

import msgspec
import numpy as np
import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.paths.features import Features, bag_of_tokens, prefixes_of
from potluck.paths.grid import Grid, path_name
from potluck.paths.router import Router

MAX_DOCUMENTS = 1 << 24
VALIDATION_SHARE = 20  # one document in so many of each path is for validation
STARVING_SHARE = 0.25  # of the mean tokens per path: below that a path starves


class Routing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in a routing file."""

    levels: tuple[int, ...]
    prefix: Annotated[int, msgspec.Meta(ge=1)]
    documents: str  # digest
    paths: list[int]  # the number of each document's path
    lengths: list[int]  # tokens of each document
    seed: int = 0
    kind: str = "kmeans"
    weight: str = ""  # the router's, as base64 of float32; empty: it came from a file, and routes nothing new
    bias: str = ""

    @property
    def router(self) -> Router | None:
        """What routes new texts."""
        if not self.weight:
            return None
        bias = _tensor(self.bias)
        return Router(weight=_tensor(self.weight).view(len(bias), -1), bias=bias)


class Shards:
    """The documents of each path."""

    def __init__(self, grid: Grid, routing: Routing) -> None:
        self.grid = grid
        self.routing = routing
        self.training: list[list[int]] = [[] for _ in grid.paths]
        self.validation: list[list[int]] = [[] for _ in grid.paths]
        seen = [0] * grid.num_paths
        for document, path in enumerate(routing.paths):
            # The second of a path, and each twentieth after it: a path with two documents has one of each.
            is_validation = seen[path] % VALIDATION_SHARE == 1
            seen[path] += 1
            (self.validation if is_validation else self.training)[path].append(document)

    def tokens(self, path: int) -> int:
        """|D_i|: what a path trains on."""
        return sum(self.routing.lengths[document] for document in self.training[path])

    @property
    def all_tokens(self) -> int:
        """|D|."""
        return sum(self.tokens(path) for path in range(self.grid.num_paths))

    def warnings(self, phase_tokens: int = 0) -> list[str]:
        """Which paths starve, for the organiser to read."""
        found = []
        mean = self.all_tokens / self.grid.num_paths
        for number, path in enumerate(self.grid.paths):
            tokens = self.tokens(number)
            if tokens < STARVING_SHARE * mean:
                found.append(
                    f"path {path_name(path)} starves: {tokens:,} tokens, where paths have {mean:,.0f} on average. Take "
                    "fewer paths, more documents, or another routing"
                )
            elif phase_tokens and tokens < phase_tokens:
                found.append(
                    f"path {path_name(path)} has {tokens:,} tokens, fewer than the {phase_tokens:,} of one phase: it "
                    "sees the same documents again in each"
                )
        return found


def routed(
    grid: Grid,
    documents: Sequence[Tensor],
    router: Router,
    *,
    prefix: int,
    kind: str,
    seed: int = 0,
    features: Features = bag_of_tokens,
) -> Routing:
    """The routing of these documents; ConfigurationError where a path gets none."""
    if router.num_paths != grid.num_paths:
        raise ConfigurationError(f"the router knows {router.num_paths} paths, and levels make {grid.num_paths}")
    paths = router.route(features(prefixes_of(documents, prefix))).tolist()
    routing = Routing(
        levels=grid.levels,
        prefix=prefix,
        documents=digest_of(documents),
        paths=paths,
        lengths=[len(document) for document in documents],
        seed=seed,
        kind=kind,
        weight=_text(router.weight),
        bias=_text(router.bias),
    )
    check_routing(grid, routing)
    return routing


def read_assignment(grid: Grid, documents: Sequence[Tensor], file: FilePath, *, prefix: int) -> Routing:
    """A routing that the organiser has made: a JSON list with the number, or the levels, of each document's path."""
    try:
        given = msgspec.json.decode(file.read_bytes(), type=list[int | list[int]])
    except OSError as error:
        raise ConfigurationError(f"the routing file {file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"the routing file {file} is no list of paths ({error}): write one number, or one [i, j], per document"
        ) from error
    if len(given) != len(documents):
        raise ConfigurationError(
            f"the routing file {file} routes {len(given)} documents, and the recipe has {len(documents)}: make it anew"
        )
    paths = []
    for document, path in enumerate(given):
        number = path if isinstance(path, int) else grid.number_of(tuple(path))
        if not 0 <= number < grid.num_paths:
            raise ConfigurationError(
                f"the routing file {file} sends document {document} to path {number}, and there are {grid.num_paths}"
            )
        paths.append(number)
    prefixes_of(documents, prefix)
    lengths = [len(document) for document in documents]
    digest = digest_of(documents)
    routing = Routing(levels=grid.levels, prefix=prefix, documents=digest, paths=paths, lengths=lengths, kind="file")
    check_routing(grid, routing)
    return routing


def check_routing(grid: Grid, routing: Routing) -> None:
    """ConfigurationError unless the routing fits the levels, and each path has something to train on."""
    if routing.levels != grid.levels:
        raise ConfigurationError(
            f"the routing is for levels = {list(routing.levels)}, and run.toml has {list(grid.levels)}: run "
            "`potluck paths prepare` again"
        )
    if len(routing.paths) != len(routing.lengths) or any(not 0 <= p < grid.num_paths for p in routing.paths):
        raise ConfigurationError("the routing file is damaged: run `potluck paths prepare` again")
    counts = np.bincount(np.array(routing.paths, dtype=np.int64), minlength=grid.num_paths)
    if empty := [path_name(grid.paths[n]) for n in range(grid.num_paths) if counts[n] < 2]:
        raise ConfigurationError(
            f"{'paths' if empty[1:] else 'path'} {', '.join(empty[:5])}{' …' if empty[5:] else ''} would be empty: "
            "a path needs at least two documents, one of them for validation. Take fewer levels or another route"
        )


def write_routing(routing: Routing, file: FilePath) -> str:
    """Write it at once or not at all; its digest."""
    data = msgspec.json.encode(routing)
    beside = file.with_name(file.name + ".new")
    beside.write_bytes(data)
    beside.replace(file)
    return hashlib.sha256(data).hexdigest()


def read_routing(file: FilePath) -> Routing:
    """As `write_routing` wrote it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Routing)
    except OSError as error:
        raise ConfigurationError(
            f"the routing {file.name} is not here ({error.strerror}): the organiser makes it with "
            "`potluck paths prepare`"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{file.name} is no routing: {error}. Run `potluck paths prepare` again") from error


def check_documents(routing: Routing, documents: Sequence[Tensor]) -> None:
    """ConfigurationError where the documents are others than those that were routed."""
    if len(documents) != len(routing.paths):
        raise ConfigurationError(
            f"this machine has {len(documents)} documents, and the run's routing is for {len(routing.paths)}: its data "
            "or the version of its recipe differ"
        )
    if digest_of(documents) != routing.documents:
        raise ConfigurationError(
            "this machine's documents are not those that the run's routing was made for: its data differ"
        )


def digest_of(documents: Sequence[Tensor]) -> str:
    """Of what the documents hold, in order."""
    found = hashlib.sha256()
    for document in documents:
        found.update(len(document).to_bytes(8, "little"))
        found.update(document.to(torch.int32).numpy().tobytes())
    return found.hexdigest()


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.detach().float().contiguous().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.float32).copy()
    except ValueError as error:
        raise ConfigurationError(
            f"the routing's router is damaged: {error}. Run `potluck paths prepare` again"
        ) from None
    if not len(values) or not math.isfinite(float(np.abs(values).max())):
        raise ConfigurationError("the routing's router is damaged: run `potluck paths prepare` again")
    return torch.from_numpy(values)
