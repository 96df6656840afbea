"""The subjects of one run, each built in one place.

Everything of a run is under `p.RUN`. A member's own id is a token of every subject it may publish on, and the
hub enforces that (permissions.py), so a receiver reads the sender off the subject and can trust it.

    p.RUN.lobby.PEER          request: an application for access (the only thing a stranger may do)
    p.RUN.card.PEER           request: a member tells who it is and where it can be reached
    p.RUN.beacon.PEER         a sign of life each second
    p.RUN.leave.PEER          request: a member says good-bye
    p.RUN.ask.PEER.SERVICE    request to the guard: `time`, …
    p.RUN.read.PEER.STORE     request to the guard: entries of a store, as JetStream's direct get gives them
    p.RUN.write.PEER.STORE.…  request to the guard by a coordinator: a write of a key of a store
    p.RUN.organise.PEER.VERB  request to the guard by an organiser: invite, approve, ban, …
    p.RUN.relay.TO.FROM       link packets that find no direct way
    p.RUN.plan.PEER           a coordinator's plans;  p.RUN.commit.PEER  its commits
    p.RUN.news.PEER.TOPIC     whatever else a member tells all others
    p.RUN.kv.STORE.KEY        the guard's writes to a store;  p.RUN.changed.STORE.KEY  its changes, told by the hub
"""

from __future__ import annotations

import re

from potluck.errors import ConfigurationError

RUN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")
PEER_ID = re.compile(r"U[A-Z2-7]{55}")


def check_run_name(run: str) -> str:
    """The name itself, or ConfigurationError."""
    if not RUN_NAME.fullmatch(run):
        raise ConfigurationError(
            f"{run!r} cannot name a run: use 1 to 48 lower-case letters, digits and inner hyphens, as in my-first-run"
        )
    return run


class Subjects:
    """Builds the subjects of one run."""

    def __init__(self, run: str) -> None:
        self.run = check_run_name(run)
        self.root = f"p.{run}"

    def every_peer(self, kind: str) -> str:
        """The subject of one kind of message from any peer, to listen on."""
        return f"{self.root}.{kind}.*"

    def lobby(self, peer: str) -> str:
        return f"{self.root}.lobby.{peer}"

    def card(self, peer: str) -> str:
        return f"{self.root}.card.{peer}"

    def beacon(self, peer: str) -> str:
        return f"{self.root}.beacon.{peer}"

    def leave(self, peer: str) -> str:
        return f"{self.root}.leave.{peer}"

    def ask(self, peer: str, service: str) -> str:
        return f"{self.root}.ask.{peer}.{service}"

    def read(self, peer: str, store: str) -> str:
        return f"{self.root}.read.{peer}.{store}"

    def write(self, peer: str, store: str, key: str) -> str:
        return f"{self.root}.write.{peer}.{store}.{key}"

    def organise(self, peer: str, verb: str) -> str:
        return f"{self.root}.organise.{peer}.{verb}"

    def relay(self, receiver: str, sender: str) -> str:
        return f"{self.root}.relay.{receiver}.{sender}"

    def plan(self, peer: str) -> str:
        return f"{self.root}.plan.{peer}"

    def commit(self, peer: str) -> str:
        return f"{self.root}.commit.{peer}"

    def news(self, peer: str, topic: str) -> str:
        return f"{self.root}.news.{peer}.{topic}"

    def store_write(self, store: str, key: str) -> str:
        return f"{self.root}.kv.{store}.{key}"

    def store_change(self, store: str, key: str) -> str:
        return f"{self.root}.changed.{store}.{key}"

    def stream(self, store: str) -> str:
        """The JetStream stream behind a store."""
        return f"potluck_{self.run}_{store}"

    @staticmethod
    def inbox(peer: str) -> str:
        """The prefix of a peer's reply subjects; nobody else may listen there."""
        return f"_INBOX.{peer}"
