"""The calls that the npu kernel takes and refuses, without running it."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from npu_wheel import VERSION

from ascend_parallel import Settings
from ascend_parallel.ops import Matmul, UnmetRequestError, choose, npu, npu_limits
from ascend_parallel.ops.call import (
    ALL_GATHER,
    ALL_REDUCE,
    EXPERT_EXCHANGE,
    OPERATORS,
    REDUCE_SCATTER,
    Exchange,
    ExpertMatmuls,
)

BF16 = torch.bfloat16
A2, A3, ASCEND_950 = "Ascend910B1", "Ascend910_9391", "Ascend950PR_9599"
DTYPES = (torch.bfloat16, torch.float16)


def problem(operator=REDUCE_SCATTER, m=4096, k=1024, n=1024, dtype=BF16, device="npu", ranks=8, soc=A2, **others):
    return Matmul(operator, m, k, n, dtype, device, ranks, soc=soc, **others)


def int8(antiquant="channel", group_size=0, scale_dtype=BF16, **others):
    return {
        "operator": ALL_REDUCE,
        "antiquant": antiquant,
        "group_size": group_size,
        "scale_dtype": scale_dtype,
        **others,
    }


# int8 by int8 of an all-reduce.
W8A8 = {"operator": ALL_REDUCE, "int8_input": True, "scale_dtype": BF16}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documented_calls_are_taken(operator, dtype):
    assert npu.supports(problem(operator, dtype=dtype)) is None


REFUSED = {
    "another device": ({"device": "cpu"}, "device cpu, not npu"),
    "fp32": ({"dtype": torch.float32}, "not torch.float32"),
    "fp64": ({"dtype": torch.float64}, "not torch.float64"),
    "a chip nobody named": ({"soc": ""}, "the chip is unknown"),
    "a chip without them": ({"soc": "Ascend310P3"}, "no fused operator .* Ascend310P3"),
    "a chip of the first generation": ({"soc": "Ascend910B"}, "no fused operator .* Ascend910B"),
    "all-reduce on A3": ({"operator": ALL_REDUCE, "soc": A3}, "not documented for Ascend910_9391 .generation A3"),
    "3 ranks": ({"ranks": 3, "m": 4095}, "2, 4, 8 ranks, not 3"),
    "16 ranks on A2": ({"ranks": 16}, "2, 4, 8 ranks, not 16"),
    "32 ranks on A3": ({"ranks": 32, "soc": A3, "fused_ranks": 16}, "2, 4, 8, 16 ranks, not 32"),
    "16 ranks on A3, not requested": ({"ranks": 16, "soc": A3}, "on 16 ranks only with fused_ranks=16"),
    "16 ranks on A3, aiv": (
        {"ranks": 16, "soc": A3, "fused_ranks": 16, "comm_mode": "aiv"},
        "comm_mode=aiv takes up to 8 ranks, not 16",
    ),
    "16 ranks on A2, requested": ({"ranks": 16, "fused_ranks": 16}, "2, 4, 8 ranks, not 16"),
    "ccu on A2": ({"comm_mode": "ccu"}, "takes comm_mode ai_cpu or aiv, not ccu"),
    "ccu on A3": ({"comm_mode": "ccu", "soc": A3}, "takes comm_mode ai_cpu or aiv, not ccu"),
    "aiv on 950": ({"comm_mode": "aiv", "soc": ASCEND_950}, "takes comm_mode ai_cpu or ccu, not aiv"),
    "aiv, all-reduce": (
        {"operator": ALL_REDUCE, "comm_mode": "aiv"},
        "matmul_all_reduce on .* takes comm_mode ai_cpu, not aiv",
    ),
    "aiv, a small buffer": (
        {"comm_mode": "aiv", "hccl_buffsize": 199},
        "needs a communication buffer of 200 MB, and HCCL_BUFFSIZE is 199",
    ),
    "int8 by int8, a small buffer": ({"int8_input": True, "hccl_buffsize": 120}, "and HCCL_BUFFSIZE is 120"),
    "64 ranks on 950, reduce-scatter": (
        {"soc": ASCEND_950, "ranks": 64, "fused_ranks": 64},
        "2, 4, 8, 16, 32 ranks, not 64",
    ),
    "32 ranks on 950, not requested": (
        {"soc": ASCEND_950, "ranks": 32, "fused_ranks": 16},
        "on 32 ranks only with fused_ranks=32",
    ),
    "aiv on 950, all-reduce": (
        {"operator": ALL_REDUCE, "soc": ASCEND_950, "comm_mode": "aiv"},
        "takes comm_mode ai_cpu or ccu, not aiv",
    ),
    "more than ccu gathers on 950": (
        {"operator": ALL_GATHER, "soc": ASCEND_950, "comm_mode": "ccu", "m": 2**21, "k": 63 * 64 + 1},
        "gathers up to 16911433728 bytes, not 16915628032",
    ),
    "an int8 weight on 950": (
        int8(soc=ASCEND_950),
        "not documented for an int8 weight",
    ),
    "950 without its number": ({"soc": "Ascend950"}, "no fused operator is documented for the chip Ascend950"),
    "a product too large for 950": (
        {"soc": ASCEND_950, "m": 2**20, "n": 2048 + 1},
        "a product of up to 4294967296 bytes, not 4297064448",
    ),
    "int8 by int8, ai_cpu": ({"int8_input": True, "comm_mode": "ai_cpu"}, "int8 by int8 only with comm_mode aiv"),
    "int8 by int8, 950": ({"int8_input": True, "soc": ASCEND_950}, "not documented for int8 by int8"),
    "int8 by int8, 16 ranks": (
        {"int8_input": True, "soc": A3, "ranks": 16, "fused_ranks": 16},
        "comm_mode=aiv takes up to 8 ranks, not 16",
    ),
    "int8 by int8, all-reduce, a comm_mode": (
        {**W8A8, "comm_mode": "aiv"},
        "int8 by int8 only without comm_mode, not with aiv",
    ),
    "int8 by int8, all-reduce on A3": ({**W8A8, "soc": A3}, "not documented for Ascend910_9391"),
    "int8 by int8, all-reduce, 16 ranks": ({**W8A8, "ranks": 16}, "1, 2, 4, 8 ranks, not 16"),
    "int8 by int8, all-reduce, K too large": ({**W8A8, "k": 65536}, "int8 weight takes K up to 65535, not 65536"),
    "int8 by int8, all-reduce, N too large": ({**W8A8, "n": 65536}, "int8 weight takes N up to 65535, not 65536"),
    "int8 by int8, all-reduce, bf16 of fp32 scales": (
        {**W8A8, "scale_dtype": torch.float32},
        "into torch.bfloat16 takes scales of torch.bfloat16, not torch.float32",
    ),
    "int8 by int8, all-reduce, fp16 of fp64 scales": (
        {**W8A8, "dtype": torch.float16, "scale_dtype": torch.float64},
        "takes scales of torch.float16 or torch.bfloat16 or torch.float32, not torch.float64",
    ),
    "int8 by int8, all-reduce, an old torch_npu": (
        {**W8A8, "arguments": frozenset({"dequant_scale"})},
        "of the installed torch_npu has no argument pertoken_scale",
    ),
    "communication in int8, an old torch_npu": (
        {**W8A8, "comm_quant": True, "arguments": frozenset({"dequant_scale", "pertoken_scale"})},
        "of the installed torch_npu has no argument comm_quant_scale_1, comm_quant_scale_2",
    ),
    "communication in int8, rank order": (
        {**W8A8, "comm_quant": True, "deterministic": True},
        "not documented to sum in rank order",
    ),
    "int8 by int8, K too small": ({"int8_input": True, "k": 255}, "K from 256 to 65534, not 255"),
    "int8 by int8, products in fp32": ({"int8_input": True, "dtype": torch.float32}, "not torch.float32"),
    "int8 by int8, an old torch_npu": (
        {"int8_input": True, "arguments": frozenset({"comm_mode", "x2_scale"})},
        "of the installed torch_npu has no argument output_dtype, x1_scale",
    ),
    "no operator": ({"arguments": frozenset()}, "torch_npu has no operator npu_mm_reduce_scatter_base"),
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
    "int8, K too large": (int8(k=65536), "an int8 weight takes K up to 65535, not 65536"),
    "int8, N too large": (int8(n=65536), "an int8 weight takes N up to 65535, not 65536"),
    "int8, groups of all K": (int8("group", 1024), "groups of at most K - 1 = 1023, not 1024"),
    "int8, scales in fp32": (int8(scale_dtype=torch.float32), "dtype of x, torch.bfloat16, not torch.float32"),
    "int8, x in fp32": (int8(dtype=torch.float32), "not torch.float32"),
    "int8, A3": (int8(soc=A3), "not documented for Ascend910_9391"),
    "rank order, all-reduce": ({"operator": ALL_REDUCE, "deterministic": True}, "not documented to sum in rank order"),
    "rank order, reduce-scatter": ({"deterministic": True}, "not documented to sum in rank order"),
    "rank order, 2 ranks": ({"deterministic": True, "ranks": 2}, "not documented to sum in rank order"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_refuses_before_the_operator_is_reached(case):
    changed, words = REFUSED[case]
    reason = npu.supports(problem(**changed))
    assert reason is not None and re.search(words, reason), reason
    assert ";" not in reason, "the log cuts reasons at a semicolon"


def test_limits_are_inclusive_where_documented():
    for operator, (smallest, largest) in npu_limits.K_RANGE.items():
        assert npu.supports(problem(operator, k=smallest)) is None
        assert npu.supports(problem(operator, k=largest)) is None
    assert npu.supports(problem(ALL_REDUCE, m=1, n=2**31 - 1, ranks=1)) is None
    assert npu.supports(problem(ALL_REDUCE, m=4095)) is None  # its rows need not be divisible
    for operator, ranks in itertools.product((REDUCE_SCATTER, ALL_GATHER), (2, 4, 8, 16)):
        for comm_mode in (None, "ai_cpu", *(("aiv",) if ranks <= 8 else ())):
            call = problem(operator, ranks=ranks, soc=A3, fused_ranks=16, comm_mode=comm_mode)
            assert npu.supports(call) is None
    ranks_of = {ALL_REDUCE: (1, 2, 4, 8, 16, 32, 64), REDUCE_SCATTER: (2, 4, 8, 16, 32), ALL_GATHER: (2, 4, 8, 16, 32)}
    for operator, comm_mode in itertools.product(OPERATORS, (None, "ai_cpu", "ccu")):
        wanted = Settings(fused=True, fused_ranks=64, comm_mode=comm_mode, strict=True)
        for ranks in ranks_of[operator]:
            call = problem(operator, ranks=ranks, soc=ASCEND_950)
            assert npu.supports(replace(call, fused_ranks=64, comm_mode=comm_mode)) is None
            if ranks > 1:  # one rank has nothing to communicate
                choice = choose(call, wanted)
                assert (choice.kernel, choice.options) == ("npu", (("comm_mode", comm_mode),) if comm_mode else ())
    assert npu.supports(problem(ALL_GATHER, soc=ASCEND_950, comm_mode="ccu", m=2**21, k=63 * 64)) is None
    assert npu.supports(problem(comm_mode="aiv", hccl_buffsize=200)) is None
    assert npu.supports(problem(soc=ASCEND_950, m=2**20, n=2048)) is None


# From libtorch_npu of plain torch_npu 2.7.1. The schema of 2.7.1.post8 ends with `str? comm_mode=None`.
ALL_REDUCE_2_7_1 = (
    "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None, "
    "Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None, "
    "int antiquant_group_size=0, int comm_turn=0) -> Tensor"
)


def test_a_request_that_the_installed_torch_npu_cannot_meet_is_refused_before_the_first_call():
    known = frozenset(argument.name for argument in torch._C.parse_schema(ALL_REDUCE_2_7_1).arguments)
    call = problem(ALL_REDUCE, arguments=known)
    assert choose(call, Settings(fused=True)).kernel == "npu"
    assert npu.supports(problem(**int8(arguments=known))) is None
    choice = choose(call, Settings(fused=True, comm_mode="ai_cpu"))
    reason = "npu_mm_all_reduce_base of the installed torch_npu has no argument comm_mode"
    assert choice.kernel == "chunked" and reason in choice.unmet
    with pytest.raises(UnmetRequestError, match=reason):
        choose(call, Settings(fused=True, comm_mode="ai_cpu", strict=True))
    newer = problem(ALL_REDUCE, arguments=known | {"comm_mode"})
    choice = choose(newer, Settings(fused=True, comm_mode="ai_cpu", strict=True))
    assert choice.options == (("comm_mode", "ai_cpu"),)


def experts(features=1024, inner=(2048, 1024), top_k=2, inference=True, parts=4, ranks=8, soc=A3, **others):
    own = {name: others.pop(name) for name in ("arguments",) if name in others}
    matmuls = ExpertMatmuls(inner, top_k, inference, soc, **own)
    given = {"dtype": BF16, "device": "npu", **others}
    return Exchange(EXPERT_EXCHANGE, parts, None, features, given["dtype"], given["device"], ranks, matmuls)


def test_experts_are_taken_as_documented():
    for ranks, parts in ((8, 32), (16, 16), (32, 8), (64, 4)):
        for dtype, top_k in itertools.product(DTYPES, (2, 8)):
            assert npu_limits.supports_experts(experts(ranks=ranks, parts=parts, dtype=dtype, top_k=top_k)) is None
    assert npu_limits.supports_experts(experts(features=65535, inner=(65535, 1))) is None


EXPERTS_REFUSED = {
    "no matmuls": (None, "it runs no experts"),
    "a CPU": ({"device": "cpu"}, "it runs no experts"),
    "training": ({"inference": False}, "for inference alone"),
    "fp32": ({"dtype": torch.float32}, "not torch.float32"),
    "A2": ({"soc": A2}, "documented for the chip Ascend910B1"),
    "950": ({"soc": ASCEND_950}, "documented for the chip Ascend950PR_9599"),
    "an unknown chip": ({"soc": ""}, "documented for the chip "),
    "4 ranks": ({"ranks": 4}, "8, 16, 32, 64 ranks, not 4"),
    "128 ranks": ({"ranks": 128, "parts": 2}, "8, 16, 32, 64 ranks, not 128"),
    "33 experts of a rank": ({"parts": 33}, "up to 32 experts on a rank and 256 in all, not 33 and 264"),
    "257 experts": ({"ranks": 64, "parts": 5}, "256 in all, not 5 and 320"),
    "too wide": ({"features": 65536}, "widths from 1 to 65535, not 65536"),
    "too wide inside": ({"inner": (65536, 8)}, "widths from 1 to 65535, not 65536"),
    "one expert for a token": ({"top_k": 1}, "2 to 8 experts for a token, not 1"),
    "an old torch_npu": ({"arguments": frozenset()}, "has no operator npu_alltoallv_gmm or npu_gmm_alltoallv"),
}


@pytest.mark.parametrize("case", EXPERTS_REFUSED)
def test_each_limit_of_experts_refuses(case):
    changed, words = EXPERTS_REFUSED[case]
    exchange = replace(experts(), matmuls=None) if changed is None else experts(**changed)
    reason = npu_limits.supports_experts(exchange)
    assert reason is not None and words in reason, reason


def test_a_bias_is_given_to_operators_that_add_it():
    bias = torch.zeros(1024, dtype=BF16)
    taken = [
        problem(ALL_REDUCE),
        problem(ALL_REDUCE, soc=ASCEND_950),
        problem(comm_mode="aiv"),
        problem(comm_mode="aiv", soc=A3),
        problem(soc=ASCEND_950),
        problem(**int8()),
    ]
    refused = [problem(), problem(comm_mode="ai_cpu"), problem(int8_input=True), problem(**W8A8)]
    assert [npu_limits.takes_bias(call, bias) for call in taken] == [True] * len(taken)
    assert [npu_limits.takes_bias(call, bias) for call in refused] == [False] * len(refused)
    for other in (bias.float(), bias[:8], bias.reshape(1, -1)):
        assert not npu_limits.takes_bias(taken[0], other)


def test_sixteen_ranks_are_fused_on_request():
    call = problem(ranks=16, soc=A3)
    assert choose(call, Settings(fused=True)).kernel == "chunked"
    assert choose(call, Settings(fused=True, fused_ranks=16)).kernel == "npu"


@pytest.mark.parametrize(
    "scales", [int8("tensor"), int8("channel", k=65535, n=65535), int8("group", 32), int8("group", 992)], ids=str
)
def test_an_int8_weight_is_taken_as_documented(scales):
    assert npu.supports(problem(**scales)) is None
    half = {**scales, "dtype": torch.float16, "scale_dtype": torch.float16}
    assert npu.supports(problem(**half)) is None


@pytest.mark.parametrize("operator", [REDUCE_SCATTER, ALL_GATHER])
def test_int8_by_int8_is_taken_as_documented_and_names_its_engine(operator):
    for soc, dtype, ranks in itertools.product((A2, A3), DTYPES, (2, 4, 8)):
        call = problem(operator, soc=soc, dtype=dtype, ranks=ranks, int8_input=True)
        for comm_mode in (None, "aiv"):
            choice = choose(call, Settings(fused=True, comm_mode=comm_mode, strict=True))
            assert (choice.kernel, choice.options) == ("npu", (("comm_mode", "aiv"),))


@pytest.mark.parametrize("comm_quant", [False, True])
def test_an_all_reduce_of_int8_by_int8_is_taken_as_documented(comm_quant):
    scales = [(BF16, BF16), *((torch.float16, scale) for scale in (torch.float16, BF16, torch.float32))]
    for (dtype, scale), ranks, size in itertools.product(scales, (2, 4, 8), (1, 65535)):
        call = problem(
            **{**W8A8, "dtype": dtype, "scale_dtype": scale, "comm_quant": comm_quant}, ranks=ranks, k=size, n=size
        )
        choice = choose(call, Settings(fused=True, strict=True))
        assert (choice.kernel, choice.options) == ("npu", ())


def test_the_extra_installs_the_pair_that_is_tested():
    minor = VERSION.rpartition(".")[0]
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'npu = ["torch=={minor}.*", "torch_npu=={minor}.*"]' in text


def test_rank_order_and_row_tiles_leave_nothing_to_the_fused_operators():
    settings = Settings(fused=True, num_chunks=4, deterministic=True)
    chosen = {operator: choose(problem(operator), settings) for operator in OPERATORS}
    kernels = {operator: choice.kernel for operator, choice in chosen.items()}
    assert kernels == {ALL_REDUCE: "ordered", REDUCE_SCATTER: "ordered", ALL_GATHER: "chunked"}
    assert "which COC_DETERMINISTIC=1 requires" in chosen[ALL_REDUCE].reason
    assert "its matmul is not in row tiles, which COC_DETERMINISTIC=1 requires" in chosen[ALL_GATHER].reason


@pytest.mark.slow
def test_torch_npu_is_imported_only_when_something_is_called():
    code = "import sys, ascend_parallel.ops.npu as npu; sys.exit('torch_npu' in sys.modules)"
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0
