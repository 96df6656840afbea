"""Layouts: every block in one stage, the best cut, and what a server must fetch when the layout changes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from potluck.errors import ConfigurationError
from potluck.pipeline.layout import Layout, Span, missing_blocks, servers_of, spans_by_room

costs = st.lists(st.integers(1, 20).map(float), min_size=1, max_size=9)


@given(costs, st.data())
def test_a_balanced_layout_is_the_best_of_all_cuts(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    layout = Layout.balanced(costs, num_stages)

    def worst(starts: tuple[int, ...]) -> float:
        return max(sum(costs[block] for block in blocks) for blocks in Layout(len(costs), starts).stages)

    every_cut = ((0, *cut) for cut in combinations(range(1, len(costs)), num_stages - 1))
    assert worst(layout.starts) == min(worst(cut) for cut in every_cut)
    assert [block for blocks in layout.stages for block in blocks] == list(range(len(costs)))
    assert all(block in layout.blocks_of(layout.stage_of(block)) for block in range(len(costs)))


@given(st.integers(1, 12), st.data())
def test_a_server_fetches_exactly_what_it_lacks(num_blocks: int, data: st.DataObject) -> None:
    old, new = (Layout.even(num_blocks, data.draw(st.integers(1, num_blocks))) for _ in range(2))
    first = data.draw(st.integers(0, old.num_stages - 1))
    had = Span(first, data.draw(st.integers(1, old.num_stages - first)))
    serves = Span(data.draw(st.integers(0, new.num_stages - 1)))
    fetched = missing_blocks(old, had, new, serves)
    assert set(fetched) | set(old.blocks_in(had)) >= set(new.blocks_in(serves))
    assert not set(fetched) & set(old.blocks_in(had))
    assert missing_blocks(old, None, new, serves) == tuple(new.blocks_in(serves))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_large_machines_serve_several_consecutive_stages(sizes: list[int], rooms: list[int]) -> None:
    layout = Layout.even(len(sizes), len(sizes))
    named = {f"m{index}": room for index, room in enumerate(rooms)}
    try:
        spans = spans_by_room(layout, sizes, named)
    except ConfigurationError:
        assume(max(rooms) >= sum(sizes))  # one machine could hold all: then it must not have failed
        raise
    assert all(len(servers) == 1 for servers in servers_of(spans, layout.num_stages))
    assert all(sum(sizes[block] for block in layout.blocks_in(span)) <= named[name] for name, span in spans.items())


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 4), (0, 2, 1)])
def test_a_stage_without_blocks_is_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="each needs a block of its own"):
        Layout(4, starts)


def test_more_stages_than_blocks_say_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"choose 1 to 3, or have the recipe's blocks\(\) cut it finer"):
        Layout.even(3, 4)
