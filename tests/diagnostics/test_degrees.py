"""``ascend-parallel verify --degrees``: the script runs at each degree, and every tensor of its layers is compared."""

import json
import os
import subprocess

import pytest
from launch import forked_python

from ascend_parallel.diagnostics.degrees import DegreesError, degrees_of, difference, read

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import ascend_parallel

dist.init_process_group("gloo")
group, settings = dist.group.WORLD, ascend_parallel.configure()
torch.manual_seed(0)
x, up, down = torch.randn(24, 64, requires_grad=True), torch.randn(128, 64), torch.randn(64, 128)
mine = slice(group.rank() * 128 // group.size(), (group.rank() + 1) * 128 // group.size())
up, down = up[mine].clone().requires_grad_(), down[:, mine].clone().requires_grad_()
options = {"group": group, "settings": settings}
if "--sequence" in sys.argv and group.size() > 1:
    options["sequence_parallel"] = True
    x = x.detach().chunk(group.size())[group.rank()].requires_grad_()
z = ascend_parallel.column_linear(x, up, **options)
ascend_parallel.row_linear(z.relu(), down, **options).sum().backward()
dist.destroy_process_group()
"""


def verify(tmp_path, *arguments, script=SCRIPT, **variables):
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [forked_python(), "-m", "ascend_parallel", "verify", "--degrees", "1,2", str(path), *arguments]
    names = {name: value for name, value in os.environ.items() if not name.startswith("COC_") and name != "RANK"}
    finished = subprocess.run(command, env={**names, **variables}, capture_output=True, text=True, timeout=300)
    return finished.returncode, finished.stdout.strip(), finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--sequence",)], ids=str)
def test_equal_bits_have_one_digest(tmp_path, arguments):
    """Also with sequence parallelism where there are several ranks: blocks of rows are compared."""
    code, printed, errors = verify(tmp_path, *arguments)
    assert code == 0, errors
    assert printed.startswith("degrees 1, 2: all 6 tensors have the same bits, digest ")


@pytest.mark.slow
def test_the_first_difference_is_named(tmp_path):
    code, printed, errors = verify(tmp_path, COC_DETERMINISTIC="1")
    assert code == 1, errors
    assert "tensor 2, the output of row layer, differs first" in printed


TAILS = """
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import ascend_parallel
from ascend_parallel.ops.elementwise import ELEMENTWISE

if "--own-kernels" in sys.argv:
    ELEMENTWISE.follow(False)
    ELEMENTWISE.follow = lambda wanted: None
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 344), torch.nn.SiLU(), torch.nn.Linear(344, 64))
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
model(torch.randn(7, 64, requires_grad=True)).square().mean().backward()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_tails_of_activations_are_found(tmp_path):
    """With torch's own kernels between the layers, which the setting replaces."""
    code, printed, errors = verify(tmp_path, script=TAILS)
    assert code == 0, errors
    code, printed, errors = verify(tmp_path, "--own-kernels", script=TAILS)
    assert code == 1, errors
    assert "tensor 2, the output of row layer, differs first" in printed


def written(folder, ranks):
    folder.mkdir()
    for rank, lines in enumerate(ranks):
        text = "".join(json.dumps({"layer": "row layer", "tensor": name, "digests": of}) + "\n" for name, of in lines)
        (folder / f"rank{rank}.jsonl").write_text(text)
    return read(folder, len(ranks))


def test_blocks_of_all_ranks_are_compared(tmp_path):
    one = written(tmp_path / "1", [[("output", {"whole": "a"}), ("input gradient", {"0": "b", "1": "c"})]])
    same = [[("output", {"whole": "a"}), ("input gradient", {str(rank): "bc"[rank]})] for rank in range(2)]
    two = written(tmp_path / "2", same)
    assert difference((1, 2), [one, two])[0]
    other = written(tmp_path / "3", [same[0], [same[1][0], ("input gradient", {"1": "d"})]])
    equal, words = difference((1, 2), [one, other])
    assert not equal
    assert (
        words == "tensor 2, the input gradient of row layer, block 1 of 2, differs first: c at degree 1, d at degree 2"
    )
    assert difference((1, 2), [one, two[:1]]) == (False, "degree 1 computed 2 tensors, degree 2 1")
    with pytest.raises(DegreesError, match="rank 1 has another output of row layer"):
        written(tmp_path / "4", [[("output", {"whole": "a"})], [("output", {"whole": "b"})]])


@pytest.mark.parametrize("text", ["1", "1,3", "1,,2", "1,x", "0,1", "1,16", "1,²", ""])
def test_degrees_that_are_not_allowed(text):
    with pytest.raises(DegreesError, match="give two or more of 1, 2, 4 and 8"):
        degrees_of(text)
