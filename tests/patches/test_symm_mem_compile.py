"""torch.compile's micro-pipeline pass with the kernels: a tensor-parallel MLP with sequence parallelism."""

import sys
import threading
import types

import pytest
import torch
from compiling import compiling, fresh
from marks import promise
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import PatchError
from ascend_parallel.patches.symm_mem import inductor

HIDDEN, MIDDLE, SEQUENCE = 96, 192, 96  # divisible by 2 and 3 ranks; a rank has rows for two chunks
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class MLP(nn.Module):
    """A residual MLP; `gated`: two column-parallel layers share a gather."""

    def __init__(self, gated):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mlp = Gated() if gated else Plain()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, MIDDLE, bias=False)
        self.down = nn.Linear(MIDDLE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Gated(Plain):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, MIDDLE, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.gate(x)) * self.up(x))


def parallel(mesh, gated, dim, dtype):
    """Return the model in the usual plan: the input gathered once, the output scattered, both along `dim`."""
    torch.manual_seed(0)
    plan = {
        "norm": SequenceParallel(sequence_dim=dim),
        "mlp": PrepareModuleInput(input_layouts=Shard(dim), desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
    }
    if gated:
        plan["mlp.gate"] = ColwiseParallel()
    return parallelize_module(MLP(gated).to(dtype), mesh, plan)


def step(model, run, x):
    """Return the loss and every gradient, whole; and the counts of this package's operators."""
    model.zero_grad()
    COUNTS.clear()
    loss = run(x).float().pow(2).mean().full_tensor()
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())], COUNTS.as_dict()


def trained(group, gated, dim, dtype, order, tag):
    """Return the results and counts: eager, then compiled once for each of `order`, with the kernels if true."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    model = parallel(mesh, gated, dim, dtype)
    torch.manual_seed(1)
    shape = (2, SEQUENCE, HIDDEN) if dim else (SEQUENCE, 2, HIDDEN)
    x = distribute_tensor(torch.randn(shape, dtype=dtype), mesh, [Shard(dim)])
    found = [step(model, model, x)]
    with compiling(tag):
        for registered in order:
            if registered:
                ascend_parallel.register_symm_mem()
            torch._dynamo.reset()
            found.append(step(model, torch.compile(model, fullgraph=True), x))
            ascend_parallel.unregister_symm_mem()
    return found


def calls(counts):
    """Return how often the operators ran; every call was in chunks."""
    assert all(total["chunks"] > total["calls"] for total in counts.values())
    return {operator: total["calls"] for operator, total in counts.items()}


def near(mine, other, dtype):
    for a, b in zip(mine, other, strict=True):
        assert (a - b).abs().max() <= LIMIT[dtype] * b.abs().max()


@promise("symm-mem-bits")
@pytest.mark.slow
def test_compiled_with_the_kernels_and_without_in_one_process(ranks):
    """On two ranks the bits are those of the model compiled without them; nothing stale comes from a cache."""
    for (eager, _), (plain, none), (ours, counts), (again, no_more) in ranks(2).run(
        trained, False, 1, torch.float32, (False, True, False), fresh()
    ):
        assert none == no_more == {}
        assert calls(counts) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}
        near(ours, eager, torch.float32)
        assert all(map(torch.equal, ours, plain))
        assert all(map(torch.equal, again, plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "gated", "dim", "dtype"),
    [(2, True, 0, torch.bfloat16), (3, True, 1, torch.float32), (2, False, 0, torch.float32)],
)
def test_losses_and_gradients_are_those_of_eager(ranks, count, gated, dim, dtype):
    """The gated MLP's input gradient is a sum of two products, which torch's pass does not fuse."""
    for (eager, _), (ours, counts) in ranks(count).run(trained, gated, dim, dtype, (True,), fresh()):
        assert calls(counts) == {"all_gather_matmul": 2, "matmul_reduce_scatter": 1 if gated else 2}
        near(ours, eager, dtype)


def scaled(group, tag):
    """Compile a gather before a scaled matmul and a scatter after it; return the counts."""
    import torch.distributed._functional_collectives as functional

    def run(x, w, one):
        gathered = functional.all_gather_tensor(x.view(torch.uint8), 0, group)  # gloo sends no float8
        y = torch._scaled_mm(gathered.view(x.dtype), w, one, one, out_dtype=torch.bfloat16)
        return functional.reduce_scatter_tensor(y, "sum", 0, group)

    x, w = torch.ones(32, 32).to(torch.float8_e4m3fn), torch.ones(48, 32).to(torch.float8_e4m3fn).t()
    with compiling(tag), torch.no_grad():
        ascend_parallel.register_symm_mem()
        COUNTS.clear()
        y = torch.compile(run, fullgraph=True)(x, w, torch.ones(()))
        return y.float().unique().tolist(), COUNTS.as_dict()


def test_scaled_matmuls_stay_as_they_are(ranks):
    for values, counts in ranks(2).run(scaled, fresh()):
        assert values == [64.0]
        assert counts == {}


def between(group, tag):
    """Compile matmuls between two collectives; return the results, eager and compiled, and the counts."""
    import torch.distributed._functional_collectives as functional

    def scattered(x, w):
        return functional.reduce_scatter_tensor(functional.all_gather_tensor(x, 0, group) @ w, "sum", 0, group)

    def gathered_twice(x, w):
        return functional.all_gather_tensor(functional.all_gather_tensor(x, 0, group) @ w, 0, group) @ w

    x, w = torch.randn(64, 32) + group.rank(), torch.eye(32)
    found = []
    for run in (scattered, gathered_twice):
        with compiling(tag), torch.no_grad():
            ascend_parallel.register_symm_mem()
            expected = run(x, w) + 0
            COUNTS.clear()
            found.append((expected, torch.compile(run, fullgraph=True)(x, w) + 0, COUNTS.as_dict()))
    return found


def test_a_matmul_between_two_collectives_is_fused_once(ranks):
    for found in ranks(2).run(between, fresh()):
        for expected, result, counts in found:
            assert torch.equal(result, expected)
            assert calls(counts) == {"all_gather_matmul": 1}


class Pass(types.ModuleType):
    """A stand-in for the pass's module."""

    def __init__(self):
        super().__init__(inductor.PASS)
        for name in inductor.HELPERS:
            setattr(self, name, None)
        self.fuse_all_gather_matmul = lambda all_gather: None
        self.fuse_matmul_reduce_scatter = lambda reduce_scatter: None


def test_the_pass_is_replaced_once_and_restored(monkeypatch):
    module = Pass()
    before = dict(vars(module))
    monkeypatch.setitem(sys.modules, inductor.PASS, module)
    patch = inductor.PassPatch()
    patch.apply()
    replaced = dict(vars(module))
    patch.apply()
    assert dict(vars(module)) == replaced
    assert {name for name in before if before[name] is not replaced[name]} == set(inductor.FUNCTIONS)
    patch.revert()
    assert dict(vars(module)) == before
    assert not patch.applied


def test_graphs_on_other_devices_go_to_the_original(monkeypatch):
    """The kernels serve no meta tensors, as no CUDA tensors."""
    module, seen = Pass(), []
    module._get_tensor = lambda node: torch.empty(4, 4, device="meta")
    module.fuse_all_gather_matmul = lambda all_gather: seen.append(torch.distributed.is_nccl_available())
    monkeypatch.setitem(sys.modules, inductor.PASS, module)
    patch = inductor.PassPatch()
    patch.apply()
    node = types.SimpleNamespace(_erased=False)
    module.fuse_all_gather_matmul(types.SimpleNamespace(shard_node=node))
    patch.revert()
    assert seen == [torch.distributed.is_nccl_available()]


def test_only_the_thread_of_the_pass_is_told_of_nccl(monkeypatch):
    before, answers = torch.distributed.is_nccl_available, []
    plain = before()

    def ask(_all_gather=None):
        answers.append(torch.distributed.is_nccl_available())

    def fuse(all_gather):
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()

    module = Pass()
    module.fuse_all_gather_matmul, module._get_tensor = fuse, lambda node: torch.empty(4, 4)
    module._find_consumer_matmuls, module._is_last_dim = lambda node: [], lambda x, dim: False
    monkeypatch.setitem(sys.modules, inductor.PASS, module)
    node = types.SimpleNamespace(_erased=False)
    ascend_parallel.register_symm_mem()
    try:
        module.fuse_all_gather_matmul(types.SimpleNamespace(shard_node=node, res_node=node, gather_dim=0))
    finally:
        ascend_parallel.unregister_symm_mem()
    assert answers == [True, plain]
    assert torch.distributed.is_nccl_available is before


def test_a_patch_on_top_is_an_error(monkeypatch):
    module = Pass()
    monkeypatch.setitem(sys.modules, inductor.PASS, module)
    patch = inductor.PassPatch()
    patch.apply()
    ours, module.fuse_all_gather_matmul = module.fuse_all_gather_matmul, print
    with pytest.raises(PatchError, match="fuse_all_gather_matmul: another replacement"):
        patch.revert()
    module.fuse_all_gather_matmul = ours
    patch.revert()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"fuse_all_gather_matmul": lambda graph, match: None}, "has the parameters graph, match, expected all_gather"),
        ({"_find_producer_matmul": ...}, "has no _find_producer_matmul"),
    ],
)
def test_an_unknown_pass_stays_as_it_is(monkeypatch, caplog, changed, text):
    module = Pass()
    for name, function in changed.items():
        setattr(module, name, function)
        if function is ...:
            delattr(module, name)
    before = dict(vars(module))
    monkeypatch.setitem(sys.modules, inductor.PASS, module)
    patch = inductor.PassPatch()
    patch.apply()
    assert dict(vars(module)) == before
    assert text in caplog.text
    patch.revert()
