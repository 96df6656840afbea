"""The run's notice board: the manifest in the hub, signed by an organiser.

The guard lets only organisers put it up, and everybody checks the signature for itself: a hub that belongs to somebody
else can withhold a manifest, but not change one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Self

from potluck.errors import ConfigurationError, DeadlineExceededError, ProtocolError, RetryableError
from potluck.hub.connection import Entry, HubConnection, Subscription
from potluck.hub.keys import Signer, verify
from potluck.hub.stores import MANIFEST_KEY
from potluck.messages import Message, decode, encode
from potluck.peer.groupsession import GroupSession
from potluck.peer.session import Session
from potluck.training.manifest.manifest import Manifest

logger = logging.getLogger(__name__)

LIMIT_BYTES = 48 * 1024
RETRY_SECONDS = 0.5


class SignedManifest(Message, frozen=True, kw_only=True):
    """What stands in the store."""

    body: bytes
    organiser: str
    signature: bytes


def sign(manifest: Manifest, signer: Signer) -> bytes:
    """A manifest as it is put up; ConfigurationError when nobody could read it: such a run could not be mended."""
    try:
        body = encode(manifest)
    except (OverflowError, ValueError) as error:  # an integer of more than 64 bits, a text that is no text
        raise ConfigurationError(f"the manifest cannot be written down: {error}. Choose other values") from error
    if len(body) > LIMIT_BYTES - 1024:  # beside the key and the signature
        raise ConfigurationError(
            f"the manifest has {len(body)} bytes, of {LIMIT_BYTES - 1024} at most: plan fewer changes in advance"
        )
    try:
        decode(Manifest, body)
    except ProtocolError as error:
        raise ConfigurationError(f"peers could not read this manifest, {error}. Choose other values") from error
    signature = signer.sign(_context(manifest.run) + body)
    return encode(SignedManifest(body=body, organiser=signer.public_key, signature=signature))


def read(data: bytes, run: str) -> tuple[Manifest, str]:
    """The manifest and who signed it; ProtocolError unless somebody did, for this run."""
    signed = decode(SignedManifest, data, limit_bytes=LIMIT_BYTES)
    if not verify(signed.organiser, _context(run) + signed.body, signed.signature):
        raise ProtocolError(f"the manifest of run {run} is not signed by {signed.organiser}: ignored")
    manifest = decode(Manifest, signed.body, limit_bytes=LIMIT_BYTES)
    if manifest.run != run:
        raise ProtocolError(f"the manifest is of run {manifest.run}, not of {run}: ignored")
    return manifest, signed.organiser


class NoticeBoard:
    """Follows a run's manifest."""

    def __init__(self, hub: HubConnection, run: str, check: Callable[[str], None] | None = None) -> None:
        """`check` gets the first organiser's key, and raises ConfigurationError if it is not the run's."""
        self._check = check or (lambda _organiser: None)
        self._refusal: ConfigurationError | None = None
        self.bad_manifests = 0
        self.manifest: Manifest | None = None
        self.organiser = ""
        self.signed = b""
        """The newest manifest as its organiser signed it."""
        self._hub = hub
        self._run = run
        self._watch: Subscription | None = None
        self._news = asyncio.Event()
        self._listeners: list[Callable[[Manifest], None]] = []

    @classmethod
    def of(cls, session: Session | GroupSession) -> Self:
        """That of a peer, which knows from its join link who the organiser is."""
        return cls(session.hub, session.subjects.run, session.check_organiser)

    async def start(self) -> None:
        """Read the manifest, if there is one, and follow it; while the hub is away, wait for it."""
        while self._watch is None:
            try:
                self._watch = await self._hub.store("manifest").watch(self._changed)
            except RetryableError as error:
                logger.info("the manifest cannot be read yet, trying on: %s", error)
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """Stop following. Idempotent."""
        if self._watch is not None:
            await self._watch.cancel()
            self._watch = None

    def listen(self, listener: Callable[[Manifest], None]) -> None:
        """Call `listener` with each newer manifest."""
        self._listeners.append(listener)

    async def first(self, timeout_seconds: float | None = None) -> Manifest:
        """The manifest, as soon as there is one; ConfigurationError if somebody else than the organiser signed it."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._news.wait()
        except TimeoutError:
            raise DeadlineExceededError(f"the organiser has not said yet what run {self._run} trains") from None
        self.check()
        assert self.manifest is not None
        return self.manifest

    def check(self) -> None:
        """ConfigurationError if there is a manifest, but of somebody else than the organiser."""
        if self._refusal is not None and self.manifest is None:
            raise self._refusal

    def _changed(self, entry: Entry) -> None:
        if entry.key != MANIFEST_KEY or entry.value is None:
            return
        try:
            manifest, organiser = read(entry.value, self._run)
        except ProtocolError as error:
            self._pass_over(str(error))
            return
        known = self.manifest
        if known is None:
            try:
                self._check(organiser)
            except ConfigurationError as error:
                self._refusal = error
                self._news.set()
                self._pass_over(str(error))
                return
        if known is not None and organiser != self.organiser:
            self._pass_over(f"{organiser} signed it, and not {self.organiser}, who signed the one before")
        elif known is None or manifest.revision > known.revision:
            self.manifest, self.organiser, self.signed = manifest, organiser, entry.value
            self._news.set()
            for listener in self._listeners:
                listener(manifest)

    def _pass_over(self, why: str) -> None:
        self.bad_manifests += 1
        logger.warning("a manifest is passed over: %s", why)


def _context(run: str) -> bytes:
    return f"potluck manifest {run}\0".encode()
