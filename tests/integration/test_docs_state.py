"""The program that docs/state.md shows, run as it stands there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from traincompany import house_with_link

import potluck
from potluck.run.loopthread import LoopThread

# libuv opens one pipe per process, for good, with its first loop: here, before a test counts.
LoopThread().__enter__().close()

PAGE = Path(__file__).resolve().parents[2] / "docs" / "state.md"


async def test_the_programs_on_the_page_train_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, with_groups = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POTLUCK_IDENTITY", str(tmp_path / "peer.nkey"))
    model = nn.Linear(3, 1)
    async with house_with_link(tmp_path) as (_, link):
        names: dict[str, Any] = {
            "potluck": potluck,
            "torch": torch,
            "link": str(link),
            "model": model,
            "loader": [torch.randn(32, 3) for _ in range(4)],
            "loss_of": lambda model, batch: model(batch).square().mean(),
        }
        await asyncio.to_thread(exec, program, names)
        assert "'local_epoch': 2" in capsys.readouterr().out
        names["value"] = nn.Linear(3, 2)
        await asyncio.to_thread(exec, with_groups, names)
        assert "1 {'critic': 2, 'main': 4}" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "state" / "backups").glob("*.json")) == [
        "epoch-00000000.json",
        "epoch-00000002.json",
        "epoch-00000004.json",
    ]
