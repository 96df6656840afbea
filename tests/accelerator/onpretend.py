"""A pytest plugin: the pretend accelerator is there, and tests put their models on it."""

from __future__ import annotations

import os

from potluck.testing import accelerator

accelerator.install()
os.environ["POTLUCK_TEST_DEVICE"] = accelerator.NAME
os.environ["ACCELERATE_TORCH_DEVICE"] = accelerator.NAME  # a Trainer of transformers computes there
