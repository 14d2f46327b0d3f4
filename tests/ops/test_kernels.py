"""Every kernel that runs on this machine, through the whole matrix, against the truth."""

import itertools
import shutil
import sys

import pytest
import torch
from test_operators import SHAPES, layouts, operands, truth_all_gather, truth_all_reduce, truth_reduce_scatter
from truth import LIMIT, close

from ascend_parallel import Settings
from ascend_parallel.ops import operators, shm
from ascend_parallel.ops.registry import KERNELS

SETTINGS = {
    "reference": [Settings(mode=1)],
    "chunked": [Settings(num_chunks=chunks) for chunks in (2, 3, 8)],
    "ordered": [Settings(num_chunks=chunks, mode=2, deterministic=True) for chunks in (1, 3)],
    "shm": [Settings(fused=True), Settings(fused=True, deterministic=True)],
}
NO_EXTENSION = shm.extension() if isinstance(shm.extension(), str) else ""
KINDS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "shm" and bool(NO_EXTENSION), reason=NO_EXTENSION))
    for name in SETTINGS
]


class Taken(set):
    """Record the kernels that the operators look up."""

    def __enter__(self):
        self._kept = operators.choose
        operators.choose = self._choose
        return self

    def __exit__(self, *_):
        operators.choose = self._kept

    def _choose(self, problem, settings):
        choice = self._kept(problem, settings)
        self.add(choice.kernel)
        return choice


def run_all_reduce(x, w, group, settings):
    return operators.start_matmul_all_reduce(x, w, group, settings).wait()


def matrix(group, name, dtype):
    """Every shape and every layout by one kernel; returns the kernels that ran and the largest error."""
    worst = 0.0
    with Taken() as taken:
        for settings in SETTINGS[name]:
            for shape in SHAPES:
                x, w, x_r, w_r = operands(group, shape, 40, dtype)
                truth = truth_all_reduce(x, w, group.rank())
                y = run_all_reduce(x_r, w_r, group, settings)
                worst = max(worst, close(y, truth.view(y.shape), dtype))
                if len(shape) == 1:
                    continue
                y, gathered = operators.run_all_gather_matmul(x_r, w_r, group, settings)
                assert torch.equal(gathered.double(), torch.cat(x).view(gathered.shape))
                worst = max(worst, close(y, truth_all_gather(x, w, group.rank()).view(y.shape), dtype))
                x, w, x_r, w_r = operands(group, (shape[0] * group.size(), *shape[1:]), 40, dtype)
                y = operators.start_matmul_reduce_scatter(x_r, w_r, group, settings).wait()
                worst = max(worst, close(y, truth_reduce_scatter(x, w, group.rank()).view(y.shape), dtype))
            strides(group, settings, dtype)
    return sorted(taken), worst


def strides(group, settings, dtype):
    x, w, x_r, w_r = operands(group, (48 * group.size(), 24), 24, dtype)  # a square weight too
    for x_s, w_s in itertools.product(layouts(x_r).values(), layouts(w_r).values()):
        close(run_all_reduce(x_s, w_s, group, settings), truth_all_reduce(x, w, 0), dtype)
        y = operators.run_all_gather_matmul(x_s, w_s, group, settings)[0]
        close(y, truth_all_gather(x, w, group.rank()), dtype)
        y = operators.start_matmul_reduce_scatter(x_s, w_s, group, settings).wait()
        close(y, truth_reduce_scatter(x, w, group.rank()), dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_the_matrix(ranks, count, dtype, name):
    for taken, worst in ranks(count).run(matrix, name, dtype):
        assert name in taken or (name == "ordered" and count == 2)  # sums of two ranks have only one order
        assert worst <= LIMIT[dtype]


def test_the_extension_is_there_where_a_compiler_is():
    """Without the extension all tests of the shared-memory kernel would be skipped silently."""
    if not sys.platform.startswith("linux") or not shutil.which("c++"):
        pytest.skip("the extension needs Linux and a C++ compiler, and there is none here")
    assert NO_EXTENSION == ""


def test_every_kernel_is_in_the_matrix_or_has_one_of_its_own():
    assert set(SETTINGS) | {"npu"} == set(KERNELS)  # npu: tests/ops/test_npu.py
