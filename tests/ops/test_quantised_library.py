"""An int8 weight through the public operator: traced, with gradients."""

import itertools

import pytest
import torch
from int8 import DTYPES, GRAINS, N, exact, operands
from pool import on_ranks
from tolerances import close

from ascend_parallel import ops


@on_ranks(2)
def test_the_public_operator_takes_an_int8_weight(group):
    rank = group.rank()
    for grain, symmetric, dtype, chunks in itertools.product(GRAINS, (True, False), DTYPES, (1, 3)):
        x, _, weights = operands(group, (5, 3, 70), grain, symmetric, dtype)
        x_r = x[rank].to(dtype).requires_grad_()
        y = ops.matmul_all_reduce(x_r, weights[rank], group, num_chunks=chunks)
        close(y, sum(a @ exact(w) for a, w in zip(x, weights, strict=True)), dtype)
        y.sum().backward()
        close(x_r.grad, torch.ones(5, 3, N).double() @ exact(weights[rank]).t(), dtype)
    x, w = torch.randn(4, 70, requires_grad=True), weights[rank]
    torch.library.opcheck(
        torch.ops.ascend_parallel.matmul_all_reduce_int8.default,
        (
            torch.randn(4, 70, requires_grad=True),
            w.values,
            w.scale.float(),
            w.offset.float(),
            w.group_size,
            group.group_name,
            [2],
        ),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@on_ranks(2)
def test_scales_that_want_a_gradient_are_refused(group):
    x, _, weights = operands(group, (5, 3, 70), "channel", True, torch.float32)
    weights[0].scale.requires_grad_()
    with pytest.raises(ValueError, match="scale of an int8 weight requires a gradient"):
        ops.matmul_all_reduce(x[0].float(), weights[0], group)
