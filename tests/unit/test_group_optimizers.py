"""`potluck.Optimizer(run, …, group="critic")`: several models in one run, each with members and epochs of its own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from keptlab import EXACT
from trainlab import PATIENCE_SECONDS, TrainLab, loss_of, make_batch, make_model, together, train_lab
from typer.testing import CliRunner

from potluck.cli.main import app
from potluck.errors import AccessError, ConfigurationError
from potluck.optim.diloco import DiLoCo
from potluck.optim.optimizer import Optimizer
from potluck.run.joined import Joined
from potluck.state.backups import BackupConfig, Backups, backup_folder
from potluck.state.keeper import StateConfig
from potluck.testing.polling import poll_until_sync


class Learner:
    """One model of one peer, trained in one group."""

    def __init__(self, run: Joined, number: int, group: str, kind: type = Optimizer, **options: Any) -> None:
        self.number = number
        self.run_name = run.peer.session.subjects.run
        self.model = make_model(0)
        self.position = 0
        inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if kind is Optimizer:
            options = {"target_batch_size": 16, "matchmaking_seconds": 10.0, **options}
        else:
            options = {"inner_steps": 2, "grace_seconds": 10.0, **options}
        self.optimizer = kind(run, inner, codecs=EXACT, num_threads=1, group=group, **options)

    def train(self, num_epochs: int) -> None:
        while self.optimizer.epoch < num_epochs:
            loss_of(self.model, make_batch(1000 * self.number + self.position)).backward()
            self.position += 1
            self.optimizer.step(batch_size=4)
            self.optimizer.zero_grad()


def values(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def assert_alike(one: Learner, other: Learner) -> None:
    assert all(torch.equal(a, b) for a, b in zip(values(one), values(other), strict=True))


def two_peers(lab: TrainLab) -> list[Joined]:
    return [lab.join("alice", coordinates=True), lab.join("bob", coordinates=False)]


@pytest.mark.parametrize("kind", [Optimizer, DiLoCo])
def test_two_peers_train_two_models_in_two_groups(kind: type) -> None:
    with train_lab() as lab:
        runs = two_peers(lab)
        actors = [Learner(run, number, "main", kind) for number, run in enumerate(runs)]
        critics = [Learner(run, 10 + number, "critic", kind) for number, run in enumerate(runs)]
        together(*(lambda a=a: a.train(3) for a in actors), *(lambda c=c: c.train(5) for c in critics))
        assert_alike(*actors)
        assert_alike(*critics)
        assert not torch.equal(values(actors[0])[0], values(critics[0])[0])
        assert critics[0].optimizer.epoch >= 5
        members = {presence.card.name for presence in runs[0].group("critic").members}
        assert members == {"alice", "bob"}


def test_a_group_that_nobody_may_coordinate_is_told_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with train_lab() as lab:
        lab.join("alice", coordinates=True)  # like a host: in main alone
        critic = Learner(lab.join("bob", coordinates=False), 10, "critic")
        for _ in range(6):
            loss_of(critic.model, make_batch(0)).backward()
            critic.optimizer.step(batch_size=4)
            critic.optimizer.zero_grad()
        poll_until_sync(lambda: "start the host with --group critic" in caplog.text, PATIENCE_SECONDS, "a warning")
        assert critic.optimizer.epoch == 0
        assert caplog.text.count("may coordinate") == 1


def test_a_newcomer_fetches_the_state_of_its_group_and_not_of_another() -> None:
    with train_lab() as lab:
        runs = two_peers(lab)
        actors = [Learner(run, number, "main") for number, run in enumerate(runs)]
        critic = Learner(runs[0], 10, "critic")
        together(*(lambda a=a: a.train(2) for a in actors))
        critic.train(4)
        late = Learner(runs[1], 11, "critic")
        assert late.optimizer.epoch >= 4
        assert_alike(late, critic)


def test_one_group_has_one_optimizer_in_a_process() -> None:
    with train_lab() as lab:
        run = lab.join("alice", coordinates=True)
        Learner(run, 0, "critic")
        with pytest.raises(ConfigurationError, match="has an optimizer of group 'critic' already"):
            Learner(run, 1, "critic")


def test_a_group_that_this_peer_may_not_be_in_is_refused() -> None:
    with train_lab() as lab:
        run = lab.join("alice", coordinates=True, allowed_groups=("main",))
        with pytest.raises(AccessError, match="may not be in the group 'critic'"):
            Learner(run, 0, "critic")
        Learner(run, 0, "main").train(1)


def test_a_name_that_cannot_be_a_group_is_refused() -> None:
    with train_lab() as lab:
        run = lab.join("alice", coordinates=True)
        with pytest.raises(ConfigurationError, match="cannot name a group"):
            Learner(run, 0, "My Critic")


def test_other_tensors_than_the_groups_are_refused() -> None:
    with train_lab() as lab:
        runs = two_peers(lab)
        first = Learner(runs[0], 0, "critic")
        first.train(1)
        model = torch.nn.Linear(3, 7)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match="this peer trains another model"):
            Optimizer(
                runs[1],
                inner,
                target_batch_size=16,
                group="critic",
                num_threads=1,
                codecs=EXACT,
                load_state_timeout_seconds=5.0,
            )


def test_an_aux_peer_helps_in_a_group() -> None:
    with train_lab() as lab:
        helper = lab.join("aux", coordinates=True, role="aux")
        Optimizer(helper, None, target_batch_size=16, auxiliary=True, group="critic", num_threads=1)
        runs = [lab.join("alice", coordinates=False), lab.join("bob", coordinates=False)]
        critics = [Learner(run, number, "critic") for number, run in enumerate(runs)]
        together(*(lambda c=c: c.train(2) for c in critics))
        assert_alike(*critics)
        poll_until_sync(lambda: len(helper.group("critic").members) == 3, PATIENCE_SECONDS, "all to be members")


def num_workers() -> int:
    return sum(thread.name.startswith("potluck-tensors") for thread in threading.enumerate())


def test_groups_of_one_peer_share_threads_and_leave_none_behind() -> None:
    with train_lab() as lab:
        run = lab.join("alice", coordinates=True)
        Learner(run, 0, "one").train(1)
        for_one = num_workers()
        assert for_one > 0
        Learner(run, 1, "two").train(1)
        Learner(run, 2, "three").train(1)
        assert num_workers() == for_one
        run.close()
        assert num_workers() == 0


def test_each_group_has_backups_of_its_own_and_resumes_from_them(tmp_path: Path) -> None:
    state = StateConfig(folder=tmp_path, backups=BackupConfig(every_epochs=1), keep="always")
    with train_lab() as lab:
        run = lab.join("alice", coordinates=True)
        actor, critic = Learner(run, 0, "main", state=state), Learner(run, 1, "critic", state=state)
        actor.train(2)
        critic.train(5)
        before = values(critic)
    assert 5 in Backups(backup_folder(tmp_path, "critic")).epochs(), "the last one is written before it leaves"
    listed = CliRunner().invoke(app, ["checkpoint", "list", "--path", str(tmp_path), "--json"])
    rows = {(row["group"], row["epoch"], row["run"]) for row in json.loads(listed.output)}
    assert ("critic", 5, f"{actor.run_name}/critic") in rows
    assert ("main", 2, actor.run_name) in rows
    one = CliRunner().invoke(app, ["checkpoint", "list", "--path", str(tmp_path), "--group", "critic", "--json"])
    assert max(row["epoch"] for row in json.loads(one.output)) == 5
    unknown = CliRunner().invoke(app, ["checkpoint", "list", "--path", str(tmp_path), "--group", "actor"])
    assert "there are no backups of a group 'actor': there are main, critic" in str(unknown.exception)
    with train_lab() as lab:
        again = Learner(lab.join("alice", coordinates=True), 1, "critic", state=state)
        assert all(torch.equal(a, b) for a, b in zip(values(again), before, strict=True))
