"""Whose word counts for a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.joinlink import JoinLink, organiser_hash
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.peer.organisers import KnownOrganisers
from potluck.recipes.catalogue import RecipeRef
from potluck.testing.memoryhub import MemoryHub
from potluck.training import notice
from potluck.training.manifest import Manifest
from potluck.training.notice import NoticeBoard

ADA, MALLORY = Signer(new_seed("user")), Signer(new_seed("user"))
LINK = JoinLink(host="hub.example.org", port=4222, run="bakery", ca_hash="a" * 32)


def test_the_link_says_whose_word_counts(tmp_path: Path) -> None:
    known = KnownOrganisers(tmp_path / "known.json")
    link = replace(LINK, organiser_hash=organiser_hash(ADA.public_key))
    known.check(link, ADA.public_key)
    with pytest.raises(ConfigurationError, match="not the organiser that the join link names"):
        known.check(link, MALLORY.public_key)
    assert not known.path.exists(), "there is nothing to remember"


def test_without_that_whoever_is_seen_first(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "known.json"
    KnownOrganisers(path).check(LINK, ADA.public_key)
    KnownOrganisers(path).check(LINK, ADA.public_key)
    KnownOrganisers(path).check(replace(LINK, run="brewery"), MALLORY.public_key)
    KnownOrganisers(path).check(replace(LINK, ca_hash="b" * 32), MALLORY.public_key)
    with pytest.raises(ConfigurationError, match="take the line of") as refused:
        KnownOrganisers(path).check(LINK, MALLORY.public_key)
    assert str(path) in str(refused.value)
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("scribble")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        KnownOrganisers(path).check(LINK, ADA.public_key)


async def test_a_manifest_of_somebody_else_is_an_error_and_not_waited_out(tmp_path: Path) -> None:
    hub = MemoryHub()
    store, run = hub.connect("guard").store("manifest"), hub.subjects.run
    manifest = Manifest(run=run, recipe=RecipeRef(name="digits"))
    await store.put(MANIFEST_KEY, notice.sign(manifest, MALLORY))
    link = replace(LINK, run=run, organiser_hash=organiser_hash(ADA.public_key))
    known = KnownOrganisers(tmp_path / "known.json")
    board = NoticeBoard(hub.connect("ada"), run, lambda organiser: known.check(link, organiser))
    await board.start()
    with pytest.raises(ConfigurationError, match="posing"):
        await board.first(10.0)
    await store.put(MANIFEST_KEY, notice.sign(manifest, ADA))
    await board.close()
