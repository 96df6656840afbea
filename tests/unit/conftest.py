"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import roundlab


@pytest.fixture(params=roundlab.GROUPS)
def each_group(request: pytest.FixtureRequest) -> Iterator[str]:
    """The rounds of a lab are those of `main`, and once more those of a named group."""
    token = roundlab.GROUP.set(request.param)
    yield request.param
    roundlab.GROUP.reset(token)
