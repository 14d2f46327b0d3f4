"""The npu kernel: what it refuses, and the rest run with the real torch_npu wheel, whose operators here run on CPU.

Nothing here ran on an NPU. What is shown is that our calls fit the wheel's schemas and the documented
limits, and that the layers built on them are right if the operators do what their documentation says.
"""

import gc
import itertools
import os
import re
import subprocess
import sys

import npu_wheel
import pytest
import torch
import torch.distributed as dist
from launch import launch
from test_linear import part, whole_layer
from truth import close

from ascend_parallel import Settings, column_linear, row_linear
from ascend_parallel.ops import Problem, npu
from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, OPERATORS, REDUCE_SCATTER

BF16 = torch.bfloat16
A2, A3 = "Ascend910B1", "Ascend910_9391"
DTYPES = (torch.bfloat16, torch.float16)


def problem(operator=REDUCE_SCATTER, m=4096, k=1024, n=1024, dtype=BF16, device="npu", ranks=8, soc=A2):
    return Problem(operator, m, k, n, dtype, device, ranks, soc=soc)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documented_calls_are_taken(operator, dtype):
    assert npu.supports(problem(operator, dtype=dtype)) is None


REFUSED = {
    "another device": ({"device": "cpu"}, "device cpu, not npu"),
    "fp32": ({"dtype": torch.float32}, "not torch.float32"),
    "fp64": ({"dtype": torch.float64}, "not torch.float64"),
    "a chip nobody named": ({"soc": ""}, "the chip is not known"),
    "a chip without them": ({"soc": "Ascend310P3"}, "no fused operator .* Ascend310P3"),
    "a chip of the first generation": ({"soc": "Ascend910B"}, "no fused operator .* Ascend910B"),
    "all-reduce on A3": ({"operator": ALL_REDUCE, "soc": A3}, "not documented for Ascend910_9391 .generation A3"),
    "3 ranks": ({"ranks": 3, "m": 4095}, "2, 4, 8 ranks, not 3"),
    "16 ranks on A2": ({"ranks": 16}, "2, 4, 8 ranks, not 16"),
    "64 ranks on A3": ({"ranks": 64, "soc": A3}, "2, 4, 8, 16, 32 ranks, not 64"),
    "1 rank, reduce-scatter": ({"ranks": 1}, "not 1"),
    "16 ranks, all-reduce": ({"operator": ALL_REDUCE, "ranks": 16}, "1, 2, 4, 8 ranks, not 16"),
    "K too small, reduce-scatter": ({"k": 255}, "K from 256 to 65534, not 255"),
    "K too large, reduce-scatter": ({"k": 65535}, "K from 256 to 65534, not 65535"),
    "K too small, all-gather": ({"operator": ALL_GATHER, "k": 255}, "K from 256 to 65534, not 255"),
    "K too large, all-gather": ({"operator": ALL_GATHER, "k": 65535}, "K from 256 to 65534, not 65535"),
    "K of 0, all-reduce": ({"operator": ALL_REDUCE, "k": 0}, "K from 1 to 2147483647, not 0"),
    "K too large, all-reduce": ({"operator": ALL_REDUCE, "k": 2**31}, "not 2147483648"),
    "M too large, all-reduce": ({"operator": ALL_REDUCE, "m": 2**31}, "M up to 2147483647"),
    "N too large, all-reduce": ({"operator": ALL_REDUCE, "n": 2**31}, "N up to 2147483647"),
    "no rows": ({"operator": ALL_REDUCE, "m": 0}, "no empty operand, and M is 0"),
    "no columns": ({"n": 0}, "no empty operand, and N is 0"),
    "M not divisible": ({"m": 4092}, "divisible by the 8 ranks, and M is 4092"),
    "gathered M not divisible": ({"operator": ALL_GATHER, "m": 4092}, "divisible by the 8 ranks, and M is 4092"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_refuses_before_the_operator_is_reached(case):

    changed, words = REFUSED[case]
    reason = npu.supports(problem(**changed))
    assert reason is not None and re.search(words, reason), reason
    assert ";" not in reason, "the log cuts reasons at a semicolon"


def test_limits_are_inclusive_where_documented():
    for operator, (smallest, largest) in npu.K_RANGE.items():
        assert npu.supports(problem(operator, k=smallest)) is None
        assert npu.supports(problem(operator, k=largest)) is None
    assert npu.supports(problem(ALL_REDUCE, m=1, n=2**31 - 1, ranks=1)) is None
    assert npu.supports(problem(ALL_REDUCE, m=4095)) is None  # its rows need not be divisible
    for operator, ranks in itertools.product((REDUCE_SCATTER, ALL_GATHER), (2, 4, 8, 16, 32)):
        assert npu.supports(problem(operator, ranks=ranks, soc=A3)) is None


def test_an_unknown_comm_mode_is_refused():
    with pytest.raises(ValueError, match="comm_mode is 'fast'; it may be 'ai_cpu' or 'aiv'"):
        npu._mode(ALL_GATHER, "fast")


def test_torch_npu_is_imported_only_when_something_is_called():
    code = "import sys, ascend_parallel.ops.npu as npu; sys.exit('torch_npu' in sys.modules)"
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0


@pytest.fixture(scope="module")
def with_torch_npu(tmp_path_factory):
    """Give ``run(function)``: it runs a function of this file on 2 ranks that have the real torch_npu."""
    try:
        environ = npu_wheel.environment(tmp_path_factory.mktemp("stubs"))
    except npu_wheel.Missing as reason:
        pytest.skip(str(reason))

    def run(function):
        code = f"import test_npu; test_npu.on_a_rank(test_npu.{function.__name__})"
        for rank, finished in enumerate(launch(code, [environ] * 2)):
            assert finished.returncode == 0, f"rank {rank}:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
            assert "every check was made" in finished.stdout

    return run


def on_a_rank(function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kernels = npu_wheel.CpuKernels()
    kernels.groups["tensor parallel"] = dist.group.WORLD
    npu.set_hccl_name(dist.group.WORLD, "tensor parallel")
    function(kernels, dist.group.WORLD)
    print("every check was made")
    # A gloo group that lives on to the interpreter's end may abort the process, with torch_npu and without.
    kernels.groups.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def operands(group, m, k, n, dtype):
    """Every rank's x and w [R, ...] in float64 but of `dtype`'s precision, and this rank's in `dtype`."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((group.size(), m, k), (group.size(), k, n))
    x, w = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes)
    return x, w, x[group.rank()].to(dtype), w[group.rank()].to(dtype)


def layouts(x, w):
    """The same operands in every layout that a layer may hand over."""
    yield x, w
    yield x, w.t().contiguous().t()  # a forward: the weight's transposed view
    yield x.t().contiguous().t(), w
    yield torch.cat([x, x], 1)[:, : x.shape[1]], torch.cat([w, w], 1)[:, : w.shape[1]]


def operators(kernels, group):
    ranks, rank = group.size(), group.rank()
    for dtype, (m, k, n) in itertools.product(DTYPES, [(40, 256, 24), (2, 384, 512)]):
        xs, ws, x_r, w_r = operands(group, m, k, n, dtype)
        total, y_gathered = (xs @ ws).sum(0), xs.flatten(0, 1) @ ws[rank]
        for x, w in layouts(x_r, w_r):
            meta = x.to("meta"), w.to("meta"), group, ()
            reduced = npu.matmul_all_reduce(x, w, group, ()).wait()
            close(reduced, total, dtype)
            assert npu.matmul_all_reduce(*meta).wait().shape == reduced.shape
            scattered = npu.matmul_reduce_scatter(x, w, group, ()).wait()
            close(scattered, total.chunk(ranks)[rank], dtype)
            assert npu.matmul_reduce_scatter(*meta).wait().shape == scattered.shape
            y, gathered = npu.all_gather_matmul(x, w, group, ())
            close(y, y_gathered, dtype)
            assert torch.equal(gathered.double(), xs.flatten(0, 1))
            assert [t.shape for t in npu.all_gather_matmul(*meta)] == [y.shape, gathered.shape]
    kernels.wrong = True  # the same checks notice one rank's missing part
    for wrong, truth in (
        (npu.matmul_all_reduce(x, w, group, ()).wait(), total),
        (npu.matmul_reduce_scatter(x, w, group, ()).wait(), total.chunk(ranks)[rank]),
    ):
        with pytest.raises(AssertionError, match="relative error"):
            close(wrong, truth, dtype)


def test_operators_match_the_truth_in_every_layout(with_torch_npu):
    with_torch_npu(operators)


def arguments(kernels, group):
    import torch_npu

    _, _, x, w = operands(group, 8, 256, 16, BF16)
    for keep_gathered, comm_mode in itertools.product((True, False), (None, "ai_cpu", "aiv")):
        kernels.calls.clear()
        npu.matmul_all_reduce(x, w, group, (), comm_mode=comm_mode)
        npu.matmul_reduce_scatter(x, w, group, (), comm_mode=comm_mode)
        _, gathered = npu.all_gather_matmul(x, w, group, (), keep_gathered=keep_gathered, comm_mode=comm_mode)
        assert [operator for operator, _ in kernels.calls] == list(npu_wheel.ALLOWED)
        assert [options.get("comm_mode") for _, options in kernels.calls] == [comm_mode] * 3
        assert kernels.calls[2][1].get("gather_output", True) is keep_gathered
        assert (gathered is not None) is keep_gathered
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'chunks'"):  # the schemas are the wheel's own
        torch_npu.npu_mm_all_reduce_base(x, w, "tensor parallel", chunks=4)
    with pytest.raises(RuntimeError, match=r"missing value for argument 'input'"):
        torch_npu.npu_mm_reduce_scatter_base(x1=x, x2=w, hcom="tensor parallel", world_size=2)

    other = kernels.groups["another"] = dist.new_group()
    npu.set_hccl_name(other, "another")
    assert npu.hccl_name(group) == "tensor parallel" and npu.hccl_name(other) == "another"
    npu.matmul_all_reduce(x, w, other, ())
    names_are_asked_once()


def names_are_asked_once():
    class Backend:
        asked = 0

        def get_hccl_comm_name(self, rank):
            Backend.asked += 1
            return f"name of rank {rank}"

    class Group:
        def _get_backend(self, device):
            assert device.type == "npu"
            return Backend()

    group = Group()
    assert npu.hccl_name(group) is npu.hccl_name(group) == f"name of rank {dist.get_rank()}"
    assert Backend.asked == 1


def test_arguments_are_what_the_schemas_and_the_documentation_ask_for(with_torch_npu):
    with_torch_npu(arguments)


def layers(kernels, group):
    """All four layers; every matmul next to a collective contracts over 256 at least."""
    from ascend_parallel.ops import operators

    operators.KERNELS["chunked"] = npu
    for dtype, sequence_parallel, shape in itertools.product(DTYPES, (False, True), [(64, 256), (36, 2, 256)]):
        for recompute in (True, False):
            settings = Settings(num_chunks=2, mode=2, recompute_all_gather=recompute)
            kernels.calls.clear()
            check_column(group, shape, dtype, settings, sequence_parallel)
            called = ["npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"]
            expected = called if sequence_parallel else ["npu_mm_all_reduce_base"]
            assert [operator for operator, _ in kernels.calls] == expected, kernels.calls
        kernels.calls.clear()
        check_row(group, (*shape[:-1], 512), dtype, settings, sequence_parallel)
        expected = called[::-1] if sequence_parallel else ["npu_mm_all_reduce_base"]
        assert [operator for operator, _ in kernels.calls] == expected, kernels.calls


def check_column(group, shape, dtype, settings, sequence_parallel):
    x, weight, bias, y, dy = whole_layer(shape, 512, dtype)
    x_r = (part(x, group, 0) if sequence_parallel else x.detach()).to(dtype).requires_grad_()
    w_r, b_r = (part(t, group, 0).to(dtype).requires_grad_() for t in (weight, bias))
    y_r = column_linear(x_r, w_r, b_r, group=group, settings=settings, sequence_parallel=sequence_parallel)
    y_r.backward(part(dy, group, -1).to(dtype))
    close(y_r, part(y, group, -1), dtype)
    close(x_r.grad, part(x.grad, group, 0) if sequence_parallel else x.grad, dtype)
    close(w_r.grad, part(weight.grad, group, 0), dtype)
    close(b_r.grad, part(bias.grad, group, 0), dtype)


def check_row(group, shape, dtype, settings, sequence_parallel):
    x, weight, bias, y, dy = whole_layer(shape, 256, dtype)
    x_r, w_r = (part(t, group, -1).to(dtype).requires_grad_() for t in (x, weight))
    y_r = row_linear(x_r, w_r, group=group, settings=settings, sequence_parallel=sequence_parallel)
    y_r.backward((part(dy, group, 0) if sequence_parallel else dy).to(dtype))
    y = (y - bias).detach()
    close(y_r, part(y, group, 0) if sequence_parallel else y, dtype)
    close(x_r.grad, part(x.grad, group, -1), dtype)
    close(w_r.grad, part(weight.grad, group, -1), dtype)


def test_all_four_layers_match_the_truth_forward_and_backward(with_torch_npu):
    with_torch_npu(layers)
