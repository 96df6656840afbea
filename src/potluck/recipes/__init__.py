"""Recipes: what a run trains. Model, data, loss, and what to show of it.

recipe.py      Recipe: the interface, and all that a recipe of your own has to fill in
downloads.py   files that a recipe needs: fetched, resumed, checked
catalogue.py   recipes by name or by file, and the digest that pins a file
stdlib_lm.py   a byte-level language model on the source of Python's own standard library
digits.py      a small classifier on scikit-learn's digits
"""

from potluck.recipes.downloads import Download
from potluck.recipes.recipe import Recipe, RecipeConfig, Sample

__all__ = ["Download", "Recipe", "RecipeConfig", "Sample"]
