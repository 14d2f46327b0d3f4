"""The calls that torch_npu's fused operators take: `supports`, and the limits of shapes and dtypes.

Nothing here imports torch_npu. The chips and their rank counts are in ops/soc.py, the sources also in docs/npu.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ascend_parallel.ops.arithmetic import arithmetic_of
from ascend_parallel.ops.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL_MATMUL,
    MATMUL_ALL_TO_ALL,
    REDUCE_SCATTER,
    Exchange,
    ExchangedMatmul,
    Matmul,
)
from ascend_parallel.ops.soc import (
    AIV_BUFFER,
    AIV_RANKS,
    COMM_MODES,
    EXCHANGED_CANN,
    EXCHANGED_COLUMNS,
    EXCHANGED_ENGINES,
    EXCHANGED_K,
    EXCHANGED_RANKS,
    EXPERT_RANKS,
    EXPERT_TOP_K,
    GENERATIONS,
    INT8_ENGINE,
    INT8_GENERATIONS,
    LARGEST_EXCHANGED,
    LARGEST_EXPERT_SIDE,
    LARGEST_GATHER_950,
    LARGEST_SCATTER_950,
    MOST_EXPERTS,
    MOST_EXPERTS_OF_ALL,
    RANKS,
)

# torch_npu's name of each operator.
FUSED_OPERATORS = {
    ALL_REDUCE: "npu_mm_all_reduce_base",
    REDUCE_SCATTER: "npu_mm_reduce_scatter_base",
    ALL_GATHER: "npu_all_gather_base_mm",
}

# Of a matmul beside an all-to-all.
EXCHANGED_OPERATORS = {ALL_TO_ALL_MATMUL: "npu_all_to_all_matmul", MATMUL_ALL_TO_ALL: "npu_matmul_all_to_all"}

# Of the exchange around experts: rows to their experts and the first product, the second product and the way back.
EXPERT_OPERATORS = ("npu_alltoallv_gmm", "npu_gmm_alltoallv")

DTYPES = (torch.float16, torch.bfloat16)

# Smallest and largest K of a call. op-plugin 7.3.0's pages give [1, 2147483647] and the half-open [256, 65535).
K_RANGE = {ALL_REDUCE: (1, 2**31 - 1), REDUCE_SCATTER: (256, 65534), ALL_GATHER: (256, 65534)}

# Largest K and N of npu_mm_all_reduce_base with an int8 weight, from its page. With an int8 input the page takes a
# larger N if the weight is a transposed view. That is refused too: a matmul does not tell the layout.
LARGEST_INT8 = 65535

# Dtypes of the weight's scales that npu_mm_all_reduce_base of int8 by int8 can be given exactly, by the dtype of the
# result: it takes bf16 scales for bf16, and fp32 scales for fp16. Pages of aclnnQuantMatmulAllReduceV2 and V3.
INT8_SCALES = {
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16, torch.bfloat16, torch.float32),
}

# Largest M and N of npu_mm_all_reduce_base, from its page; the other two pages name none.
LARGEST_SIDE = {ALL_REDUCE: 2**31 - 1}


def supports(matmul: Matmul) -> str | None:
    """Return the reason why the fused operator cannot run `matmul`, or None if it can.

    A pure function of values that are the same on every rank. K is checked for this call only: a layer's
    backward contracts over another dimension and has its own check.
    """
    return next(_refusals(matmul), None)


def supports_experts(exchange: Exchange) -> str | None:
    """Return why the fused operators cannot run an exchange with its experts' products, or None; as `supports`."""
    return next(_expert_refusals(exchange), None)


def _expert_refusals(exchange: Exchange) -> Iterator[str]:
    matmuls, experts, ranks = exchange.matmuls, exchange.parts, exchange.ranks
    if matmuls is None or exchange.device != "npu":
        yield f"it runs no {exchange.worker}"
        return
    if not matmuls.inference:
        yield "its operators for experts are documented for inference alone"
    if exchange.dtype not in DTYPES:
        yield f"experts take {' or '.join(map(str, DTYPES))}, not {exchange.dtype}"
    allowed = EXPERT_RANKS.get(GENERATIONS.get(matmuls.soc, ""))
    if allowed is None:
        yield f"no operator for experts is documented for the chip {matmuls.soc}"
    elif ranks not in allowed:
        yield f"experts take {', '.join(map(str, allowed))} ranks, not {ranks}"
    if experts > MOST_EXPERTS or experts * ranks > MOST_EXPERTS_OF_ALL:
        limit = f"up to {MOST_EXPERTS} experts on a rank and {MOST_EXPERTS_OF_ALL} in all"
        yield f"it takes {limit}, not {experts} and {experts * ranks}"
    for side in (exchange.features, *matmuls.inner):
        if not 1 <= side <= LARGEST_EXPERT_SIDE:
            yield f"experts take widths from 1 to {LARGEST_EXPERT_SIDE}, not {side}"
    if matmuls.top_k not in EXPERT_TOP_K:
        yield f"experts take {EXPERT_TOP_K[0]} to {EXPERT_TOP_K[-1]} experts for a token, not {matmuls.top_k}"
    if matmuls.arguments is not None and not {"send_counts", "trans_gmm_weight"} <= matmuls.arguments:
        yield f"the installed torch_npu has no operator {' or '.join(EXPERT_OPERATORS)}"


def fused_operators_of(soc: str) -> list[str]:
    """Return the fused operators that are documented for a chip, with the ranks that each takes."""
    generation = GENERATIONS.get(soc, "")
    ranks = dict(RANKS.get(generation, {}))
    if generation in EXCHANGED_RANKS:
        ranks |= dict.fromkeys(EXCHANGED_OPERATORS, EXCHANGED_RANKS[generation])
    if generation in EXPERT_RANKS:
        ranks["experts in inference"] = EXPERT_RANKS[generation]
    return [f"{operator} on {counts[0]} to {counts[-1]} ranks" for operator, counts in ranks.items()]


def supports_exchanged(matmul: ExchangedMatmul) -> str | None:
    """Return why the fused operator cannot run a matmul beside an all-to-all, or None; as `supports`."""
    return next(_exchanged_refusals(matmul), None)


def exchanged_engine(matmul: ExchangedMatmul) -> str | None:
    """Return the engine that the call of a matmul beside an all-to-all names; None: the chip's usual one.

    Only a second version of the operators can be told one, which came with a later CANN.
    """
    usual = EXCHANGED_ENGINES.get(GENERATIONS.get(matmul.soc, ""), ("",))[0]
    return None if matmul.comm_mode == usual else matmul.comm_mode


def _exchanged_refusals(matmul: ExchangedMatmul) -> Iterator[str]:
    """Yield the reasons why the fused operator cannot run `matmul`."""
    operator, generation = matmul.operator, GENERATIONS.get(matmul.soc, "")
    if matmul.device != "npu":
        yield f"device {matmul.device}, not npu"
    if matmul.dtype not in DTYPES:
        yield f"{operator} takes {' or '.join(map(str, DTYPES))}, not {matmul.dtype}"
    where, allowed = f"{matmul.soc} (generation {generation})", EXCHANGED_RANKS.get(generation)
    if allowed is None:
        what = f"no {operator} is documented for the chip {matmul.soc}"
        yield what if matmul.soc else "the chip is unknown, and so are its operators and their rank counts"
        return
    if matmul.ranks not in allowed:
        yield f"{operator} on {where} takes {', '.join(map(str, allowed))} ranks, not {matmul.ranks}"
    yield from _exchanged_versions(matmul)
    yield from _exchanged_engines(matmul, generation, where)
    yield from _exchanged_sizes(matmul, generation, where)
    if matmul.captured and generation != "950":
        yield f"{operator} on {where} runs in no graph, and one is captured"
    if matmul.elsewhere and generation == "A2":
        yield f"{where} has one group for all fused operators of a process, and that is {matmul.elsewhere}"
    if matmul.deterministic:
        asked = arithmetic_of(matmul.deterministic).asked
        yield f"its product is not in row tiles, which {asked} requires"


def _exchanged_versions(matmul: ExchangedMatmul) -> Iterator[str]:
    """Refuse a call that the installed CANN or torch_npu does not know."""
    name = EXCHANGED_OPERATORS[matmul.operator]
    if matmul.cann and matmul.cann < EXCHANGED_CANN:
        has, needs = (".".join(map(str, version)) for version in (matmul.cann, EXCHANGED_CANN))
        yield f"CANN {has} has no {matmul.operator}: it came with {needs}"
    if matmul.arguments is None:  # nobody has looked them up
        return
    if not matmul.arguments:
        yield f"the installed torch_npu has no operator {name}"
    elif exchanged_engine(matmul) is not None and "comm_mode" not in matmul.arguments:
        yield f"{name} of the installed torch_npu has no argument comm_mode"


def _exchanged_engines(matmul: ExchangedMatmul, generation: str, where: str) -> Iterator[str]:
    """Refuse an engine that the chip does not have, and a communication buffer that is too small for its own."""
    engines, mode = EXCHANGED_ENGINES[generation], matmul.comm_mode
    if mode is not None and mode not in engines:
        yield f"{matmul.operator} on {where} takes comm_mode {' or '.join(engines)}, not {mode}"
    if engines == ("aiv",) and matmul.hccl_buffsize < AIV_BUFFER:
        yield (
            f"{matmul.operator} on {where} needs a communication buffer of {AIV_BUFFER} MB, "
            f"and HCCL_BUFFSIZE is {matmul.hccl_buffsize}"
        )


def _exchanged_sizes(matmul: ExchangedMatmul, generation: str, where: str) -> Iterator[str]:
    """Refuse sizes of a matmul beside an all-to-all that are not documented."""
    operator = matmul.operator
    smallest, largest = EXCHANGED_K[operator][generation]
    if not smallest <= matmul.k <= largest:
        yield f"{operator} on {where} takes K from {smallest} to {largest}, not {matmul.k}"
    before = operator == MATMUL_ALL_TO_ALL
    columns = EXCHANGED_COLUMNS.get(generation, LARGEST_EXCHANGED) if before else LARGEST_EXCHANGED
    for side, size, most in (("M", matmul.m, LARGEST_EXCHANGED // matmul.ranks), ("N", matmul.n, columns)):
        if not 1 <= size <= most:
            yield f"{operator} on {where} takes {side} from 1 to {most}, not {size}"
    shared, size = ("N", matmul.n) if before else ("K", matmul.k)
    if size % matmul.ranks:
        yield f"{operator} needs {shared} divisible by the {matmul.ranks} ranks, and {shared} is {size}"


def engine(matmul: Matmul) -> str | None:
    """Return the engine of the communication that the call of `matmul` names; None: it names none."""
    named = matmul.int8_input and matmul.operator != ALL_REDUCE and matmul.comm_mode is None
    return INT8_ENGINE if named else matmul.comm_mode


def takes_bias(matmul: Matmul, bias: torch.Tensor) -> bool:
    """Tell whether the fused operator of `matmul` adds a bias [N]: to a product of its dtype, a sum of products.

    The first reduce-scatter takes a bias of zeros alone; its second version ("aiv", and on 950) adds it.
    """
    if matmul.int8_input or bias.dtype != matmul.dtype or bias.shape != (matmul.n,):
        return False
    return matmul.operator == ALL_REDUCE or GENERATIONS.get(matmul.soc) == "950" or engine(matmul) == "aiv"


def _refusals(matmul: Matmul) -> Iterator[str]:
    """Yield the reasons why the fused operator cannot run `matmul`."""
    operator, asked = matmul.operator, f"which {matmul.arithmetic.asked} requires"
    if matmul.device != "npu":
        yield f"device {matmul.device}, not npu"
    if matmul.dtype not in DTYPES:
        yield f"{operator} takes {' or '.join(map(str, DTYPES))}, not {matmul.dtype}"
    yield from _chip_refusals(matmul)
    yield from _schema_refusals(matmul)
    smallest, largest = K_RANGE[operator]
    if not smallest <= matmul.k <= largest:
        yield f"{operator} takes K from {smallest} to {largest}, not {matmul.k}"
    for side, size in (("M", matmul.m), ("N", matmul.n)):
        if size < 1:  # documented for all-reduce; elsewhere an empty call gains nothing
            yield f"{operator} takes no empty operand, and {side} is {size}"
        if size > LARGEST_SIDE.get(operator, size):
            yield f"{operator} takes {side} up to {LARGEST_SIDE[operator]}, not {size}"
    if operator != ALL_REDUCE and matmul.m % matmul.ranks:
        yield f"{operator} needs M divisible by the {matmul.ranks} ranks, and M is {matmul.m}"
    if operator == ALL_REDUCE and (matmul.antiquant or matmul.int8_input):
        yield from _int8_weight_refusals(matmul)
    if matmul.deterministic and operator == ALL_GATHER:
        yield f"its matmul is not in row tiles, {asked}"
    if matmul.deterministic:  # a fused matmul cannot be tiled, and the order of its sums is undocumented
        yield f"{operator} is not documented to sum in rank order, {asked}"


def _chip_refusals(matmul: Matmul) -> Iterator[str]:
    """Refuse combinations of chip, operator, ranks and engine that are not documented."""
    if not matmul.soc:
        yield "the chip is unknown, and so are its operators and their rank counts"
        return
    if matmul.soc not in GENERATIONS:
        yield f"no fused operator is documented for the chip {matmul.soc}"
        return
    generation = GENERATIONS[matmul.soc]
    where, allowed = f"{matmul.soc} (generation {generation})", RANKS[generation].get(matmul.operator)
    if allowed is None:
        yield f"{matmul.operator} is not documented for {where}"
    elif matmul.ranks not in allowed:
        yield f"{matmul.operator} on {where} takes {', '.join(map(str, allowed))} ranks, not {matmul.ranks}"
    elif matmul.ranks > matmul.fused_ranks:
        yield (
            f"{matmul.operator} on {where} runs on {matmul.ranks} ranks only with fused_ranks={matmul.ranks}, "
            "because the sources disagree about it"
        )
    yield from _mode_refusals(matmul, generation, where)
    if generation == "950":
        yield from _size_refusals(matmul, where)


def _size_refusals(matmul: Matmul, where: str) -> Iterator[str]:
    """Refuse more bytes than a collective of Ascend 950 takes."""
    size = matmul.m * matmul.n * matmul.dtype.itemsize
    if matmul.operator == REDUCE_SCATTER and size > LARGEST_SCATTER_950:
        yield f"{matmul.operator} on {where} takes a product of up to {LARGEST_SCATTER_950} bytes, not {size}"
    size = matmul.m * matmul.k * matmul.dtype.itemsize
    if matmul.operator == ALL_GATHER and matmul.comm_mode == "ccu" and size > LARGEST_GATHER_950:
        yield f"{matmul.operator} with comm_mode=ccu on {where} gathers up to {LARGEST_GATHER_950} bytes, not {size}"


def _mode_refusals(matmul: Matmul, generation: str, where: str) -> Iterator[str]:
    """Refuse an engine of the communication that the chip does not have, or not for so many ranks."""
    modes, mode = COMM_MODES[generation].get(matmul.operator, ()), engine(matmul)
    if (matmul.int8_input or matmul.antiquant) and generation not in INT8_GENERATIONS:
        what = "int8 by int8" if matmul.int8_input else "an int8 weight"
        yield f"{matmul.operator} on {where} is not documented for {what}"
    if matmul.int8_input and matmul.operator == ALL_REDUCE and mode is not None:
        yield f"{matmul.operator} multiplies int8 by int8 only without comm_mode, not with {mode}"
    elif matmul.int8_input and matmul.operator != ALL_REDUCE and mode != INT8_ENGINE:
        yield f"{matmul.operator} multiplies int8 by int8 only with comm_mode {INT8_ENGINE}, not {mode}"
    if mode is not None and mode not in modes:
        yield f"{matmul.operator} on {where} takes comm_mode {' or '.join(modes)}, not {mode}"
    if mode == "aiv" and matmul.ranks > AIV_RANKS:
        yield f"{matmul.operator} with comm_mode=aiv takes up to {AIV_RANKS} ranks, not {matmul.ranks}"
    if mode == "aiv" and matmul.hccl_buffsize < AIV_BUFFER:
        yield (
            f"{matmul.operator} with comm_mode=aiv needs a communication buffer of {AIV_BUFFER} MB, "
            f"and HCCL_BUFFSIZE is {matmul.hccl_buffsize}"
        )


def _schema_refusals(matmul: Matmul) -> Iterator[str]:
    """Refuse a call whose arguments the installed torch_npu does not know."""
    if matmul.arguments is None:  # nobody has looked them up
        return
    name = FUSED_OPERATORS[matmul.operator]
    if not matmul.arguments:
        yield f"the installed torch_npu has no operator {name}"
    missing = sorted(_named_arguments(matmul) - matmul.arguments)
    if missing:
        yield f"{name} of the installed torch_npu has no argument {', '.join(missing)}"


def _named_arguments(matmul: Matmul) -> set[str]:
    """Return the arguments, beyond those that every torch_npu has, that the call of `matmul` gives."""
    named = set() if engine(matmul) is None else {"comm_mode"}
    if matmul.int8_input:
        reduces = matmul.operator == ALL_REDUCE
        named |= {"dequant_scale", "pertoken_scale"} if reduces else {"x1_scale", "x2_scale", "output_dtype"}
    if matmul.comm_quant:
        named |= {"comm_quant_scale_1", "comm_quant_scale_2"}
    if matmul.antiquant:
        named |= {"antiquant_scale", "antiquant_offset", "antiquant_group_size"}
    return named


def _int8_weight_refusals(matmul: Matmul) -> Iterator[str]:
    """Refuse an int8 weight of an all-reduce whose shape, groups or scales are outside the documented limits."""
    for side, size in (("K", matmul.k), ("N", matmul.n)):
        if size > LARGEST_INT8:
            yield f"{matmul.operator} with an int8 weight takes {side} up to {LARGEST_INT8}, not {size}"
    if matmul.int8_input:
        scales = INT8_SCALES.get(matmul.dtype, ())
        if matmul.scale_dtype not in scales:
            allowed = " or ".join(map(str, scales))
            yield (
                f"{matmul.operator} of int8 by int8 into {matmul.dtype} takes scales of {allowed}, "
                f"not {matmul.scale_dtype}"
            )
        return
    if matmul.group_size >= matmul.k:
        yield f"{matmul.operator} takes groups of at most K - 1 = {matmul.k - 1}, not {matmul.group_size}"
    if matmul.scale_dtype != matmul.dtype:
        yield f"{matmul.operator} takes scales of the dtype of x, {matmul.dtype}, not {matmul.scale_dtype}"
