"""What a conductor tells all who look: Conductor.overview(), as news."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.messages import Message

OVERVIEW_TOPIC = "pipeline"


class Overview(Message, frozen=True, kw_only=True, tag="pipeline.overview"):
    """As JSON."""

    text: Annotated[str, msgspec.Meta(max_length=1 << 19)]
