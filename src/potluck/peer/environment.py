"""All that Potluck reads from the environment, in one place.

    POTLUCK_LINK          the join link, when a command gets none
    POTLUCK_NAME          what you want to be called
    POTLUCK_IDENTITY      path of the identity file
    POTLUCK_DATA          folder of the files that recipes need
    POTLUCK_LISTEN        address on which a framework's trainer accepts links, and a run of its own (default: all)
    POTLUCK_TARGET_BATCH_SIZE   samples of an epoch, where a framework's trainer is not told (strategy="potluck")
    PL_INITIAL_PEERS, INITIAL_PEERS   the join link, as users of hivemind's strategy know it
    POTLUCK_HF_ENDPOINT   base URL of the Hugging Face hub (default https://huggingface.co)
    HF_TOKEN              Hugging Face token to show when a run asks for an account
    POTLUCK_NO_DASHBOARD  hosts start no dashboard, though it is installed
    POTLUCK_JOB, POTLUCK_JOB_FOLDER, POTLUCK_STOP_SECONDS   what an agent tells its job (potluck.fleet.current)
    OMP_NUM_THREADS       threads to compute with, as torch has it; unless --threads says so

An explicit argument comes before the command line, that before a file, that before the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from potluck.errors import ConfigurationError

OF_THE_MACHINE = (
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "SHELL",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
)
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


def peers() -> str:
    """The join link under the names that hivemind's strategy has (and says it has) for it, or nothing."""
    return os.environ.get("PL_INITIAL_PEERS", "") or os.environ.get("INITIAL_PEERS", "")


def listen_address() -> str:
    """Where to accept connections, if somebody says so."""
    return os.environ.get("POTLUCK_LISTEN", "")


def target_batch_size() -> int | None:
    """How many samples make an epoch, if somebody says so."""
    value = os.environ.get("POTLUCK_TARGET_BATCH_SIZE", "")
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigurationError(f"POTLUCK_TARGET_BATCH_SIZE is {value!r}: it must be a number from 1 on")
    return int(value)


def wants_no_dashboard() -> bool:
    """Whether hosts shall start no dashboard, though it is installed."""
    return os.environ.get("POTLUCK_NO_DASHBOARD", "") not in ("", "0")


def job_name() -> str:
    """The job of a fleet that this process is, or nothing."""
    return os.environ.get("POTLUCK_JOB", "")


def job_folder() -> Path | None:
    """Potluck's own folder of that job."""
    value = os.environ.get("POTLUCK_JOB_FOLDER", "")
    return Path(value) if value else None


def stop_seconds() -> float:
    """How long that job may take to end once it is told to."""
    try:
        return float(os.environ.get("POTLUCK_STOP_SECONDS", ""))
    except ValueError:
        return 20.0


def secret(name: str) -> str | None:
    """The value of a variable that somebody names as a job's secret; None where it is not set."""
    return os.environ.get(name)


def for_job() -> dict[str, str]:
    """What a job's process inherits of this environment: how the machine is set up, and nothing of its owner's."""
    return {name: value for name, value in os.environ.items() if name in OF_THE_MACHINE or name.startswith("LC_")}


def for_child(changes: Mapping[str, str]) -> dict[str, str]:
    """The whole environment, with these changes, for a process that this one starts."""
    return {**os.environ, **changes}


def keep_gloo_on_this_machine() -> None:
    """Have the processes of one peer talk over loopback, unless the environment names another interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
