"""torch's two operators on CPUs, with the kernels of change.diff, against the whole computation in float64."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patched_copy import patched

from ascend_parallel.tuning.launch.ranks import call_on_ranks

HERE = Path(__file__).parent
COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"  # v2.13.0


def rank(group, file):
    """Register the kernels in this process, and return the cases that differ from the truth."""
    import torch.distributed._symmetric_memory as symmetric_memory

    before = Path(symmetric_memory.__file__).read_text().splitlines()
    added = [
        line for line in (HERE / "change.diff").read_text().splitlines() if line.startswith("+") and line[1:2] != "+"
    ]
    assert len(Path(file).read_text().splitlines()) == len(before) + len(added)  # nothing is taken away
    exec("\n".join(line[1:] for line in added), vars(symmetric_memory))
    ranks, wrong = group.size(), []
    generator = torch.Generator().manual_seed(1)

    def differs(name, found, truth):
        if found.shape != truth.shape or not torch.allclose(found.double(), truth, rtol=1e-5, atol=1e-4):
            wrong.append(name)

    for shape, dim in (((5, 3, 64), 0), ((2, 3, 64), 1), ((6, 64), 0), ((2, 3, 64), 2)):
        shards = [torch.randn(shape, generator=generator) for _ in range(ranks)]
        bs = [
            torch.randn(shape[-1] * (ranks if dim == len(shape) - 1 else 1), n, generator=generator) for n in (32, 48)
        ]
        whole = torch.cat(shards, dim).double()
        arguments = (shards[group.rank()], bs, dim, group.group_name)
        a, products = torch.ops.symm_mem.fused_all_gather_matmul(*arguments)
        meta = torch.ops.symm_mem.fused_all_gather_matmul(
            arguments[0].to("meta"), [b.to("meta") for b in bs], dim, group.group_name
        )
        differs(f"gather {dim} A", a, whole)
        for b, product, planned in zip(bs, products, meta[1], strict=True):
            differs(f"gather {dim}", product, whole @ b.double())
            assert product.stride() == planned.stride()  # what compiled code relies on
        assert torch.ops.symm_mem.fused_all_gather_matmul(*arguments, return_A=False)[0] is None
    for shape, dim in (((12, 3, 64), 0), ((2, 12, 64), 1), ((12, 64), 0)):
        parts = [torch.randn(shape, generator=generator) for _ in range(ranks)]
        b = torch.randn(64, 32, generator=generator)
        total = sum(part.double() @ b.double() for part in parts)
        for op in ("sum", "avg"):
            arguments = (parts[group.rank()], b, op, dim, group.group_name)
            found = torch.ops.symm_mem.fused_matmul_reduce_scatter(*arguments)
            truth = total.chunk(ranks, dim)[group.rank()] / (ranks if op == "avg" else 1)
            differs(f"scatter {dim} {op}", found, truth)
    dist.barrier(group)
    return wrong


@pytest.mark.slow
@pytest.mark.skipif(torch.version.git_version != COMMIT, reason="the change is against torch 2.13.0")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_kernels_compute_what_the_operators_say(ranks, tmp_path, monkeypatch):
    import torch.distributed._symmetric_memory as symmetric_memory

    file = patched(HERE / "change.diff", Path(symmetric_memory.__file__), tmp_path)
    support = HERE.parents[1] / "tests" / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(support), os.environ.get("PYTHONPATH", "")]))
    assert call_on_ranks("test_cpu_kernels:rank", ranks, limit=120, file=str(file)) == []
