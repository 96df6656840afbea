"""What a peer says about what passed between it and the servers beside it, for spot checks (judging.py).

    before it                    a server that is checked                 after it
    sent the input      ─────▶                             ─────▶   got the output
    got its gradient    ◀─────                             ◀─────   sent the output's gradient

The neighbours of a server that is checked in this step send copies to its verifier. The server itself is not told; it
keeps a short digest of all that passes, in every step, so that no neighbour can tell a verifier something else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Sequence

from potluck import tasks
from potluck.errors import PeerError, RetryableError
from potluck.link.carrier import Buffer
from potluck.link.dispatch import Incoming
from potluck.link.links import Links
from potluck.pipeline.messages import AskStatement, Passed, Passing, SpotCheck, Statement, Testimony
from potluck.pipeline.wire import TensorSpec

logger = logging.getLogger(__name__)

SEND_SECONDS = 60.0


def digest_of_frames(frames: Iterable[Buffer]) -> str:
    """Of what travelled."""
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()[:32]


class Witness:
    """One peer's memory of a step, as server, neighbour and feeder."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._step = -1
        self._is_on = False
        self._verifiers: dict[str, str] = {}
        self._passed: dict[tuple[int, int, int, Passing], str] = {}
        self._sending: set[asyncio.Task[None]] = set()
        links.handle(AskStatement, self._state)

    async def close(self) -> None:
        """Idempotent."""
        self._links.unhandle(AskStatement)
        await tasks.end(*self._sending)

    def begin(self, step: int, checks: Sequence[SpotCheck], *, is_on: bool) -> None:
        """A step's attempt begins."""
        self._is_on = is_on
        self.watch(step, checks)

    def watch(self, step: int, checks: Sequence[SpotCheck]) -> None:
        """Tell these verifiers what passes between us and their servers."""
        if step != self._step:
            self._passed.clear()
        self._step = step
        self._verifiers = {check.server: check.verifier for check in checks}

    # About oneself

    def note(self, kind: Passing, stage: int, attempt: int, micro: int, frames: Iterable[Buffer]) -> None:
        """Something passed in or out of a stage here."""
        if self._is_on:
            self._passed[attempt, micro, stage, kind] = digest_of_frames(frames)

    def _state(self, incoming: Incoming[AskStatement]) -> Statement:
        found = self._passed.items() if incoming.message.step == self._step else ()
        return Statement(
            passed=tuple(
                Passed(attempt=attempt, id=micro, stage=stage, kind=kind, digest=digest)
                for (attempt, micro, stage, kind), digest in found
            )
        )

    # About others

    def testify(
        self,
        kind: Passing,
        server: str,
        stage: int,
        attempt: int,
        micro: int,
        tensors: tuple[TensorSpec, ...] = (),
        frames: Sequence[Buffer] = (),
        *,
        samples: int = 0,
        loss: float = 0.0,
    ) -> None:
        """Something passed between us and a stage of this server: its verifier hears of it, where it has one."""
        verifier = self._verifiers.get(server)
        if verifier is None:
            return
        message = Testimony(
            server=server,
            step=self._step,
            attempt=attempt,
            id=micro,
            stage=stage,
            kind=kind,
            tensors=tensors,
            samples=samples,
            loss=loss,
        )
        copies = [bytes(frame) for frame in frames]  # what came over a link is only lent
        task = asyncio.create_task(self._send(verifier, message, copies))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, verifier: str, message: Testimony, frames: list[bytes]) -> None:
        try:
            await self._links.send(verifier, message, frames, timeout_seconds=SEND_SECONDS, bulk=True)
        except (PeerError, RetryableError) as error:  # a check that lacks something finds nothing
            logger.info("%s does not hear what passed %s: %s", verifier[:8], message.server[:8], error)
