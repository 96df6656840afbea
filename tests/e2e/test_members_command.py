"""`potluck members`: who may take part, by the real commands."""

from __future__ import annotations

import re
from dataclasses import replace

from commandline import PATIENCE_SECONDS, RUN, Party, Terminal, until_event


def test_invites(party: Party) -> None:
    made = party.ask("invite", "--uses", "2", "--days", "1", "--note", "for the neighbours")
    ada, peer = party.joined("Ada", made["link"])
    until_event(party.host, "joined", peer=peer)
    member = party.member(peer)
    assert (member["name"], member["role"], member["state"]) == ("Ada", "trainer", "alive")
    assert member["admitted by"] == f"invite:{made['id']}"
    assert "Ada" in party.members("list")
    [row] = [row for row in party.ask("invites") if row["id"] == made["id"]]
    assert (row["used"], row["state"], row["note"]) == ("1 of 2", "valid", "for the neighbours")
    refused = party.terminal.refuse("join", made["link"], *party.key("Aux"), "--role", "aux", code=2)
    assert "only as trainer or observer, not as aux" in refused
    assert "revoked" in party.members("revoke", made["id"])
    assert "revoked" in party.members("invites")
    assert "revoked" in party.terminal.refuse("join", made["link"], *party.key("Ben"), code=1)
    assert ada.exit_code is None  # who is in stays in
    text = party.members("invite", "--uses", "0", "--days", "0", "--role", "observer", "--role", "aux")
    link = re.search(r"potluck://\S+", text)
    assert link is not None
    observer = party.join("Olga", link.group(), "--role", "observer")
    assert party.member(until_event(observer, "joined")["peer"])["role"] == "observer"
    helper = party.join("Hilde", link.group())
    assert party.member(until_event(helper, "joined")["peer"])["role"] == "aux", "the link allows no trainer"


def test_whoever_was_invited_may_look_before_and_after_joining(party: Party) -> None:
    made = party.ask("invite")
    for command in (("monitor", "--once"), ("leaderboard",)):
        party.terminal.ask(command[0], made["link"], *command[1:])
    party.joined("Ines", made["link"])
    assert party.terminal.ask("monitor", made["link"], "--once")["run"] == RUN
    [row] = [row for row in party.ask("invites") if row["id"] == made["id"]]
    assert row["used"] == "1 of 1"
    assert "as many peers as it may" in party.terminal.refuse("join", made["link"], *party.key("Jan"), code=1)


def test_who_looks_without_an_invite_leaves_no_request(party: Party) -> None:
    before = party.ask("requests")
    said = party.terminal.refuse("monitor", str(replace(party.link, invite="")), "--once", code=1)
    assert "ask an organiser for a link" in said
    assert party.ask("requests") == before


def test_who_has_no_invite_waits_and_gets_in_when_approved(party: Party) -> None:
    ask = replace(party.link, invite="")
    carl, dora = party.join("Carl", ask, "--message", "may I?"), party.join("Dora", ask)
    carl_id, dora_id = (until_event(process, "waiting")["peer"] for process in (carl, dora))
    waiting = {row["peer"]: row for row in party.ask("requests")}
    assert (waiting[carl_id]["name"], waiting[carl_id]["message"], waiting[carl_id]["state"]) == (
        "Carl",
        "may I?",
        "waiting",
    )
    assert "may I?" in party.members("requests")
    told = until_event(party.host, "asks to be let in", peer=carl_id)
    assert (told["name"], told["message"]) == ("Carl", "may I?")
    said = party.terminal.refuse("join", str(ask), *party.key("Red")[:2], "--name", "a\x1b[31mred\x07\nb", code=2)
    assert "name has a control or bidirectional character" in " ".join(said.split())
    other = party.terminal.start(  # another who calls himself so
        "join", str(ask), *party.key("Karl")[:2], "--name", "Carl", "--json", name="another-carl"
    )
    other_id = until_event(other, "waiting")["peer"]
    said = party.terminal.refuse("members", "approve", "carl", *party.place, code=2)
    assert "2 of the peers listed are called 'carl'" in said
    assert f"Carl ({carl_id[:12]})" in said.replace("\n", " ")
    assert other_id in party.members("deny", other_id[:20])
    assert other.wait(PATIENCE_SECONDS) == 1
    assert carl_id in party.members("approve", carl_id[:20])
    assert until_event(carl, "joined")["peer"] == carl_id
    party.members("deny", dora_id, "--reason", "the oven is full")
    assert dora.wait(PATIENCE_SECONDS) == 1
    assert "the oven is full" in dora.output()
    assert "Traceback" not in dora.output()
    assert "Nobody" not in party.members("requests")  # the denied stay listed for a while
    said = party.terminal.refuse("members", "approve", "UNOSUCH", *party.place, code=2)
    assert "no peer listed is called 'UNOSUCH'" in said


def test_who_gives_up_waiting_leaves(party: Party) -> None:
    emil = party.terminal.start("join", str(replace(party.link, invite="")), *party.key("Emil"))
    emil.wait_for_line("Waiting for an organiser", PATIENCE_SECONDS)
    emil.interrupt()
    assert emil.wait(PATIENCE_SECONDS) == 0
    assert "Traceback" not in emil.output()
    said = party.terminal.refuse(
        "join", str(replace(party.link, invite="")), *party.key("Emil"), "--wait-minutes", "0", code=1
    )
    assert "not let you in yet" in said


def test_bans(party: Party) -> None:
    fred, peer = party.joined("Fred")
    said = party.members("ban", "fred", "--reason", "burnt the bread")
    assert "is banned" in said
    assert fred.wait(PATIENCE_SECONDS) == 1
    assert "burnt the bread" in fred.output()
    assert "Traceback" not in fred.output()
    assert party.member(peer)["state"] == "banned"
    assert {row["target"]: row["reason"] for row in party.ask("bans")} == {peer: "burnt the bread"}
    assert "burnt the bread" in party.members("bans")
    assert "burnt the bread" in party.terminal.refuse("join", str(party.link), *party.key("Fred"), code=1)
    assert "may join again" in party.members("unban", peer[:16])
    assert party.ask("bans") == []
    assert party.joined("Fred")[1] == peer
    assert "no peer listed is called" in party.terminal.refuse("members", "unban", peer[:16], *party.place, code=2)


def test_pardon(party: Party) -> None:
    _, peer = party.joined("Greta")
    assert f"{peer} takes part in rounds again" in party.members("pardon", peer[:16])
    assert "no peer listed is called" in party.terminal.refuse("members", "pardon", "UNOBODY", *party.place, code=2)


def test_a_run_that_is_not_hosted_here(terminal: Terminal) -> None:
    for command in (["list"], ["ban", "hf:x"]):
        said = terminal.refuse("members", *command, code=2)
        assert "no run is hosted in" in said
        assert "potluck host" in said
    assert "cannot name a run" in terminal.refuse("members", "list", "--run", "../other", code=2)
    assert "cannot name a run" in terminal.refuse("host", "--run", "Not A Name", code=2)
