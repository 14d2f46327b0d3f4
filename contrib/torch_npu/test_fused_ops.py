"""The rules of fused_ops.diff through DTensor, under the schemas and meta kernels of the real wheel, on gloo ranks.

Run with ``pytest contrib/torch_npu``. The CPU kernels are of our own: nothing here runs on an NPU.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import npu_wheel
import pytest
import torch
from launch import launch

HERE = Path(__file__).parent
ADDED = "torch_npu/distributed/tensor/_fused_ops.py"
B, N, SQ, SKV = 4, 8, 6, 10
MASKS = {"batch": (B, 1, SQ, SKV), "batch and heads": (B, N, SQ, SKV), "one": (1, 1, SQ, SKV), "square": (SQ, SKV)}


def softmax(x, mask, scale=1, fixed_triu_mask=False):
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return (x * scale).masked_fill(mask, -1e4).softmax(-1)


def softmax_backward(y_grad, y, mask, scale, fixed_triu_mask):
    if fixed_triu_mask:
        mask = torch.ones(y.shape[-2:], dtype=torch.bool).triu(1)
    return scale * (y * (y_grad - (y_grad * y).sum(-1, keepdim=True))).masked_fill(mask, 0)


def every_strategy_gives_the_whole():
    """On this many ranks: every strategy of both rules, then layouts that no strategy has, with changing arguments."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch_npu.op_plugin.meta import _meta_registrations as meta

    meta.get_soc_version = lambda: 220  # asked for by meta kernels; there is no chip
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    npu, known = torch.ops.npu, DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    forward, backward = npu.npu_scaled_masked_softmax.default, npu.npu_scaled_masked_softmax_backward.default
    assert npu.npu_swiglu.default in known  # the wheel's own rules are there
    assert forward not in known and backward not in known, "torch_npu has rules by now: the patch is not needed"
    tensors = [distribute_tensor(t, mesh) for t in (torch.zeros(B, N, SQ, SKV), torch.zeros(SQ, SKV).bool())]
    with pytest.raises(NotImplementedError, match="sharding strategy"):
        forward(*tensors)
    rules = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("r", os.environ["RULES"]))
    spec.loader.exec_module(rules)
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_scaled_masked_softmax", softmax, "CPU")
    library.impl("npu_scaled_masked_softmax_backward", softmax_backward, "CPU")

    torch.manual_seed(5)
    x, y_grad = (torch.randn(B, N, SQ, SKV, dtype=torch.float64) for _ in range(2))
    layouts = {str(p): p for p in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(3))}

    def check(op, tensors, placements, *more):
        found = op(*(distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)), *more)
        torch.testing.assert_close(found.full_tensor(), op(*tensors, *more), rtol=1e-12, atol=1e-12)
        return found.placements[0]

    for shape in MASKS.values():
        mask = torch.rand(shape) < 0.3
        for triu in (False, True):  # the same shapes: an answer that DTensor keeps must do for both
            leaf = x.clone().requires_grad_()
            y = softmax(leaf, mask, 0.5, triu)
            (expected,) = torch.autograd.grad(y, leaf, y_grad)
            y = y.detach()
            torch.testing.assert_close(backward(y_grad, y, mask, 0.5, triu), expected)
            given = rules.npu_scaled_masked_softmax_strategy(x, mask)
            assert [str(outputs[0]) for outputs, _ in given] == [str(p) for p in list(layouts.values())[:3]]
            for (output,), inputs in given:
                assert check(forward, (x, mask), inputs[:2], 0.5, triu) == output
            for (output,), inputs in rules.npu_scaled_masked_softmax_backward_strategy(y_grad, y, mask, 0.5, triu):
                assert check(backward, (y_grad, y, mask), inputs[:3], 0.5, triu) == output
            for scale in (0.5, 2.0):  # rows and columns are cut by no strategy: scores are redistributed
                for cut in (Shard(2), Shard(3)):
                    assert check(forward, (x, mask), (cut, Replicate()), scale, triu) in list(layouts.values())[:3]
                    check(backward, (y_grad, y, mask), (cut, Shard(1), Replicate()), scale, triu)
    print("every check was made", library is not None)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The variables of a process that has the real torch_npu, and the new file of the patch in RULES."""
    try:
        found = npu_wheel.environment(tmp_path_factory.mktemp("stubs"))
    except npu_wheel.Missing as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("patched")
    apply = ["git", "apply", "--unidiff-zero", f"--include={ADDED}", str(HERE / "fused_ops.diff")]
    subprocess.run(apply, cwd=folder, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    path = os.pathsep.join([found["PYTHONPATH"], str(HERE)])
    return found | {"PYTHONPATH": path, "RULES": str(folder / ADDED)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
def test_every_strategy_gives_the_whole(environ, ranks):
    code = "import test_fused_ops as tests; tests.every_strategy_gives_the_whole()"
    for rank, ended in enumerate(launch(code, [environ] * ranks, fresh=True, timeout=240)):
        assert ended.returncode == 0, f"rank {rank}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        assert "every check was made" in ended.stdout
