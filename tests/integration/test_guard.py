"""The guard on a real hub: who gets in, who is kept out, and who is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from guardhouse import (
    PATIENCE_SECONDS,
    SUBJECTS,
    GuardHouse,
    Person,
    beacon,
    hand_in_card,
    knock,
    open_house,
    until_refused,
)
from huggingfacelike import huggingface_like
from rawmember import RawMember

from potluck.errors import ConfigurationError, NotAdmittedError, PermissionDeniedError, ProtocolError
from potluck.hub.access.application import Answer, Application, waiting_subject
from potluck.hub.access.member import Member, Policy, Scopes
from potluck.hub.access.organise import Organiser
from potluck.hub.connection import Delivery, Entry
from potluck.hub.guard import lobbycrowd
from potluck.hub.guard.door import DoorLimits
from potluck.hub.guard.guard import Guard
from potluck.hub.guard.presencecore import PresenceConfig
from potluck.hub.keys import Signer, new_seed
from potluck.hub.nats.connection import NatsConnection
from potluck.hub.presence import Beacon, Card, CardAnswer, Presence, with_link_proof
from potluck.messages import decode, encode
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

QUICK = PresenceConfig(suspect_after_seconds=1.5, dead_after_seconds=4.0, busy_seconds=4.0)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GuardHouse]:
    async with open_house(tmp_path) as opened:
        yield opened


async def listen_for_decision(lobby: NatsConnection, peer: str) -> asyncio.Future[Answer]:
    decided: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def take(delivery: Delivery) -> None:
        if not decided.done():
            decided.set_result(decode(Answer, delivery.payload))

    await lobby.subscribe(waiting_subject(peer), take)
    return decided


# Getting in


async def test_an_invite_lets_in_and_the_roster_tells_everyone(house: GuardHouse):
    organiser = await house.organiser()
    invite, secret = await organiser.create_invite(
        scopes=Scopes(roles=("aux",), coordinates=True, trusted=True), person="guest:ann", note="for Ann"
    )
    ann = Person(house)
    with pytest.raises(NotAdmittedError):
        await ann.connect("main")
    answer = await ann.apply(Application(role="aux", invite=secret, name="Ann", service="cloud"))
    assert answer.status == "admitted"
    assert answer.scopes is not None
    assert answer.scopes.coordinates
    await ann.join(role="aux", name="Ann")
    presence = (await house.roster())[ann.peer]
    assert (presence.state, presence.person, presence.host) == ("alive", "guest:ann", "127.0.0.1")
    assert (presence.coordinates, presence.trusted) == (True, True)
    [listed] = await organiser.list_invites()
    assert (listed.id, listed.used, listed.note) == (invite.id, 1, "for Ann")
    members = {state.member.peer: state for state in await organiser.list_members()}
    assert (members[ann.peer].state, members[ann.peer].member.service) == ("alive", "cloud")
    assert members[house.host.peer].state is None


async def test_each_refusal_by_invite(house: GuardHouse):
    organiser = await house.organiser()
    revoked, revoked_secret = await organiser.create_invite(uses=None)
    await organiser.revoke_invite(revoked.id)
    _, expiring_secret = await organiser.create_invite(lifetime_seconds=0.01)
    _, single_secret = await organiser.create_invite(uses=1)
    await asyncio.sleep(0.02)
    assert (await Person(house).apply(Application(role="trainer", invite=revoked_secret))).code == "revoked"
    assert (await Person(house).apply(Application(role="trainer", invite=expiring_secret))).code == "expired"
    assert (await Person(house).apply(Application(role="trainer", invite="never-made"))).code == "unknown_invite"
    assert (await Person(house).apply(Application(role="aux", invite=single_secret))).code == "role"
    first = Person(house)
    assert (await first.apply(Application(role="trainer", invite=single_secret))).status == "admitted"
    assert (await Person(house).apply(Application(role="trainer", invite=single_secret))).code == "used_up"
    assert (await first.apply(Application(role="trainer", invite=single_secret))).status == "admitted"
    assert (await first.apply(Application(role="trainer"))).status == "admitted"
    with pytest.raises(ConfigurationError, match="no invite"):
        await organiser.revoke_invite("nosuchinvite")


async def test_two_guards_count_the_uses_of_an_invite_together(house: GuardHouse):
    second = Guard(house.config, house.keys, house.hub.address())
    await second.start()
    try:
        organiser = await house.organiser()
        _, secret = await organiser.create_invite(uses=5)
        people = [Person(house) for _ in range(20)]
        answers = await asyncio.gather(*(person.apply(Application(role="trainer", invite=secret)) for person in people))
        assert sorted(answer.status for answer in answers) == ["admitted"] * 5 + ["refused"] * 15
        assert {answer.code for answer in answers} == {"", "used_up"}
        [invite] = await organiser.list_invites()
        assert invite.used == 5
        worked = [guard.statistics().get("lobby_admitted", 0) for guard in (house.guard, second)]
        assert sum(worked) == 5
        admitted = [person for person, answer in zip(people, answers, strict=True) if answer.status == "admitted"]
        for person in admitted:  # whichever guard answers the door knows them
            await person.join()
        for person in admitted:
            assert (await house.until_state(person.peer, "alive")).card.session == "s1"
    finally:
        await second.stop()


async def test_waiting_then_approved_without_a_restart(house: GuardHouse):
    organiser = await house.organiser()
    ann, bob = Person(house), Person(house)
    lobby = await ann.connect("lobby")
    decided = await listen_for_decision(lobby, ann.peer)
    answer = await knock(lobby, ann.peer, Application(role="trainer", name="Ann", message="please"))
    assert (answer.status, answer.place) == ("waiting", 1)
    assert (await bob.apply(Application(role="trainer"))).place == 2
    assert (await knock(lobby, ann.peer, Application(role="trainer"))).place == 1
    with pytest.raises(NotAdmittedError):
        await ann.connect("main")
    requests = {request.peer: request for request in await organiser.list_requests()}
    assert set(requests) == {ann.peer, bob.peer}
    assert (requests[ann.peer].message, requests[ann.peer].host) == ("please", "127.0.0.1")
    await organiser.approve(ann.peer)
    told = await asyncio.wait_for(decided, PATIENCE_SECONDS)
    assert told.status == "admitted"
    assert told.scopes == Scopes(roles=("trainer", "observer"))
    await ann.join()
    assert (await house.roster())[ann.peer].person == f"key:{ann.peer}"
    assert [request.peer for request in await organiser.list_requests()] == [bob.peer]


async def test_denied_is_told_at_once_and_again(house: GuardHouse):
    organiser = await house.organiser()
    ann = Person(house)
    lobby = await ann.connect("lobby")
    decided = await listen_for_decision(lobby, ann.peer)
    assert (await knock(lobby, ann.peer, Application(role="trainer"))).status == "waiting"
    await organiser.deny(ann.peer, "no room")
    told = await asyncio.wait_for(decided, PATIENCE_SECONDS)
    assert (told.status, told.code) == ("refused", "denied")
    assert "no room" in told.message
    assert (await knock(lobby, ann.peer, Application(role="trainer"))).code == "denied"
    _, secret = await organiser.create_invite()
    assert (await knock(lobby, ann.peer, Application(role="trainer", invite=secret))).status == "admitted"
    with pytest.raises(ConfigurationError, match="does not wait"):
        await organiser.deny(ann.peer)


async def test_somebody_can_be_let_in_before_coming(house: GuardHouse):
    ann = Person(house)
    await (await house.organiser()).approve(ann.peer, scopes=Scopes(roles=("aux", "trainer")), person="guest:ann")
    await ann.join(role="aux")
    assert (await house.roster())[ann.peer].person == "guest:ann"


async def test_a_closed_run_and_an_old_version(house: GuardHouse):
    organiser = await house.organiser()
    policy = await organiser.policy()
    assert policy == Policy()
    await organiser.set_policy(Policy(waiting_list=False, minimum_version="2.0"))
    assert (await Person(house).apply(Application(role="trainer", version="1.9"))).code == "version_too_old"
    assert (await Person(house).apply(Application(role="trainer", version="2.0.1"))).code == "closed"
    await house.restart_guard()
    assert (await organiser.policy()).minimum_version == "2.0"


async def test_hugging_face_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")
    policy = Policy(token_holders="listed", users=("alice",), organisations=("bakers",), waiting_list=False)
    async with (
        huggingface_like() as (service, url),
        open_house(tmp_path, policy=policy, huggingface_url=url, huggingface_timeout_seconds=1.0) as house,
    ):

        async def knock_with(token: str, person: Person | None = None) -> Answer:
            return await (person or Person(house)).apply(Application(role="trainer", token=token))

        alice = Person(house)
        answer = await knock_with("hf_alice", alice)
        assert (answer.status, answer.person) == ("admitted", "hf:alice")
        await alice.join()
        assert (await house.roster())[alice.peer].person == "hf:alice"
        assert (await knock_with("hf_bob")).status == "admitted"
        assert (await knock_with("hf_carol")).code == "not_listed"
        assert (await knock_with("hf_wrong")).code == "bad_token"
        for token, seconds in (("hf_429", 21.0), ("hf_500", 30.0), ("hf_slow", 30.0)):
            answer = await knock_with(token)
            assert (answer.code, answer.retry_after_seconds) == ("token_service_down", seconds)
        num_asked = len(service.asked)
        assert (await knock_with("hf_wrong", alice)).status == "admitted"  # a member's token is not looked at
        assert len(service.asked) == num_asked
        organiser = await house.organiser()
        await organiser.set_policy(Policy(token_holders="listed", users=("alice",)))
        carol = Person(house)
        assert (await knock_with("hf_carol", carol)).status == "waiting"
        assert [request.person for request in await organiser.list_requests()] == ["hf:carol"]
        await organiser.ban("hf:carol")
        assert (await knock_with("hf_carol")).code == "banned"  # under another key
        stored = [entry.value for name in ("members", "requests") for entry in await entries_of(house, name)]
    assert stored
    assert not any(b"hf_" in (value or b"") for value in stored)
    assert "hf_alice" not in caplog.text
    assert "hf_wrong" not in caplog.text


async def test_one_slow_token_check_holds_up_nobody(tmp_path: Path):
    async with (
        huggingface_like() as (service, url),
        open_house(tmp_path, policy=Policy(token_holders="anyone"), huggingface_url=url) as house,
    ):
        slow, slower = Person(house), Person(house)
        waiting = [
            asyncio.create_task(person.apply(Application(role="trainer", token="hf_slow"))) for person in (slow, slower)
        ]
        await poll_until(lambda: len(service.asked) == 2, PATIENCE_SECONDS, "both tokens to be asked about")
        assert (await Person(house).apply(Application(role="trainer", token="hf_alice"))).status == "admitted"
        assert (await slow.apply(Application(role="trainer"))).code == "too_many_tries"
        assert not any(task.done() for task in waiting)
        service.stop()
        assert [(await task).code for task in waiting] == ["bad_token", "bad_token"]


async def entries_of(house: GuardHouse, store: str) -> list[Entry]:
    """What stands in one of the guard's own stores."""
    connection = await house.connect(house.keys.guard_seed, "guard")
    return await connection.store(store).entries()


# Keeping out


async def test_a_ban_cuts_the_live_connection_and_keeps_out(house: GuardHouse):
    organiser = await house.organiser()
    ann = await house.newcomer()
    lost = asyncio.Event()
    main = await ann.connect("main", on_disconnected=lost.set)
    bulk = await ann.connect("bulk")
    await hand_in_card(main, ann.peer, session="s1")
    assert await organiser.ban(ann.peer, "noise") == 2
    await asyncio.wait_for(lost.wait(), PATIENCE_SECONDS)
    await until_refused(main)
    await until_refused(bulk)
    answer = await ann.apply(Application(role="trainer"))
    assert answer.code == "banned"
    assert "noise" in answer.message
    with pytest.raises(NotAdmittedError):
        await ann.connect("main")
    assert (await house.until_state(ann.peer, "dead")).state == "dead"
    assert [ban.target for ban in await organiser.list_bans()] == [ann.peer]
    assert [state.banned for state in await organiser.list_members() if state.member.peer == ann.peer] == [True]
    await organiser.unban(ann.peer)
    await ann.join(session="s2")
    with pytest.raises(ConfigurationError, match="not banned"):
        await organiser.unban(ann.peer)


async def test_what_audits_found_is_pardoned_and_the_roster_says_so(house: GuardHouse):
    organiser = await house.organiser()
    ann = await house.newcomer()
    main = await ann.join()
    assert (await house.roster())[ann.peer].pardoned_at == 0.0
    before = time.time()
    await organiser.pardon(ann.peer)

    async def is_pardoned() -> float:
        return (await house.roster())[ann.peer].pardoned_at

    pardoned_at = await poll_until(is_pardoned, PATIENCE_SECONDS, "the roster to tell of the pardon")
    assert before <= pardoned_at <= time.time()
    [member] = [state.member for state in await organiser.list_members() if state.member.peer == ann.peer]
    assert (member.pardoned_at, member.pardoned_by) == (pardoned_at, house.host.peer)
    await ann.join(session="s2")
    assert (await house.roster())[ann.peer].pardoned_at == pardoned_at, "it is for good"
    with pytest.raises(ConfigurationError, match="not a member"):
        await organiser.pardon(Person(house).peer)
    with pytest.raises(PermissionDeniedError):
        await Organiser(main, SUBJECTS, ann.peer).pardon(ann.peer)


async def test_a_person_is_banned_with_all_peers_and_invites(house: GuardHouse):
    organiser = await house.organiser()
    _, secret = await organiser.create_invite(person="guest:ann", uses=None)
    phones = [Person(house) for _ in range(3)]
    for phone in phones:
        assert (await phone.apply(Application(role="trainer", invite=secret))).status == "admitted"
    mains = [await phone.join() for phone in phones]
    waiting = Person(house)
    assert await organiser.ban("guest:ann") == 3
    for main in mains:
        await until_refused(main)
    assert (await waiting.apply(Application(role="trainer", invite=secret))).code == "banned"


async def test_a_ban_reaches_those_who_wait(house: GuardHouse):
    organiser = await house.organiser()
    ann = Person(house)
    lobby = await ann.connect("lobby")
    decided = await listen_for_decision(lobby, ann.peer)
    await knock(lobby, ann.peer, Application(role="trainer"))
    await organiser.ban(ann.peer)
    assert (await asyncio.wait_for(decided, PATIENCE_SECONDS)).code == "banned"
    assert await organiser.list_requests() == []


async def test_a_person_has_so_many_seats(house: GuardHouse):
    organiser = await house.organiser()
    _, secret = await organiser.create_invite(scopes=Scopes(seats={"kaggle": 2}), person="guest:ann", uses=None)
    people = [Person(house) for _ in range(3)]
    application = Application(role="trainer", invite=secret, service="kaggle")
    first = None
    for person in people[:2]:
        assert (await person.apply(application)).status == "admitted"
        main = await person.join()
        first = first or main
    refused = await people[2].apply(application)
    assert refused.code == "seats"
    assert refused.retry_after_seconds
    elsewhere = Application(role="trainer", invite=secret, service="local")
    assert (await people[2].apply(elsewhere)).status == "admitted"
    again = await people[0].connect("main")  # a second connection of the same peer takes no seat
    await again.close()
    assert first is not None
    await first.close()

    async def seat_is_free() -> bool:
        return (await people[2].apply(application)).status == "admitted"

    await poll_until(seat_is_free, PATIENCE_SECONDS, "a seat to be free")
    await people[2].join()
    with pytest.raises(NotAdmittedError):  # the door counts too
        await people[0].connect("main")


async def test_of_those_who_rush_in_together_only_so_many_stay(house: GuardHouse):
    organiser = await house.organiser()
    people = [Person(house) for _ in range(6)]
    for person in people:
        await organiser.approve(person.peer, scopes=Scopes(seats={"local": 2}), person="guest:ann")
    results = await asyncio.gather(*(person.connect("main") for person in people), return_exceptions=True)
    let_in = [result for result in results if isinstance(result, NatsConnection)]
    assert len(let_in) == 2
    assert sum(isinstance(result, NotAdmittedError) for result in results) == 4


async def test_only_organisers_organise(house: GuardHouse):
    ann = await house.newcomer(coordinates=True)
    main = await ann.join()
    with pytest.raises(PermissionDeniedError):
        await Organiser(main, SUBJECTS, ann.peer).ban(house.host.peer)
    with pytest.raises(PermissionDeniedError):
        await Organiser(main, SUBJECTS, house.host.peer).ban(house.host.peer)
    organiser = await house.organiser()
    with pytest.raises(ConfigurationError, match="yourself"):
        await organiser.ban(house.host.peer)
    with pytest.raises(ConfigurationError, match="neither"):
        await organiser.ban("ann")


async def test_an_organiser_can_make_another(house: GuardHouse):
    ann = await house.newcomer()
    main = await ann.join()
    reconnected = asyncio.Event()
    renewed = await ann.connect("main", on_connected=reconnected.set)
    await (await house.organiser()).approve(ann.peer, scopes=Scopes(organiser=True))
    await asyncio.wait_for(reconnected.wait(), PATIENCE_SECONDS)  # to come back with the new rights
    assert await Organiser(renewed, SUBJECTS, ann.peer).list_bans() == []
    await main.close()


async def test_a_forged_signature_is_refused(house: GuardHouse):
    """Somebody who knows a member's public key but not its secret."""
    ann = await house.newcomer()
    host, port = house.hub.address().servers[0].removeprefix("nats://").split(":")
    for signature in ("", "AAAA", "A" * 86):
        reader, writer = await asyncio.open_connection(host, int(port))
        await reader.readline()
        options = f'{{"verbose":false,"nkey":"{ann.peer}","sig":"{signature}","name":"main","protocol":1}}'
        writer.write(f"CONNECT {options}\r\nPING\r\n".encode())
        answer = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        while answer.strip() == b"PING":
            answer = await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        assert b"Authorization Violation" in answer
        writer.close()
        await writer.wait_closed()
    assert house.guard.statistics()["door_unproven"] == 3


# Presence


async def test_hub_time(house: GuardHouse):
    ann = await house.newcomer()
    main = await ann.join()
    before = time.time()
    told = decode(float, await main.request(SUBJECTS.ask(ann.peer, "time"), b"", timeout_seconds=PATIENCE_SECONDS))
    assert before <= told <= time.time()


async def test_good_bye_and_coming_again(house: GuardHouse):
    ann = await house.newcomer()
    main = await ann.join()
    await main.request(SUBJECTS.leave(ann.peer), encode(Beacon(session="s1")), timeout_seconds=PATIENCE_SECONDS)
    assert (await house.roster())[ann.peer].state == "left"
    await main.close()
    main = await ann.join(session="s2")
    assert (await house.roster())[ann.peer].state == "alive"
    answer = await hand_in_card(main, ann.peer, session="s1")
    assert not answer.accepted
    assert (await house.roster())[ann.peer].card.session == "s2"


async def test_a_card_with_a_role_that_is_not_allowed(house: GuardHouse):
    ann = await house.newcomer()
    main = await ann.connect()
    assert not (await hand_in_card(main, ann.peer, session="s1", role="aux")).accepted
    assert not (await hand_in_card(main, ann.peer, session="no spaces please")).accepted
    assert ann.peer not in await house.roster()


async def test_a_killed_process_is_dead_within_two_seconds(house: GuardHouse, children: Children, tmp_path: Path):
    ann = await house.newcomer()
    process = house.spawn_member(children, ann, tmp_path)
    await process.until_line("joined", PATIENCE_SECONDS)
    await house.until_state(ann.peer, "alive")
    process.kill()
    killed = time.monotonic()
    await house.until_state(ann.peer, "dead")
    assert time.monotonic() - killed < 2


async def test_a_frozen_process_is_suspect_then_dead_then_alive(tmp_path: Path, children: Children):
    async with open_house(tmp_path, presence=QUICK) as house:
        ann = await house.newcomer()
        process = house.spawn_member(children, ann, tmp_path)
        await process.until_line("joined", PATIENCE_SECONDS)
        session = (await house.until_state(ann.peer, "alive")).card.session
        process.freeze()
        await house.until_state(ann.peer, "suspect")
        await house.until_state(ann.peer, "dead")
        process.thaw()
        assert (await house.until_state(ann.peer, "alive")).card.session == session


async def test_a_silent_member_is_suspect_and_a_beacon_clears_it(tmp_path: Path):
    async with open_house(tmp_path, presence=QUICK) as house:
        ann = await house.newcomer()
        main = await ann.join()
        await house.until_state(ann.peer, "suspect")
        await beacon(main, ann.peer)
        await house.until_state(ann.peer, "alive")


async def test_the_guard_is_restarted_while_members_go_on(tmp_path: Path, children: Children):
    async with open_house(tmp_path, presence=QUICK) as house:
        ann = await house.newcomer()
        process = house.spawn_member(children, ann, tmp_path)
        await process.until_line("joined", PATIENCE_SECONDS)
        bob = await house.newcomer()
        bobs = await bob.join()
        before = (await house.roster())[ann.peer]
        await house.guard.stop()
        await asyncio.sleep(QUICK.dead_after_seconds + 0.5)  # long enough to be dead, had anybody judged
        await house.restart_guard()
        await beacon(bobs, bob.peer)
        roster = await house.roster()
        assert roster[ann.peer] == before
        assert roster[bob.peer].state == "alive"
        await asyncio.sleep(QUICK.suspect_after_seconds * 2)
        assert (await house.roster())[ann.peer] == before  # its beacons are heard by the new guard
        await house.until_state(bob.peer, "suspect", "dead")
        process.kill()
        await house.until_state(ann.peer, "dead")
        assert len(await (await house.organiser()).list_members()) == 3


async def test_a_guard_that_starts_late_knows_who_is_connected(house: GuardHouse):
    """Its table of connections comes from the hub's lists, not from events it has not seen."""
    ann = await house.newcomer()
    main = await ann.join()
    await house.restart_guard()
    assert house.guard.statistics()["connections"] >= 2
    await main.close()
    assert (await house.until_state(ann.peer, "dead")).reason


# Hostile input


async def test_garbage_on_every_subject_neither_stops_nor_slows_the_guard(house: GuardHouse):
    ann = await house.newcomer(organiser=True, coordinates=True)
    main = await ann.join()
    garbage = [b"", b"\xc1", b"\x00" * 50, b"\x93" * 5000, b"{}", b"\xff" * 200_000, encode({"session": 7})]
    subjects = [
        SUBJECTS.card(ann.peer),
        SUBJECTS.beacon(ann.peer),
        SUBJECTS.leave(ann.peer),
        SUBJECTS.ask(ann.peer, "time"),
        SUBJECTS.ask(ann.peer, "nothing"),
        SUBJECTS.organise(ann.peer, "invite"),
        SUBJECTS.organise(ann.peer, "ban"),
        SUBJECTS.organise(ann.peer, "set_policy"),
        SUBJECTS.organise(ann.peer, "nothing"),
    ]
    for subject in subjects:
        for payload in garbage:
            await main.publish(subject, payload)
    lobby = await Person(house).connect("lobby")
    stranger = lobby._credentials.inbox_prefix.removeprefix("_INBOX.")
    for payload in [each for each in garbage if len(each) < 1000]:
        await lobby.publish(SUBJECTS.lobby(stranger), payload)
    answer = await knock(lobby, stranger, Application(role="trainer"))
    assert answer.status == "waiting"
    # As the guard itself, whom the hub lets publish anywhere: what no member could send at all.
    trusted = await house.connect(house.keys.guard_seed, "guard")
    for subject in (SUBJECTS.lobby("nobody"), SUBJECTS.card("x"), SUBJECTS.beacon("x")):
        for payload in garbage:
            await trusted.publish(subject, payload)
    await trusted.store("roster").put(ann.peer, b"garbage")
    await trusted.store("members").put("garbage", b"garbage")
    await trusted.store("members").put(ann.peer, b'{"stream":"potluck_bakery_lease","seq":2}')
    await trusted.store("policy").put("policy", b"")
    # Nobody may ask the door but a server; a store's entry is made to go there all the same.
    entry = f"$JS.API.DIRECT.GET.{SUBJECTS.stream('members')}.{SUBJECTS.store_write('members', 'garbage')}"
    await trusted.forward(entry, b"", reply="$SYS.REQ.USER.AUTH")
    await poll_until(
        lambda: house.guard.statistics().get("door_invalid_questions", 0) == 1,
        PATIENCE_SECONDS,
        "the garbage to be counted",
    )
    counted = house.guard.statistics()
    for name in ("invalid_cards", "invalid_beacons", "invalid_good_byes", "unknown_questions", "organise_failed_input"):
        assert counted[name] >= 5, name
    assert counted["lobby_malformed"] >= 4
    assert counted["invalid_senders"] >= 3 * len(garbage)
    assert counted["invalid_records"] >= 2
    assert counted.get("task_errors", 0) == 0
    # What no guard wrote is put right again.
    assert (await house.until_state(ann.peer, "alive")).card.session == "s1"
    await poll_until(lambda: member_in_store(trusted, ann.peer), PATIENCE_SECONDS, "the record to be put right")
    assert (await trusted.store("members").get("garbage")) is None
    assert (await (await house.organiser()).policy()) == Policy()
    assert (await house.newcomer()).peer
    assert main.is_connected


async def member_in_store(connection: NatsConnection, peer: str) -> bool:
    entry = await connection.store("members").get(peer)
    try:
        return entry is not None and decode(Member, entry.value or b"").peer == peer
    except ProtocolError:
        return False


async def test_a_reply_subject_of_somebody_else_gets_no_answer(house: GuardHouse):
    """The hub does not check where a sender wants its answer; the guard must not be made to speak for others."""
    ann = await house.newcomer()
    main = await ann.join()
    heard: list[str] = []
    eavesdropper = await house.connect(house.keys.guard_seed, "guard")
    for subject in (SUBJECTS.plan("*"), f"_INBOX.{house.host.peer}.>", SUBJECTS.store_write("roster", ">")):
        await eavesdropper.subscribe(subject, lambda delivery: heard.append(delivery.subject))
    raw = await RawMember.open(house.hub.address().servers[0], ann.seed, "main")
    house.close_later(raw.close)
    targets = [
        SUBJECTS.plan(house.host.peer),
        f"_INBOX.{house.host.peer}.lobby",
        SUBJECTS.store_write("roster", house.host.peer),
        f"_INBOX.{ann.peer}",
    ]
    for target in targets:
        raw.publish(SUBJECTS.ask(ann.peer, "time"), reply=target)
        raw.publish(SUBJECTS.card(ann.peer), reply=target)
        raw.publish(SUBJECTS.read(ann.peer, "roster"), reply=target)
    assert (await raw.settle()).errors == []
    await poll_until(
        lambda: house.guard.statistics().get("misdirected_replies", 0) == 3 * len(targets),
        PATIENCE_SECONDS,
        "the replies to be held back",
    )
    await main.request(SUBJECTS.ask(ann.peer, "time"), b"", timeout_seconds=PATIENCE_SECONDS)
    assert heard == []


async def test_stores_are_read_through_the_guard(house: GuardHouse):
    ann = await house.newcomer()
    main = await ann.join()
    wanted = {"last_by_subj": SUBJECTS.store_write("roster", ann.peer)}
    answer = await main.request(SUBJECTS.read(ann.peer, "roster"), msgspec.json.encode(wanted), timeout_seconds=30)
    assert decode(Presence, answer).peer == ann.peer
    with pytest.raises(PermissionDeniedError):
        await main.request(SUBJECTS.read(ann.peer, "members"), b"{}", timeout_seconds=30)
    trusted = await house.connect(house.keys.guard_seed, "guard")
    reply = f"{SUBJECTS.inbox(ann.peer)}.x"
    await trusted.forward(SUBJECTS.read(ann.peer, "members"), b"{}", reply=reply)
    await trusted.forward(SUBJECTS.read(ann.peer, "roster"), b"x" * 5000, reply=reply)
    await trusted.forward(SUBJECTS.write(ann.peer, "members", ann.peer), b"", reply=reply)
    await poll_until(lambda: refusals(house.guard) == (2, 1), PATIENCE_SECONDS, "all to be refused")


def refusals(guard: Guard) -> tuple[float, float]:
    """How many reads and writes a guard has refused."""
    statistics = guard.statistics()
    return statistics.get("refused_reads", 0), statistics.get("refused_writes", 0)


async def test_who_floods_the_lobby_is_cut_off(house: GuardHouse):
    cut = asyncio.Event()
    ann = Person(house)
    lobby = await ann.connect("lobby", on_disconnected=cut.set)
    await lobby.publish(SUBJECTS.lobby(ann.peer), b"x" * 100_000)
    await asyncio.wait_for(cut.wait(), PATIENCE_SECONDS)
    assert house.guard.statistics()["lobby_floods"] == 1


async def test_who_guesses_secrets_is_slowed_down(house: GuardHouse):
    codes = []
    for _ in range(40):
        answer = await Person(house).apply(Application(role="trainer", invite="guess"))
        codes.append(answer.code)
        if answer.code == "too_many_tries":
            assert answer.retry_after_seconds
            break
    assert codes[-1] == "too_many_tries"
    assert set(codes[:-1]) == {"unknown_invite"}


# Link keys


async def test_a_link_key_is_its_peers_own_or_refused(house: GuardHouse):
    ann, bob = [await house.newcomer() for _ in range(2)]

    async def hand_in(person: Person, card: Card) -> CardAnswer:
        main = await person.connect()
        payload = encode(card)
        return decode(CardAnswer, await main.request(SUBJECTS.card(person.peer), payload, timeout_seconds=30))

    def signed(person: Person, card: Card) -> Card:
        return with_link_proof(card, SUBJECTS.run, person.peer, Signer(person.seed).sign)

    card = Card(session="s1", role="trainer", link_key="a" * 64)
    assert "not signed" in (await hand_in(ann, card)).message
    assert "not signed" in (await hand_in(ann, signed(bob, card))).message
    assert (await hand_in(ann, signed(ann, card))).accepted
    refused = await hand_in(bob, signed(bob, card))
    assert not refused.accepted
    assert f"the link key is that of {ann.peer}" in refused.message
    assert bob.peer not in await house.roster()
    assert (await hand_in(bob, signed(bob, msgspec.structs.replace(card, link_key="b" * 64)))).accepted
    old = await hand_in(bob, msgspec.structs.replace(card, protocol=1, version="0.1.0"))
    assert "your potluck 0.1.0 only 1: update yours" in old.message


async def test_a_peer_of_an_older_protocol_is_told_so_at_the_lobby(house: GuardHouse):
    answer = await Person(house).apply(Application(role="trainer", protocol=1, version="0.1.0"))
    assert answer.code == "version_too_old"
    assert "this run speaks protocol 2 and your potluck 0.1.0 only 1: update yours" in answer.message


# What people write


@pytest.mark.parametrize("text", ["a\x1b[31mred\x07\nb", "x\u202ey"])
async def test_names_and_messages_that_command_a_terminal_are_refused(house: GuardHouse, text: str):
    organiser = await house.organiser()
    for wrong in (Application(role="trainer", name=text), Application(role="trainer", message=text)):
        answer = await Person(house).apply(wrong)
        assert answer.code == "malformed"
        assert "has a control or bidirectional character" in answer.message
        assert answer.message.isprintable()
    assert await organiser.list_requests() == []
    ann = await house.newcomer()
    refused = await hand_in_card(await ann.connect(), ann.peer, session="s1", name=text)
    assert (refused.accepted, "name has a control" in refused.message) == (False, True)
    with pytest.raises(ConfigurationError, match="reason has a control or bidirectional character"):
        await organiser.ban(ann.peer, text)
    with pytest.raises(ConfigurationError, match="note has a control or bidirectional character"):
        await organiser.create_invite(note=text)


# A crowd at the door


async def test_a_crowd_of_idle_strangers_keeps_nobody_out(tmp_path: Path):
    async with open_house(tmp_path, limits=DoorLimits(lobby=24)) as house:
        organiser = await house.organiser()
        _, secret = await organiser.create_invite(uses=None)
        server = house.hub.address().servers[0]
        waiting = Person(house)  # who waits stays, whatever the others do
        line = await waiting.connect("lobby")
        decided = await listen_for_decision(line, waiting.peer)
        assert (await knock(line, waiting.peer, Application(role="trainer", name="Wim"))).status == "waiting"

        async def stand_about(number: int) -> RawMember | None:
            try:
                return await RawMember.open(server, new_seed("user"), "lobby", source=f"127.0.0.{2 + number % 3}")
            except (AssertionError, ConnectionError):  # more than can be cut at once
                return None

        strangers = [await stand_about(number) for number in range(60)]
        for raw in strangers:
            if raw is not None:
                house.close_later(raw.close)
        assert (await Person(house).apply(Application(role="trainer", invite=secret))).status == "admitted"
        assert (await Person(house).apply(Application(role="trainer"))).place == 2
        first = next(raw for raw in strangers if raw is not None)
        await first.until_cut()
        await poll_until(lambda: _few_strangers(house), PATIENCE_SECONDS, "the lobby to be thinned out")
        assert house.guard.statistics()["lobby_cuts"] >= 60 - 24
        await organiser.approve(waiting.peer)
        assert (await asyncio.wait_for(decided, PATIENCE_SECONDS)).status == "admitted"


async def _few_strangers(house: GuardHouse) -> bool | None:
    return house.guard._connections.count("lobby") <= 24 or None


async def test_a_stranger_that_says_nothing_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lobbycrowd, "IDLE_SECONDS", 1.0)
    async with open_house(tmp_path) as house:
        raw = await RawMember.open(house.hub.address().servers[0], new_seed("user"), "lobby")
        house.close_later(raw.close)
        await raw.until_cut()
