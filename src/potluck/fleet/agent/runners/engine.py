"""A container engine: Docker's or Podman's socket, whichever answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from potluck.errors import ConfigurationError

TIMEOUT_SECONDS = 60
LOOK_SECONDS = 5


def sockets() -> list[str]:
    """Where engines usually listen."""
    own = f"/run/user/{os.getuid()}"
    paths = ("/var/run/docker.sock", "/run/podman/podman.sock", f"{own}/podman/podman.sock", f"{own}/docker.sock")
    return [f"unix://{path}" for path in paths]


def connect(url: str = "") -> Any:
    """A client of the engine at `url`, else of the first that answers; ConfigurationError when none does."""
    try:
        import docker
        from docker.errors import DockerException
    except ImportError as error:
        raise ConfigurationError("containers need the `docker` package: install potluck-train[fleet]") from error
    tried: list[str] = []
    for candidate in [url] if url else sockets():
        path = candidate.removeprefix("unix://")
        if candidate.startswith("unix://") and not Path(path).exists():
            tried.append(f"{path}: not there")
            continue
        try:
            client = docker.DockerClient(base_url=candidate, timeout=TIMEOUT_SECONDS)
            client.ping()
        except (DockerException, OSError) as error:
            tried.append(f"{path}: {error}")
            continue
        return client
    raise ConfigurationError(
        f"no container engine answers ({'; '.join(tried)}). Start Docker, or Podman (`systemctl --user start "
        "podman.socket`), or name its socket with --engine unix:///…"
    )


def name_of(client: Any) -> str:
    """Docker or Podman, with its version."""
    version = client.version()
    names = [part.get("Name", "") for part in version.get("Components") or ()]
    kind = "podman" if any("podman" in name.lower() for name in names) else "docker"
    return f"{kind} {version.get('Version', '')}".strip()
