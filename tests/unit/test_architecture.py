"""The tree keeps its shape: imports go one way, no torch below the rounds, a small public surface."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import potluck

SOURCE = Path(potluck.__file__).parent
FOUNDATION = ("errors", "messages", "plaintext", "clock", "tasks", "faultpoints")
# In the order that data flows: a package may import itself and those before it.
ORDER = (
    *FOUNDATION,
    "hub",
    "peer",
    "link",
    "run",
    "round",
    "state",
    "optim",
    "pipeline",
    "paths",
    "fleet",
    "spot",
    "recipes",
    "training",
    "monitor",
    "notebook",
    "integrations",
    "testing",
    "sim",
    "cli",
)
TORCH_FREE = (*FOUNDATION, "hub", "peer", "link", "run", "cli")
PUBLIC = ["BackupConfig", "DiLoCo", "Optimizer", "PotluckError", "StateConfig", "__version__", "join"]


def imports_of(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Full names of the modules that a file imports; only its top level when `at_import_time`."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_import_time else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(path) for path in modules()} <= set(ORDER)


def test_imports_go_one_way() -> None:
    wrong = []
    for path in modules():
        own = ORDER.index(package_of(path))
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "potluck" and len(parts) > 1 and ORDER.index(parts[1]) > own:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_only_commands_and_tests_use_the_testing_package() -> None:
    users = {package_of(path) for path in modules() if any(n.startswith("potluck.testing") for n in imports_of(path))}
    assert users <= {"testing", "sim", "cli"}


def test_the_lower_packages_never_import_torch() -> None:
    for path in modules():
        if package_of(path) in TORCH_FREE:
            assert not any(n.split(".")[0] == "torch" for n in imports_of(path, at_import_time=True)), path


def test_importing_potluck_is_light() -> None:
    code = "import sys, potluck; print([m for m in ('torch', 'scipy', 'nats', 'typer') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "potluck.monitor.dashboard.server",
        "potluck.monitor.exporters",
        "potluck.monitor.follower",
        "potluck.monitor.watcher",
        "potluck.run.runcheck",
        "potluck.state.backups",
        "potluck.training.books.ballot",
        "potluck.training.books.contributions",
        "potluck.training.manifest.organising",
        "potluck.training.manifest.readiness",
        "potluck.training.books.receipts",
        "potluck.training.manifest.rollback",
        "potluck.training.manifest.runfile",
    ],
)
def test_who_only_looks_at_a_run_or_steers_it_needs_no_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {module}"  # so that `import torch` raises
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr


def test_the_public_surface_is_what_we_say() -> None:
    assert sorted(potluck.__all__) == potluck.__all__ == PUBLIC
    for name in potluck.__all__:
        assert getattr(potluck, name) is not None


def test_no_file_is_named_after_nothing() -> None:
    shapeless = {"utils.py", "common.py", "helpers.py", "misc.py"}
    assert not [path for path in modules() if path.name in shapeless]


def test_every_file_stands_in_the_map_of_its_package() -> None:
    """A package whose docstring names its files names all of them."""
    for init in sorted(SOURCE.rglob("__init__.py")):
        drawn = ast.get_docstring(ast.parse(init.read_text())) or ""
        names = {path.name for path in init.parent.glob("*.py")} - {"__init__.py"}
        if sum(name in drawn for name in names) > 1:
            stems = {name: name.removesuffix(".py") for name in names}
            missing = sorted(name for name, stem in stems.items() if not re.search(rf"\b{re.escape(stem)}\b", drawn))
            assert not missing, f"{init.relative_to(SOURCE)} does not say what these are for: {missing}"
