"""`ascend-parallel try --emulated`: a launch of torchrun on the virtual clock, plain and overlapped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


with torch.device("npu"):
    model = nn.Sequential(*[Block(4096) for _ in range(4)]).bfloat16()
    x = torch.randn(4096, 4096, dtype=torch.bfloat16)
for block in model:
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
if "factorise" in sys.argv:
    torch.linalg.qr(torch.ones(4, 4, device="npu"))
for step in range(100):
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""


def tried(script, *words):
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("LD_LIB", "EMULATED"))}
    command = [Path(sys.executable).parent / "torchrun", "--nproc-per-node", "2", script, *words]
    options = ["--emulated", "910B1", "--chunks", "4", "--steps", "8", "--json"]
    return subprocess.run(
        [Path(sys.executable).parent / "ascend-parallel", "try", *options, "--", *map(str, command)],
        env=outside, capture_output=True, text=True, timeout=380,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_launch_is_compared_on_the_virtual_clock(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = tried(script)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    plain, ours = found["plain"], found["overlapped"]
    # An all-reduce of 32 MiB for each layer and gradient but the first input's: 1.8 ms over one link of HCCS.
    assert plain["collectives"] == pytest.approx(7 * 1.8, rel=0.02)
    assert plain["exposed"] >= 0.95 * plain["collectives"] > ours["exposed"]
    assert plain["busy"] + plain["starved"] + plain["exposed"] == pytest.approx(plain["step"], rel=0.02)
    assert any("covered" in line for line in found["said"]) and "nothing ran on an NPU" in found["note"]


@pytest.mark.timeout(400)
def test_an_operator_without_a_kernel_is_named_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = tried(script, "factorise")
    assert done.returncode == 1
    assert "aclnnLinalgQr has no kernel in emulated_ascend" in done.stderr.split("try: ", 1)[1].splitlines()[0]
