"""What a host tells everybody of its own troubles, for monitors and dashboards. Shown, never acted upon.

It goes over plain messages and not into a store: when the host's disk is full, stores are what does not work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec

from potluck.errors import RetryableError
from potluck.messages import Message, encode
from potluck.peer.session import Session

logger = logging.getLogger(__name__)

TOPIC = "host"
EVERY_SECONDS = 5.0
FRESH_SECONDS = 3 * EVERY_SECONDS  # news that are older say nothing any more
MAX_TROUBLES = 8
MAX_TEXT = 1000
MAX_NEWS_BYTES = 16 * 1024


class HostNews(Message, frozen=True, kw_only=True):
    """The troubles of one host by kind, with what to do about each; none: all is well again."""

    troubles: Annotated[
        dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]],
        msgspec.Meta(max_length=MAX_TROUBLES),
    ]


async def tell_troubles(session: Session, troubles: Callable[[], Mapping[str, str]]) -> None:
    """Tell of troubles for as long as there are any, and once that they are over; returns never."""
    told: Mapping[str, str] = {}
    while True:
        now = troubles()
        if now or told:
            news = HostNews(troubles={kind: text[:MAX_TEXT] for kind, text in now.items()})
            try:
                await session.hub.publish(session.subjects.news(session.peer_id, TOPIC), encode(news))
            except RetryableError as error:
                logger.debug("the host's troubles could not be told: %s", error)
            else:
                told = now
        await asyncio.sleep(EVERY_SECONDS)
