"""All that Potluck reads from the environment, in one place.

    POTLUCK_LINK          the join link, when a command gets none
    POTLUCK_NAME          what you want to be called
    POTLUCK_IDENTITY      path of the identity file
    POTLUCK_DATA          folder of the files that recipes need
    POTLUCK_HF_ENDPOINT   base URL of the Hugging Face hub (default https://huggingface.co)
    HF_TOKEN              Hugging Face token to show when a run asks for an account
    POTLUCK_NO_DASHBOARD  hosts start no dashboard, though it is installed
    OMP_NUM_THREADS       threads to compute with, as torch has it; unless --threads says so

An explicit argument comes before the command line, that before a file, that before the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

PUBLIC_HUGGINGFACE = "https://huggingface.co"


def names_threads() -> bool:
    """Whether somebody has said with how many threads to compute."""
    return "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ


def service() -> str:
    """Where this process runs, by the marks that notebook services leave."""
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    if "COLAB_RELEASE_TAG" in os.environ or "COLAB_GPU" in os.environ:
        return "colab"
    return "local"


def link() -> str:
    """The join link, or nothing."""
    return os.environ.get("POTLUCK_LINK", "")


def person_name() -> str:
    """What this person wants to be called, or nothing."""
    return os.environ.get("POTLUCK_NAME", "")


def identity_path() -> Path | None:
    """Where the identity is, if somebody says so."""
    value = os.environ.get("POTLUCK_IDENTITY", "")
    return Path(value).expanduser() if value else None


def data_path() -> Path | None:
    """Where recipes' files are, if somebody says so."""
    value = os.environ.get("POTLUCK_DATA", "")
    return Path(value).expanduser() if value else None


def huggingface_endpoint() -> str:
    """Base URL of the Hugging Face hub."""
    return os.environ.get("POTLUCK_HF_ENDPOINT", PUBLIC_HUGGINGFACE).rstrip("/")


def huggingface_token() -> str:
    """The Hugging Face token, or nothing."""
    return os.environ.get("HF_TOKEN", "")


def wants_no_dashboard() -> bool:
    """Whether hosts shall start no dashboard, though it is installed."""
    return os.environ.get("POTLUCK_NO_DASHBOARD", "") not in ("", "0")
