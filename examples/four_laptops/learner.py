"""The learner: trains the value network that all laptops pool, and publishes its versions.

    python learner.py            # as a job of a fleet: see fleet.toml
    python learner.py LINK       # by hand

It needs the right to take from the queue `experience`, and to publish on the topic `value`. Started again, it goes on
from the version that it published last.
"""

from __future__ import annotations

import argparse
import logging

import torch

import potluck.fleet
from potluck.fleet.value.learner import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("link", nargs="?", default="", help="the fleet's join link, where this is not a job")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    job = potluck.fleet.current()
    fleet = potluck.fleet.connect(arguments.link) if arguments.link else job.fleet
    with job, fleet:
        print("learning", flush=True)
        serve(fleet, stop=job.stopping, on_version=lambda learner: job.log(learner.statistics()))


if __name__ == "__main__":
    main()
