"""Whose word counts for a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.address import HubAddress
from potluck.hub.joinlink import JoinLink, organiser_hash
from potluck.hub.keys import Signer, new_seed
from potluck.hub.stores import MANIFEST_KEY
from potluck.peer.identity import Identity
from potluck.peer.organisers import KnownOrganisers
from potluck.recipes.reference import RecipeRef
from potluck.run.peer import Peer, PeerConfig
from potluck.sim.memoryhub import MemoryHub
from potluck.sim.memoryrun import MemoryRun
from potluck.sim.virtualloop import LoopClock, in_virtual_time
from potluck.testing.polling import poll_until
from potluck.training.manifest import noticeboard
from potluck.training.manifest.manifest import Manifest
from potluck.training.manifest.noticeboard import NoticeBoard
from potluck.training.trainer.auxiliarywork import AuxiliaryWork

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
    await store.put(MANIFEST_KEY, noticeboard.sign(manifest, MALLORY))
    link = replace(LINK, run=run, organiser_hash=organiser_hash(ADA.public_key))
    known = KnownOrganisers(tmp_path / "known.json")
    board = NoticeBoard(hub.connect("ada"), run, lambda organiser: known.check(link, organiser))
    await board.start()
    with pytest.raises(ConfigurationError, match="posing"):
        await board.first(10.0)
    with pytest.raises(ConfigurationError, match="posing"):
        board.check()
    await store.put(MANIFEST_KEY, noticeboard.sign(manifest, ADA))
    await poll_until(lambda: board.manifest == manifest, 10.0, "the organiser's own")
    board.check()
    await board.close()


async def test_whoever_comes_by_a_link_checks_by_it() -> None:
    """Trainers, aux peers and observers alike: a peer's session carries the check to whoever reads the manifest."""
    link = replace(LINK, organiser_hash=organiser_hash(ADA.public_key))
    identity = Identity.temporary()
    for config, is_checked in ((PeerConfig(link=link), True), (PeerConfig(invite="x"), False)):
        check = Peer(HubAddress(servers=("nats://127.0.0.1:1",)), link.run, identity, config).session.check_organiser
        check(ADA.public_key)
        if is_checked:
            with pytest.raises(ConfigurationError, match="not the organiser that the join link names"):
                check(MALLORY.public_key)
        else:
            check(MALLORY.public_key)


@in_virtual_time
async def test_an_aux_peer_does_not_help_whoever_poses_as_the_organiser() -> None:
    def check(organiser: str) -> None:
        KnownOrganisers().check(replace(LINK, organiser_hash=organiser_hash(ADA.public_key)), organiser)

    run = MemoryRun(clock=LoopClock())
    await run.open()
    manifest = Manifest(run=run.hub.subjects.run, recipe=RecipeRef(name="digits"))
    await run.hub.connect("GUARD").store("manifest").put(MANIFEST_KEY, noticeboard.sign(manifest, MALLORY))
    alan = await run.join("Alan", role="aux")
    alan.session.check_organiser = check
    with pytest.raises(ConfigurationError, match="posing"):
        await AuxiliaryWork.start(alan)
    await run.close()
