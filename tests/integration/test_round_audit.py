"""An audited round with a real hub and real processes: a reducer that lies is found, and no poison is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from roundcluster import check_agreement, open_cluster

pytestmark = pytest.mark.timeout(300)


async def test_a_lying_reducer_is_found_and_done_without(tmp_path: Path) -> None:
    async with open_cluster(tmp_path, num_full=1, num_clients=0, num_strangers=3) as cluster:
        answers = await cluster.round()
        assert answers[0]["audited"] > 0
        assert answers[0]["excluded"] == {}

        liar = cluster.members[2]
        await liar.ask("poison")
        honest = [member for member in cluster.members if member is not liar]
        patterns = cluster.begin()
        answers = await cluster.answers(patterns, honest)
        assert (await liar.ask("status"))["poisoned"] > 0, "it never lied"
        check_agreement(answers, must_contribute=[m.number for m in honest], may_contribute=[])
        for answer in answers:
            assert answer["excluded"].keys() == answer["left_out"].keys() == {liar.id}
            assert "is not that of its inputs" in answer["excluded"][liar.id]
            assert answer["audited"] > 0
        assert (await cluster.members[0].ask("status"))["statistics"]["coordinator_liars"] == 1
        [answer] = await cluster.answers(patterns, [liar])
        assert not answer["holds"]

        # It is ready for the next one too, and is not taken.
        patterns = cluster.begin()
        answers = await cluster.answers(patterns, cluster.members)
        assert [answer["holds"] for answer in answers] == [member is not liar for member in cluster.members]
        holders = [answer for answer in answers if answer["holds"]]
        check_agreement(holders, must_contribute=[m.number for m in honest], may_contribute=[])
        assert "is excluded for another" in answers[2]["reason"]
