"""When an organiser should look."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from potluck.errors import ConfigurationError
from potluck.hub.presence import Beacon, Card, Presence
from potluck.monitor.alarms import AlarmConfig, Alarms
from potluck.round.plan.messages import Commit, CommittedMember, Restoration, RoundKey
from potluck.run.cutboard import Cut, PartRecord
from potluck.run.hostnews import FRESH_SECONDS, HostNews
from potluck.state.announcement import Kept, KeptState


class Scene:
    """A run that a test has things happen in."""

    def __init__(self, *trainers: str, client: bool = False) -> None:
        self.alarms = Alarms()
        self.now = 0.0
        self.epoch = 0
        self.trainers = trainers
        for name in trainers:
            self.tell(name, client=client)

    def tell(self, name: str, state: Any = "alive", *, client: bool = False, role: Any = "trainer") -> None:
        addresses = () if client else ("tcp://127.0.0.1:1",)
        card = Card(session="s", role=role, name=name, addresses=addresses)
        presence = Presence(peer=name, card=card, state=state, host="", person=name)
        self.alarms.peer_changed(presence, self.now)

    def epochs(self, *losses: float, seconds: float = 1.0, **commit: Any) -> None:
        for loss in losses:
            self.now += seconds
            self.epoch += 1
            for name in self.trainers:
                self.alarms.beacon_came(name, Beacon(session="s", loss=loss), self.now)
            key = RoundKey(epoch=self.epoch, token=1, attempt=0)
            fields: dict[str, Any] = {"digest": "", "parent": "", "layout": "", "members": (), "committed_at": self.now}
            made = Commit(epoch=self.epoch, key=key, term=1, coordinator="host", **{**fields, **commit})
            self.alarms.committed(made, self.now)

    def kinds(self, *, after: float = 0.0, **look: Any) -> list[str]:
        self.now += after
        return [alarm.kind for alarm in self.alarms.look(self.now, **{"coordinator": "host", **look})]

    def text(self, **look: Any) -> str:
        [alarm] = self.alarms.look(self.now, **{"coordinator": "host", **look})
        return alarm.text


def test_a_run_that_trains_is_left_alone() -> None:
    scene = Scene("Ada", "Grace")
    scene.epochs(*(3.0 - 0.01 * n for n in range(100)))
    assert scene.kinds(after=30.0) == []


def test_no_epoch_for_long() -> None:
    scene = Scene("Ada")
    scene.epochs(3.0, 3.0, 3.0, seconds=20.0)
    assert scene.kinds(after=90.0) == []  # an epoch takes 20 s here
    assert scene.kinds(after=20.0) == ["standstill"]
    assert "110 s" in scene.text()
    assert "20 s before" in scene.text()
    since = scene.alarms.look(scene.now)[0].since
    scene.now += 5.0
    assert scene.alarms.look(scene.now)[0].since == since
    assert "nobody coordinates" in scene.text(coordinator="")
    scene.tell("Ada", "left")
    assert "nobody trains" in scene.text()
    scene.epochs(3.0)
    assert scene.kinds() == []


def test_a_pause_is_no_standstill_and_neither_is_what_has_not_begun() -> None:
    scene = Scene()
    assert scene.kinds() == []
    assert scene.kinds(after=1e6) == []
    scene.tell("Ada")
    scene.epochs(3.0)
    assert scene.kinds(after=1e6, is_paused=True) == []
    assert scene.kinds(after=30.0) == []
    assert scene.kinds(after=31.0) == ["standstill"]


def test_time_in_which_nobody_trained_is_no_standstill() -> None:
    scene = Scene()
    assert scene.kinds(after=85.0) == []
    scene.tell("Ada")
    assert scene.kinds(after=30.0) == []
    assert scene.kinds(after=31.0) == ["standstill"]
    scene.tell("Ada", "left")
    scene.now += 1e3
    scene.tell("Ada")
    assert scene.kinds() == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(loss: float) -> None:
    scene = Scene("Ada")
    scene.epochs(3.0, loss)
    assert scene.kinds() == ["loss not finite"]
    assert "Ada" in scene.text()
    scene.epochs(3.0)
    assert scene.kinds() == []


def test_a_loss_that_rises_is_told_until_the_run_went_back() -> None:
    scene = Scene("Ada")
    scene.epochs(*[2.0] * 150)
    assert scene.kinds() == []
    scene.epochs(*[2.6] * 60)
    assert scene.kinds() == ["loss rising"]
    assert "2.6" in scene.text()
    scene.epochs(2.6, restored=Restoration(order=1, epoch=3, digest=""), num_restored=1)
    assert scene.kinds() == []


def rises(scene: Scene, losses: list[float]) -> int:
    """How often the alarm comes, epoch by epoch."""
    count, was_rising = 0, False
    for loss in losses:
        scene.epochs(loss)
        is_rising = "loss rising" in scene.kinds()
        count += is_rising and not was_rising
        was_rising = is_rising
    return count


def noisy(level: float, num_epochs: int, seed: int) -> list[float]:
    """What a peer tells whose batches are alike for a while, as those of a shard are: within a fifth of the level."""
    chance, deviation, told = random.Random(seed), 0.0, []
    for _ in range(num_epochs):
        deviation = 0.9 * deviation + 0.19**0.5 * chance.gauss(0.0, 0.2)
        told.append(level * (1.0 + deviation))
    return told


@pytest.mark.parametrize("seed", range(3))
def test_a_flat_and_noisy_loss_raises_no_alarm(seed: int) -> None:
    """It came and went ten times and more in as many epochs."""
    assert rises(Scene("Ada"), noisy(1.0, 700, seed)) == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_loss_that_doubles_raises_one(seed: int) -> None:
    assert rises(Scene("Ada"), noisy(1.0, 300, seed) + noisy(3.0, 120, seed)) == 1


def test_where_the_host_evaluates_that_loss_decides() -> None:
    scene = Scene("Ada")
    for _ in range(30):
        scene.epochs(*noisy(1.0, 10, scene.epoch))
        scene.alarms.evaluated(scene.epoch, 1.0)
    scene.epochs(*[3.0] * 5)  # another shard, a peer that left: the model is as good as it was
    for _ in range(8):
        scene.epochs(*[3.0] * 10)
        scene.alarms.evaluated(scene.epoch, 1.05)
        assert scene.kinds() == []
    scene.alarms.evaluated(scene.epoch + 1, 1.5)
    assert scene.kinds() == [], "one may be chance"
    scene.alarms.evaluated(scene.epoch + 2, 1.6)
    assert "1.6 on data that nobody trains on, 1 at its best" in scene.text()
    scene.alarms.evaluated(scene.epoch + 3, 1.15)
    assert scene.kinds() == ["loss rising"], "it is told until it is half as bad"
    scene.alarms.evaluated(scene.epoch + 4, 1.05)
    assert scene.kinds() == []


def test_everybody_is_a_client() -> None:
    scene = Scene("Ada", "Grace", client=True)
    scene.tell("watcher", role="observer")
    assert scene.kinds() == []
    assert scene.kinds(after=31.0) == ["all clients"]
    scene.tell("host", role="aux")
    assert scene.kinds() == []
    scene.tell("host", "left", role="aux")
    assert scene.kinds() == []  # it may come back


def test_one_peer_is_dropped_again_and_again() -> None:
    scene = Scene("Ada", "Grace")
    scene.epochs(*[3.0] * 4, left_out={"Ada": "too slow"})
    assert scene.kinds() == []
    scene.epochs(3.0, left_out={"Ada": "too slow"})
    assert scene.kinds() == ["dropped"]
    assert "Ada was left out of 5 of the last 5 epochs (last: too slow)" in scene.text()
    scene.epochs(*[3.0] * 20)
    assert scene.kinds() == []


def test_one_peer_dies_again_and_again() -> None:
    scene = Scene("Ada", "Grace")
    for _ in range(3):
        scene.tell("Ada", "dead")
        scene.tell("Ada", "dead")  # said twice
        scene.tell("Ada")
        scene.epochs(3.0)
    assert scene.kinds() == ["dropped"]
    assert "3 times" in scene.text()
    for _ in range(60):
        scene.epochs(3.0, seconds=10.0)
    assert scene.kinds() == []


@pytest.mark.parametrize(("trusted", "coordinates"), [(True, True), (True, False), (False, True)])
def test_the_troubles_of_a_host_are_told_until_they_are_over(trusted: bool, coordinates: bool) -> None:
    scene = Scene()
    card = Card(session="s", role="aux", name="host")
    standing = {"trusted": trusted, "coordinates": coordinates}
    scene.alarms.peer_changed(
        Presence(peer="host", card=card, state="alive", host="", person="", **standing), scene.now
    )
    news = HostNews(troubles={"disk": "the disk is full", "weather": "it rains"})
    scene.alarms.host_told("host", news, scene.now)
    scene.alarms.host_told("a stranger", news, scene.now)
    if not (trusted and coordinates):  # anybody else could frighten everybody
        assert scene.kinds() == []
        return
    assert scene.kinds() == ["disk"]
    assert scene.text() == "the disk is full"
    assert scene.kinds(after=FRESH_SECONDS + 0.1) == []
    scene.alarms.host_told("host", news, scene.now)
    assert scene.kinds() == ["disk"]
    scene.alarms.host_told("host", HostNews(troubles={}), scene.now)
    assert scene.kinds() == []


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError):
        AlarmConfig(loss_factor=1.0)


def saved(*epochs: int, trouble: str = "", session: str = "s") -> Kept:
    states = tuple(KeptState(epoch=epoch, digest="0" * 64, num_bytes=1, made_at=epoch) for epoch in epochs)
    return Kept(session=session, saved=states, trouble=trouble)


def with_host(scene: Scene, name: str = "host", **flags: bool) -> None:
    card = Card(session="s", role="aux", name=name, addresses=("tcp://127.0.0.1:1",))
    presence = Presence(peer=name, card=card, state="alive", host="", person=name, **(flags or {"trusted": True}))
    scene.alarms.peer_changed(presence, scene.now)


def test_no_backup_has_advanced_for_long_though_epochs_pass() -> None:
    scene = Scene("Ada", "Grace")
    with_host(scene)
    with_host(scene, "stranger", trusted=False)
    scene.epochs(1.0, 1.0)
    scene.alarms.kept("host", saved(1), scene.now)
    scene.epochs(*[1.0] * 40, seconds=10.0)
    assert scene.kinds() == [], "many epochs, and not long"
    scene.alarms.kept("stranger", saved(40), scene.now)
    scene.alarms.kept("host", saved(40, session="another"), scene.now)
    scene.epochs(*[1.0] * 40, seconds=10.0)
    assert scene.kinds() == ["no backup"], "only what the run trusts counts"
    assert "the newest backup is of epoch 1, and the run is at epoch 82" in scene.text()
    scene.alarms.kept("host", saved(1, 80), scene.now)
    assert scene.kinds() == []
    scene.epochs(*[1.0] * 20, seconds=100.0)
    assert scene.kinds() == [], "long, and not many epochs"


def test_no_backup_at_all() -> None:
    scene = Scene("Ada", "Grace")
    scene.epochs(*[1.0] * 100, seconds=10.0)
    assert scene.kinds() == [], "nobody keeps states, by choice"
    with_host(scene)
    scene.alarms.kept("host", saved(), scene.now)
    scene.epochs(*[1.0] * 100, seconds=10.0)
    assert "there is no backup" in scene.text()


def test_states_that_nobody_can_decide_between_are_told_by_who_is_trusted() -> None:
    scene = Scene("Ada", "Grace")
    with_host(scene)
    scene.alarms.kept("Ada", saved(trouble="all is lost"), scene.now)
    assert scene.kinds() == []
    scene.alarms.kept("host", saved(trouble="the states of epoch 7 differ"), scene.now)
    assert scene.kinds() == ["states differ"]
    assert scene.text() == "the states of epoch 7 differ"
    scene.alarms.kept("host", saved(), scene.now)
    assert scene.kinds() == []


def test_who_claims_far_more_than_counts_is_named_at_once() -> None:
    scene = Scene("Ada", "Mallory")
    liar = CommittedMember(peer="Mallory", weight=640.0, claimed=1e9, holds=True)
    honest = CommittedMember(peer="Ada", weight=40.0, holds=True)
    scene.epochs(1.0, members=(honest, liar))
    assert "Mallory claims 1,000,000,000 samples for an epoch, and 640 count" in scene.text()
    scene.epochs(*[1.0] * 20, members=(honest,))
    assert scene.kinds() == []


def test_who_claims_a_little_more_than_counts_is_named_when_it_goes_on() -> None:
    scene = Scene("Ada", "Grace")
    fast = CommittedMember(peer="Grace", weight=640.0, claimed=800.0, holds=True)
    scene.epochs(*[1.0] * 4, members=(fast,))
    assert scene.kinds() == []
    scene.epochs(1.0, members=(fast,))
    assert scene.kinds() == ["claims"]


def cut_of(number: int) -> Cut:
    return Cut(number=number, parts={}, coordinator="host", made_at=0.0)


def test_cuts_that_stop_becoming_safe() -> None:
    scene = Scene()
    cuts, patience = scene.alarms.cuts, AlarmConfig().cut_seconds + 1.0
    cuts.group_committed("critic", 1)
    cuts.cuts_changed(7, cut_of(7), scene.now)
    cuts.group_committed("critic", 2)
    assert scene.kinds(after=patience) == [], "no newer one is wanted"
    cuts.cuts_changed(8, cut_of(7), scene.now)
    cuts.part_told("main", PartRecord(number=8, is_saved=True))
    cuts.part_told("critic", PartRecord(number=7, is_saved=True, trouble="its disk is full"))
    assert scene.kinds() == ["no cut"]
    assert "go back to cut 7. Not saved: critic (its disk is full)." in scene.text()
    cuts.cuts_changed(8, cut_of(8), scene.now)
    assert scene.kinds(after=patience) == []
    cuts.cuts_changed(9, cut_of(8), scene.now)
    assert scene.kinds(after=patience) == [], "nothing has moved, so nothing would be lost"
    cuts.group_committed("critic", 3)
    assert scene.kinds() == ["no cut"]


def test_a_run_whose_cuts_were_never_safe() -> None:
    scene = Scene()
    scene.alarms.cuts.cuts_changed(1, None, scene.now)
    scene.alarms.cuts.group_committed("critic", 5)
    assert scene.kinds(after=AlarmConfig().cut_seconds) == []
    assert scene.kinds(after=1.0) == ["no cut"]
    assert "Not saved: critic, main." in scene.text()
