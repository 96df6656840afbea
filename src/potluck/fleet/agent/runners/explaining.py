"""How a job ended, in plain language (pure)."""

from __future__ import annotations

import signal

from potluck.fleet.agent.reconciler import Instance
from potluck.fleet.jobs.job import Job

# What programs write when something outside of them is the matter, and what that means.
KNOWN_TROUBLES = (
    ("no space left on device", "the machine's disk is full: make room, then `potluck fleet restart {job}`"),
    ("address already in use", "a port that it wants is in use on this machine: choose another, or end what has it"),
    ("cuda out of memory", "the GPU has too little memory for it: make its batches smaller"),
    ("modulenotfounderror", "a Python module is missing: install it on the machine, or use an image that has it"),
)
TAIL_CHARACTERS = 300


def last_words(job: Job, instance: Instance, log_tail: str) -> str:
    """Why an instance ended."""
    exit_ = instance.exit
    if exit_.reason:
        trouble = _trouble(job, exit_.reason)
        return f"{exit_.reason}: {trouble}" if trouble else exit_.reason
    if exit_.out_of_memory:
        limit = job.limits.memory_bytes
        allowed = f"its limit of {limit / 1e6:.0f} MB" if limit else "the machine has"
        return f"killed for memory: it wanted more than {allowed}"
    if instance.stopped:
        return "stopped"
    if exit_.is_success:
        return "finished (exit code 0)"
    trouble = _trouble(job, log_tail)
    how = _how(exit_.code, exit_.signal)
    line = next((line.strip() for line in reversed(log_tail.splitlines()) if line.strip()), "")
    said = f"; it said: {line[:TAIL_CHARACTERS]}" if line else ""
    return f"{how}: {trouble}" if trouble else f"{how}{said}"


def _trouble(job: Job, text: str) -> str:
    lowered = text.lower()
    return next((meaning for sign, meaning in KNOWN_TROUBLES if sign in lowered), "").format(job=job.name)


def _how(code: int | None, number: int) -> str:
    if number:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    if code is None:
        return "ended while no agent was running, so its exit code is not known"
    if code == 126:
        return "exit code 126 (its command is not a program)"
    if code == 127:
        return "exit code 127 (its command is not there)"
    if code > 128 and code - 128 in signal.valid_signals():
        return f"exit code {code} (killed by {signal.Signals(code - 128).name})"
    return f"exit code {code}"
