"""JetStream's answers, as far as we look at them."""

from __future__ import annotations

import msgspec

from potluck.errors import ConfigurationError, HubUnavailableError, NobodyAnswersError, PotluckError, ProtocolError

STREAM_NAME_IN_USE = 10058  # the stream exists with another configuration
WRONG_LAST_SEQUENCE = (10071, 10164)  # a compare-and-set failed
# A cluster whose servers have not all found each other: too few peers, not available now, not the leader.
UNAVAILABLE = 503
PASSING = (10005, 10008, 10009)


class JetStreamError(msgspec.Struct, frozen=True):
    """Why JetStream did not do it."""

    code: int = 0
    err_code: int = 0
    description: str = ""

    def explained(self, problem: str) -> PotluckError:
        """One of our errors: worth another try if the trouble may pass, else not."""
        text = f"{problem}: {self.description} (JetStream error {self.err_code})"
        if self.code == UNAVAILABLE:
            return NobodyAnswersError(text)
        return HubUnavailableError(text) if self.err_code in PASSING else ConfigurationError(text)


class JetStreamAnswer(msgspec.Struct, frozen=True):
    """The answer to a write or to a change of a stream."""

    seq: int = 0
    error: JetStreamError | None = None


_decoder = msgspec.json.Decoder(JetStreamAnswer)


def decode_answer(data: bytes) -> JetStreamAnswer:
    """The answer in `data`, or ProtocolError."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the hub's answer cannot be read: {error}") from error
