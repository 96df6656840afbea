"""What a peer tells of its links, for a picture of the run. Shown, never trusted."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.link.counters import LinkStatistics
from potluck.messages import Message

TOPIC = "links"
MAX_LINKS = 32  # those that have carried most
MAX_NEWS_BYTES = 8 * 1024

Name = Annotated[str, msgspec.Meta(max_length=64)]


class LinkFigures(Message, frozen=True, kw_only=True, array_like=True):
    """One link, as one of its two ends sees it."""

    peer: Name
    path: Name  # the kind of carrier: direct or relay
    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None
    rtt_seconds: float | None = None
    sent_bytes: int = 0


class LinkNews(Message, frozen=True, kw_only=True):
    """The links of one peer that have a path now."""

    links: Annotated[tuple[LinkFigures, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()


def link_news(own: str, statistics: LinkStatistics) -> LinkNews:
    """What is worth telling."""
    links = [
        LinkFigures(
            peer=peer,
            path=link.path,
            upload_bytes_per_second=link.upload_bytes_per_second,
            download_bytes_per_second=link.download_bytes_per_second,
            rtt_seconds=link.rtt_seconds,
            sent_bytes=link.counters.bytes_sent,
        )
        for peer, link in statistics.peers.items()
        if link.path is not None and peer != own
    ]
    links.sort(key=lambda link: (-link.sent_bytes, link.peer))
    return LinkNews(links=tuple(links[:MAX_LINKS]))
