"""The programs that docs/integrations.md shows, run as they stand there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from traincompany import house_with_link
from transformers import TrainingArguments

from potluck.run.loopthread import LoopThread

# libuv opens one pipe per process, for good, with its first loop: here, before a test counts.
LoopThread().__enter__().close()

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(inputs).square().mean()}


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning", "ignore:.*LeafSpec:FutureWarning"
)
async def test_the_programs_on_the_page_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_lightning, by_transformers, by_loop, by_groups = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POTLUCK_LISTEN", "127.0.0.1")
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    batches: Any = [torch.randn(32, 3) for _ in range(4)]
    programs: list[tuple[str, dict[str, Any]]] = [
        (by_lightning, {"model": Module(), "loader": DataLoader(batches, batch_size=None)}),
        (by_transformers, {"model": Model(), "args": args, "data": [{"inputs": torch.randn(3)} for _ in range(128)]}),
        (by_loop, {"model": nn.Linear(3, 1), "loader": batches, "loss_of": loss_of}),
        (by_groups, {"model": nn.Linear(3, 1), "value": nn.Linear(3, 2), "loader": batches, "loss_of": loss_of}),
    ]
    for number, (program, names) in enumerate(programs):
        before = [parameter.detach().clone() for parameter in names["model"].parameters()]
        monkeypatch.setenv("POTLUCK_IDENTITY", str(tmp_path / f"{number}.nkey"))
        async with house_with_link(tmp_path / str(number)) as (_, link):
            monkeypatch.setenv("POTLUCK_LINK", str(link))
            await asyncio.to_thread(exec, program, names)
        after = list(names["model"].parameters())
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True)), program


def test_every_argument_of_hivemind_is_in_the_table() -> None:
    from potluck.integrations.naming import MEANINGLESS, RENAMED

    page = PAGE.read_text()
    for name in [*MEANINGLESS, *RENAMED]:
        if name != "batch_size_per_step":  # the optimizer's name for what the strategy calls batch_size
            assert f"`{name}`" in page, name
