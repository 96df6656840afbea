"""A method of training of one's own is one class: the driver carries it through rounds, falling behind, and saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from trainlab import TrainLab, together, train_lab

from potluck.optim.collaboration import join_collaboration
from potluck.optim.diloco import DiLoCoConfig
from potluck.optim.driver import Driver
from potluck.optim.method import Metadata, Method, Offer
from potluck.optim.parameters import GRADIENT, PARAMETER
from potluck.round.codecs import CodecChoice

RATE = 0.25  # exact in float32


class SignVote(Method):
    """Each sample votes on where every value should go, and the majority decides."""

    def __init__(self, wanted: Tensor) -> None:
        self.wanted = wanted
        self.values = torch.zeros_like(wanted)
        self.votes = torch.zeros_like(wanted)
        self.samples = 0

    def vote(self) -> None:
        self.votes += (self.values - self.wanted).sign()
        self.samples += 1

    def offer(self, epoch: int) -> Offer:
        offer = Offer({GRADIENT + "votes": self.votes / max(1, self.samples)}, self.samples, (self.votes, self.samples))
        self.discard()
        return offer

    def blank(self, epoch: int) -> Offer:
        return Offer({GRADIENT + "votes": torch.zeros_like(self.votes)}, 0.0)

    def accept(self, offer: Offer, *, epoch: int, alone: bool) -> None:
        self.values -= RATE * offer.tensors[GRADIENT + "votes"].sign()

    def withdraw(self, offer: Offer) -> None:
        votes, samples = offer.detail
        self.votes, self.samples = self.votes + votes, self.samples + samples

    def discard(self) -> None:
        self.votes, self.samples = torch.zeros_like(self.votes), 0

    def tensors(self) -> dict[str, Tensor]:
        return {PARAMETER + "values": self.values}

    def metadata(self) -> Metadata:
        return {}

    def load(self, tensors: Mapping[str, Tensor], metadata: Metadata) -> None:
        self.values.copy_(tensors[PARAMETER + "values"])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone(), "votes": self.votes.clone(), "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.votes, self.samples = state["votes"].clone(), state["samples"]


class Voter:
    """A peer that votes."""

    def __init__(self, lab: TrainLab, wanted: list[float], **options: Any) -> None:
        run = lab.join("voter")
        self.method = SignVote(torch.tensor(wanted))
        config = DiLoCoConfig(codecs=CodecChoice.everything("float32"), num_threads=1, **options)
        self.driver = Driver(run, self.method, join_collaboration(run, config), config.driver(), lab.states)
        self.driver.begin()

    def train(self, num_epochs: int, *, votes: int = 1) -> None:
        while self.driver.epoch < num_epochs:
            for _ in range(votes):
                self.method.vote()
            if self.driver.is_behind:
                self.driver.catch_up()
            else:
                self.driver.round()


def test_a_method_of_ones_own() -> None:
    with train_lab() as lab:
        one, other = Voter(lab, [1.0, 1.0, -1.0]), Voter(lab, [1.0, -1.0, -1.0])
        together(lambda: one.train(3, votes=2), lambda: other.train(3))  # two votes weigh more than one
        assert one.method.values.tolist() == other.method.values.tolist() == [0.75, 0.75, -0.75]
        late = Voter(lab, [-1.0, -1.0, -1.0])
        assert (late.driver.epoch, late.method.values.tolist()) == (3, [0.75, 0.75, -0.75])
        together(*(lambda v=v: v.train(4) for v in (one, other, late)))
        assert {tuple(v.method.values.tolist()) for v in (one, other, late)} == {(1.0, 0.5, -1.0)}
        lab.states.check_alike(at_least=4)


def test_its_work_counts_again_after_a_round_that_failed_and_is_saved_with_it() -> None:
    with train_lab() as lab:
        voter = Voter(lab, [1.0, -1.0], min_peers=2, averaging_timeout_seconds=0.3)
        voter.method.vote()
        assert not voter.driver.round()
        assert voter.driver.statistics()["failed_rounds"] == 1
        saved = voter.driver.state_dict()
        assert saved["method"]["samples"] == 1
        again = Voter(lab, [0.0, 0.0], min_peers=2)
        again.driver.load_state_dict(saved)
        together(lambda: again.driver.round(), lambda: voter.train(1))
        assert again.method.values.tolist() == voter.method.values.tolist() == [0.25, -0.25]
