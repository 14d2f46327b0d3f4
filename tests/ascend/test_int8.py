"""int8 weights, int8 by int8 and communication in int8 by torch_npu's operators, with the limits of their pages."""

import pytest
import torch
import torch.distributed as dist
from programs import counted, device, error

BF16 = torch.bfloat16


def rank_operands(m, k, n, seed=0):
    """Return each rank's input [M, K] and weight [K, N], fp32."""
    drawn = torch.Generator().manual_seed(seed)
    ranks = dist.get_world_size()
    return [(torch.randn(m, k, generator=drawn), torch.randn(k, n, generator=drawn)) for _ in range(ranks)]


def on_npu(weight):
    """Return an int8 weight on this rank's device."""
    from ascend_parallel import QuantisedWeight

    parts = (None if part is None else part.to(device()) for part in (weight.values, weight.scale, weight.offset))
    return QuantisedWeight(*parts, weight.group_size)


def weight_only(grain, offset):
    """W8A16: multiply by an int8 weight and sum; return the error, the operators, and the error of the gradient."""
    import ascend_parallel

    rank, operands = dist.get_rank(), rank_operands(32, 384, 256)
    how = {"grain": "group", "group_size": grain} if isinstance(grain, int) else {"grain": grain}
    weights = [ascend_parallel.quantise_weight(w.to(BF16), symmetric=not offset, **how) for _, w in operands]
    x = operands[rank][0].to(BF16).to(device()).requires_grad_()
    own = on_npu(weights[rank])
    settings = ascend_parallel.Settings(fused=True, strict=True)

    def run():
        y = ascend_parallel.quantised_row_linear(x, own, group=dist.group.WORLD, settings=settings)
        y.backward(torch.ones_like(y))
        return y

    y, numbers = counted(run)
    dense = [each.dequantise(torch.float64) for each in weights]
    truth = sum(a.to(BF16).double() @ w for (a, _), w in zip(operands, dense, strict=True))
    gradient = torch.ones(32, 256, dtype=torch.float64) @ dense[rank].t()
    return error(y, truth), error(x.grad, gradient), numbers


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("grain", ["tensor", "channel", 64], ids=str)
def test_an_int8_weight_goes_to_the_operator(ranks, grain, offset):
    for forward, backward, numbers in ranks().run(weight_only, grain, offset):
        assert max(forward, backward) < 2e-2
        assert numbers["aclnnWeightQuantMatmulAllReduce"] == 1, numbers


def weight_only_in_chunks():
    """Return the error of an int8 weight [1024, 256] in chunks of its columns, which has no memory to lay out."""
    import ascend_parallel

    rank, operands = dist.get_rank(), rank_operands(40, 1024, 256)
    weights = [ascend_parallel.quantise_weight(w.to(BF16), grain="channel") for _, w in operands]
    x, settings = operands[rank][0].to(BF16).to(device()), ascend_parallel.Settings(num_chunks=2, mode=2)
    y = ascend_parallel.quantised_row_linear(x, on_npu(weights[rank]), group=dist.group.WORLD, settings=settings)
    dense = [each.dequantise(torch.float64) for each in weights]
    return error(y, sum(a.to(BF16).double() @ w for (a, _), w in zip(operands, dense, strict=True)))


def test_an_int8_weight_runs_in_chunks(ranks):
    assert max(ranks().run(weight_only_in_chunks)) < 2e-2


def both_int8(kind, sequence, grain, communicated=False):
    """W8A8: a layer whose input is exact in int8; return the error, the limit of it, and the operators."""
    import ascend_parallel

    rank, ranks, operands = dist.get_rank(), dist.get_world_size(), rank_operands(32, 384, 256)
    weights = [ascend_parallel.quantise_weight(w.to(BF16), "channel") for _, w in operands]
    dense = [each.dequantise(torch.float64) for each in weights]
    # Whole numbers with a 127 in each row: every scale of the input is 1.
    xs = [(x * 30).round().clamp(-127, 127).index_fill(1, torch.tensor([0]), 127).to(BF16) for x, _ in operands]
    settings = ascend_parallel.Settings(fused=True, strict=True, enable_coc_in_column_backward=True)
    how = {"group": dist.group.WORLD, "settings": settings, "grain": grain}
    own, limit = on_npu(weights[rank]), 2e-2
    if kind == "column":
        truth, run = torch.cat(xs).double() @ dense[rank], ascend_parallel.int8_column_linear
    else:
        products = [x.double() @ w for x, w in zip(xs, dense, strict=True)]
        total = sum(products)
        truth, run = total.chunk(ranks)[rank] if sequence else total, ascend_parallel.int8_row_linear
        how["sequence_parallel"] = sequence
    if communicated:
        partial = torch.stack(products).abs().amax((0, 1)) / 127
        summed = (total.abs().amax(0) + ranks * partial) / 127
        how["comm_scales"] = ascend_parallel.CommScales(*(scale.to(BF16).to(device()) for scale in (partial, summed)))
        worst = ranks * partial / 2 + summed / 2
        limit = 2e-2 + (worst.max() / truth.abs().max()).item() * 1.1
    y, numbers = counted(run, xs[rank].to(device()), own, **how)
    return error(y, truth), limit, numbers


@pytest.mark.parametrize("grain", ["token", "tensor"])
@pytest.mark.parametrize(
    ("kind", "sequence", "operator"),
    [
        ("column", True, "aclnnAllGatherMatmulV2"),
        ("row", True, "aclnnMatmulReduceScatterV2"),
        ("row", False, "aclnnQuantMatmulAllReduce"),
    ],
)
def test_int8_by_int8_goes_to_the_operator(ranks, kind, sequence, operator, grain):
    for found, limit, numbers in ranks().run(both_int8, kind, sequence, grain):
        assert found < limit
        assert sum(number for name, number in numbers.items() if name.startswith(operator)) == 1, numbers


def test_sums_are_communicated_in_int8(ranks):
    for found, limit, numbers in ranks().run(both_int8, "row", False, "token", True):
        assert 0 < found < limit
        assert sum(number for name, number in numbers.items() if name.startswith("aclnnQuantMatmulAllReduce")) == 1
