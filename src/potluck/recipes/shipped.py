"""The files of a run on this machine: the organiser's own, by their folder, or those that its host serves, by digest.

What is served lies where downloads lie (downloads.py), and is known by its hash there. A host puts its own copies in
the same place, so that all who need a run's files look for them in one way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from potluck.errors import ConfigurationError
from potluck.recipes.downloads import Download, path_of
from potluck.recipes.reference import MAX_FILES, MAX_SHIPPED_BYTES, FileRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where files are, by the names that the recipe knows them by."""

    folder: Path | None = None
    """The organiser's, where any file may be named."""

    paths: Mapping[str, Path] = field(default_factory=dict)
    """Those that the manifest names."""

    def path(self, name: str) -> Path | None:
        """Where a file is; None where it is not here."""
        found = self.paths.get(name) or (self.folder / name if self.folder is not None else None)
        return found if found is not None and found.is_file() else None

    def named(self, short: str) -> Path | None:
        """A file by its name without folders; None where it is not here."""
        name = next((name for name in self.paths if name.rpartition("/")[2] == short), short)
        return self.path(name)

    def matching(self, pattern: str) -> list[Path]:
        """Files by a name, or by a pattern as in data/*.jsonl; in the order of their names."""
        if self.folder is not None:
            return [self.folder / name for name in names_matching(self.folder, pattern)]
        return [path for name, path in sorted(self.paths.items()) if fnmatchcase(name, pattern) and path.is_file()]


def folder_files(folder: Path) -> RunFiles:
    """An organiser's."""
    return RunFiles(folder=folder)


def fetched_files(refs: Iterable[FileRef]) -> RunFiles:
    """Those that a manifest names, as far as they are here."""
    return RunFiles(paths={ref.name: path_of(as_download(ref)) for ref in refs})


def as_download(ref: FileRef, url: str = "http://unknown.invalid/") -> Download:
    """A file that a host serves, as something to fetch."""
    return Download(name=ref.name.rpartition("/")[2], url=url, sha256=ref.sha256, num_bytes=ref.num_bytes)


def names_matching(folder: Path, pattern: str) -> list[str]:
    """Files of a folder by a name or a pattern, as names from there on; ConfigurationError where they lie elsewhere."""
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise ConfigurationError(
            f"{pattern!r} is not in the run's folder: a run ships files that lie beside its run.toml"
        )
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(pattern) if path.is_file())


def refs_of(folder: Path, patterns: Iterable[str]) -> tuple[FileRef, ...]:
    """What a run ships, with digests; ConfigurationError for what is not there or too much."""
    import hashlib

    names: dict[str, None] = {}
    for pattern in patterns:
        found = names_matching(folder, pattern)
        if not found:
            raise ConfigurationError(f"files={pattern!r}: {folder} has no such file. Mend the name, or leave it out")
        names |= dict.fromkeys(found)
    if len(names) > MAX_FILES:
        raise ConfigurationError(
            f"files={len(names)} are more than a run ships, which is {MAX_FILES}: pack them into fewer, as one parquet "
            "file, or name a data set that volunteers stream"
        )
    refs = []
    for name in names:
        path = folder / name
        size = path.stat().st_size
        if size > MAX_SHIPPED_BYTES:
            raise ConfigurationError(
                f"{path} has {size / 1e9:.1f} GB: a host serves files of up to {MAX_SHIPPED_BYTES / 1e9:.0f} GB. Put "
                "it where it can be downloaded, and declare that in the recipe (downloads)"
            )
        with path.open("rb") as file:
            refs.append(FileRef(name=name, sha256=hashlib.file_digest(file, "sha256").hexdigest(), num_bytes=size))
    return tuple(refs)


def keep_copies(folder: Path, refs: Iterable[FileRef]) -> None:
    """Put an organiser's files where all that is served lies; files that are there already stay."""
    for ref, target in _missing(refs):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        shutil.copyfile(folder / ref.name, part)
        part.replace(target)


def _missing(refs: Iterable[FileRef]) -> Iterator[tuple[FileRef, Path]]:
    for ref in refs:
        target = path_of(as_download(ref))
        if not target.exists():
            yield ref, target
