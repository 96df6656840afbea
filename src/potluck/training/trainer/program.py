"""A run as a program with a loop of its own sees it: `potluck.join(link)`, with the run's own model and data.

    with potluck.join("potluck://…") as run:
        recipe = run.recipe()
        model = recipe.model()
        for batch in run.batches(recipe, batch_size=32):
            ...

What needs torch is imported when it is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from potluck.errors import ConfigurationError
from potluck.hub.access.application import Answer
from potluck.hub.joinlink import JoinLink
from potluck.peer.identity import Identity
from potluck.peer.lease import LeaseView
from potluck.run import joined
from potluck.run.joined import Joined

if TYPE_CHECKING:
    from potluck.recipes.recipe import Batch, Recipe
    from potluck.training.books.shards import LeasedShards
    from potluck.training.manifest.manifest import Manifest

MANIFEST_SECONDS = 60.0


class ProgramRun(Joined):
    """A run that this program takes part in."""

    link: JoinLink | None = None
    """The one it came by."""

    def manifest(self) -> Manifest:
        """What the organiser has said; DeadlineExceededError where nobody has."""
        from potluck.training.manifest.noticeboard import NoticeBoard

        board = NoticeBoard.of(self.peer.session)
        self.attach(board.close)
        self.call(board.start())
        return self.call(board.first(MANIFEST_SECONDS))

    def recipe(self, *, yes: bool = False) -> Recipe[Any]:
        """The run's own model, data and loss, with its files fetched.

        Where the organiser wrote the recipe, `yes=True` lets that code run in this program; it is signed by them.
        """
        from potluck.recipes.approval import approve, is_approved
        from potluck.recipes.catalogue import open_recipe
        from potluck.training.manifest.curriculum import data_at
        from potluck.training.manifest.requirements import check_requirements, fetch_all, fetches_of

        manifest = self.manifest()
        check_requirements(manifest)
        if not is_approved(manifest.recipe):
            if not yes:
                raise ConfigurationError(
                    f"the run {manifest.run} trains with code of its organiser's own, {manifest.recipe.name}: let it "
                    "run here with run.recipe(yes=True)"
                )
            approve(manifest.recipe)
        if self.link is not None:
            fetch_all(fetches_of(manifest, self.link), lambda _download: lambda _there, _total: None)
        found = open_recipe(manifest.recipe, manifest.model, files=manifest.files)
        found.data = data_at(found, manifest, manifest.newest.from_epoch)
        return found

    def shards(self, num_shards: int, reader: int = 0) -> LeasedShards:
        """Which shard is next for this peer, out of the run's ledger: `take` names one, `reach` says how far it is."""
        from potluck.training.books.shards import LeasedShards

        view = LeaseView()
        watch = self.call(self.peer.session.hub.store("lease").watch(view.apply))
        self.attach(watch.cancel)
        return LeasedShards(self, view, num_shards, zlib.crc32(self.peer_id.encode()), reader)

    def batches(self, recipe: Recipe[Any], batch_size: int) -> Iterator[Batch]:
        """Batches without end of shards that nobody else trains on, read ahead in a process of their own."""
        from potluck.training.trainer.feed import Feed

        feed = Feed(recipe, [self.shards(recipe.num_shards)], batch_size, zlib.crc32(self.peer_id.encode()))
        try:
            while True:
                yield feed.next()
        finally:
            feed.close()


def join(
    link: str = "",
    *,
    identity: Identity | None = None,
    on_waiting: Callable[[Answer], None] | None = None,
    **config: Any,
) -> ProgramRun:
    """Take part in a run by its join link (else POTLUCK_LINK), as a context manager.

    `config` is what `potluck.run.peer.PeerConfig` has: name, role, client_mode, wait_seconds and so on. `on_waiting` is
    called, on the event loop, while an organiser has to let this peer in.
    """
    run = joined.join_as(ProgramRun, link, identity=identity, on_waiting=on_waiting, **config)
    run.link = joined.parsed_link(link)
    return run
