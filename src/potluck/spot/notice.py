"""The notice that a spot machine gets before it is taken away, as a request to leave.

AWS says it two minutes ahead in the instance's metadata (version 2, which wants a token first). `watch` runs a command
and sends it SIGTERM then: `potluck join` hands in what it has done and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

import httpx

logger = logging.getLogger(__name__)

METADATA_URL = "http://169.254.169.254"
POLL_SECONDS = 5.0
TOKEN_SECONDS = 21_600
TIMEOUT_SECONDS = 2.0


class MetadataNotice:
    """Asks the metadata service whether this machine is about to be taken away."""

    def __init__(self, url: str = METADATA_URL) -> None:
        """Nothing is asked yet."""
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, trust_env=False)
        self._token = ""

    async def __call__(self) -> str:
        """Return what is going to happen, as in `terminate at 2026-11-18T02:30:00Z`; empty where nothing is."""
        try:
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                self._token = (await self._client.put("/latest/api/token", headers=headers)).raise_for_status().text
            answer = await self._client.get(
                "/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": self._token}
            )
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                self._token = ""  # it has expired
                return ""
            if answer.status_code != httpx.codes.OK:
                return ""
            action = answer.json()
            return f"{action.get('action', 'terminate')} at {action.get('time', 'an unknown time')}"
        except (httpx.HTTPError, ValueError) as error:
            logger.debug("the metadata service did not answer: %s", error)
            return ""

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


async def watch(
    argv: Sequence[str],
    notice: Callable[[], Awaitable[str]],
    *,
    stop: asyncio.Event,
    poll_seconds: float = POLL_SECONDS,
    say: Callable[[str], None] = logger.warning,
) -> int:
    """Run a command; ask it to leave when there is a notice or `stop` is set; return its exit code."""
    process = await asyncio.create_subprocess_exec(*argv)
    ended = asyncio.create_task(process.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not ended.done():
            why = "asked to stop" if stop.is_set() else await notice()
            if why:
                say(f"{why}: the peer hands in its work and leaves")
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                break
            pause = asyncio.create_task(asyncio.sleep(poll_seconds))
            await asyncio.wait({ended, stopping, pause}, return_when=asyncio.FIRST_COMPLETED)
            pause.cancel()
        return await ended
    finally:
        stopping.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
