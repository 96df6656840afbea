"""Which wheel a host serves, as its join link says it: `pip=PORT,VERSION,SHA256`.

The wheel is Potluck itself, as the host runs it. It comes by plain HTTP from the link's first host, and is used only if
its bytes have the hash that the link names: so a newcomer gets the host's version before anything is published, and
nobody in between can change it. The notebooks read this option by themselves, without Potluck: change both together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from potluck.errors import LinkFormatError
from potluck.hub.server.configuration import host_port

DISTRIBUTION = "potluck-train"
"""What pip knows Potluck by. On PyPI the plain name belongs to an unrelated project."""

_VERSION = re.compile(r"[0-9a-z.]{1,40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPin:
    """The one wheel that a link stands for."""

    port: int
    version: str
    sha256: str

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536 or not _VERSION.fullmatch(self.version) or not _SHA256.fullmatch(self.sha256):
            raise LinkFormatError(
                f"the link's pip={str(self)[:100]} is not whole: it must be a port, a version and 64 hexadecimal "
                "digits, with commas between them. Copy the whole link again, and put it in quotes: a shell cuts it "
                "at the first &"
            )

    def __str__(self) -> str:
        """As it stands in a link."""
        return f"{self.port},{self.version},{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> WheelPin:
        """Read it back; LinkFormatError when it was cut short or changed."""
        port, _, rest = text.lower().partition(",")
        version, _, sha256 = rest.partition(",")
        return cls(port=int(port) if re.fullmatch("[0-9]{1,5}", port) else 0, version=version, sha256=sha256)

    @property
    def file_name(self) -> str:
        """The wheel's file name; pip reads the version from it."""
        return wheel_name(self.version)

    def pip_line(self, host: str) -> str:
        """The command that installs exactly this wheel, and what it depends on from PyPI."""
        url = f"http://{host_port(host, self.port)}/{self.file_name}#sha256={self.sha256}"
        return f"pip install '{DISTRIBUTION} @ {url}'"


def wheel_name(version: str) -> str:
    """What a wheel of this version is called."""
    return f"{DISTRIBUTION.replace('-', '_')}-{version}-py3-none-any.whl"
