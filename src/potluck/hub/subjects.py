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
    p.RUN.plan.PEER           a coordinator's plans
    p.RUN.news.PEER.TOPIC     whatever else a member tells all others
    p.RUN.g.GROUP.…           plan.PEER, beacon.PEER and news.PEER.TOPIC of a group other than `main`
    p.RUN.kv.STORE.KEY        the guard's writes to a store;  p.RUN.changed.STORE.KEY  its changes, told by the hub

The group `main` has no token: its subjects and keys are those of the run. `subjects.of_group("critic")` builds the same
subjects under `p.RUN.g.critic`. What such a group keeps in stores stands in the store `groups`, under `g.critic.`.
"""

from __future__ import annotations

import re

from potluck.errors import ConfigurationError

RUN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,46}[a-z0-9])?")
PEER_ID = re.compile(r"U[A-Z2-7]{55}")
MAIN = "main"  # the group that every run has
ANY_GROUP = "*"  # in a subject to listen on, or in what an invite allows


def check_run_name(run: str) -> str:
    """The name itself, or ConfigurationError."""
    if not RUN_NAME.fullmatch(run):
        raise ConfigurationError(
            f"{run!r} cannot name a run: use 1 to 48 lower-case letters, digits and inner hyphens, as in my-first-run"
        )
    return run


def check_group_name(group: str) -> str:
    """The name itself, or ConfigurationError."""
    if not RUN_NAME.fullmatch(group):
        raise ConfigurationError(
            f"{group[:80]!r} cannot name a group: use 1 to 48 lower-case letters, digits and inner hyphens (stage-2)"
        )
    return group


class Subjects:
    """Builds the subjects of one run, and of one group of it."""

    def __init__(self, run: str, group: str = MAIN) -> None:
        self.run = check_run_name(run)
        self.group = group if group == ANY_GROUP else check_group_name(group)
        self.root = f"p.{run}"
        is_main = group == MAIN
        self._group_root = self.root if is_main else f"{self.root}.g.{group}"
        self.scope = run if is_main else f"{run}/{group}"
        """What signatures cover, so that a message of one group means nothing in another."""
        self.key_prefix = "" if is_main else f"g.{group}."
        """How this group's keys in the store `groups` begin."""

    def of_group(self, group: str) -> Subjects:
        """The same run's subjects for a group; `*`, to listen or to permit: for all groups but `main`."""
        return Subjects(self.run, group)

    def every_peer(self, kind: str) -> str:
        """The subject of one kind of message from any peer, to listen on."""
        return f"{self.root}.{kind}.*"

    def lobby(self, peer: str) -> str:
        return f"{self.root}.lobby.{peer}"

    def card(self, peer: str) -> str:
        return f"{self.root}.card.{peer}"

    def beacon(self, peer: str) -> str:
        return f"{self._group_root}.beacon.{peer}"

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
        return f"{self._group_root}.plan.{peer}"

    def news(self, peer: str, topic: str) -> str:
        return f"{self._group_root}.news.{peer}.{topic}"

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
