"""Which run a framework's trainer takes part in: by a link, by the environment, or one that it starts itself.

An explicit link comes before the environment (POTLUCK_LINK, and the two names that hivemind's users know). Without any,
a run of this program's own is started (embeddedrun.py) and its link is printed, for others to join. A loop of one's own
does the same:

    with open_run() as run:
        optimizer = potluck.Optimizer(run, torch.optim.AdamW(model.parameters()), target_batch_size=4096)
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from potluck.errors import ConfigurationError
from potluck.hub.joinlink import JoinLink
from potluck.integrations.embeddedrun import EmbeddedConfig, EmbeddedRun
from potluck.peer import environment
from potluck.peer.identity import Identity
from potluck.run.joined import Joined, join

logger = logging.getLogger(__name__)

DEFAULT_RUN = "potluck-run"
PEER_OPTIONS = ("announce", "client_mode", "identity_path", "listen", "name", "trusted_lan", "wait_seconds")
TELL_LOSS_SECONDS = 1.0  # at most so often: reading it waits for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """Which run, and with which identity."""

    initial_peers: str | Sequence[str] | None = None
    """The join link; hivemind's name for what leads to a run."""

    run_id: str = ""
    """The name of a run that is started here; where there is a link, it must be the link's."""

    identity_path: str | Path | None = None
    """The file with this peer's key, so that it comes back as itself; a free one of this user's unless given."""

    client_mode: bool = False
    """Only dial out, accept no links."""

    name: str = ""
    """What this peer is called."""

    listen: tuple[str, ...] = ()
    """Where to accept links, as tcp://HOST:PORT."""

    announce: tuple[str, ...] = ()
    """Addresses to announce without a check, as tcp://HOST:PORT."""

    trusted_lan: bool = False
    """Send bulk bytes in the clear: only where you trust everybody on the network."""

    wait_seconds: float = 0.0
    """How long to wait for an organiser's approval."""

    embedded: EmbeddedConfig = field(default_factory=EmbeddedConfig)
    """How a run is started here, where there is no link."""

    verbose: bool = False
    """Log what happens in the run, for as long as it is joined."""

    def __post_init__(self) -> None:
        link = self.link()
        if link and self.run_id and run_name(self.run_id) != JoinLink.parse(link).run:
            raise ConfigurationError(
                f"run_id={self.run_id!r}, and the link leads to the run {JoinLink.parse(link).run!r}: leave run_id out"
            )

    def link(self) -> str:
        """The link that was given, or that of the environment; nothing if a run is to be started here."""
        given = self.initial_peers if self.initial_peers is not None else environment.link() or environment.peers()
        return _one_link(given)

    def peer_options(self) -> dict[str, Any]:
        """What `potluck.join` takes."""
        listen = self.listen
        if not listen and not self.client_mode and (address := environment.listen_address()):
            listen = (f"tcp://[{address}]:0" if ":" in address else f"tcp://{address}:0",)
        return {
            "client_mode": self.client_mode,
            "listen": listen,
            "announce": self.announce,
            "trusted_lan": self.trusted_lan,
            "wait_seconds": self.wait_seconds,
            **({"name": self.name} if self.name else {}),
        }


class OpenRun:
    """A run that was joined, and where it was started here, the run itself."""

    def __init__(self, run: Joined, embedded: EmbeddedRun | None = None, *, is_ours: bool = True) -> None:
        self.run = run
        self._embedded = embedded
        self._is_ours = is_ours
        self._quieten: Callable[[], None] = lambda: None
        self._told_at = 0.0

    @property
    def link(self) -> str:
        """By which others join a run that was started here; empty where it was not."""
        return self._embedded.link if self._embedded is not None else ""

    @property
    def num_peers(self) -> int:
        """How many trainers are in the run now, this one among them."""
        return self.run.call(self._num_trainers())

    async def _num_trainers(self) -> int:
        return sum(1 for presence in self.run.peer.session.roster if presence.card.role == "trainer")

    def __enter__(self) -> Joined:
        return self.run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def tell_loss(self, loss: Any) -> None:
        """Let those who watch the run know how this peer's batches go: a number, or a tensor with one."""
        now = time.monotonic()
        if now - self._told_at < TELL_LOSS_SECONDS:
            return
        self._told_at = now
        value = float(loss)
        session, shown = self.run.peer.session, value if math.isfinite(value) else None
        self.run.soon(lambda: session.update_beacon(loss=shown))

    def close(self) -> None:
        """Leave the run, and end it if it is ours. A run that was given to us is left alone."""
        try:
            if self._is_ours:
                self.run.close()
        finally:
            if self._embedded is not None:
                self._embedded.close()
            self._quieten()

    def tell_more(self) -> Self:
        """Log what happens in the run until it is left, wherever logs go; to the screen if nobody has said."""
        log = logging.getLogger("potluck")
        before, handler = log.level, logging.StreamHandler()
        if log.getEffectiveLevel() > logging.INFO:
            log.setLevel(logging.INFO)
        if not log.hasHandlers():
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
            log.addHandler(handler)

        def quieten() -> None:
            log.setLevel(before)
            log.removeHandler(handler)

        self._quieten = quieten
        return self


def open_run(link: str = "", **options: Any) -> OpenRun:
    """Join a run by its link, or that of the environment, or start one. The options are those of JoinConfig."""
    return join_or_start(JoinConfig(initial_peers=link or None, **options))


def join_or_start(config: JoinConfig, run: Joined | None = None) -> OpenRun:
    """Join the run that the configuration leads to; a run that is joined already is taken as it is."""
    part = OpenRun(run, is_ours=False) if run is not None else _joined_or_started(config)
    return part.tell_more() if config.verbose else part


def _joined_or_started(config: JoinConfig) -> OpenRun:
    link = config.link()
    if link:
        return OpenRun(_join(link, config))
    settings = config.embedded
    if settings == EmbeddedConfig() and (address := environment.listen_address()):
        settings = replace(settings, listen=address)
    embedded = EmbeddedRun(run_name(config.run_id or DEFAULT_RUN), settings).start()
    try:
        joined = _join(embedded.link, config)
    except BaseException:
        embedded.close()
        raise
    _tell(embedded.link)
    return OpenRun(joined, embedded)


def run_name(text: str) -> str:
    """A run's name out of whatever hivemind takes for one."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-")


def _join(link: str, config: JoinConfig) -> Joined:
    identity = Identity.open(Path(config.identity_path).expanduser()) if config.identity_path is not None else None
    try:
        return join(link, identity=identity, **config.peer_options()).open()
    except BaseException:
        if identity is not None:
            identity.close()
        raise


def _one_link(given: str | Sequence[str]) -> str:
    links = [given] if isinstance(given, str) else list(dict.fromkeys(map(str, given)))
    links = [link for link in links if link.strip()]
    if not links:
        return ""
    if any(link.lstrip().startswith(("/ip4/", "/ip6/", "/dns")) for link in links):
        raise ConfigurationError(
            f"initial_peers={links[0]!r} is an address of hivemind's: give the join link of a Potluck run, which "
            "the first peer prints (potluck://…)"
        )
    if len(links) > 1:
        raise ConfigurationError(f"initial_peers has {len(links)} links: a run has one link, which names all its hubs")
    return links[0]


def _tell(link: str) -> None:
    sys.stdout.write(
        "Potluck: others join this run by starting the same program with\n"
        f"  POTLUCK_LINK='{link}'\n"
        "in their environment, or with that link as initial_peers. Everyone who has the link is trusted with the run.\n"
    )
    sys.stdout.flush()
