"""The real commands in real processes, as a person or a script uses them."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import PATIENCE_SECONDS, RUN, Party, Terminal, events, until_event

import potluck
from potluck.hub.server.certificate import prepare_certificates
from potluck.hub.server.process import find_binary
from potluck.testing.ports import unused_tcp_port
from potluck.testing.processes import Children

# Help


COMMANDS = [
    [],
    *(
        [name]
        for name in ("demo", "init", "host", "join", "monitor", "dashboard", "leaderboard", "vote", "doctor", "members")
    ),
    *(
        ["members", name]
        for name in (
            "invite",
            "invites",
            "revoke",
            "requests",
            "approve",
            "deny",
            "list",
            "ban",
            "unban",
            "bans",
            "pardon",
        )
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "potluck")
def test_every_command_explains_itself(terminal: Terminal, fresh_terminal: Terminal, command: list[str]) -> None:
    where = fresh_terminal if command in ([], ["host"], ["join"], ["members", "invite"]) else terminal
    output = where.run(*command, "--help")
    assert "Usage: " in output
    assert "--help" in output
    if command and command[0] in ("init", "host", "join", "monitor", "dashboard", "leaderboard", "vote", "doctor"):
        assert "Example: potluck" in output


def test_nothing_is_asked_for_means_help(terminal: Terminal) -> None:
    assert "Usage: " in terminal.run(code=2)


def test_the_help_is_quick(fresh_terminal: Terminal) -> None:
    wall, processor = [], []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        fresh_terminal.run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.monotonic() - started)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert (
        min(processor) < 1.0
    )  # half a second is the aim; other processes slow down also what they do not take part in
    assert min(wall) < 5.0


def test_the_version(terminal: Terminal) -> None:
    assert terminal.run("--version").strip() == f"potluck {potluck.__version__}"


def test_what_is_misspelt_is_the_users_mistake(terminal: Terminal) -> None:
    assert "No such command" in terminal.run("jion", code=2)
    assert "--role" in terminal.run("join", "potluck://x", "--role", "king", code=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'name = "bakery"\nrecipe = [oven', "line 2"),
        (b'name = "bakery"\noven = 3', "unknown field `oven`"),
        (b'name = "bakery"\n[exchange]\ncodec = "morse"', "float16"),
        (b"\xff\xfe", "utf-8"),
        (None, "potluck init"),
    ],
)
def test_a_run_file_that_is_wrong_opens_no_hub(terminal: Terminal, text: bytes | None, words: str) -> None:
    path = terminal.folder / "run.toml"
    if text is not None:
        path.write_bytes(text)
    hub = terminal.folder / "hub"
    said = terminal.refuse("host", path, "--folder", hub, "--listen", "127.0.0.1", "--no-dashboard", code=2)
    assert words in said
    assert "potluck init" in said
    assert not hub.exists()


# Links that do not work


LINK = "potluck://127.0.0.1:4222/bakery?ca=abcdefghijklmnopqrstuvwxyz234567#ask"


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("", "which run"),
        ("hello", "not a join link"),
        ("https://example.org/bakery", "https:// link"),
        (LINK.replace("#ask", ""), "no invite"),
        (LINK.replace("?ca=abcdefghijklmnopqrstuvwxyz234567", ""), "which certificate"),
        (LINK.replace("234567", ""), "not whole"),
        (LINK.replace("#ask", "#abcdefghijkl"), "cut short"),
        (LINK[:20], "names no"),
        (LINK.replace(":4222", ":99999"), "port"),
        (LINK.replace("/bakery", "/Ba ke ry"), "space"),
    ],
)
def test_a_link_that_cannot_be_read(terminal: Terminal, link: str, words: str) -> None:
    assert words in terminal.refuse("join", link, code=2)


def test_a_link_from_the_environment(terminal: Terminal) -> None:
    assert "not a join link" in terminal.refuse("join", code=2, POTLUCK_LINK="hello")


def test_a_hub_that_is_not_there(terminal: Terminal) -> None:
    link = LINK.replace("4222", str(unused_tcp_port()))
    said = terminal.refuse("join", link, code=1)
    assert "cannot be reached" in said
    assert "another network" in said


def test_a_hub_with_another_certificate(party: Party) -> None:
    wrong = replace(party.link, ca_hash="abcdefghijklmnopqrstuvwxyz234567")
    said = party.terminal.refuse("join", str(wrong), code=2)
    assert "not the one that the link names" in said


def test_options_that_do_not_go_together(party: Party) -> None:
    refuse = party.terminal.refuse
    link = str(party.link)
    assert "--client-mode" in refuse("join", link, "--client-mode", "--listen", "tcp://127.0.0.1:0", code=2)
    assert "tcp://" in refuse("join", link, "--announce", "everywhere", code=2)
    assert "64 characters" in refuse("join", link, "--name", "x" * 65, code=2)


def test_an_identity_that_cannot_be_used(party: Party) -> None:
    in_the_way = party.terminal.folder / "file"
    in_the_way.write_text("nothing")
    for path in (in_the_way, in_the_way / "below"):
        said = party.terminal.refuse("join", str(party.link), "--identity-path", path, code=2)
        assert str(path) in said


# Taking part, and leaving


def test_for_a_person(party: Party) -> None:
    """Without --json: what a person reads."""
    gina = party.terminal.start("join", str(party.link), *party.key("Gina"))
    gina.wait_for_line("You are in", PATIENCE_SECONDS)
    hans, _ = party.joined("Hans")
    gina.wait_for_line(r"Hans \(U[A-Z2-7]+\) joined", PATIENCE_SECONDS)
    hans.interrupt()
    gina.wait_for_line(r"Hans \(U[A-Z2-7]+\) left", PATIENCE_SECONDS)
    assert hans.wait(PATIENCE_SECONDS) == 0


def test_ctrl_c_leaves_cleanly_and_the_others_see_it(party: Party) -> None:
    (ida, _), (jan, peer) = party.joined("Ida"), party.joined("Jan")
    until_event(ida, "joined", peer=peer)
    jan.interrupt()
    assert jan.wait(PATIENCE_SECONDS) == 0
    assert "leaving cleanly" in jan.output()
    assert until_event(ida, "left", peer=peer)["reason"] == "it said good-bye"
    ida.send_signal(signal.SIGTERM)
    assert ida.wait(PATIENCE_SECONDS) == 0


def test_a_second_ctrl_c_quits_at_once(terminal: Terminal) -> None:
    party = Party(terminal)
    kim, _ = party.joined("Kim")
    hub_pid = int((party.folder / "server.pid").read_text().split()[0])
    os.kill(hub_pid, signal.SIGSTOP)  # a hub that does not answer makes leaving slow
    try:
        kim.interrupt()
        kim.wait_for_line("leaving cleanly", PATIENCE_SECONDS)
        assert kim.exit_code is None
        kim.interrupt()
        assert kim.wait(PATIENCE_SECONDS) == -signal.SIGINT  # left alone, it would leave with 0 after some seconds
    finally:
        os.kill(hub_pid, signal.SIGCONT)


def test_ctrl_c_also_ends_a_search_for_the_hub(terminal: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        lost = terminal.start("join", LINK.replace("4222", str(silent.getsockname()[1])), "--verbose")
        connection, _ = silent.accept()
        with connection:
            lost.interrupt()
            lost.wait_for_line("leaving cleanly", PATIENCE_SECONDS)
            started = time.monotonic()
            assert lost.wait(PATIENCE_SECONDS) == 0
            assert time.monotonic() - started < 10.0  # its own patience is longer


def test_a_host_ends_and_goes_on_where_it_was(terminal: Terminal) -> None:
    party = Party(terminal)
    lea, peer = party.joined("Lea")
    party.host.interrupt()
    assert party.host.wait(PATIENCE_SECONDS) == 0
    until_event(lea, "hub away")
    said = terminal.refuse("members", "list", *party.place, code=1)
    assert "connection refused" in said
    again = Party(terminal)
    assert again.link == party.link
    until_event(lea, "hub back")
    assert again.member(peer)["state"] == "alive"
    said = terminal.refuse("host", *party.place, "--listen", "127.0.0.1", code=2)
    assert "another hub is running" in said
    said = terminal.refuse("host", "--run", "other", "--folder", party.folder, "--listen", "127.0.0.1", code=2)
    assert "belongs to the run bakery" in said
    again.host.send_signal(signal.SIGTERM)
    assert again.host.wait(PATIENCE_SECONDS) == 0


def test_a_link_with_another_run_s_name_is_told_so(party: Party) -> None:
    other = replace(party.link, run="bakeri")
    for command in (("join",), ("monitor",), ("leaderboard",)):
        said = party.terminal.refuse(*command, str(other), code=2)
        assert (
            said == "this hub has no run called 'bakeri': check the name in the link, or ask the organiser for another"
        )
    found = json.loads(party.terminal.run("doctor", str(other), "--json", code=1))
    assert "no run called 'bakeri'" in found["checks"][-1]["remedy"]


def test_data_are_fetched_by_a_run_s_folder_too(terminal: Terminal) -> None:
    folder = terminal.folder / "my-run"
    terminal.run("init", folder)
    for named in (folder, folder / "run.toml", folder / "recipe.py"):
        assert terminal.ask("download", "data", named) == []
    (folder / "run.toml").write_text("name = 'x'")
    assert "run.toml names no recipe" in terminal.refuse("download", "data", folder, code=2)
    assert "there is no" in terminal.refuse("download", "data", terminal.folder, code=2)


def test_whoever_has_another_version_than_the_host_is_told_the_line_that_installs_it(party: Party) -> None:
    assert party.link.wheel is not None
    other = replace(party.link, wheel=replace(party.link.wheel, version="99.1"))
    ada = party.join("ada", other, "--role", "observer")
    notice = until_event(ada, "other version")["notice"]
    assert notice.startswith(f"this is Potluck {potluck.__version__}, and the run's host has 99.1.")
    assert notice.endswith(other.pip_line)
    until_event(ada, "joined")  # the protocol is the same: it is a note, and no more
    assert not [each for each in events(party.join("bo", party.link)) if each["event"] == "other version"]
    found = party.terminal.ask("doctor", str(other))
    [check] = [each for each in found["checks"] if each["name"] == "join link"]
    assert (check["level"], check["remedy"]) == ("yellow", notice)


# Doctor, demo, and a hub of one's own


def test_the_doctor_looks_at_this_machine(terminal: Terminal) -> None:
    found = terminal.ask("doctor")
    names = ["potluck", "torch", "processors", "device", "memory", "disk", "open files"]
    assert [check["name"] for check in found["checks"]] == names
    text = terminal.run("doctor")
    assert "Python" in text


def test_the_doctor_looks_at_the_way_into_a_run(party: Party) -> None:
    found = party.terminal.ask("doctor", str(party.link))
    levels = {check["name"]: check["level"] for check in found["checks"]}
    assert {"join link", "hub", "access", "clock", "reachable", "speed"} <= set(levels)
    assert levels["access"] == levels["hub"] == levels["reachable"] == "green", found
    assert "you are in" in party.terminal.run("doctor", POTLUCK_LINK=str(party.link))


def test_the_doctor_says_what_is_wrong(party: Party) -> None:
    text = party.terminal.run("doctor", "potluck://nowhere", code=1)
    assert "join link: cannot be read" in text
    assert "has to be mended" in text
    nobody = party.terminal.run("doctor", LINK.replace("4222", str(unused_tcp_port())), "--json", code=1)
    found = json.loads(nobody)
    assert found["level"] == "red"
    assert found["checks"][-1]["name"] == "hub"
    asking = party.terminal.ask("doctor", str(replace(party.link, invite="")))
    assert asking["checks"][-1]["level"] == "yellow"
    assert "not let you in yet" in asking["checks"][-1]["remedy"]


@pytest.mark.timeout(600)
def test_the_demo_keeps_its_promises(terminal: Terminal) -> None:
    folder = terminal.folder / "demo"
    outcome = terminal.ask("demo", "--epochs", "20", "--folder", folder, patience_seconds=560.0)  # eight of them start
    assert outcome["ok"], outcome
    assert outcome["broken"] == []
    assert outcome["loss_after"] < outcome["loss_before"]
    kinds = [incident["kind"] for incident in outcome["incidents"]]
    assert kinds == ["trainer killed", "coordinator killed", "coordinator killed", "newcomer"]
    assert Path(outcome["plot"]).read_bytes().startswith(b"\x89PNG")
    assert Path(outcome["checkpoint"]).is_file()
    assert outcome["text"].startswith("def ")
    refused = terminal.refuse("demo", "--folder", folder, code=2)
    assert "has a demo already" in refused


def test_a_run_on_an_existing_server(terminal: Terminal, children: Children) -> None:
    folder = terminal.folder / "nats"
    folder.mkdir()
    place = ("--run", RUN, "--folder", terminal.folder / "run")
    access = terminal.run("host", *place, "--print-hub-config")
    certificates = prepare_certificates(folder / "identity", folder / "tls", ["127.0.0.1"])
    port = unused_tcp_port()
    configuration = f"""
        listen: "127.0.0.1:{port}"
        jetstream {{ store_dir: "{folder / "streams"}" }}
        tls {{ cert_file: "{certificates.chain_file}", key_file: "{certificates.chain_file}" }}
        {access}
    """
    (folder / "nats.conf").write_text(configuration)
    server = children.spawn([find_binary(), "-c", folder / "nats.conf"], name="nats-server")
    server.wait_for_line("Server is ready", PATIENCE_SECONDS)
    url = f"tls://127.0.0.1:{port}"
    assert "--hub-ca" in terminal.refuse("host", *place, "--hub", url, code=2)
    assert "cannot be read" in terminal.refuse("host", *place, "--hub", url, "--hub-ca", folder / "none.pem", code=2)
    assert "tls://HOST:PORT" in terminal.refuse("host", *place, "--hub", "127.0.0.1", code=2)
    party = Party(terminal, "--hub", url, "--hub-ca", certificates.ca_file)
    assert (party.link.host, party.link.port) == ("127.0.0.1", port)
    mia, peer = party.joined("Mia")
    until_event(party.host, "joined", peer=peer)
    assert party.member(peer)["state"] == "alive"
    found = terminal.ask("doctor", str(party.link))
    assert found["level"] == "green", found
    mia.interrupt()
    assert mia.wait(PATIENCE_SECONDS) == 0
    party.host.interrupt()
    assert party.host.wait(PATIENCE_SECONDS) == 0
    assert server.exit_code is None  # it is not ours to stop
