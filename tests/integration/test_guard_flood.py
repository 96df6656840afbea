"""A member that tells everybody more than anybody can hear: it is put out, and the others hardly notice."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from guardhouse import PATIENCE_SECONDS, SUBJECTS, open_house
from rawmember import RawMember

from potluck.hub.access.application import Application
from potluck.hub.connection import Entry
from potluck.hub.guard.floodcore import FloodLimits
from potluck.hub.presence import Presence
from potluck.messages import decode
from potluck.testing.polling import poll_until
from potluck.testing.processes import Children

FLOODER = Path(__file__).with_name("floodchild.py")
NUM_HONEST = 3


@pytest.mark.timeout(180)
@pytest.mark.parametrize("subject", [SUBJECTS.news("{}", "progress"), SUBJECTS.beacon("{}")], ids=["news", "beacons"])
async def test_who_floods_everybody_is_put_out_for_a_while_and_nobody_else(
    subject: str, tmp_path: Path, children: Children
):
    async with open_house(tmp_path) as house:
        organiser = await house.organiser()
        honest = [await house.newcomer() for _ in range(NUM_HONEST)]
        members = [house.spawn_member(children, person, tmp_path) for person in honest]
        sessions = {}
        for person, member in zip(honest, members, strict=True):
            await member.until_line("joined", PATIENCE_SECONDS)
            sessions[person.peer] = (await house.until_state(person.peer, "alive")).card.session
        dead: list[str] = []

        def note_deaths(entry: Entry) -> None:
            presence = decode(Presence, entry.value) if entry.value is not None else None
            if presence is not None and presence.state in ("dead", "left"):
                dead.append(presence.peer)

        watcher = await house.host.connect()
        await watcher.store("roster").watch(note_deaths)
        mallory = await house.newcomer()
        await mallory.join()
        [server] = house.hub.address().servers
        argv = [server, mallory.seed.decode(), "main", subject.format(mallory.peer)]
        flooder = children.spawn([sys.executable, FLOODER, *argv], name="flooder")
        await flooder.until_line("let in", PATIENCE_SECONDS)
        await poll_until(lambda: house.guard.statistics().get("floods", 0) == 1, PATIENCE_SECONDS, "the verdict")
        await flooder.until_line("hung up on not let in", PATIENCE_SECONDS)
        for member in members:  # the flood was real
            await member.until_line(f"heard {mallory.peer}", PATIENCE_SECONDS)
        refused = await mallory.apply(Application(role="trainer"))
        assert (refused.status, refused.code) == ("refused", "kept_out")
        assert "flooded the run" in refused.message
        assert refused.retry_after_seconds is not None
        [ban] = await organiser.list_bans()
        assert (ban.target, ban.banned_by, round(ban.until - ban.banned_at)) == (mallory.peer, "guard", 60)
        await house.until_state(mallory.peer, "dead")
        for person in honest:
            assert (await house.until_state(person.peer, "alive")).card.session == sessions[person.peer]
        assert set(dead) <= {mallory.peer}
        assert all(member.exit_code is None for member in members)
        flooder.kill()
        await organiser.unban(mallory.peer)
        await mallory.join(session="better")
        assert house.guard.statistics()["floods"] == 1


async def test_who_hangs_up_before_the_next_look_is_found_too_and_let_in_again_when_its_time_is_over(tmp_path: Path):
    limits = FloodLimits(messages_per_second=1, burst_messages=500, first_seconds=1)
    async with open_house(tmp_path, flood=limits) as house:
        mallory = await house.newcomer()
        [server] = house.hub.address().servers

        async def is_refused(num_messages: int = 100) -> bool:
            try:
                raw = await RawMember.open(server, mallory.seed, "main")
            except ConnectionError:
                return True
            for _ in range(num_messages):
                raw.publish(SUBJECTS.news(mallory.peer, "kept"))
            with suppress(ConnectionError):  # cut off in the middle of it
                await raw.settle()
            await raw.close()
            return False

        await poll_until(is_refused, PATIENCE_SECONDS, "the door to be closed", every_seconds=0.0)
        assert house.guard.statistics()["floods"] >= 1

        async def is_let_in() -> bool:
            return not await is_refused(0)

        await poll_until(is_let_in, PATIENCE_SECONDS, "the door to be open again", every_seconds=0.1)
