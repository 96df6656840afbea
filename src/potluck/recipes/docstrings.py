"""All docstrings of Python's standard library: English text that lies on every machine which can run this."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from potluck.recipes.stdlib_lm import LEFT_OUT

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[str]:
    """One after the other, in the order of the files' names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if set(LEFT_OUT).isdisjoint(path.relative_to(root).parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # templates and the like, which are no modules
                continue
            for node in ast.walk(tree):
                if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                    yield text
