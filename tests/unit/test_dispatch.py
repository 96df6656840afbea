"""What becomes of a handler that fails."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from potluck.errors import DeadlineExceededError, HubUnavailableError
from potluck.hub.connection import Delivery
from potluck.hub.nats.dispatch import DispatchCounts, Dispatcher
from potluck.sim.virtualloop import in_virtual_time


@dataclass(frozen=True)
class Message:
    payload: bytes = b""
    subject: str = "p.bakery.news"
    reply: str = ""

    async def respond(self, payload: bytes) -> None:
        raise AssertionError("nobody asked")


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceededError("no answer on p.bakery.read within 5 s"),
        HubUnavailableError("the hub is away"),
        TimeoutError(),
    ],
)
def test_a_handler_that_finds_no_answer_is_one_plain_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """As when the process, or the hub, stood still for longer than the handler's timeout."""

    @in_virtual_time
    async def scene() -> None:
        counts, heard = DispatchCounts(), []

        async def handle(delivery: Delivery) -> None:
            await asyncio.sleep(1.0)
            heard.append(delivery.payload)
            if delivery.payload == b"1":
                raise error

        dispatcher = Dispatcher("p.bakery.news", handle, counts)
        dispatcher.offer(Message(b"1"))
        dispatcher.offer(Message(b"2"))
        await asyncio.sleep(10.0)
        await dispatcher.close()
        assert (heard, counts.handled, counts.handler_errors) == ([b"1", b"2"], 1, 1)

    scene()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert record.getMessage().endswith(str(error) or "it took too long")
