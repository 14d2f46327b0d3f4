"""Every kernel that runs on this machine, through the whole matrix, against the truth."""

import itertools
import shutil
import sys

import by_settings
import pytest
import torch
from loops import LOOPS, loop_of
from pairwise import pairwise
from pool import on_ranks
from test_operators import SHAPES, layouts, operands, truth_all_gather, truth_all_reduce, truth_reduce_scatter
from tolerances import LIMIT, close

from ascend_parallel import Settings
from ascend_parallel.ops import operators, shm
from ascend_parallel.ops.probing import ANY, TRANSPOSED
from ascend_parallel.ops.registry import KERNELS

SETTINGS = {
    "reference": [Settings(mode=1)],
    "chunked": [Settings(num_chunks=chunks) for chunks in (2, 3, 8)],
    "ordered": [Settings(num_chunks=chunks, mode=2, deterministic=True) for chunks in (1, 3)],
    "shm": [Settings(fused=True), Settings(fused=True, deterministic=True)],
}
NO_EXTENSION = shm.extension() if isinstance(shm.extension(), str) else ""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MATRIX = [
    pytest.param(*case, marks=pytest.mark.skipif("shm" in case and bool(NO_EXTENSION), reason=NO_EXTENSION))
    for case in pairwise(SETTINGS, [2, 3, 4], DTYPES)
]


class Taken(set):
    """Record the kernels that the operators run."""

    def __enter__(self):
        self._kept = operators._operands
        operators._operands = self._operands
        return self

    def __exit__(self, *_):
        operators._operands = self._kept

    def _operands(self, x, w, decision, product):
        self.add(decision.kernel)
        return self._kept(x, w, decision, product)


def run_all_reduce(x, w, group, settings):
    return by_settings.start_matmul_all_reduce(x, w, group, settings).wait()


def strides(group, settings, dtype):
    x, w, x_r, w_r = operands(group, (48 * group.size(), 24), 24, dtype)  # a square weight too
    for x_s, w_s in itertools.product(layouts(x_r).values(), layouts(w_r).values()):
        close(run_all_reduce(x_s, w_s, group, settings), truth_all_reduce(x, w, 0), dtype)
        y = by_settings.run_all_gather_matmul(x_s, w_s, group, settings)[0]
        close(y, truth_all_gather(x, w, group.rank()), dtype)
        y = by_settings.start_matmul_reduce_scatter(x_s, w_s, group, settings).wait()
        close(y, truth_reduce_scatter(x, w, group.rank()), dtype)


@pytest.mark.sample(
    "reference-2-torch.float32", "chunked-3-torch.float16", "ordered-4-torch.bfloat16", "shm-2-torch.float32"
)
@pytest.mark.parametrize(("name", "count", "dtype"), MATRIX, ids=str)
@on_ranks()
def test_the_matrix(group, name, dtype):
    """Every shape and every layout by one kernel, and by both loops where it has two."""
    worst = 0.0
    with Taken() as taken:
        for settings, loop in itertools.product(SETTINGS[name], LOOPS if name in ("chunked", "ordered") else LOOPS[:1]):
            with loop_of(loop):
                worst = max(worst, worst_error(group, settings, dtype))
    taken = sorted(taken)
    assert name in taken or (name == "ordered" and group.size() == 2)  # sums of two ranks have only one order
    assert worst <= LIMIT[dtype]


def worst_error(group, settings, dtype):
    """Return the largest error of every shape and layout."""
    worst = 0.0
    for shape in SHAPES:
        x, w, x_r, w_r = operands(group, shape, 40, dtype)
        truth = truth_all_reduce(x, w, group.rank())
        y = run_all_reduce(x_r, w_r, group, settings)
        worst = max(worst, close(y, truth.view(y.shape), dtype))
        if len(shape) == 1:
            continue
        y, gathered = by_settings.run_all_gather_matmul(x_r, w_r, group, settings)
        assert torch.equal(gathered.double(), torch.cat(x).view(gathered.shape))
        worst = max(worst, close(y, truth_all_gather(x, w, group.rank()).view(y.shape), dtype))
        x, w, x_r, w_r = operands(group, (shape[0] * group.size(), *shape[1:]), 40, dtype)
        y = by_settings.start_matmul_reduce_scatter(x_r, w_r, group, settings).wait()
        worst = max(worst, close(y, truth_reduce_scatter(x, w, group.rank()).view(y.shape), dtype))
    strides(group, settings, dtype)
    return worst


def kept_choices(group):
    """Return how often each call, made twice, describes a new problem; a shape that no other test has."""
    described, matmul_of = [], operators.matmul_of
    operators.matmul_of = lambda *call: described.append(call) or matmul_of(*call)
    x, w, two = torch.randn(89, 56), torch.randn(56, 24), Settings(num_chunks=2)
    calls = {
        "the same": (x, w, two, ANY),
        "more rows": (torch.randn(90, 56), w, two, ANY),
        "more columns": (x, torch.randn(56, 25), two, ANY),
        "a dtype": (x.double(), w.double(), two, ANY),
        "settings": (x, w, Settings(num_chunks=3), ANY),
        "a layout": (x, w.t().contiguous().t(), two, TRANSPOSED),
        "fused": (x, w, Settings(fused=True), ANY),
    }
    found = {}
    try:
        for name, (left, right, settings, layout) in calls.items():
            before = len(described)
            for _ in range(2):
                y = by_settings.start_matmul_all_reduce(left, right, group, settings, layout=layout).wait()
            close(y, sum_over(group, left.double() @ right.double()), left.dtype)
            found[name] = len(described) - before
        for left, right in ((x.double(), w), (x, w.double()), (x[:, 1:], w), (x.int(), w.int())):
            with pytest.raises(ValueError, match="matmul_all_reduce: x"):
                by_settings.start_matmul_all_reduce(left, right, group, two)
    finally:
        operators.matmul_of = matmul_of
    return found


def sum_over(group, term):
    torch.distributed.all_reduce(term, group=group)
    return term


def test_a_choice_is_kept_for_operands_alike(ranks):
    names = ("the same", "more rows", "more columns", "a dtype", "settings", "a layout")
    assert ranks(2).run(kept_choices) == [dict.fromkeys(names, 1) | {"fused": 2}] * 2


def test_the_extension_is_there_where_a_compiler_is():
    """Without the extension all tests of the shared-memory kernel would be skipped silently."""
    if not sys.platform.startswith("linux") or not shutil.which("c++"):
        pytest.skip("the extension needs Linux and a C++ compiler, and there is none here")
    assert NO_EXTENSION == ""


def test_every_kernel_is_in_the_matrix_or_has_one_of_its_own():
    elsewhere = {"npu", "tree"}  # tests/ops/test_npu.py, tests/overlap/test_every_degree.py
    assert set(SETTINGS) | elsewhere == set(KERNELS)
