"""A matmul beside an all-to-all: what the fused operators take, what is chosen, and the kernel of torch's own calls."""

from dataclasses import replace

import pytest
import torch
from test_npu import A2, A3, ASCEND_950, BF16, DTYPES

from ascend_parallel import Settings, UnmetRequestError
from ascend_parallel.ops import choose, npu_limits, registry
from ascend_parallel.ops.call import (
    ALL_TO_ALL_MATMUL,
    HEAD_EXCHANGE,
    MATMUL_ALL_TO_ALL,
    Exchange,
    ExchangedMatmul,
    Matmul,
)
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.exchanged_matmul import all_to_all_matmul, exchanged_kernel, matmul_all_to_all

BOTH = frozenset({"x1", "x2", "hcom", "world_size", "bias", "all2all_axes", "comm_mode"})


def back(m=1024, k=4096, n=4096, dtype=BF16, device="npu", ranks=8, soc=A2, cann=(9, 0, 0), arguments=BOTH, **others):
    """Return the way back of heads, and their projection."""
    return ExchangedMatmul(
        ALL_TO_ALL_MATMUL, m, k, n, dtype, device, ranks, soc=soc, cann=cann, arguments=arguments, **others
    )


def heads(projection, parts=4, ranks=8):
    return Exchange(HEAD_EXCHANGE, parts, 8192, 12288, projection.dtype, projection.device, ranks, None, projection)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documented_calls_are_taken(dtype):
    for soc, ranks in ((A2, (2, 4, 8)), (A3, (2, 4, 8, 16)), (ASCEND_950, (2, 4, 8, 16))):
        for count in ranks:
            matmul = back(soc=soc, ranks=count, dtype=dtype)
            assert npu_limits.supports_exchanged(matmul) is None
            assert npu_limits.supports_exchanged(matmul.backward) is None
    assert npu_limits.supports_exchanged(back(k=35000)) is None
    assert npu_limits.supports_exchanged(back(soc=A3, k=65528, n=65535).backward) is None
    assert npu_limits.supports_exchanged(back(cann=(), arguments=None)) is None  # nobody has looked


def test_the_gradient_is_the_transposed_product():
    matmul = back(k=4096, n=1024).backward
    assert (matmul.operator, matmul.shape) == (MATMUL_ALL_TO_ALL, (1024, 1024, 4096))


REFUSED = {
    "a CPU": ({"device": "cpu"}, "device cpu, not npu"),
    "fp32": ({"dtype": torch.float32}, "not torch.float32"),
    "an unknown chip": ({"soc": ""}, "the chip is unknown"),
    "910A": ({"soc": "Ascend910B"}, "no all_to_all_matmul is documented for the chip Ascend910B"),
    "16 ranks on A2": ({"ranks": 16}, "takes 2, 4, 8 ranks, not 16"),
    "3 ranks": ({"ranks": 3, "k": 4095, "soc": A3}, "takes 2, 4, 8, 16 ranks, not 3"),
    "CANN 8.5": ({"cann": (8, 5, 0)}, "CANN 8.5.0 has no all_to_all_matmul: it came with 9.0"),
    "torch_npu 2.7": ({"arguments": frozenset()}, "has no operator npu_all_to_all_matmul"),
    "ccu without the argument": (
        {"soc": ASCEND_950, "comm_mode": "ccu", "arguments": BOTH - {"comm_mode"}},
        "npu_all_to_all_matmul of the installed torch_npu has no argument comm_mode",
    ),
    "ai_cpu on A2": ({"comm_mode": "ai_cpu"}, "takes comm_mode aiv, not ai_cpu"),
    "aiv on A3": ({"comm_mode": "aiv", "soc": A3}, "takes comm_mode ai_cpu, not aiv"),
    "aiv on 950": ({"comm_mode": "aiv", "soc": ASCEND_950}, "takes comm_mode ai_cpu or ccu, not aiv"),
    "a small buffer on A2": ({"hccl_buffsize": 100}, "buffer of 200 MB, and HCCL_BUFFSIZE is 100"),
    "K on A2": ({"k": 35008}, "takes K from 1 to 35000, not 35008"),
    "K on A3": ({"k": 65536, "soc": A3}, "takes K from 2 to 65535, not 65536"),
    "no rows": ({"m": 0}, "takes M from 1 to 268435455, not 0"),
    "heads that no ranks share": ({"k": 4100}, "needs K divisible by the 8 ranks, and K is 4100"),
    "a graph on A3": ({"captured": True, "soc": A3}, "runs in no graph, and one is captured"),
    "two groups on A2": ({"elsewhere": "the group of 4 ranks"}, "that is the group of 4 ranks"),
    "row tiles": ({"deterministic": True}, "its product is not in row tiles, which COC_DETERMINISTIC=1 requires"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_refuses(case):
    changed, words = REFUSED[case]
    reason = npu_limits.supports_exchanged(back(**changed))
    assert reason is not None and words in reason, reason


GRADIENT_REFUSED = {
    "columns on A2": ({"k": 368648}, "takes N from 1 to 368640, not 368648"),
    "K": ({"n": 65536, "soc": A3}, "matmul_all_to_all on Ascend910_9391 (generation A3) takes K from 1 to 65535"),
    "heads": ({"k": 4100, "soc": A3}, "needs N divisible by the 8 ranks, and N is 4100"),
}


@pytest.mark.parametrize("case", GRADIENT_REFUSED)
def test_each_limit_of_the_gradient_refuses(case):
    changed, words = GRADIENT_REFUSED[case]
    reason = npu_limits.supports_exchanged(back(**changed).backward)
    assert reason is not None and words in reason, reason


def test_a_graph_and_other_groups_are_taken_where_the_pages_allow_them():
    assert npu_limits.supports_exchanged(back(soc=ASCEND_950, captured=True)) is None
    for soc in (A3, ASCEND_950):
        assert npu_limits.supports_exchanged(back(soc=soc, elsewhere="the group of 4 ranks")) is None


def test_the_engine_is_named_where_it_is_not_the_chips_usual_one():
    named = [(A2, "aiv", None), (A3, "ai_cpu", None), (ASCEND_950, "ai_cpu", None), (ASCEND_950, "ccu", "ccu")]
    for soc, asked, given in named:
        assert npu_limits.exchanged_engine(back(soc=soc, comm_mode=asked)) == given


FUSED = Settings(fused=True, strict=True)


def test_one_group_is_fused_and_several_are_not():
    call = heads(back())
    alone = choose(call, FUSED)
    assert (alone.kernel, alone.sizes, alone.codes) == ("npu", (4,), ("number", "fused_projection"))
    assert "COC_PARALLEL_NUM=2 or more hides more" in alone.reason
    groups = choose(call, replace(FUSED, num_chunks=2))
    assert (groups.kernel, len(groups.sizes), groups.code) == ("chunked", 2, "groups_hide_more")
    assert "2 groups hide more than one operator around the projection" in groups.reason
    one_head = choose(heads(back(), parts=1), replace(FUSED, num_chunks=4))  # no groups can be made
    assert (one_head.kernel, one_head.sizes) == ("npu", (1,))
    assert one_head.codes == ("number", "few_parts", "fused_projection")
    asked = choose(call, replace(FUSED, num_chunks=4, customized_coc={call.shape: 1}))
    assert (asked.kernel, asked.code) == ("npu", "fused_projection")
    assert choose(call, Settings(num_chunks=1)).kernel == "reference"
    assert choose(call, replace(FUSED, mode=1)).kernel == "reference"


def test_what_is_not_fused_runs_in_groups_with_the_reason():
    call = heads(back(soc=A3, k=65536))
    decision = choose(call, Settings(fused=True))
    assert (decision.kernel, len(decision.sizes), decision.code) == ("chunked", 4, "not_fused")
    assert "npu: all_to_all_matmul on Ascend910_9391 (generation A3) takes K from 2 to 65535" in decision.unmet
    with pytest.raises(UnmetRequestError, match="takes K from 2 to 65535"):
        choose(call, FUSED)
    unknown = choose(replace(call, projection=None), Settings(fused=True))
    assert "npu: it runs no attention" in unknown.unmet


def test_a_gradient_that_is_not_taken_leaves_forward_fused():
    projection = back(soc=A3, n=65536)
    decision = choose(heads(projection), FUSED)
    assert decision.codes == ("number", "fused_projection", "fused_forward")
    assert "forward alone, because matmul_all_to_all" in decision.reason
    assert [exchanged_kernel(each) for each in (projection, projection.backward)] == ["npu", "reference"]


def test_the_settings_limit_the_operators():
    refused = {
        "comm_mode": ({"comm_mode": "ai_cpu"}, "takes comm_mode aiv, not ai_cpu"),
        "buffer": ({"hccl_buffsize": 100}, "HCCL_BUFFSIZE is 100"),
        "deterministic": ({"deterministic": True}, "which COC_DETERMINISTIC=1 requires"),
    }
    for settings, words in refused.values():
        assert words in choose(heads(back()), Settings(fused=True, **settings)).unmet


def test_a_matmul_beside_a_reduction_is_no_matmul_of_an_exchange():
    with pytest.raises(ValueError, match="operator='all_to_all_matmul' is not allowed"):
        Matmul(ALL_TO_ALL_MATMUL, 8, 8, 8, BF16, "npu", 2)


def reference(group):
    """Run both operators by torch's own calls; return the errors against float64."""
    ranks, rank, m, n = group.size(), group.rank(), 6, 10
    drawn = torch.Generator().manual_seed(3)
    xs = torch.randn(ranks, ranks * m, 4, generator=drawn, dtype=torch.float64)  # of each rank
    w, bias = (torch.randn(size, generator=drawn, dtype=torch.float64) for size in ((4 * ranks, n), (n,)))
    matmul = ExchangedMatmul(ALL_TO_ALL_MATMUL, m, 4 * ranks, n, torch.float64, "cpu", ranks)
    x_m = torch.cat([xs[source, rank * m : (rank + 1) * m] for source in range(ranks)], 1)
    COUNTS.clear()
    errors = []
    for added in (None, bias):
        y, came = all_to_all_matmul(xs[rank], w, added, group, matmul)
        errors += [(y - x_m @ w - (0 if added is None else added)).abs().max(), (came - x_m).abs().max()]
    ds = torch.randn(ranks, m, n, generator=drawn, dtype=torch.float64)
    d_heads = matmul_all_to_all(ds[rank], w.t(), group, matmul.backward)
    errors.append((d_heads - torch.cat([(d @ w.t()).chunk(ranks, 1)[rank] for d in ds])).abs().max())
    assert COUNTS.as_dict() == {
        ALL_TO_ALL_MATMUL: {"calls": 2, "chunks": 2, "collectives": 2},
        MATMUL_ALL_TO_ALL: {"calls": 1, "chunks": 1, "collectives": 1},
    }
    return max(errors).item()


@pytest.mark.parametrize("count", [2, 4])
def test_torchs_own_calls_compute_the_formulas(ranks, count):
    assert max(ranks(count).run(reference)) < 1e-12


EXPLAINED = {  # settings, the exchange, what runs the way back and the gradient's dispatch, with codes, what is said
    "fused": (Settings(fused=True), heads(back()), [("npu", "fused_projection")] * 2, "npu_all_to_all_matmul: taken"),
    "forward alone": (
        Settings(fused=True),
        heads(back(n=65536, soc=A3)),
        [("npu", "fused_projection"), ("reference", "fused_forward")],
        "reference; npu_matmul_all_to_all: cannot: matmul_all_to_all on Ascend910_9391 (generation A3) takes K from 1",
    ),
    "groups": (
        Settings(fused=True, num_chunks=2),
        heads(back()),
        [("chunked", "groups_hide_more")] * 2,
        "npu_all_to_all_matmul: can, in one group",
    ),
    "refused": (
        Settings(fused=True),
        heads(back(soc=""), parts=1),
        [("reference", "not_fused")] * 2,
        "npu_all_to_all_matmul: cannot: the chip is unknown",
    ),
    "not asked": (Settings(), heads(back()), [("reference", "number")] * 2, "can, with USE_COC_FUSED_KERNEL=1"),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_says_what_runs_beside_an_all_to_all_and_why(case):
    settings, exchange, expected, words = EXPLAINED[case]
    found = registry.explain(exchange, settings)
    assert [choice.matmul.operator for choice in found.beside] == [ALL_TO_ALL_MATMUL, MATMUL_ALL_TO_ALL]
    assert [(choice.kernel, choice.code) for choice in found.beside] == expected
    assert words in str(found)
    assert (choose(exchange, settings).kernel == "npu") == (found.beside[0].kernel == "npu")


def test_explain_of_an_exchange_without_a_projection_names_no_operator():
    assert registry.explain(replace(heads(back()), projection=None), Settings(fused=True)).beside == ()
