"""The wheel of this very Potluck, packed anew from the installed files.

The same files make the same bytes on every machine: names in order, no times, nothing compressed (versions of zlib
differ). So the hubs of a cluster serve the same wheel, and a link stays good when its host starts again.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import potluck
from potluck.errors import ConfigurationError
from potluck.hub.wheelpin import DISTRIBUTION, wheel_name

_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # of ZIP's calendar
_WHEEL = "Wheel-Version: 1.0\nGenerator: potluck\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that pip installs."""

    version: str
    data: bytes

    @property
    def file_name(self) -> str:
        """Its file's name."""
        return wheel_name(self.version)

    @property
    def sha256(self) -> str:
        """The hash of its bytes, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


def pack_wheel() -> Wheel:
    """Pack the Potluck that runs here; ConfigurationError where its files do not say what they need."""
    described = _description()
    version = potluck.__version__
    package = Path(potluck.__file__).parent
    files = {
        f"potluck/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    folder = wheel_name(version).removesuffix("-py3-none-any.whl") + ".dist-info"
    files |= {f"{folder}/{name}": data for name, data in described.items()}
    files[f"{folder}/WHEEL"] = _WHEEL.encode()
    lines = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in sorted(files.items())]
    files[f"{folder}/RECORD"] = "\n".join([*lines, f"{folder}/RECORD,,", ""]).encode()
    return Wheel(version=version, data=_zipped(files))


def _description() -> dict[str, bytes]:
    """What the installation says about the package: what it depends on, its command, its licence."""
    again = "install it again (`pip install .` in a clone), and newcomers can get Potluck from this host"
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigurationError(f"{DISTRIBUTION} runs here without being installed: {again}") from error
    if installed.version != potluck.__version__:
        raise ConfigurationError(
            f"{DISTRIBUTION} {installed.version} is installed, and what runs is {potluck.__version__}: {again}"
        )
    found = {name: installed.read_text(name) for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")}
    return {name: text.encode() for name, text in found.items() if text is not None}


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode("ascii").rstrip("=")


def _zipped(files: dict[str, bytes]) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.create_system = 3  # Unix, wherever it is packed
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return into.getvalue()
