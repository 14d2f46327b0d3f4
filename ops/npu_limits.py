"""The calls that torch_npu's fused operators take: `supports`, and the limits of shapes and dtypes.

Nothing here imports torch_npu. The chips and their rank counts are in ops/soc.py, the sources also in docs/npu.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ascend_parallel.ops.problem import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Problem
from ascend_parallel.ops.soc import (
    AIV_RANKS,
    COMM_MODES,
    GENERATIONS,
    INT8_ENGINE,
    INT8_GENERATIONS,
    LARGEST_SCATTER_950,
    RANKS,
)

# torch_npu's name of each operator.
FUSED_OPERATORS = {
    ALL_REDUCE: "npu_mm_all_reduce_base",
    REDUCE_SCATTER: "npu_mm_reduce_scatter_base",
    ALL_GATHER: "npu_all_gather_base_mm",
}

DTYPES = (torch.float16, torch.bfloat16)

# Smallest and largest K of a call. op-plugin 7.3.0's pages give [1, 2147483647] and the half-open [256, 65535).
K_RANGE = {ALL_REDUCE: (1, 2**31 - 1), REDUCE_SCATTER: (256, 65534), ALL_GATHER: (256, 65534)}

# Largest K and N of npu_mm_all_reduce_base with an int8 weight, from its page. With an int8 input the page takes a
# larger N if the weight is a transposed view. That is refused too: a problem does not tell the layout.
LARGEST_INT8 = 65535

# Dtypes of the weight's scales that npu_mm_all_reduce_base of int8 by int8 can be given exactly, by the dtype of the
# result: it takes bf16 scales for bf16, and fp32 scales for fp16. Pages of aclnnQuantMatmulAllReduceV2 and V3.
INT8_SCALES = {
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16, torch.bfloat16, torch.float32),
}

# Largest M and N of npu_mm_all_reduce_base, from its page; the other two pages name none.
LARGEST_SIDE = {ALL_REDUCE: 2**31 - 1}


def supports(problem: Problem) -> str | None:
    """Return the reason why the fused operator cannot run `problem`, or None if it can.

    A pure function of values that are the same on every rank. K is checked for this call only: a layer's
    backward contracts over another dimension and has its own check.
    """
    return next(_refusals(problem), None)


def engine(problem: Problem) -> str | None:
    """Return the engine of the communication that the call of `problem` names; None: it names none."""
    named = problem.int8_input and problem.operator != ALL_REDUCE and problem.comm_mode is None
    return INT8_ENGINE if named else problem.comm_mode


def _refusals(problem: Problem) -> Iterator[str]:
    """Yield the reasons why the fused operator cannot run `problem`."""
    operator, asked = problem.operator, f"which {problem.arithmetic.asked} requires"
    if problem.device != "npu":
        yield f"device {problem.device}, not npu"
    if problem.dtype not in DTYPES:
        yield f"{operator} takes {' or '.join(map(str, DTYPES))}, not {problem.dtype}"
    yield from _chip_refusals(problem)
    yield from _schema_refusals(problem)
    smallest, largest = K_RANGE[operator]
    if not smallest <= problem.k <= largest:
        yield f"{operator} takes K from {smallest} to {largest}, not {problem.k}"
    for side, size in (("M", problem.m), ("N", problem.n)):
        if size < 1:  # documented for all-reduce; elsewhere an empty call gains nothing
            yield f"{operator} takes no empty operand, and {side} is {size}"
        if size > LARGEST_SIDE.get(operator, size):
            yield f"{operator} takes {side} up to {LARGEST_SIDE[operator]}, not {size}"
    if operator != ALL_REDUCE and problem.m % problem.ranks:
        yield f"{operator} needs M divisible by the {problem.ranks} ranks, and M is {problem.m}"
    if operator == ALL_REDUCE and (problem.antiquant or problem.int8_input):
        yield from _int8_weight_refusals(problem)
    if problem.deterministic and operator == ALL_GATHER:
        yield f"its matmul is not in row tiles, {asked}"
    if problem.deterministic:  # a fused matmul cannot be tiled, and the order of its sums is undocumented
        yield f"{operator} is not documented to sum in rank order, {asked}"


def _chip_refusals(problem: Problem) -> Iterator[str]:
    """Refuse combinations of chip, operator, ranks and engine that are not documented."""
    if not problem.soc:
        yield "the chip is unknown, and so are its operators and their rank counts"
        return
    if problem.soc not in GENERATIONS:
        yield f"no fused operator is documented for the chip {problem.soc}"
        return
    generation = GENERATIONS[problem.soc]
    where, allowed = f"{problem.soc} (generation {generation})", RANKS[generation].get(problem.operator)
    if allowed is None:
        yield f"{problem.operator} is not documented for {where}"
    elif problem.ranks not in allowed:
        yield f"{problem.operator} on {where} takes {', '.join(map(str, allowed))} ranks, not {problem.ranks}"
    elif problem.ranks > problem.fused_ranks:
        yield (
            f"{problem.operator} on {where} runs on {problem.ranks} ranks only with fused_ranks={problem.ranks}, "
            "because the sources disagree about it"
        )
    yield from _mode_refusals(problem, generation, where)
    size = problem.m * problem.n * problem.dtype.itemsize
    if generation == "950" and problem.operator == REDUCE_SCATTER and size > LARGEST_SCATTER_950:
        yield f"{problem.operator} on {where} takes a product of up to {LARGEST_SCATTER_950} bytes, not {size}"


def _mode_refusals(problem: Problem, generation: str, where: str) -> Iterator[str]:
    """Refuse an engine of the communication that the chip does not have, or not for so many ranks."""
    modes, mode = COMM_MODES[generation], engine(problem)
    if problem.int8_input and generation not in INT8_GENERATIONS:
        yield f"{problem.operator} on {where} is not documented for int8 by int8"
    if problem.int8_input and problem.operator == ALL_REDUCE and mode is not None:
        yield f"{problem.operator} multiplies int8 by int8 only without comm_mode, not with {mode}"
    elif problem.int8_input and problem.operator != ALL_REDUCE and mode != INT8_ENGINE:
        yield f"{problem.operator} multiplies int8 by int8 only with comm_mode {INT8_ENGINE}, not {mode}"
    if mode is not None and mode not in modes:
        yield f"{problem.operator} on {where} takes comm_mode {' or '.join(modes)}, not {mode}"
    if mode == "aiv" and problem.ranks > AIV_RANKS:
        yield f"{problem.operator} with comm_mode=aiv takes up to {AIV_RANKS} ranks, not {problem.ranks}"


def _schema_refusals(problem: Problem) -> Iterator[str]:
    """Refuse a call whose arguments the installed torch_npu does not know."""
    if problem.arguments is None:  # nobody has looked them up
        return
    name = FUSED_OPERATORS[problem.operator]
    if not problem.arguments:
        yield f"the installed torch_npu has no operator {name}"
    missing = sorted(_named_arguments(problem) - problem.arguments)
    if missing:
        yield f"{name} of the installed torch_npu has no argument {', '.join(missing)}"


def _named_arguments(problem: Problem) -> set[str]:
    """Return the arguments, beyond those that every torch_npu has, that the call of `problem` gives."""
    named = set() if engine(problem) is None else {"comm_mode"}
    if problem.int8_input:
        reduces = problem.operator == ALL_REDUCE
        named |= {"dequant_scale", "pertoken_scale"} if reduces else {"x1_scale", "x2_scale", "output_dtype"}
    if problem.comm_quant:
        named |= {"comm_quant_scale_1", "comm_quant_scale_2"}
    if problem.antiquant:
        named |= {"antiquant_scale", "antiquant_offset", "antiquant_group_size"}
    return named


def _int8_weight_refusals(problem: Problem) -> Iterator[str]:
    """Refuse an int8 weight of an all-reduce whose shape, groups or scales are outside the documented limits."""
    for side, size in (("K", problem.k), ("N", problem.n)):
        if size > LARGEST_INT8:
            yield f"{problem.operator} with an int8 weight takes {side} up to {LARGEST_INT8}, not {size}"
    if problem.int8_input:
        scales = INT8_SCALES.get(problem.dtype, ())
        if problem.scale_dtype not in scales:
            allowed = " or ".join(map(str, scales))
            yield (
                f"{problem.operator} of int8 by int8 into {problem.dtype} takes scales of {allowed}, "
                f"not {problem.scale_dtype}"
            )
        return
    if problem.group_size >= problem.k:
        yield f"{problem.operator} takes groups of at most K - 1 = {problem.k - 1}, not {problem.group_size}"
    if problem.scale_dtype != problem.dtype:
        yield f"{problem.operator} takes scales of the dtype of x, {problem.dtype}, not {problem.scale_dtype}"
