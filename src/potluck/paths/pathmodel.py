"""Inference with paths: a text is routed, and only the modules that its path needs are loaded.

model = PathModel.load(folder, recipe.model)        # as `potluck paths export --all` wrote it
path = model.route(tokens)                          # by its first tokens
logits = model.path(path)(tokens)                   # an ordinary module
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path as FilePath
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from potluck.errors import ConfigurationError
from potluck.paths.features import Features, bag_of_tokens
from potluck.paths.grid import Grid, Path
from potluck.paths.router import Router
from potluck.paths.sharding import Routing, read_routing, write_routing

INDEX_FILE = "paths.json"
ROUTING_FILE = "routing.json"
MOST_LOADED = 8  # paths that stay put together

Load = Callable[[str], Mapping[str, Tensor]]


class PathModel:
    """All paths of a model, loaded as they are needed."""

    def __init__(
        self,
        grid: Grid,
        make: Callable[[], nn.Module],
        load: Load,
        *,
        router: Router | None = None,
        prefix: int = 32,
        features: Features = bag_of_tokens,
    ) -> None:
        """`make` makes a path's model, with any values; `load` returns the parameters of a module by name."""
        self.grid = grid
        self.prefix = prefix
        self.loaded: set[str] = set()
        """Modules that were needed so far."""
        self._make = make
        self._load = load
        self._router = router
        self._features = features
        self._ready: OrderedDict[Path, nn.Module] = OrderedDict()

    @classmethod
    def load(cls, folder: FilePath, make: Callable[[], nn.Module]) -> Self:
        """What `potluck paths export --all` wrote; ConfigurationError where it is something else."""
        try:
            index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            grid = Grid(tuple(index["levels"]), tuple(index["shared"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{folder} has no {INDEX_FILE} that can be read ({error}): export it again"
            ) from error
        routing = read_routing(folder / ROUTING_FILE)
        return cls(
            grid,
            make,
            lambda name: load_file(folder / f"{name}.safetensors"),
            router=routing.router,
            prefix=routing.prefix,
        )

    def save(self, folder: FilePath, routing: Routing) -> list[str]:
        """Write all modules, each to a file, and the routing; the names of the files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.grid.modules:
            save_file({n: t.contiguous() for n, t in self._load(name).items()}, folder / f"{name}.safetensors")
        write_routing(routing, folder / ROUTING_FILE)
        index = {"levels": list(self.grid.levels), "shared": list(self.grid.shared), "modules": list(self.grid.modules)}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
        return [*(f"{name}.safetensors" for name in self.grid.modules), ROUTING_FILE, INDEX_FILE]

    @torch.no_grad()
    def path(self, path: Path) -> nn.Module:
        """One path as an ordinary module, in evaluation mode."""
        self.grid.number_of(path)
        if path not in self._ready:
            model = self._make()
            parameters = dict(model.named_parameters())
            for module in self.grid.modules_of(path):
                self.loaded.add(module)
                for name, value in self._load(module).items():
                    if name not in parameters or parameters[name].shape != value.shape:
                        raise ConfigurationError(f"module {module} has {name!r}, which does not fit this model")
                    parameters[name].copy_(value)
            self._ready[path] = model.eval()
            while len(self._ready) > MOST_LOADED:
                self._ready.popitem(last=False)
        self._ready.move_to_end(path)
        return self._ready[path]

    def route(self, tokens: Tensor) -> Path:
        """The path of a text, by its first tokens; ConfigurationError where it cannot be routed."""
        return self.grid.paths[int(self.routes(tokens[None, : self.prefix])[0])]

    def routes(self, prefixes: Tensor) -> Tensor:
        """The numbers of the paths of several texts."""
        if self._router is None:
            raise ConfigurationError("the paths of this run came from a file: it has no router for new texts")
        if prefixes.shape[1] < self.prefix:
            raise ConfigurationError(
                f"a text of {prefixes.shape[1]} tokens is routed by {self.prefix}: it is too short"
            )
        return self._router.route(self._features(prefixes))
