"""How a manifest names its recipe. Apart from the recipes themselves, so that who only watches a run needs no torch."""

from __future__ import annotations

from potluck.messages import Message


class RecipeRef(Message, frozen=True, kw_only=True):
    """A recipe as a manifest names it."""

    name: str
    digest: str = ""  # SHA-256 of the file; empty for a recipe that is built in
    version: str = ""  # of Potluck, for a recipe that is built in
