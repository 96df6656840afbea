"""The spot runner against a server that speaks EC2's API, and with real processes as machines."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import httpx
import pytest
from aiohttp import web
from moto.server import ThreadedMotoServer

from potluck.errors import ConfigurationError
from potluck.spot import notice
from potluck.spot.aws import AwsConfig, AwsProvider
from potluck.spot.local import LocalProvider
from potluck.spot.preemption import PreemptionConfig, generate
from potluck.spot.runner import Runner
from potluck.spot.supervision import Supervision, SupervisionConfig
from potluck.spot.tiers import Slot, slots
from potluck.testing.polling import poll_until, poll_until_sync

IMAGE = "ami-12c6146b"  # one of those that moto knows
SECRET = "potluck://host:4222/run?ca=secret&invite=topsecret"
LINK = f"potluck://host.example.org:4222/bread?ca=none&pip=4224,0.1.0,{'a' * 64}#ask"
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def ec2(server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AwsProvider]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    names = iter(range(1000))

    def provider(experiment: str = "") -> AwsProvider:
        name = experiment or f"trial-{next(names)}-{time.time_ns()}"
        return AwsProvider(
            AwsConfig(experiment=name, region="us-east-1", image=IMAGE, endpoint_url=server, max_price=1.0)
        )

    return provider


WANTED = slots(num_workers=4, num_aux=2, bandwidth="1x200,2x100,1x50", aux_bandwidth_mbit=500)
CONFIG = SupervisionConfig(
    kinds=("g4dn.xlarge", "g4dn.2xlarge"), aux_kinds=("r5.large",), settle_seconds=0, short_life_seconds=0
)


def filled(provider: AwsProvider | LocalProvider) -> Counter[str]:
    return Counter(machine.slot for machine in provider.machines() if machine.state != "ending")


async def test_the_number_is_reached_and_kept_and_down_leaves_nothing(ec2: Callable[..., AwsProvider]) -> None:
    provider, other = ec2(), ec2()
    other.start(Slot(role="worker", index=0), "g4dn.xlarge")  # another experiment, which is left alone
    provider.keep_link(SECRET, "potluck-train @ http://host/wheel")
    runner = Runner(provider, Supervision(WANTED, CONFIG))
    everybody = Counter(slot.name for slot in WANTED)
    assert (await runner.turn()).is_full
    assert filled(provider) == everybody
    by_slot = {machine.slot: machine for machine in provider.machines()}
    assert by_slot["aux-0"].kind == "r5.large"
    provider.end([by_slot["worker-1"].id, by_slot["worker-3"].id])  # preempted
    assert (await runner.turn()).is_full
    assert filled(provider) == everybody
    fresh = Runner(provider, Supervision(WANTED, CONFIG))  # the runner crashed, and another goes on
    await fresh.turn()
    assert filled(provider) == everybody
    removed = ec2(provider.config.experiment).remove_everything()
    assert {machine.id for machine in by_slot.values()} - {by_slot["worker-1"].id, by_slot["worker-3"].id} <= set(
        removed
    )
    assert not filled(provider)
    assert "/potluck/" in " ".join(removed)
    assert filled(other) == Counter(["worker-0"])
    other.remove_everything()


async def test_machines_get_their_own_tier_again_and_no_secret_is_in_user_data(
    ec2: Callable[..., AwsProvider], server: str
) -> None:
    provider = ec2()
    provider.keep_link(SECRET, "potluck-train @ http://host/wheel")
    runner = Runner(provider, Supervision(WANTED, CONFIG))
    await runner.turn()
    first = {machine.slot: machine.id for machine in provider.machines()}
    provider.end([first["worker-0"], first["worker-3"]])
    await runner.turn()
    client = boto3.client("ec2", region_name="us-east-1", endpoint_url=server)
    lines = {}
    for machine in provider.machines():
        if machine.state == "ending":
            continue
        answer = client.describe_instance_attribute(InstanceId=machine.id, Attribute="userData")
        script = base64.b64decode(answer["UserData"]["Value"]).decode()
        assert "secret" not in script
        lines[machine.slot] = script.split("--bandwidth ")[1].split("Mbit")[0]
        assert ("potluck join" in script) == machine.slot.startswith("worker")
    assert lines == {slot.name: f"{slot.bandwidth_mbit:g}" for slot in WANTED}
    provider.remove_everything()


class Front(ThreadingHTTPServer):
    """Stands before EC2: passes requests on, but answers an action with errors while it has some."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), FrontHandler)
        self.behind = behind
        self.errors: dict[str, list[tuple[int, str]]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FrontHandler(BaseHTTPRequestHandler):
    server: Front

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        action = parse_qs(body.decode()).get("Action", [""])[0]
        if errors := self.server.errors.get(action):
            status, code = errors.pop(0)
            error = f"<Errors><Error><Code>{code}</Code><Message>not now</Message></Error></Errors>"
            self._answer(status, f"<Response>{error}<RequestID>1</RequestID></Response>".encode(), "text/xml")
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        found = httpx.post(self.server.behind, content=body, headers=headers, timeout=60)
        self._answer(found.status_code, found.content, found.headers.get("content-type", "text/xml"))

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def front(server: str) -> Iterator[Front]:
    with Front(server) as front:
        thread = threading.Thread(target=front.serve_forever)
        thread.start()
        yield front
        front.shutdown()
        thread.join()


async def test_errors_of_the_provider_never_end_the_supervision(
    ec2: Callable[..., AwsProvider], front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No capacity makes a slot take the next kind; too many requests and other errors wait; expired rights too."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # or boto3 itself tries again, seconds later
    provider = AwsProvider(replace(ec2().config, endpoint_url=front.url))
    refused = [(500, "InsufficientInstanceCapacity"), (503, "RequestLimitExceeded"), (500, "InternalError")]
    front.errors = {"RunInstances": refused}
    said: list[str] = []
    config = SupervisionConfig(kinds=CONFIG.kinds, settle_seconds=0, first_wait_seconds=0.01, short_life_seconds=0)
    runner = Runner(
        provider, Supervision(slots(num_workers=2, num_aux=0), config), interval_seconds=0.05, say=said.append
    )
    stop = asyncio.Event()
    running = asyncio.create_task(runner.run(stop))
    await poll_until(lambda: len(filled(provider)) == 2, 60, "two machines")
    front.errors["DescribeInstances"] = [(401, "AuthFailure")]
    await poll_until(lambda: any("AuthFailure" in line for line in said), 60, "the error to be told")
    provider.end([provider.machines()[0].id])
    await poll_until(lambda: len(filled(provider)) == 2, 60, "the supervision to go on")
    stop.set()
    await running
    assert not any(front.errors.values())
    for told in (
        "worker-0 (g4dn.xlarge): AWS has no such machine now (InsufficientInstanceCapacity)",
        "worker-1 (g4dn.xlarge): AWS wants fewer requests (RequestLimitExceeded)",
        "AWS answered with InternalError",
    ):
        assert any(told in line for line in said), said
    assert any("worker-0 is" in line and "(g4dn.2xlarge)" in line for line in said), said
    provider.remove_everything()


def test_the_command_keeps_its_machines_through_an_interruption_and_a_crash_and_down_leaves_nothing(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`potluck spot`, typed: a plan, machines, one taken away, the runner killed, another goes on, all removed."""
    for name, value in (("AWS_ACCESS_KEY_ID", "testing"), ("AWS_SECRET_ACCESS_KEY", "testing")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    experiment = f"typed-{time.time_ns()}"
    place = ("--provider", "aws", "--experiment", experiment, "--endpoint-url", server, "--json")
    wanted = ("--workers", "3", "--aux", "1", "--bandwidth", "1x200,2x50", "--link", LINK, "--image", IMAGE)

    def potluck(*words: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "potluck.cli", "spot", *words, *place], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=server)
    ssm = boto3.client("ssm", region_name="us-east-1", endpoint_url=server)
    tagged = [{"Name": "tag:potluck-experiment", "Values": [experiment]}]

    def there() -> list[dict[str, Any]]:
        found = ec2.describe_instances(Filters=tagged)["Reservations"]
        machines = [machine for reservation in found for machine in reservation["Instances"]]
        return [machine for machine in machines if machine["State"]["Name"] in ("pending", "running")]

    def slots_of() -> dict[str, str]:
        names = {machine["InstanceId"]: {tag["Key"]: tag["Value"] for tag in machine["Tags"]} for machine in there()}
        return {tags["potluck-slot"]: number for number, tags in names.items()}

    def up() -> subprocess.Popen[bytes]:
        log = (tmp_path / "up.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "potluck.cli", "spot", "up", *wanted, *place], stdout=log, stderr=log
            )

    def until_full(process: subprocess.Popen[bytes]) -> None:
        def is_full() -> bool:
            assert process.poll() is None, (tmp_path / "up.log").read_text()
            return len(there()) == 4

        poll_until_sync(is_full, 100, lambda: (tmp_path / "up.log").read_text())

    def crash(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    plan = potluck("up", *wanted, "--dry-run", "--max-price", "100")
    assert [row["kind"] for row in plan["slots"]] == ["g4dn.xlarge"] * 3 + ["r5.large"]
    assert [row["line_mbit"] for row in plan["slots"]] == [200, 50, 50, None]
    prices = plan["prices"]
    assert plan["dollars_per_hour"] == pytest.approx(3 * prices["g4dn.xlarge"] + prices["r5.large"])
    dear = potluck("up", *wanted, "--dry-run", "--max-price", "0.000001")
    assert {row["kind"] for row in dear["slots"]} == {None}
    assert there() == [], "a dry run starts nothing"

    running = [up()]
    try:
        until_full(running[0])
        first = slots_of()
        assert set(first) == {"worker-0", "worker-1", "worker-2", "aux-0"}
        market = {machine["InstanceId"]: machine.get("InstanceLifecycle", "") for machine in there()}
        assert {slot: market[number] for slot, number in first.items()} == {
            **dict.fromkeys(("worker-0", "worker-1", "worker-2"), "spot"),
            "aux-0": "",
        }
        crash(running[0])
        ec2.terminate_instances(InstanceIds=[first["worker-0"]])  # AWS takes a machine away
        assert {row["slot"] for row in potluck("status")} == set(first) - {"worker-0"}
        running.append(up())
        until_full(running[1])
        again = slots_of()
        assert set(again) == set(first), "each slot once"
        assert {slot for slot in first if again[slot] != first[slot]} == {"worker-0"}
        script = ec2.describe_instance_attribute(InstanceId=again["worker-0"], Attribute="userData")["UserData"][
            "Value"
        ]
        assert b"--bandwidth 200Mbit" in base64.b64decode(script), "in its own tier"
        crash(running[1])
        assert set(again.values()) <= set(potluck("down")["removed"])
    finally:
        for process in running:
            crash(process)
    assert there() == []
    assert ec2.describe_volumes(Filters=tagged)["Volumes"] == []
    asked = [*tagged, {"Name": "state", "Values": ["open", "active"]}]
    assert ec2.describe_spot_instance_requests(Filters=asked)["SpotInstanceRequests"] == []
    assert ssm.get_parameters_by_path(Path=f"/potluck/{experiment}", Recursive=True)["Parameters"] == []
    assert potluck("down")["removed"] == []


def test_what_aws_refuses_is_told_as_a_mistake(ec2: Callable[..., AwsProvider]) -> None:
    provider = ec2()
    config = provider.config
    wrong = AwsProvider(replace(config, subnet="subnet-none"))
    provider.end(["i-0123456789abcdef0", "i-0123456789abcdef1"])  # gone long ago: no error
    with pytest.raises(ConfigurationError, match="AWS refuses this"):
        wrong.start(Slot(role="worker", index=0), "g4dn.xlarge")
    assert provider.prices(["g4dn.xlarge"])["g4dn.xlarge"] > 0


def a_sleeper(slot: Slot, place: Path) -> Sequence[str]:
    return SLEEP


async def test_a_trace_of_preemptions_with_real_processes(tmp_path: Path) -> None:
    """Machines are killed by the trace, come back in their own slot, and none is left or there twice."""
    wanted = slots(num_workers=5, num_aux=1)
    trace = generate(PreemptionConfig(num_machines=6, bursts_per_hour=40, mean_return_seconds=60), hours=1, seed=3)
    seconds = [0.0]
    provider = LocalProvider(tmp_path / "machines", a_sleeper, trace=trace, now=lambda: seconds[0])
    config = SupervisionConfig(kinds=("process",), settle_seconds=0, first_wait_seconds=0.0, short_life_seconds=0)
    runner = Runner(provider, Supervision(wanted, config), log_path=tmp_path / "turns.jsonl")
    for _ in range(60):
        await runner.turn()
        seconds[0] += 30
    assert provider.num_preempted > 10
    turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert all(len(turn["slots"]) == len(set(turn["slots"])) for turn in turns)
    assert max(turn["workers"] for turn in turns) == 5
    assert min(turn["workers"] for turn in turns) < 5
    assert all(turn["aux"] == 1 for turn in turns), "aux peers are not on the spot market"
    after = LocalProvider(tmp_path / "machines", a_sleeper)  # the runner crashed: its machines are found by their files
    there = after.machines()
    assert there
    assert set(after.remove_everything()) == {machine.id for machine in there}
    assert not after.machines()
    assert not provider.machines()  # which also lets go of the processes that it started


async def test_the_metadata_service_is_asked_with_a_token() -> None:
    """A server that behaves as version 2 does: no answer without a token, 404 until there is a notice."""
    state = {"notice": False, "tokens": 0}

    async def token(request: web.Request) -> web.Response:
        assert request.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        state["tokens"] += 1
        return web.Response(text=f"token-{state['tokens']}")

    async def action(request: web.Request) -> web.Response:
        if request.headers.get("X-aws-ec2-metadata-token") != f"token-{state['tokens']}":
            return web.Response(status=401)
        if not state["notice"]:
            return web.Response(status=404)
        return web.json_response({"action": "terminate", "time": "2026-11-18T02:30:00Z"})

    app = web.Application()
    app.router.add_put("/latest/api/token", token)
    app.router.add_get("/latest/meta-data/spot/instance-action", action)
    site = web.AppRunner(app)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    asked = notice.MetadataNotice(f"http://127.0.0.1:{site.addresses[0][1]}")
    try:
        assert await asked() == ""
        state["notice"], state["tokens"] = True, 2  # the first token has expired
        assert await asked() == ""
        assert await asked() == "terminate at 2026-11-18T02:30:00Z"
    finally:
        await asked.close()
        await site.cleanup()
    assert await notice.MetadataNotice("http://127.0.0.1:9")() == ""  # nobody answers there
