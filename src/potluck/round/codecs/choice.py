"""Which tensor takes which codec: by its role, its name and its size.

The first rule that fits a tensor decides. Plans carry the rules' outcome, not the rules: see Layout.runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from potluck.errors import ConfigurationError
from potluck.messages import Message
from potluck.round.plan.specs import CodecSpec

TensorRole = Literal["gradient", "parameter", "optimizer", "buffer"]

EXACT = CodecSpec(name="float32")


class CodecRule(Message, frozen=True, kw_only=True):
    """One codec, and the tensors it is for. A condition that is left out fits every tensor."""

    codec: CodecSpec
    role: TensorRole | None = None
    pattern: str = "*"  # of the tensor's name, as in a shell: * ? [seq]; case matters
    at_least: int = 0  # elements
    at_most: int | None = None  # elements

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ConfigurationError("a codec rule's pattern is empty and fits no name: write * to fit all")
        if self.at_least < 0 or (self.at_most is not None and self.at_most < self.at_least):
            raise ConfigurationError(
                f"a codec rule for {self.at_least} to {self.at_most} elements fits no tensor: widen it or remove it"
            )

    def fits(self, name: str, role: TensorRole, elements: int) -> bool:
        """Whether this rule is for such a tensor."""
        return (
            self.role in (None, role)
            and self.at_least <= elements
            and (self.at_most is None or elements <= self.at_most)
            and fnmatchcase(name, self.pattern)
        )


class CodecChoice(Message, frozen=True, kw_only=True):
    """Rules in the order of precedence; what fits none travels in float32.

    The default sends gradients in float16 (half the bytes, and no loss that a run would notice), and what persists
    from round to round more carefully: parameters and buffers in float32, and optimizer statistics in bfloat16, whose
    relative error is the same for the tiny second moments. Tensors up to 4,096 elements (biases, norms) stay in
    float32: together they are a thousandth of a model.
    """

    rules: tuple[CodecRule, ...] = (
        CodecRule(codec=EXACT, at_most=4096),
        CodecRule(codec=CodecSpec(name="float16"), role="gradient"),
        CodecRule(codec=CodecSpec(name="bfloat16"), role="optimizer"),
    )

    @classmethod
    def everything(cls, name: str, block: int = 0) -> CodecChoice:
        """One codec for all floating-point tensors."""
        return cls(rules=(CodecRule(codec=CodecSpec(name=name, block=block)),))

    @classmethod
    def by_role(
        cls, codecs: Mapping[TensorRole, str], *, small: str = "float32", small_elements: int = 4096
    ) -> CodecChoice:
        """A codec for each role, and one for small tensors of any role."""
        rules = [CodecRule(codec=CodecSpec(name=small), at_most=small_elements)]
        rules += [CodecRule(codec=CodecSpec(name=codecs[role]), role=role) for role in sorted(codecs)]
        return cls(rules=tuple(rules))

    def with_gradients_in(self, codec: CodecSpec) -> CodecChoice:
        """The same, but for gradients of any size."""
        return CodecChoice(rules=(CodecRule(codec=codec, role="gradient"), *self.rules))

    def codec_of(self, name: str, role: TensorRole, elements: int, *, integer: bool = False) -> CodecSpec:
        """The codec of one tensor. Integers are counters more often than not, and always travel in float32."""
        if integer:
            return EXACT
        return next((rule.codec for rule in self.rules if rule.fits(name, role, elements)), EXACT)
