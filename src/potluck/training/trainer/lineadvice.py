"""What a volunteer is told about a slow line: what it carries, how long a round takes there, and what would help."""

from __future__ import annotations

from torch import nn

from potluck.round.codecs import CodecSpec, codec_for
from potluck.training.manifest.manifest import Manifest, SyncSettings

LONG_ROUND_SECONDS = 15.0  # shorter ones need no word


def round_bytes(model: nn.Module, manifest: Manifest) -> int:
    """What a peer sends in a round, and gets: all values once, as they travel."""
    num_values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return codec_for(CodecSpec(name=manifest.exchange.codec)).encoded_bytes(num_values)


def line_advice(
    num_bytes: int, upload_bytes_per_second: float | None, download_bytes_per_second: float | None, manifest: Manifest
) -> str:
    """In words, where rounds of so many bytes take long on this line; empty where they do not, or nothing is known."""
    speeds = [speed for speed in (upload_bytes_per_second, download_bytes_per_second) if speed]
    if not speeds or (seconds := num_bytes / min(speeds)) < LONG_ROUND_SECONDS:
        return ""
    training = manifest.newest.training
    text = f"Your line carries {min(speeds) / 1e6:.2g} MB/s; a round takes about {seconds:.0f} s. "
    if isinstance(training, SyncSettings):
        return text + (
            "Everybody waits for that with each update. With DiLoCo (algorithm in the organiser's run.toml) a round "
            "would come once in inner_steps steps only."
        )
    if not training.overlap_steps:
        return text + (
            f"It comes once in {training.inner_steps} steps. With overlap_steps in the organiser's run.toml you would "
            "train on meanwhile."
        )
    return text + f"It comes once in {training.inner_steps} steps, and you train on meanwhile."
