"""The compiler of torch is not imported before a step needs it. In a process of its own: here it is imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from potluck.optim import compiler

compiler.postpone()
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
optimizer.zero_grad()
saved = optimizer.state_dict()
assert compiler.NAME not in sys.modules, "making an optimizer does without it"
layer(torch.ones(2)).sum().backward()
compiler.import_meanwhile()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(saved)
optimizer.state_dict()
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
assert compiler.NAME in sys.modules
for name in compiler._FUNCTIONS:
    called = getattr(torch.optim.Optimizer, name).__wrapped__.__dynamo_disable
    assert "DisableContext" in str(called), "from then on torch's own way counts"
print(layer.weight.grad)
"""


def test_making_an_optimizer_does_not_import_the_compiler_and_its_first_step_does() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
