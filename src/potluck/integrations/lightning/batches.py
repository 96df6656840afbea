"""The size of a batch, as Lightning itself infers it."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size

from potluck.integrations.samples import unknown_size


def size_of(batch: Any) -> int:
    """How many samples; ConfigurationError where there is no tensor to read it off."""
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError) as error:
        raise unknown_size(
            f"the size of a batch cannot be inferred from a {type(batch).__name__} without tensors"
        ) from error
