"""How long a plan says that it takes: as long as its own parts do, message by message, and others would take longer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gatheringroom import RUNS, Room

from potluck.round.plan.chunks import traffic_bytes
from potluck.round.plan.messages import Plan
from potluck.round.plan.partition import PartitionConfig

FREE = PartitionConfig(smallest_share_bytes=0, seconds_per_link=0.0)
MB = 1e6

# Upload and download of each, far enough apart that none is taken for another's
Lines = dict[str, tuple[float, float]]
EVEN: Lines = {"A": (8 * MB, 8 * MB), "B": (8 * MB, 8 * MB), "C": (8 * MB, 8 * MB)}
UNEVEN: Lines = {"A": (40 * MB, 40 * MB), "B": (10 * MB, 20 * MB), "C": (5 * MB, 10 * MB)}
ONE_SLOW: Lines = {"A": (20 * MB, 20 * MB), "B": (20 * MB, 20 * MB), "C": (2 * MB, 20 * MB), "D": (80 * MB, 9 * MB)}
TWO: Lines = {"A": (30 * MB, 30 * MB), "B": (3 * MB, 30 * MB)}


def room_of(lines: Lines, clients: str, aux: str) -> Room:
    room = Room(partition=FREE)
    for peer, (up, down) in lines.items():
        card: dict[str, Any] = {"upload_bytes_per_second": up, "download_bytes_per_second": down}
        if peer in clients:
            card["addresses"] = ()
        if peer in aux:
            card["role"] = "aux"
            room.add(peer, card=card, sends=False, weight=0.0, layout="", runs=())
        else:
            room.add(peer, card=card)
    return room


def seconds_of(plan: Plan, lines: Lines, counts: tuple[int, ...]) -> float:
    """What the slowest member takes if the members reduce so many chunks, with every message counted."""
    members = plan.members
    num_senders = sum(member.sends for member in members)
    chunk_bytes = traffic_bytes(RUNS, num_senders) / sum(counts)
    up, down = [0.0] * len(members), [0.0] * len(members)
    for reducer, count in enumerate(counts):
        for index, other in enumerate(members):
            if index != reducer:
                for source, target, moves in ((index, reducer, other.sends), (reducer, index, True)):
                    up[source] += count * chunk_bytes * moves
                    down[target] += count * chunk_bytes * moves
    return max(
        max(sent / lines[member.peer][0], received / lines[member.peer][1])
        for sent, received, member in zip(up, down, members, strict=True)
    )


@pytest.mark.parametrize(
    ("lines", "clients", "aux"),
    [
        (EVEN, "", ""),
        (UNEVEN, "", ""),
        (UNEVEN, "C", ""),
        (UNEVEN, "", "A"),
        (ONE_SLOW, "", ""),
        (ONE_SLOW, "D", "A"),
        (TWO, "", ""),
    ],
    ids=["even", "uneven", "a client", "an aux", "one slow", "all kinds", "two"],
)
def test_a_plan_takes_as_long_as_it_says_and_no_other_shares_of_whole_chunks_would_be_much_faster(
    lines: Lines, clients: str, aux: str
) -> None:
    proposal = room_of(lines, clients, aux).propose()
    plan = proposal.plan
    assert proposal.is_measured
    chunks = [0] * len(plan.members)
    for part in plan.parts:
        chunks[part.reducer] += part.stop - part.start
    ours = seconds_of(plan, lines, tuple(chunks))
    assert proposal.predicted_seconds == pytest.approx(ours, rel=1e-6)
    possible = [range(plan.num_chunks + 1) if member.reduces else range(1) for member in plan.members]
    best = min(
        seconds_of(plan, lines, counts) for counts in itertools.product(*possible) if sum(counts) == plan.num_chunks
    )
    assert best <= ours <= 1.05 * best + proposal.chunk_seconds
