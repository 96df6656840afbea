"""Whole peers: a real host, real peers, and what becomes of them when things go wrong."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from runhouse import (
    PATIENCE_SECONDS,
    QUICK,
    Diary,
    RunHouse,
    names,
    open_run,
    until_path,
    until_see,
)

from potluck.errors import (
    BannedError,
    ConfigurationError,
    HubUnavailableError,
    NotAdmittedError,
    PeerUnreachableError,
    ProtocolError,
    RetryableError,
)
from potluck.hub.access.organise import Organiser
from potluck.hub.guard import presencekeeper
from potluck.hub.guard.guard import Guard
from potluck.hub.guard.presencecore import PresenceConfig
from potluck.hub.keys import new_seed
from potluck.link.links import Incoming
from potluck.messages import Message
from potluck.run.peer import Peer, PeerConfig
from potluck.run.speedtest import TESTS_AT_ONCE, SpeedTest, SpeedTestAnswer
from potluck.testing.forwarder import Forwarder
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

BUSY_PROGRAM = Path(__file__).with_name("busychild.py")


class Bread(Message, frozen=True, kw_only=True, tag="test.bread"):
    number: int


class Thanks(Message, frozen=True, kw_only=True, tag="test.thanks"):
    number: int


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[RunHouse]:
    async with open_run(tmp_path) as opened:
        yield opened


def serve(peer: Peer) -> list[int]:
    """Have a peer thank for bread; the numbers that it got."""
    got: list[int] = []

    async def take(incoming: Incoming[Bread]) -> tuple[Thanks, list[bytes]]:
        got.append(incoming.message.number)
        return Thanks(number=incoming.message.number), [bytes(frame) for frame in incoming.frames]

    peer.links.handle(Bread, take)
    return got


async def give(giver: Peer, taker: Peer, number: int, num_bytes: int = 1000) -> None:
    """Send bytes to a peer and have them back."""
    frame = bytes([number % 256]) * num_bytes
    answer = await giver.links.request(
        taker.peer_id, Bread(number=number), [frame], reply=Thanks, timeout_seconds=PATIENCE_SECONDS
    )
    assert answer.message == Thanks(number=number)
    assert bytes(answer.frames[0]) == frame


# Coming and going


async def test_who_joins_by_the_link_is_seen_by_all_and_who_leaves_too(house: RunHouse):
    ada = await house.join("Ada")
    diary = Diary(ada)
    ben = await house.join("Ben", role="observer", seed=new_seed("user"))
    await until_see(house.own_peer, ada, ben, wanted={"host", "Ada", "Ben"})
    seen = ada.session.roster.get(ben.peer_id)
    assert seen is not None
    assert (seen.card.role, seen.card.service, seen.state, seen.host) == ("observer", "local", "alive", "127.0.0.1")
    assert not seen.coordinates
    host = ada.session.roster.get(house.own_peer.peer_id)
    assert host is not None
    assert (host.coordinates, host.trusted) == (True, True)
    await ben.close()
    await diary.until("Ben", "joined", "left")
    await until_see(house.own_peer, ada, wanted={"host", "Ada"})
    again = await house.join("Ben", seed=ben.identity.seed, link=replace(house.host.link, invite=""), role="observer")
    assert again.peer_id == ben.peer_id
    await diary.until("Ben", "joined", "left", "joined")


async def test_a_killed_peer_leaves_every_roster_within_seconds(house: RunHouse, children: Children):
    ada, ben = await house.join("Ada"), await house.join("Ben")
    victim = house.spawn(children, "Vic")
    await until_see(house.own_peer, ada, ben, wanted={"host", "Ada", "Ben", "Vic"})
    diaries = [Diary(peer) for peer in (house.own_peer, ada, ben)]
    victim.kill()
    for diary in diaries:
        await diary.until("Vic", "dead")
        assert "its connection closed" in diary.reasons["Vic"]  # by the hub's event, and not by silence


async def test_a_frozen_peer_is_suspected_given_up_and_welcomed_back(tmp_path: Path, children: Children):
    async with open_run(tmp_path, presence=QUICK) as house:
        ada = await house.join("Ada")
        diary = Diary(ada)
        frozen = house.spawn(children, "Ice")
        await diary.until("Ice", "joined")
        await frozen.until_line('"event":"joined"', PATIENCE_SECONDS)
        frozen.freeze()
        await diary.until("Ice", "joined", "suspect")
        assert "Ice" in names(ada)
        await diary.until("Ice", "joined", "suspect", "dead")
        frozen.thaw()
        await poll_until(lambda: diary.of("Ice")[3:4] == ["joined"], PATIENCE_SECONDS, "Ice to be welcomed back")
        frozen.interrupt()  # on a busy machine it may have been suspected once more by now
        await poll_until(lambda: diary.of("Ice")[-1] == "left", PATIENCE_SECONDS, "Ice to leave")
        assert await frozen.until_exit(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("how", ["holds the interpreter lock", "is stopped"])
async def test_a_busy_process_whose_connection_lives_is_not_dead(tmp_path: Path, children: Children, how: str):
    presence = PresenceConfig(suspect_after_seconds=1.0, dead_after_seconds=2.0, busy_seconds=600.0)
    async with open_run(tmp_path, presence=presence) as house:
        ada = await house.join("Ada")
        diary = Diary(ada)
        command = [sys.executable, BUSY_PROGRAM, str(house.host.link), "Bea"]
        bea = children.spawn(command, name="Bea", stdin=True, env={"POTLUCK_IDENTITY": str(tmp_path / "bea.nkey")})
        await bea.until_line("joined", PATIENCE_SECONDS)
        await diary.until("Bea", "joined")
        if how == "is stopped":
            bea.freeze()
        else:
            bea.send_line("")
            await bea.until_line("holds", PATIENCE_SECONDS)
        await diary.until("Bea", "joined", "suspect")
        await poll_until(lambda: "busy" in diary.reasons["Bea"], PATIENCE_SECONDS, "Bea to be called busy")
        if how == "is stopped":
            bea.thaw()
        else:
            bea.send_line("")
            await bea.until_line("free", PATIENCE_SECONDS)
        await diary.until("Bea", "joined", "suspect", "alive")


async def until_forgotten(organiser: Organiser, name: str) -> None:
    """Wait until nobody of that name is a member."""

    async def is_forgotten() -> bool:
        return name not in {state.member.name for state in await organiser.list_members()}

    await poll_until(is_forgotten, PATIENCE_SECONDS, f"{name} to be forgotten")


async def test_who_only_looks_with_a_key_of_the_moment_leaves_no_member_behind(house: RunHouse):
    organiser = await house.organiser()
    passing = await house.join("passing", role="observer")
    others = [await house.join("kept", role="observer", seed=new_seed("user")), await house.join("trainer")]
    assert passing.peer_id in {state.member.peer for state in await organiser.list_members()}
    for peer in (passing, *others):
        await peer.close()
    await until_forgotten(organiser, "passing")
    left = {state.member.peer for state in await organiser.list_members()}
    assert {other.peer_id for other in others} <= left  # their keys may come again


async def test_a_monitor_that_is_killed_is_forgotten_when_it_does_not_come_back(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(presencekeeper, "COMPARE_SECONDS", 0.5)
    monkeypatch.setattr(presencekeeper, "FORGET_TEMPORARY_SECONDS", 1.0)
    async with open_run(tmp_path) as house:
        organiser = await house.organiser()
        command = [sys.executable, "-m", "potluck.cli", "monitor", str(house.host.link), "--json"]
        monitor = children.spawn(command, name="monitor")
        await monitor.until_line('"event":"run"', PATIENCE_SECONDS)
        assert [state.member.name for state in await organiser.list_members() if state.member.temporary] == ["monitor"]
        monitor.kill()
        await until_forgotten(organiser, "monitor")


class WrongClock:
    """A machine whose battery was empty."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return 86400.0


async def test_a_peer_with_a_wrong_clock_works(house: RunHouse):
    clock = WrongClock()
    ada, ben = await house.join("Ada", clock=clock), await house.join("Ben")
    serve(ben)
    await until_see(ada, ben, wanted={"host", "Ada", "Ben"})
    await give(ada, ben, 1)
    assert ada.session.now() == pytest.approx(time.time(), abs=5.0)
    error = ada.session.hub_time.clock_error_seconds(monotonic=clock.monotonic(), wall=clock.wall())
    assert error == pytest.approx(86400.0 - time.time(), abs=5.0)


# Being turned away


async def test_who_is_not_let_in_leaves_nothing_behind(house: RunHouse):
    peer = await house.prepare("Eve", link=replace(house.host.link, invite="no-such-invite"))
    with pytest.raises(NotAdmittedError, match="does not know the invite"):
        await peer.start()
    peer = await house.prepare("Eve", link=replace(house.host.link, invite=""))
    waited: list[int] = []
    with pytest.raises(NotAdmittedError, match="not let you in yet"):
        await peer.start(lambda answer: waited.append(answer.place))
    assert waited == [1]
    nowhere = await house.prepare("Eve")
    await house.host.stop()
    with pytest.raises(HubUnavailableError):
        await nowhere.start()


async def test_a_ban_ends_the_session_with_its_reason(house: RunHouse):
    ada, eve = await house.join("Ada"), await house.join("Eve")
    diary = Diary(ada)
    organiser = await house.organiser()
    assert await organiser.ban(eve.peer_id, "too noisy") >= 1
    await diary.until("Eve", "dead")
    assert "its connection closed" in diary.reasons["Eve"]  # and not by silence
    with pytest.raises(BannedError, match=r"too noisy"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await eve.session.ended
    await eve.close()
    again = await house.prepare("Eve", seed=eve.identity.seed)
    with pytest.raises(BannedError, match=r"too noisy"):
        await again.start()
    await organiser.unban(eve.peer_id)
    forgiven = await house.join("Eve", seed=eve.identity.seed)
    assert not forgiven.session.ended.done()


async def test_a_newer_process_with_the_same_key_takes_the_place(house: RunHouse):
    first = await house.join("Ada")
    second = await house.join("Ada", seed=first.identity.seed)
    with pytest.raises(NotAdmittedError, match="newer process"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await first.session.ended
    await first.close()
    await asyncio.sleep(1.0)  # the end of the first must not count as the second's
    assert not second.session.ended.done()
    own = second.session.roster.get(second.peer_id)
    assert own is not None
    assert (own.state, own.card.session) == ("alive", second.session.card.session)


# Links


async def test_peers_on_loopback_are_full_peers_and_talk_directly(house: RunHouse):
    ada, ben = await house.join("Ada"), await house.join("Ben")
    got = serve(ben)
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = [await peer.reachability.decided() for peer in (ada, ben)]
    assert [each.mode for each in found] == ["full", "full"]
    seen = await poll_until(
        lambda: (presence := ada.session.roster.get(ben.peer_id)) and presence.card.addresses,
        PATIENCE_SECONDS,
        "Ben's address in Ada's roster",
    )
    assert seen == tuple(map(str, ben.direct.bound))
    await until_path(ada, ben.peer_id, "direct")
    await give(ada, ben, 7, num_bytes=3_000_000)
    assert got == [7]
    assert ada.direct.statistics()["bytes_sent"] >= 3_000_000
    assert ada.relay.statistics()["bytes_sent"] < 1_000_000


async def test_two_client_peers_talk_through_the_hub(house: RunHouse):
    ada, ben = [await house.join(name, client_mode=True) for name in ("Ada", "Ben")]
    serve(ben)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert (await ada.reachability.decided()).mode == "client"
    assert ada.session.card.addresses == ()
    await until_path(ada, ben.peer_id, "relay")
    await give(ada, ben, 7, num_bytes=3_000_000)
    assert ada.relay.statistics()["bytes_sent"] >= 3_000_000
    assert ada.direct.statistics()["bytes_sent"] < 100_000  # it talks to the host, too


async def test_a_client_peer_talks_directly_to_a_full_one_which_cannot_dial_it(house: RunHouse):
    full, client = await house.join("Full"), await house.join("Client", client_mode=True)
    got = serve(client)
    await until_path(full, client.peer_id, "direct")
    await give(full, client, 3, num_bytes=1_000_000)
    assert got == [3]


async def test_who_wishes_to_sends_everything_through_the_hub(house: RunHouse):
    full, relayed = await house.join("Full"), await house.join("Relayed", client_mode=True, relay_only=True)
    got = serve(full)
    await until_path(relayed, full.peer_id, "relay")
    await until_path(full, relayed.peer_id, "relay")
    await give(relayed, full, 5, num_bytes=1_000_000)
    assert got == [5]
    assert relayed.direct.statistics()["bytes_sent"] == 0
    with pytest.raises(ConfigurationError, match="through the hub"):
        PeerConfig(relay_only=True, listen=("tcp://127.0.0.1:0",))


async def test_the_first_peer_becomes_full_when_somebody_comes_to_ask(tmp_path: Path):
    async with open_run(tmp_path) as house:
        found = await house.own_peer.reachability.decided()
        assert found.mode == "client"
        assert "nobody could be asked" in found.reason
        await house.join("Ada")
        await poll_until(
            lambda: house.own_peer.session.card.addresses, PATIENCE_SECONDS, "the host to be found reachable"
        )


async def test_what_is_announced_is_believed(house: RunHouse):
    ada = await house.join("Ada", announce=("tcp://localhost:4567",))
    async with asyncio.timeout(PATIENCE_SECONDS):
        found = await ada.reachability.decided()
    assert found.mode == "full"
    assert "tcp://127.0.0.1:4567" in found.addresses
    assert "not confirmed" in found.reason


async def test_what_cannot_be_announced_is_the_users_mistake(house: RunHouse):
    peer = await house.prepare("Ada", announce=("tcp://no-such-name.invalid:4567",))
    with pytest.raises(ConfigurationError, match="tcp://"):
        await peer.start()


@pytest.mark.parametrize("client_mode", [False, True])
async def test_speed_is_measured_both_ways_and_told(
    house: RunHouse, monkeypatch: pytest.MonkeyPatch, client_mode: bool
):
    monkeypatch.setattr("potluck.run.peer.TELL_SPEED_EVERY_SECONDS", 0.5)
    ada, ben = [await house.join(name, client_mode=client_mode) for name in ("Ada", "Ben")]
    await until_path(ada, ben.peer_id, "relay" if client_mode else "direct")
    speeds = await ada.speed_tester.measure(ben.peer_id, timeout_seconds=PATIENCE_SECONDS)
    assert speeds.upload_bytes_per_second > 100_000
    assert speeds.download_bytes_per_second > 100_000

    def told() -> bool:
        seen = ben.session.roster.get(ada.peer_id)
        assert seen is not None
        return bool(seen.card.upload_bytes_per_second and seen.card.download_bytes_per_second)

    await poll_until(told, PATIENCE_SECONDS, "Ada's speeds in Ben's roster")


async def test_nobody_can_be_kept_busy_with_speed_tests(house: RunHouse):
    ada, ben = await house.join("Ada"), await house.join("Ben")
    await until_path(ada, ben.peer_id, "direct")

    async def ask(num_bytes: int, times: int = 1) -> None:
        for _ in range(times):
            request = SpeedTest(return_bytes=num_bytes)
            await ada.links.request(ben.peer_id, request, reply=SpeedTestAnswer, timeout_seconds=PATIENCE_SECONDS)

    for num_bytes in (-1, 2**40):
        with pytest.raises(ProtocolError, match="at most"):
            await ask(num_bytes)
    with pytest.raises(RetryableError, match="too many"):
        await ask(1, times=TESTS_AT_ONCE * 3)


# When the hub goes away


async def test_a_restarted_hub_finds_its_peers_again_with_their_links_intact(house: RunHouse):
    ada, ben = await house.join("Ada"), await house.join("Ben")
    got = serve(ben)
    await until_path(ada, ben.peer_id, "direct")
    await give(ada, ben, 1)
    changes: list[str] = []
    ada.session.listen(changes.append)
    diaries = [Diary(peer) for peer in (ada, ben)]
    session = ada.session.card.session

    async def meanwhile() -> None:
        await poll_until(lambda: changes == ["away"], PATIENCE_SECONDS, "the hub to be away")
        await give(ada, ben, 2, num_bytes=1_000_000)  # no hub is needed for this

    link = house.host.link
    await house.restart(meanwhile)
    assert house.host.link == link
    await poll_until(lambda: changes == ["away", "back"], PATIENCE_SECONDS, lambda: f"the hub to be back: {changes}")
    await until_see(house.own_peer, ada, ben, wanted={"host", "Ada", "Ben"})
    await give(ada, ben, 3)
    assert got == [1, 2, 3]
    assert ada.session.card.session == session
    told = [change for diary in diaries for name in ("Ada", "Ben") for change in diary.of(name)]
    assert set(told) <= {"suspect", "alive"}  # nobody was given up
    statistics = ada.links.statistics().peers[ben.peer_id]
    assert (statistics.path, statistics.counters.resets, statistics.counters.messages_lost) == ("direct", 0, 0)
    late = await house.join("Late")
    await until_see(late, ada, ben, wanted={"host", "Ada", "Ben", "Late"})


async def test_relayed_links_survive_a_restart_of_the_hub(house: RunHouse):
    ada, ben = [await house.join(name, client_mode=True) for name in ("Ada", "Ben")]
    got = serve(ben)
    await until_path(ada, ben.peer_id, "relay")
    await give(ada, ben, 1)
    under_way: list[asyncio.Task[None]] = []

    async def meanwhile() -> None:
        under_way.append(asyncio.create_task(give(ada, ben, 2, num_bytes=1_000_000)))

    await house.restart(meanwhile)
    await under_way[0]
    assert got == [1, 2]
    statistics = ada.links.statistics().peers[ben.peer_id]
    assert (statistics.counters.resets, statistics.counters.messages_lost) == (0, 0)


async def test_a_peer_that_is_cut_off_while_no_guard_answers_comes_back_later(house: RunHouse):
    async with Forwarder(house.host.link.port) as gate:
        link = replace(house.host.link, port=gate.port, websocket_port=None)
        ada = await house.join("Ada", link=link)
        changes: list[str] = []
        ada.session.listen(changes.append)
        guard = house.host._guard
        assert guard is not None
        await guard.stop()
        await gate.shut()
        await gate.open()
        hub = ada.session.hub
        refusals = lambda: hub.statistics()["refusals"]  # type: ignore[attr-defined]  # noqa: E731
        await poll_until(lambda: refusals() >= 2, PATIENCE_SECONDS, lambda: f"refusals: {refusals()}")
        await asyncio.sleep(2.0)  # past its patience: it has asked at the lobby, where nobody is
        assert not ada.session.ended.done()
        house.host._guard = Guard(house.host.config.guard, guard._keys, house.host.address)
        await house.host._guard.start()
        await poll_until(lambda: changes == ["away", "back"], PATIENCE_SECONDS, lambda: f"to be back: {changes}")
        await ada.close()


async def test_leaving_while_the_hub_is_away_is_quick_and_clean(house: RunHouse):
    ada = await house.join("Ada")
    await house.host.stop()
    started = time.monotonic()
    await ada.close()
    await ada.close()
    assert time.monotonic() - started < 5.0
    assert await ada.session.ended is None
    with pytest.raises(PeerUnreachableError):
        await ada.links.send("anybody", Bread(number=1), timeout_seconds=1)


async def test_a_start_that_is_broken_off_leaves_nothing_behind(house: RunHouse):
    async def start_for(peer: Peer, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await peer.start()
            await asyncio.sleep(60)

    for seconds in (0.0, 0.02, 0.05, 0.1, 0.2):
        peer = await house.prepare("Ada")
        with pytest.raises(TimeoutError):
            await start_for(peer, seconds)
        await peer.close()
