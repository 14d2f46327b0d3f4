"""Checks inside a run: a fault planted on one rank is caught, and named on every rank."""

import pytest
import torch
from layer_verification import planted, run, verifying

import ascend_parallel


def caught(group, where, sequence_parallel, kind, dtype):
    """Plant a fault on one rank after some calls; return the calls until the error, and its message."""
    from ascend_parallel.overlap import linear, sequence_backward

    faulty, every = group.size() - 1, 3

    def scaled(pending):
        if group.rank() == faulty:
            pending.wait().mul_(1.5)
        return pending

    def wrong_row(pending):
        if group.rank() == faulty:
            pending.wait()[37] += 100
        return pending

    def wrong_weight_gradient(dw):
        return dw + 100 * (group.rank() == faulty) * torch.eye(*dw.shape, dtype=dw.dtype)

    def missing(gradients):
        return None, gradients[1]

    change = {"scale": scaled, "row": wrong_row, "weight": wrong_weight_gradient, "missing": missing}[where]
    module = sequence_backward if sequence_parallel else linear
    target = {
        "scale": (module, "start_matmul_reduce_scatter" if sequence_parallel else "start_matmul_all_reduce"),
        "row": (linear, "start_matmul_reduce_scatter" if sequence_parallel else "start_matmul_all_reduce"),
        "weight": (sequence_backward, "weight_gradient_of"),
        "missing": (linear, "_local_backward"),
    }[where]
    with verifying(group, verify_every=every) as layers:
        model = torch.nn.Module()
        model.mlp = torch.nn.Module()
        config = {"sequence_parallel": sequence_parallel, "params_dtype": dtype}
        model.mlp.linear = layer = layers.make(kind, (96, 96), config=config)
        rows = 192 // group.size() if sequence_parallel and kind[0] == "C" else 192
        shape = (rows, 2, 96 if kind[0] == "C" else 96 // group.size())
        for _ in range(every + 2):
            run(layer, shape, seed=group.rank(), dtype=dtype)
        with planted(*target, change):
            for calls in range(1, every + 1):
                try:
                    run(layer, shape, seed=group.rank(), dtype=dtype)
                except ascend_parallel.VerificationError as error:
                    failures = ascend_parallel.verification().failures
                    return calls, str(error), failures == [str(error)]
    return None


FAULTS = [
    # fault, sequence parallel, layer, dtype, ranks, path, quantity
    ("scale", True, "ColumnParallelLinear", torch.float32, 2, "column, sequence parallel", "input gradient"),
    ("scale", False, "ColumnParallelLinear", torch.bfloat16, 3, "column", "input gradient"),
    ("row", True, "RowParallelLinear", torch.float32, 3, "row, sequence parallel", "output"),
    ("row", False, "RowParallelLinear", torch.bfloat16, 2, "row", "output"),
    ("weight", True, "ColumnParallelLinear", torch.float32, 2, "column, sequence parallel", "weight gradient"),
    ("weight", False, "RowParallelLinear", torch.float32, 2, "row", "weight gradient"),
    ("missing", False, "RowParallelLinear", torch.float32, 2, "row", "input gradient"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("where", "sequence_parallel", "kind", "dtype", "count", "path", "quantity"), FAULTS)
def test_a_fault_on_one_rank_is_caught_within_n_calls_and_named_on_all(
    ranks, where, sequence_parallel, kind, dtype, count, path, quantity
):
    results = ranks(count).run(caught, where, sequence_parallel, kind, dtype)
    assert len(set(results)) == 1, results
    calls, message, kept = results[0]
    assert calls <= 3 and kept
    worst = "rank " if where == "missing" else f"rank {count - 1} of "
    assert message.startswith(f"mlp.linear ({kind}, {path}): the {quantity} of call 7 is wrong on {worst}")
    assert str(dtype) in message and "weight [" in message and "worst at [" in message
    if where in ("weight", "missing"):
        # The input gradient's operator of a row layer without sequence parallel is a plain matmul.
        assert ("ran no operator" in message) == (path == "row")
    else:
        operator = "matmul_reduce_scatter" if sequence_parallel else "matmul_all_reduce"
        assert f"ran {operator} [384, " in message and "by kernel chunked in chunks of rows [" in message
    if where == "row":
        assert "worst at [18, 1, " in message  # row 37 of [96 or less, 2, 96]: its 19th, second of the batch
