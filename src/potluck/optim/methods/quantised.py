"""Quantised values with error feedback: any codec of the rounds that rounds each block on its own, down to 4 bits.

What a peer contributes goes through the round's codec; this transform does the same beforehand, in the same blocks, and
so knows what gets lost, and adds it to the next epoch's values. Encoding what was encoded changes nothing any more, so
what the others get is what was accounted for. (The average is encoded once more on its way back; that part of the
error is the same for all peers, and is not fed back.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.errors import ConfigurationError
from potluck.optim.methods.transform import ErrorFeedback, Tensors
from potluck.round.codecs import CodecChoice, TensorRole, codec_for
from potluck.round.plan.layout import Layout

BLOCKED = ("float32", "float16", "bfloat16", "blockwise8", "e3m0")


class Quantised(ErrorFeedback):
    """Error feedback around the codecs that a round uses for these values."""

    def __init__(self, choice: CodecChoice, *, prefix: str = "gradient/", role: TensorRole = "gradient") -> None:
        """`prefix` and `role` are those under which the values travel: they decide on the codec and the blocks."""
        super().__init__()
        for rule in choice.rules:
            if rule.codec.name not in BLOCKED:
                raise ConfigurationError(
                    f"{rule.codec.name} has a scale for each chunk, and chunks are cut anew in each round: "
                    f"take one of {', '.join(BLOCKED)}"
                )
        self._choice = choice
        self._prefix = prefix
        self._role: TensorRole = role

    def send(self, name: str, values: Tensor) -> Tensor:
        """One tensor alone, in blocks of its own."""
        return self._through_codecs({name: values})[name]

    def encode(self, values: Mapping[str, Tensor]) -> Tensors:
        """All tensors together, in the blocks that the round will cut."""
        whole = {}
        for name, value in values.items():
            error = self._error.get(name)
            whole[name] = value.clone() if error is None else value.add(error, alpha=self.decay)
        sent = self._through_codecs(whole)
        self._pending = {name: tensor.sub_(sent[name]) for name, tensor in whole.items()}
        return sent

    def _through_codecs(self, values: Mapping[str, Tensor]) -> Tensors:
        named = {self._prefix + name: tensor for name, tensor in values.items()}
        out = {name: torch.empty_like(tensor) for name, tensor in named.items()}
        layout = Layout.of(named, self._choice, self._role)
        source, target = layout.bind(named), layout.bind(out)
        start = 0
        for run in layout.runs:
            codec = codec_for(run.codec)
            flat = torch.empty(run.elements)
            source.read_into(start, flat)
            codec.decode_into(codec.encode(flat), flat)
            target.write(start, flat)
            start += run.elements
        return {name.removeprefix(self._prefix): tensor for name, tensor in out.items()}
