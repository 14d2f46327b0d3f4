"""Timelines for tests: layers and operators to record, and files made up for the purpose."""

import torch

from ascend_parallel import column_linear, ops, row_linear, timeline

MS = 1_000_000
OPERATORS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")


class Mlp(torch.nn.Module):
    """Two layers, so that there are names to find."""

    def __init__(self, group, settings, sequence_parallel):
        super().__init__()
        torch.manual_seed(group.rank())
        self.first = Layer(column_linear, torch.randn(48, 32), group, settings, sequence_parallel)
        self.second = Layer(row_linear, torch.randn(32, 48), group, settings, sequence_parallel)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Layer(torch.nn.Module):
    def __init__(self, function, weight, group, settings, sequence_parallel):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.run = lambda x: function(
            x, self.weight, group=group, settings=settings, sequence_parallel=sequence_parallel
        )

    def forward(self, x):
        return self.run(x)


def step(group, settings, sequence_parallel):
    """Output and gradients of one forward and backward, alike in every call."""
    model = Mlp(group, settings, sequence_parallel)
    torch.manual_seed(7 if not sequence_parallel else 100 + group.rank())
    x = torch.randn(128 // (group.size() if sequence_parallel else 1), 32, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(weight.grad for weight in model.parameters())]


def operators(group, folder):
    with timeline.record(folder):
        for name in OPERATORS:
            getattr(ops, name)(torch.randn(128, 64), torch.randn(64, 64), group, num_chunks=3)


def made(rank, *, begin=0, chunks=2, boot="a", clocks=None, steps=1, ranks=2, slower=1, m=64):
    """Header and passes of one rank: 10 ms matmuls, 15 ms all-reduces one after the other, from `begin` ms.

    `slower` stretches both.
    """
    header = {
        "run": "20260101-000000-abcd",
        "rank": rank,
        "ranks": ranks,
        "host": f"host-{boot}",
        "boot": boot,
        "clocks": clocks or [],
        "now": {"monotonic": 0, "wall": 0},
        "passes": steps,
        "versions": {"torch": "2", "ascend_parallel": "0"},
    }
    call = {"operator": "matmul_all_reduce", "m": m, "k": 8, "n": 4, "dtype": "float32", "kernel": "chunked"}
    passes = []
    for number in range(steps):
        start = (begin + 100 * number) * MS
        ms = slower * MS
        spans = [["matmul", "matmul", i, start + 10 * i * ms, start + 10 * (i + 1) * ms, 0] for i in range(chunks)]
        for i in range(chunks):
            queued, end = start + 10 * (i + 1) * ms, start + (10 + 15 * (i + 1)) * ms
            spans.append(["comm", "matmul_all_reduce", i, queued, end, 1])
        end = start + (10 + 15 * chunks) * ms
        spans.append(["wait", "wait", chunks - 1, start + 10 * chunks * ms, end, 0])
        passes.append(
            {
                "layer": "mlp.<fc2>",
                "kind": "row",
                "direction": "forward",
                "group": [0, 1],
                "begin": start,
                "end": end,
                "calls": [{**call, "chunks": chunks}],
                "spans": spans,
            }
        )
    return header, passes
