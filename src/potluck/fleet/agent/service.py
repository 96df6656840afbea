"""An agent as a service: a systemd unit of the user, which starts it with the machine and after a crash.

The link has an invite in it, so it stands in a file that nobody else can read, not in the unit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import platformdirs

from potluck.errors import ConfigurationError
from potluck.fleet.agent.agent import AgentConfig
from potluck.hub.joinlink import JoinLink
from potluck.hub.privatefiles import write_private

LINK_FILE = "agent.env"


def unit_text(config: AgentConfig, engine: str = "") -> str:
    """The unit. Jobs outlive a crash of the agent (KillMode=process); told to end, it ends them itself."""
    words = [
        sys.executable,
        "-m",
        "potluck.cli",
        "fleet",
        "agent",
        "--name",
        config.name,
        "--allow",
        config.allow.words(),
        "--folder",
        str(config.folder.resolve()),
    ]
    words += ["--websocket"] if config.websocket_only else []
    words += ["--relay-only"] if config.relay_only else []
    words += ["--keep-jobs"] if config.keeps_jobs else []
    words += ["--engine", engine] if engine else []
    return f"""[Unit]
Description=Potluck agent: lends this machine to a fleet
Wants=network-online.target
After=network-online.target

[Service]
EnvironmentFile={_escaped(str((config.folder / LINK_FILE).resolve()))}
ExecStart={" ".join(_quoted(word) for word in words)}
Restart=always
RestartSec=5
KillMode=process
TimeoutStopSec=120

[Install]
WantedBy=default.target
"""


def install(link: str, config: AgentConfig, engine: str = "") -> Path:
    """Write the unit and the link; the unit's path. systemd itself is the user's to call."""
    write_private(config.folder / LINK_FILE, f"POTLUCK_LINK={link}\n")
    folder = Path(platformdirs.user_config_dir("systemd")) / "user"
    path = folder / f"potluck-agent-{JoinLink.parse(link).run}.service"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(unit_text(config, engine))
    except OSError as error:
        raise ConfigurationError(f"the unit cannot be written to {path}: {error.strerror}") from error
    return path


def _quoted(word: str) -> str:
    """One argument in systemd's language."""
    if any(character in word for character in "\n\r\0"):
        raise ConfigurationError(f"{word!r} has a line break: it cannot stand in a unit")
    return '"' + _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
