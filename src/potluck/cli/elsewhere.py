"""Options that people know from other systems: each works, or says what does the same in Potluck.

A run's settings come from its manifest, so most options of a TRecover or hivemind peer have nothing to set here.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from potluck.errors import ConfigurationError

_FROM_RUN = "The organiser sets it for all peers: {} in run.toml, or `potluck run set` while the run trains"
REPLACED = {
    "--initial-peers": "The join link says where the run is",
    "--use-ipfs": "The join link says where the run is",
    "--experiment-prefix": "The join link names the run",
    "--host-maddrs": "Use --listen tcp://HOST:PORT",
    "--announce-maddrs": "Use --announce tcp://HOST:PORT",
    "--accumulate-batches": "Gradients are added up until the run has its target_batch_size: use --batch-size",
    "--target-batch-size": _FROM_RUN.format("target_batch_size under [training]"),
    "--lr": _FROM_RUN.format("learning_rate under [optimizer]"),
    "--min-lr": _FROM_RUN.format("final_share under [schedule]"),
    "--adam-beta1": _FROM_RUN.format("beta1 under [optimizer]"),
    "--adam-beta2": _FROM_RUN.format("beta2 under [optimizer]"),
    "--adam-epsilon": _FROM_RUN.format("eps under [optimizer]"),
    "--weight-decay": _FROM_RUN.format("weight_decay under [optimizer]"),
    "--clamp-value": _FROM_RUN.format("clamp under [optimizer]"),
    "--max-grad-norm": _FROM_RUN.format("max_grad_norm under [optimizer]"),
    "--warmup-steps": _FROM_RUN.format("warmup_epochs under [schedule]"),
    "--total-steps": _FROM_RUN.format("total_epochs under [schedule]"),
    "--matchmaking-time": _FROM_RUN.format("matchmaking_seconds under [training]"),
    "--allreduce-timeout": _FROM_RUN.format("round_seconds under [patience]"),
    "--averaging-timeout": _FROM_RUN.format("round_seconds under [patience]"),
    "--average-state-every": _FROM_RUN.format("average_state_every under [training]"),
    "--min-noise": _FROM_RUN.format("min_noise under [data]"),
    "--max-noise": _FROM_RUN.format("max_noise under [data]"),
    "--sync-period": "Peers follow the run's settings at each epoch, without a period",
    "--status-expiration": "Presence is kept by the hub: there is no period to choose",
    "--assist-refresh": "An aux peer is told of each round: there is no period to choose",
    "--no-reuse-grad-buffers": _FROM_RUN.format("reuse_grad_buffers under [training]"),
    "--train-dataset-size": "The data are the recipe's; end after so many steps with --max-steps",
    "--accelerator": "Use --device",
    "--wandb-key": "Use `potluck monitor --wandb`, with WANDB_API_KEY in the environment",
    "--wandb-project": "Use `potluck monitor --wandb PROJECT`",
    "--upload-state": "Use `potluck host --upload-to TARGET`",
    "--visualize-every-step": "Use `potluck visualize LINK --every 10`",
    "--refresh-period": "The monitor follows the run as it happens",
}


class KnownElsewhere(TyperCommand):
    """A command that knows options of other systems."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; for one of another system, ConfigurationError says what replaces it."""
        own = {name for parameter in self.params for name in parameter.opts}
        for word in args:
            name = word.partition("=")[0].replace("_", "-")
            if word == "--":
                break
            if name in REPLACED and name not in own:
                raise ConfigurationError(f"{name} is not needed here. {REPLACED[name]}")
        return super().parse_args(ctx, args)


def group_of(commands: dict[str, Any]) -> typer.Typer:
    """`potluck collab train` and the like: the same commands, by the names that TRecover's guide has."""
    app = typer.Typer(help="The same commands, as TRecover's guide names them.", rich_markup_mode="rich")
    for name, command in commands.items():
        app.command(name, cls=KnownElsewhere)(command)
    return app
