"""Direct carriers over real sockets on loopback: paths open, carry, break and come back."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
import uvloop
from directpeers import DEADLINE_SECONDS, Peer, Recorder, direct_config, entry, introduce, open_peer, rekeyed, send_all
from meddler import meddler

from potluck.errors import ConfigurationError
from potluck.link.direct.greeting import LinkKeys
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

CHILD = Path(__file__).with_name("directchild.py")
uvloop.run(asyncio.sleep(0))  # libuv opens one pipe per process, for good: here, before a test counts

QUICK_TO_NOTICE = {"heartbeat_seconds": 0.2, "silence_seconds": 1.0}


@pytest.fixture(params=[False, True], ids=["sealed", "plain"])
def plain(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_packets_travel_both_ways_on_either_kind_of_loop(run, plain):
    async def exchange() -> None:
        async with open_peer("a", direct_config(plain=plain)) as a, open_peer("b", direct_config(plain=plain)) as b:
            introduce(a, b)
            await a.until_open("b")
            await b.until_open("a")
            big = os.urandom(1024 * 1024)
            floats = array.array("f", range(1000))
            sent = [
                (b"header only", None),
                (b"", b""),
                (b"a little", b"payload"),
                (b"a lot", big),
                (b"a bytearray", bytearray(big)),
                (b"floats", memoryview(floats)),
                (bytes(500_000), None),
            ]
            await send_all(a, "b", sent)
            await send_all(b, "a", sent)
            await a.until_received(len(sent))
            await b.until_received(len(sent))
            expected = [(header, bytes(payload) if payload is not None else None) for header, payload in sent]
            assert [(header, payload) for _, header, payload in a.events.packets] == expected
            assert [(header, payload) for _, header, payload in b.events.packets] == expected
            assert {peer for peer, _, _ in a.events.packets} == {"b"}
            assert a.stat("bytes_sent") == a.stat("bytes_received") == b.stat("bytes_received")
            assert a.stat("packets_received") == len(sent)

    run(exchange())


@pytest.mark.parametrize("reverse", [False, True], ids=["from the dialler", "to the dialler"])
async def test_a_sender_that_is_too_fast_is_refused_and_told_when_there_is_room(reverse, plain):
    async with (
        open_peer("a", direct_config(plain=plain)) as a,
        open_peer("b", direct_config(plain=plain)) as b,
        meddler(b.carrier.bound[0].port) as (middle, address),
    ):
        introduce(b, a)
        a.carrier.update_peer(a.presence())
        a.carrier.update_peer(b.presence(addresses=[address]))
        await a.until_open("b")
        await b.until_open("a")
        middle.may_pass.clear()
        sender, receiver = (b, a) if reverse else (a, b)
        payloads = [bytearray(os.urandom(512 * 1024)) for _ in range(4)]
        packets = [(number.to_bytes(4, "big"), payloads[number % 4]) for number in range(200)]
        num_sent = 0
        while num_sent < 200 and sender.carrier.send(receiver.name, *packets[num_sent]):
            num_sent += 1
            await asyncio.sleep(0)
        assert num_sent < 200
        assert not sender.carrier.send(receiver.name, *packets[num_sent])
        middle.may_pass.set()
        await poll_until(lambda: sender.events.writable == [receiver.name], DEADLINE_SECONDS, "room")
        await send_all(sender, receiver.name, packets[num_sent:])
        await receiver.until_received(200)
        assert [header for _, header, _ in receiver.events.packets] == [header for header, _ in packets]
        assert all(receiver.events.packets[number][2] == payloads[number % 4] for number in range(200))


async def test_two_full_peers_share_the_connection_that_the_smaller_id_dialled():
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")
        assert a.stat("dials") == 1
        assert b.stat("dials") == 0
        assert b.stat("admitted") == 1
        assert a.stat("connections") == b.stat("connections") == 1


async def test_the_larger_id_dials_when_the_smaller_cannot():
    quick = direct_config(paths={"yield_seconds": 0.2})
    async with open_peer("a", quick) as a, open_peer("b", quick) as b:
        a.carrier.update_peer(b.presence(addresses=()))
        b.carrier.update_peer(b.presence())
        b.carrier.update_peer(a.presence())
        await a.until_open("b")
        await b.until_open("a")
        assert a.stat("dials") == 0
        assert b.stat("dials") == 1


@pytest.mark.parametrize("client", ["a", "b"])
async def test_a_client_peer_dials_whatever_its_id(client):
    configs = {name: direct_config(listen=() if name == client else ("tcp://127.0.0.1:0",)) for name in "ab"}
    async with open_peer("a", configs["a"]) as a, open_peer("b", configs["b"]) as b:
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")
        await send_all(a, "b", [(b"hello", None)])
        await send_all(b, "a", [(b"hello", None)])
        await a.until_received(1)
        await b.until_received(1)


async def test_when_both_dial_at_once_they_agree_on_one_connection():
    hasty = direct_config(paths={"yield_seconds": 0.0, "first_backoff_seconds": 0.05})
    for _ in range(10):
        async with open_peer("a", hasty) as a, open_peer("b", hasty) as b:
            introduce(a, b)

            async def settled(a: Peer = a, b: Peer = b) -> bool:
                if a.stat("connections") != 1 or b.stat("connections") != 1:
                    return False
                before = len(a.events.packets), len(b.events.packets)
                if not (a.carrier.send("b", b"ping", None) and b.carrier.send("a", b"pong", None)):
                    return False
                await asyncio.sleep(0.05)
                return before[0] < len(a.events.packets) and before[1] < len(b.events.packets)

            await poll_until(settled, DEADLINE_SECONDS, "one connection that carries both ways")
            assert a.stat("paths") == b.stat("paths") == 1


async def test_all_addresses_are_tried_until_one_works(unused_tcp_port):
    async with open_peer("a") as a, open_peer("b") as b:
        b.carrier.update_peer(a.presence(addresses=()))
        b.carrier.update_peer(b.presence())
        a.carrier.update_peer(a.presence())
        works = str(b.carrier.bound[0])
        a.carrier.update_peer(b.presence(addresses=["nonsense", f"tcp://127.0.0.1:{unused_tcp_port}", works]))
        await a.until_open("b")
        assert a.stat("dials_failed") >= 1


async def test_neighbours_dial_the_lan_addresses_even_of_a_client_peer():
    async with open_peer("a", direct_config(listen=())) as a, open_peer("b") as b:
        a.carrier.update_peer(a.presence())
        b.carrier.update_peer(a.presence())
        bound = str(b.carrier.bound[0])
        far = entry("b", "s1", b.carrier.link_key, lan_addresses=(bound,), host="8.8.8.8")
        a.carrier.update_peer(far)
        await asyncio.sleep(0.1)
        assert a.stat("dials") == 0
        a.carrier.update_peer(entry("b", "s1", b.carrier.link_key, lan_addresses=(bound,)))
        await a.until_open("b")


async def test_ipv6_works():
    config = direct_config(listen=("tcp://[::1]:0",))
    async with open_peer("a", config) as a, open_peer("b", config) as b:
        a.host = b.host = "::1"
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")


async def test_a_peer_dials_on_the_first_packet_in_a_large_roster():
    async with open_peer("a", direct_config(eager_peers=0)) as a, open_peer("b", direct_config(eager_peers=0)) as b:
        introduce(a, b)
        await asyncio.sleep(0.1)
        assert a.stat("dials") == b.stat("dials") == 0
        assert not a.carrier.send("b", b"first", None)
        await a.until_open("b")
        await b.until_open("a")


async def test_whoever_answers_with_another_key_is_not_the_peer(plain):
    async with open_peer("a", direct_config(plain=plain)) as a, open_peer("b", direct_config(plain=plain)) as b:
        introduce(b, a)
        a.carrier.update_peer(a.presence())
        a.carrier.update_peer(rekeyed(b.presence(), LinkKeys.generate().link_key))
        await poll_until(lambda: a.stat("dials_failed") >= 2, DEADLINE_SECONDS, "dials to fail")
        assert not a.events.is_open("b")
        assert "tcp://127.0.0.1" in a.carrier.why_no_path("b")
        assert "the handshake failed: another peer may be there" in a.carrier.why_no_path("b")


async def test_an_unknown_key_is_refused_and_let_in_once_the_roster_names_it(plain):
    async with open_peer("a", direct_config(plain=plain)) as a, open_peer("b", direct_config(plain=plain)) as b:
        a.carrier.update_peer(a.presence())
        a.carrier.update_peer(b.presence())
        await poll_until(lambda: b.stat("refused_unknown_key") >= 2, DEADLINE_SECONDS, "b to refuse a stranger")
        await poll_until(lambda: a.stat("dials_failed") >= 1, DEADLINE_SECONDS, "a to be told")
        assert "it does not admit this peer (yet)" in a.carrier.why_no_path("b")
        assert a.events.paths == []
        assert b.events.paths == []
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")


@pytest.mark.parametrize("state", ["dead", "left"])
@pytest.mark.parametrize("dropping", ["a", "b"], ids=["by the dialler", "by the listener"])
async def test_a_peer_that_leaves_the_roster_is_cut_and_kept_out(state, dropping, plain):
    async with open_peer("a", direct_config(plain=plain)) as a, open_peer("b", direct_config(plain=plain)) as b:
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")
        dropper, dropped = (a, b) if dropping == "a" else (b, a)
        dropper.carrier.update_peer(dropped.presence(state=state))
        assert not dropper.events.is_open(dropped.name)
        assert not dropper.carrier.send(dropped.name, b"", None)
        await dropped.until_closed(dropper.name)
        await poll_until(
            lambda: dropper.stat("refused_unknown_key") >= 1, DEADLINE_SECONDS, "the next dial to be refused"
        )
        assert not dropped.events.is_open(dropper.name)
        introduce(a, b)
        await dropped.until_open(dropper.name)


async def test_a_restarted_peer_comes_back_with_a_new_session_and_the_old_one_is_shut_out():
    async with open_peer("b") as b, open_peer("a") as a:
        introduce(a, b)
        await b.until_open("a")
        old = a
        async with open_peer("a", session="s2") as new:
            b.carrier.update_peer(new.presence())
            assert not b.events.is_open("a")
            new.carrier.update_peer(new.presence())
            new.carrier.update_peer(b.presence())
            await b.until_open("a")
            await new.until_open("b")
            await old.until_closed("b")
            await poll_until(
                lambda: b.stat("refused_unknown_key") >= 1, DEADLINE_SECONDS, "the old session to be refused"
            )
            await send_all(new, "b", [(b"from the new one", None)])
            await b.until_received(1)
            assert not old.events.is_open("b")


async def test_repeated_news_of_a_peer_changes_nothing():
    async with open_peer("a") as a, open_peer("b") as b:
        introduce(a, b)
        await a.until_open("b")
        await b.until_open("a")
        for _ in range(5):
            introduce(a, b)
            a.carrier.update_peer(b.presence(state="suspect"))
        await asyncio.sleep(0.1)
        assert a.events.paths == [("opened", "b")]
        assert b.events.paths == [("opened", "a")]
        assert a.stat("dials") == 1


async def test_a_lost_listener_is_dialled_again_when_it_is_back(children: Children):
    async with open_peer("b") as b, Child(children, "c", listens_to=b) as child:
        await b.until_open("c")
        child.process.kill()
        await b.until_closed("c")
        assert b.events.reasons[-1] == "disconnected"


async def test_a_frozen_peer_is_noticed_and_comes_back(children: Children):
    quick = direct_config(sockets=QUICK_TO_NOTICE)
    for name in ("a", "z"):  # one that dials us, one that we dial
        async with open_peer("m", quick) as m, Child(children, name, listens_to=m) as child:
            await m.until_open(name)
            child.process.freeze()
            await m.until_closed(name)
            child.process.thaw()
            await m.until_open(name)


async def test_packets_go_on_though_a_handler_raises():
    class Faulty(Recorder):
        def packet_arrived(self, carrier: object, peer: str, header: memoryview, payload: memoryview | None) -> None:
            super().packet_arrived(carrier, peer, header, payload)
            if bytes(header) == b"boom":
                raise RuntimeError("a handler's own fault")

    seen: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    async with open_peer("a") as a, open_peer("b", events=Faulty()) as b:
        introduce(a, b)
        await a.until_open("b")
        await send_all(a, "b", [(b"boom", None)] * 3 + [(b"fine", None)] * 3)
        await b.until_received(6)
    loop.set_exception_handler(None)
    assert [type(error) for error in seen] == [RuntimeError] * 3


async def test_what_cannot_be_sent_is_said():
    async with open_peer("a", direct_config(sockets={"max_payload_bytes": 1000})) as a:
        assert not a.carrier.send("nobody", b"", None)
        assert "roster" in a.carrier.why_no_path("nobody")
        async with open_peer("b", direct_config(listen=())) as b:
            a.carrier.update_peer(b.presence())
            assert not a.carrier.send("b", b"", None)
            assert "waiting for it to dial" in a.carrier.why_no_path("b")
            with pytest.raises(ConfigurationError, match="smaller pieces"):
                a.carrier.send("b", b"", bytes(1001))


async def test_an_address_that_is_taken_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match=r"cannot listen on .*--listen"):
            async with open_peer("a", direct_config(listen=(f"tcp://127.0.0.1:{taken.getsockname()[1]}",))):
                pass


async def test_encrypted_and_plain_peers_do_not_mix():
    async with open_peer("a", direct_config(plain=True)) as a, open_peer("b", direct_config(plain=False)) as b:
        introduce(a, b)
        await poll_until(lambda: a.stat("dials_failed") >= 2, DEADLINE_SECONDS, "dials to fail")
        assert "trusted-LAN" in a.carrier.why_no_path("b")
        assert a.events.paths == b.events.paths == []


async def test_why_there_is_no_path_is_said(unused_tcp_port):
    """Nobody there, somebody silent, another service, one that hangs up."""
    answers = {"silent": None, "another service": b"SSH-2.0-x", "hangs up": b""}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        if answers[what] is not None:
            writer.write(answers[what])
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    expected = {
        "nobody": "cannot connect: ",
        "silent": "no answer within 0.5 s",
        "another service": "the handshake failed: another peer or service may be there",
        "hangs up": "disconnected",
    }
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    impatient = direct_config(paths={"dial_timeout_seconds": 0.5})
    async with server:
        for what, reason in expected.items():
            async with open_peer("a", impatient) as a, open_peer("b") as b:
                address = f"tcp://127.0.0.1:{unused_tcp_port if what == 'nobody' else port}"
                a.carrier.update_peer(a.presence())
                a.carrier.update_peer(b.presence(addresses=[address]))
                await poll_until(lambda: a.stat("dials_failed") >= 1, DEADLINE_SECONDS, "the dial to fail")
                assert reason in a.carrier.why_no_path("b")
                assert a.stat("connections") <= 1  # of the next dial


async def test_what_was_sent_just_before_closing_still_leaves(plain):
    async with open_peer("b", direct_config(plain=plain)) as b:
        async with open_peer("a", direct_config(plain=plain, linger_seconds=30.0)) as a:
            introduce(a, b)
            await a.until_open("b")
            num_sent = 0
            while num_sent < 100 and a.carrier.send("b", b"last words", bytes(500_000)):
                num_sent += 1
        await b.until_received(num_sent)
        assert len(b.events.packets) == num_sent > 0


async def test_close_leaves_no_thread_or_descriptor_and_may_be_repeated():
    process = psutil.Process()
    threads, descriptors = process.num_threads(), process.num_fds()
    async with open_peer("a") as a, open_peer("b") as b, open_peer("c") as c:
        introduce(a, b, c)
        for one in (a, b, c):
            for other in (a, b, c):
                if one is not other:
                    await one.until_open(other.name)
        await send_all(a, "b", [(b"", bytes(100_000))] * 20)
        assert process.num_threads() == threads
        await a.carrier.close()
        await a.carrier.close()
        await b.until_closed("a")
    assert process.num_fds() == descriptors


async def test_closing_in_the_middle_of_dialling_is_quiet(unused_tcp_port):
    async with open_peer("a") as a, open_peer("b") as b:
        a.carrier.update_peer(a.presence())
        a.carrier.update_peer(b.presence(addresses=[f"tcp://127.0.0.1:{unused_tcp_port}"]))
        await poll_until(lambda: a.stat("dials") >= 1, DEADLINE_SECONDS, "a dial")
    assert a.events.paths == []


async def test_two_hundred_carriers_in_four_processes(children: Children):
    program = [sys.executable, CHILD, "many", "50"]
    processes = [children.spawn(program, name=f"many-{number}", fresh=True) for number in range(4)]
    for process in processes:
        found = await process.until_line(r"threads=(\d+) rss_mib=(\d+) descriptors=(\d+)", DEADLINE_SECONDS)
        threads, rss_mib, descriptors = map(int, found.groups())
        assert threads <= 5
        assert rss_mib < 150
        assert descriptors < 50 * 10
        assert await process.until_exit(DEADLINE_SECONDS) == 0


class Child:
    """A peer in another process, which introduces itself to one of ours."""

    def __init__(self, children: Children, name: str, *, listens_to: Peer) -> None:
        self._ours = listens_to
        self.process = children.spawn([sys.executable, CHILD, "peer", name], name=name, stdin=True)

    async def __aenter__(self) -> Child:
        ours = self._ours
        bound = str(ours.carrier.bound[0])
        self.process.send_line(f"{ours.name} {ours.session} {ours.carrier.link_key} {bound}")
        found = await self.process.until_line(r"^peer (\S+) (\S+) (\S+) (\S+)$", DEADLINE_SECONDS)
        name, session, key, address = found.groups()
        ours.carrier.update_peer(ours.presence())
        ours.carrier.update_peer(entry(name, session, key, address))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.close()
