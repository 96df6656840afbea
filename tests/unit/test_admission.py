"""Getting in, in virtual time, with a guard that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, get_args

import pytest

from potluck.errors import (
    BannedError,
    CertificateError,
    ConfigurationError,
    HubUnavailableError,
    NotAdmittedError,
    PotluckError,
    RoleRefusedError,
    SeatsTakenError,
)
from potluck.hub.access.application import Answer, Application, RefusalCode, waiting_subject
from potluck.hub.access.member import Scopes
from potluck.hub.connection import Delivery
from potluck.hub.guard.permissions import lobby_permissions
from potluck.hub.subjects import Subjects
from potluck.messages import decode, encode
from potluck.peer import admission
from potluck.peer.admission import be_admitted, refusal, why_refused
from potluck.peer.identity import Identity
from potluck.sim.memoryhub import MemoryConnection, MemoryHub
from potluck.sim.virtualloop import LoopClock, in_virtual_time

SUBJECTS = Subjects("test")
PEER = Identity.temporary().peer_id
ADMITTED = Answer(status="admitted")
WAITING = Answer(status="waiting", place=3)
FULL = Answer(status="refused", code="lobby_full", message="200 others wait", retry_after_seconds=30.0)
APPLICATION = Application(role="trainer", invite="secret-invite", token="hf_x", name="Ada", message="hello")

Reply = Answer | bytes | None  # None: silence
Script = Callable[[Application], Reply]


class House:
    """A hub in memory with a lobby; must be made in a running loop."""

    def __init__(self, script: Script = lambda _: ADMITTED) -> None:
        self.hub = MemoryHub("test")
        self.clock = LoopClock()
        self.script = script
        self.applications: list[Application] = []
        self.lanes: list[str] = []
        self.error: PotluckError | None = None  # what connecting runs into
        self.guard: MemoryConnection | None = None

    async def open(self) -> House:
        self.guard = self.hub.connect("GUARD")
        await self.guard.subscribe(SUBJECTS.every_peer("lobby"), self._answer)
        return self

    async def connect(self, lane: str, **options: Any) -> MemoryConnection:
        self.lanes.append(lane)
        if self.error is not None:
            raise self.error
        return self.hub.connect(PEER, lobby_permissions(SUBJECTS, PEER), **options)

    async def decide(self, answer: Answer) -> None:
        assert self.guard is not None
        await self.guard.publish(waiting_subject(PEER), encode(answer))

    async def admit(self, **options: Any) -> Answer:
        return await be_admitted(self.connect, SUBJECTS, PEER, APPLICATION, **options)

    async def why(self) -> PotluckError | None:
        return await why_refused(self.connect, SUBJECTS, PEER, APPLICATION)

    async def _answer(self, delivery: Delivery) -> None:
        self.applications.append(decode(Application, delivery.payload))
        reply = self.script(self.applications[-1])
        if reply is not None:
            await delivery.respond(reply if isinstance(reply, bytes) else encode(reply))

    def assert_closed(self) -> None:
        """Nobody but the guard is connected any more."""
        assert [connection.peer for connection in self.hub.connections] == ["GUARD"]

    async def close(self) -> None:
        for connection in list(self.hub.connections):
            await connection.close()


RUNNING: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive


def spawn(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    RUNNING.add(task)
    task.add_done_callback(RUNNING.discard)


def refused(code: RefusalCode, **more: Any) -> Answer:
    return Answer(status="refused", code=code, message=f"no: {code}", **more)


@in_virtual_time
async def test_a_valid_invite_lets_in() -> None:
    house = await House().open()
    waited: list[Answer] = []
    assert await house.admit(on_waiting=waited.append) == ADMITTED
    assert house.applications == [APPLICATION]
    assert house.lanes == ["lobby"]
    assert not waited
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_a_refused_role_says_which_would_be_allowed() -> None:
    house = await House(lambda _: refused("role", scopes=Scopes(roles=("aux",)))).open()
    with pytest.raises(RoleRefusedError) as caught:
        await house.admit()
    assert caught.value.allowed == ("aux",)
    await house.close()


REFUSALS: list[tuple[RefusalCode, dict[str, Any], type[PotluckError]]] = [
    ("banned", {}, BannedError),
    ("seats", {"retry_after_seconds": 30.0}, SeatsTakenError),
    ("role", {}, RoleRefusedError),
    ("version_too_old", {}, ConfigurationError),
    ("version_too_new", {}, ConfigurationError),
    ("token_service_down", {"retry_after_seconds": 5.0}, HubUnavailableError),
    ("too_many_tries", {"retry_after_seconds": 5.0}, HubUnavailableError),
    ("hub_busy", {"retry_after_seconds": 5.0}, HubUnavailableError),
    ("closed", {"retry_after_seconds": 300.0}, HubUnavailableError),
    ("closed", {}, NotAdmittedError),
    ("unknown_invite", {}, NotAdmittedError),
    ("expired", {}, NotAdmittedError),
    ("revoked", {}, NotAdmittedError),
    ("used_up", {}, NotAdmittedError),
    ("denied", {}, NotAdmittedError),
    ("kept_out", {"retry_after_seconds": 60.0}, HubUnavailableError),
    ("bad_token", {}, NotAdmittedError),
    ("not_listed", {}, NotAdmittedError),
    ("malformed", {}, NotAdmittedError),
]


@pytest.mark.parametrize(("code", "more", "kind"), REFUSALS)
@in_virtual_time
async def test_each_refusal_is_its_own_error(code: RefusalCode, more: dict[str, Any], kind: type[PotluckError]) -> None:
    house = await House(lambda _: refused(code, **more)).open()
    with pytest.raises(kind, match=f"no: {code}") as caught:
        await house.admit(wait_seconds=3600)
    assert type(caught.value) is kind
    house.assert_closed()
    await house.close()


def test_every_code_of_the_lobby_has_been_thought_of() -> None:
    assert {code for code, _, _ in REFUSALS} | {"lobby_full"} == set(get_args(RefusalCode))


def test_when_to_try_again_is_told() -> None:
    assert "again in 30 s" in str(refusal(refused("too_many_tries", retry_after_seconds=30)))


@in_virtual_time
async def test_waiting_then_approved() -> None:
    house = await House(lambda _: WAITING).open()
    waited: list[Answer] = []
    house.hub.call_later(100.0, lambda: spawn(house.decide(ADMITTED)))
    started = house.clock.monotonic()
    assert await house.admit(wait_seconds=3600, on_waiting=waited.append) == ADMITTED
    assert waited == [WAITING]
    assert house.clock.monotonic() - started == pytest.approx(100.0)
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_waiting_then_denied() -> None:
    house = await House(lambda _: WAITING).open()
    house.hub.call_later(5.0, lambda: spawn(house.decide(refused("denied"))))
    with pytest.raises(NotAdmittedError, match="no: denied"):
        await house.admit(wait_seconds=3600)
    await house.close()


@in_virtual_time
async def test_an_approval_that_got_lost_is_learnt_by_asking_again() -> None:
    house = await House(lambda _: ADMITTED if house.clock.monotonic() > started + 50 else WAITING).open()
    started = house.clock.monotonic()
    assert await house.admit(wait_seconds=3600) == ADMITTED
    assert house.clock.monotonic() - started <= 50 + admission.ASK_AGAIN_SECONDS
    assert len(house.applications) <= 5
    await house.close()


@in_virtual_time
async def test_a_new_place_in_the_list_is_no_new_wait() -> None:
    places = iter((3, 2, 1))
    house = await House(lambda _: Answer(status="waiting", place=next(places))).open()
    waited: list[Answer] = []
    with pytest.raises(NotAdmittedError, match="place 1 in the list"):
        await house.admit(wait_seconds=45, on_waiting=waited.append)
    assert [answer.place for answer in waited] == [3]
    await house.close()


@pytest.mark.parametrize("wait_seconds", [0.0, 7.0, 3600.0])
@in_virtual_time
async def test_waiting_too_long(wait_seconds: float) -> None:
    house = await House(lambda _: WAITING).open()
    started = house.clock.monotonic()
    with pytest.raises(NotAdmittedError, match=r"not let you in yet \(place 3 in the list\).*join again later"):
        await house.admit(wait_seconds=wait_seconds)
    assert house.clock.monotonic() - started == pytest.approx(wait_seconds, abs=0.1)
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_a_full_lobby_is_told_and_tried_again() -> None:
    answers = iter([FULL, FULL, WAITING])
    house = await House(lambda _: next(answers, ADMITTED)).open()
    waited: list[Answer] = []
    assert await house.admit(wait_seconds=3600, on_waiting=waited.append) == ADMITTED
    assert [answer.code or answer.status for answer in waited] == ["lobby_full", "waiting"]
    assert house.lanes == ["lobby"] * 3
    house.assert_closed()
    await house.close()


@pytest.mark.parametrize("wait_seconds", [0.0, 100.0])
@in_virtual_time
async def test_a_lobby_that_stays_full(wait_seconds: float) -> None:
    house = await House(lambda _: FULL).open()
    started = house.clock.monotonic()
    with pytest.raises(HubUnavailableError, match=r"200 others wait \(again in 30 s\)"):
        await house.admit(wait_seconds=wait_seconds)
    assert house.clock.monotonic() - started == pytest.approx(wait_seconds, abs=0.1)
    await house.close()


@in_virtual_time
async def test_a_lobby_that_lets_nobody_in_is_tried_a_few_times() -> None:
    house = await House().open()
    house.error = NotAdmittedError("authorization violation")
    with pytest.raises(HubUnavailableError, match="lets nobody into its lobby: `potluck host` is not running, or more"):
        await house.admit(wait_seconds=3600)
    assert len(house.lanes) == admission.KNOCKS
    await house.close()


@in_virtual_time
async def test_a_silent_guard() -> None:
    house = await House(lambda _: None).open()
    started = house.clock.monotonic()
    with pytest.raises(HubUnavailableError, match="nobody answers at its lobby: is `potluck host` running"):
        await house.admit(wait_seconds=3600)
    assert house.clock.monotonic() - started == pytest.approx(admission.ANSWER_TIMEOUT_SECONDS)
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_no_guard_at_all() -> None:
    house = await House().open()
    assert house.guard is not None
    await house.guard.close()
    with pytest.raises(HubUnavailableError, match="nobody answers at its lobby"):
        await house.admit()
    await house.close()


@in_virtual_time
async def test_what_connecting_runs_into_is_told_as_it_is() -> None:
    house = await House().open()
    for error in (HubUnavailableError("nothing answers"), CertificateError("another hub")):
        house.error = error
        with pytest.raises(type(error), match=str(error)):
            await house.admit(wait_seconds=3600)
    await house.close()


@in_virtual_time
async def test_an_answer_of_another_version() -> None:
    house = await House(lambda _: encode({"status": "perhaps"})).open()
    with pytest.raises(ConfigurationError, match="another version of Potluck"):
        await house.admit()
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_nonsense_where_the_decision_should_come_changes_nothing() -> None:
    house = await House(lambda _: WAITING).open()
    assert house.guard is not None
    guard = house.guard
    house.hub.call_later(2.0, lambda: spawn(guard.publish(waiting_subject(PEER), b"\xc1")))
    house.hub.call_later(4.0, lambda: spawn(house.decide(ADMITTED)))
    started = house.clock.monotonic()
    assert await house.admit(wait_seconds=60) == ADMITTED
    assert house.clock.monotonic() - started == pytest.approx(4.0)
    await house.close()


@in_virtual_time
async def test_a_restart_of_the_hub_does_not_end_the_wait() -> None:
    house = await House(lambda _: WAITING).open()
    waited: list[Answer] = []

    def restart() -> None:
        house.error = HubUnavailableError("connection refused")
        house.hub.disconnect(PEER)

    def be_back() -> None:
        house.error = None
        house.script = lambda _: ADMITTED

    house.hub.call_later(10.0, restart)
    house.hub.call_later(100.0, be_back)
    assert await house.admit(wait_seconds=3600, on_waiting=waited.append) == ADMITTED
    assert len(waited) == 1
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_patience_ends_also_while_the_hub_is_away() -> None:
    house = await House(lambda _: WAITING).open()

    def restart() -> None:
        house.error = HubUnavailableError("connection refused")
        house.hub.disconnect(PEER)

    house.hub.call_later(10.0, restart)
    started = house.clock.monotonic()
    with pytest.raises(NotAdmittedError, match="not let you in yet"):
        await house.admit(wait_seconds=42)
    assert house.clock.monotonic() - started == pytest.approx(42, abs=0.1)
    await house.close()


# Why a member is not let back in


@in_virtual_time
async def test_a_banned_member_learns_why() -> None:
    house = await House(lambda _: refused("banned")).open()
    error = await house.why()
    assert isinstance(error, BannedError)
    assert str(error) == "no: banned"
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_asking_why_uses_up_nothing() -> None:
    house = await House(lambda _: refused("banned")).open()
    await house.why()
    [question] = house.applications
    assert (question.invite, question.token, question.message) == ("", "", "")
    assert (question.role, question.name) == ("trainer", "Ada")
    await house.close()


@pytest.mark.parametrize(
    "answer",
    [ADMITTED, refused("seats", retry_after_seconds=30), refused("hub_busy", retry_after_seconds=3), None, b"\xc1"],
)
@in_virtual_time
async def test_what_may_pass_is_no_reason(answer: Reply) -> None:
    house = await House(lambda _: answer).open()
    assert await house.why() is None
    house.assert_closed()
    await house.close()


@in_virtual_time
async def test_a_hub_without_a_guard_gives_no_reason() -> None:
    house = await House().open()
    for error in (NotAdmittedError("authorization violation"), HubUnavailableError("nothing answers")):
        house.error = error
        assert await house.why() is None
    await house.close()


@pytest.mark.parametrize("answer", [WAITING, refused("closed"), refused("denied"), refused("version_too_old")])
@in_virtual_time
async def test_who_is_no_longer_wanted_learns_it(answer: Answer) -> None:
    house = await House(lambda _: answer).open()
    assert type(await house.why()) is NotAdmittedError
    await house.close()
