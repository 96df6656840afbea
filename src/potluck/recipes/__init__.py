"""Recipes: what a run trains. Model, data, loss, and what to show of it.

recipe.py      Recipe: the interface, and all that a recipe of your own has to fill in
downloads.py   files that a recipe needs: fetched, resumed, checked
shipped.py     the files of a run on this machine;   approval.py: whose code may run here
catalogue.py   recipes by name or by file;  reference.py: how a manifest names one, and the digest that pins a file
stdlib_lm.py   a byte-level language model on the source of Python's own standard library
docstrings.py  the text of its docstrings
digits.py      a small classifier on scikit-learn's digits
images.py      a classifier of pictures in a folder or a parquet file
huggingface/   language models of transformers, on any text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck.recipes.downloads import Download
    from potluck.recipes.recipe import Recipe, RecipeConfig, Sample

__all__ = ["Download", "Recipe", "RecipeConfig", "Sample"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: who only watches a run has no use for it."""
    if name not in __all__:
        raise AttributeError(f"module 'potluck.recipes' has no attribute {name!r}")
    from potluck.recipes import downloads, recipe

    return getattr(downloads if name == "Download" else recipe, name)
