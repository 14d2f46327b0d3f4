"""Checks inside a run: a fault planted on one rank is caught, and named on every rank."""

import contextlib

import pytest
import torch
from layer_verification import planted, run, verifying

import ascend_parallel


def caught(group, where, sequence_parallel, kind, dtype):
    """Plant a fault on one rank after some calls; return the calls until the error, and its message."""
    from ascend_parallel.ops.pending import Pending
    from ascend_parallel.overlap import linear, sequence_backward

    faulty, every = group.size() - 1, 3

    def scaled(found):
        if found is not None and group.rank() == faulty:
            (found.wait() if isinstance(found, Pending) else found[0]).mul_(1.5)
        return found

    def wrong_row(found):
        if found is not None and group.rank() == faulty:
            y = found.wait() if isinstance(found, Pending) else found.flatten(0, -2)
            y[37] += 100
        return found

    def wrong_weight_gradient(found):
        dw = found[1] if isinstance(found, tuple) else found
        if dw is not None and group.rank() == faulty:
            dw += 100 * torch.eye(*dw.shape, dtype=dw.dtype)
        return found

    def missing(gradients):
        return None, gradients[1]

    change = {"scale": scaled, "row": wrong_row, "weight": wrong_weight_gradient, "missing": missing}[where]
    module = sequence_backward if sequence_parallel else linear
    of_kind = ("row" if sequence_parallel else "local") if kind[0] == "R" else "column"
    in_loops = f"run_{of_kind}_sequence_gradients" if sequence_parallel else f"run_{of_kind}_gradients"
    operator = "matmul_reduce_scatter" if sequence_parallel else "matmul_all_reduce"
    # Of each what a loop in C++ runs, and what Python's runs.
    targets = {
        "scale": [(module, in_loops), (module, f"start_{operator}")],
        "row": [(linear, operator.replace("matmul", "run")), (linear, f"start_{operator}")],
        "weight": [(module, in_loops), (sequence_backward, "weight_gradient_of")],
        "missing": [(linear, "_local_backward")],
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
        with contextlib.ExitStack() as plants:
            for target in targets:
                plants.enter_context(planted(*target, change))
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
