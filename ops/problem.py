"""A call of an operator in plain, checked values: the only input of the choice of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ascend_parallel.ops.arithmetic import Arithmetic, arithmetic_of
from ascend_parallel.ops.module_weight import ModuleWeight
from ascend_parallel.ops.quantised import GRAINS, QuantisedWeight, Weight, check_group_size
from ascend_parallel.ops.quantised_rows import Input, QuantisedRows, check_int8_weight

ALL_REDUCE = "matmul_all_reduce"
REDUCE_SCATTER = "matmul_reduce_scatter"
ALL_GATHER = "all_gather_matmul"
OPERATORS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
# Exchanges around independent parts (ops/part_exchange.py): between two all-to-alls a rank's experts run on rows of all
# ranks, or the attention of a rank's heads on whole sequences; or keys are gathered, and their gradients summed.
EXPERT_EXCHANGE, HEAD_EXCHANGE, KEY_GATHER = "expert_exchange", "head_exchange", "key_gather"
# What computes the parts of an exchange, and a part: the names of what a timeline shows.
PART_NAMES = {
    EXPERT_EXCHANGE: ("experts", "expert"),
    HEAD_EXCHANGE: ("attention", "head"),
    KEY_GATHER: ("attention", "key"),
}

# Allowed values of the setting `fused_ranks`; the first is the default.
FUSED_RANKS = (8, 16)


@dataclass(frozen=True)
class Problem:
    """The values that the choice of a kernel depends on.

    m, k, n
        This rank's matmul ``[m, k] x [k, n]``; m counts gathered rows of all_gather_matmul, and rows before the
        scatter of matmul_reduce_scatter. For expert_exchange, m counts the experts of a rank, and k and n are the width
        of a row: the number of rows differs between ranks, and no choice may depend on it. For head_exchange, m counts
        the heads of keys of a rank, k the tokens of all ranks, and n the features that are sent of a token; for
        key_gather, m counts all heads of keys.
    soc
        Name of the chip, for example ``"Ascend910B1"``, if a kernel depends on it; else empty.
    deterministic
        The setting that chooses the arithmetic.
    parts
        The number of features of each part of a fused weight on this rank, such as gate and up, along the dimension
        that ranks share: k, or n of all_gather_matmul. Empty: one part. Only the tree distinguishes them.
    antiquant, group_size
        The grain of an int8 weight's scales: "tensor", "channel", or "group" (of `group_size` elements of K); empty
        for a weight of the operands' dtype. Only matmul_all_reduce takes an int8 weight with a floating input.
    scale_dtype
        The dtype of an int8 weight's scales, or None.
    int8_input
        Whether int8 is multiplied by int8, into products of `dtype`; `antiquant` is then empty.
    comm_quant
        Whether the ranks exchange int8 (ops/comm_scales.py); only by matmul_all_reduce of int8 by int8.
    comm_mode, fused_ranks
        The settings of these names, which limit Ascend's fused operators.
    arguments
        The names of the arguments of the fused operator's installed schema; None if nobody has looked them up.
    shm
        Why the group cannot share memory, or None if it can; the same on all its ranks.
    """

    operator: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    device: str
    ranks: int
    soc: str = ""
    shm: str | None = "the group was not asked"
    deterministic: bool | str = False
    parts: tuple[int, ...] = ()
    antiquant: str = ""
    group_size: int = 0
    scale_dtype: torch.dtype | None = None
    int8_input: bool = False
    comm_quant: bool = False
    comm_mode: str | None = None
    fused_ranks: int = FUSED_RANKS[0]
    arguments: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for an int8 weight or a communication in int8 that the operator cannot take."""
        if self.antiquant or self.group_size:
            _check_antiquant(self)
        if self.comm_quant and not (self.int8_input and self.operator == ALL_REDUCE):
            given = "with an int8 input" if self.int8_input else "with a floating input"
            raise ValueError(f"{self.operator} {given} takes no comm_scales, only {ALL_REDUCE} of int8 by int8 does")

    @property
    def rows(self) -> int:
        """The number of rows to split into chunks: m for matmul_all_reduce, m / R for the other two matmuls.

        Of an exchange its parts are split into groups.
        """
        return self.m if self.operator == ALL_REDUCE or self.is_exchange else self.m // self.ranks

    @property
    def arithmetic(self) -> Arithmetic:
        """How the product is formed and the sum taken."""
        return arithmetic_of(self.deterministic)

    @property
    def is_exchange(self) -> bool:
        """Whether it is an exchange around parts: it multiplies and sums nothing, and leaves each part whole."""
        return self.operator in PART_NAMES

    @property
    def cut(self) -> int:
        """The number of rows to cut; of columns for an int8 weight, so that each column is dequantised once."""
        return self.n if self.antiquant else self.rows


def matmul_in_words(problem: Problem) -> str:
    """Return a rank's matmul in words."""
    return f"[{problem.m}, {problem.k}] x [{problem.k}, {problem.n}]"


def problem_of(operator: str, x: Input, w: Weight | ModuleWeight, group: dist.ProcessGroup) -> Problem:
    """Check the operands of an operator and return the problem.

    x [..., K] and w [K, N] must have the same device and, unless w is an int8 weight, the same floating dtype. An int8
    x needs an int8 w with scales per tensor or channel and no offset. The
    reduce-scatter and the all-gather run along the first dimension of x. Their operators need an x of two or more
    dimensions; for matmul_reduce_scatter the first dimension must be divisible by the number of ranks. Raises
    `ValueError` otherwise.
    """
    ranks = group.size()
    check_operands(operator, x, w)
    if operator != ALL_REDUCE and x.dim() < 2:
        raise ValueError(f"{operator}: x has shape {list(x.shape)}; rows need a dimension before the last")
    if operator == REDUCE_SCATTER and x.shape[0] % ranks:
        raise ValueError(
            f"{operator}: the first dimension of x, {x.shape[0]}, is not divisible by the {ranks} ranks of the group; "
            "pad the sequence to a multiple of it"
        )
    m = x.shape[:-1].numel() * (ranks if operator == ALL_GATHER else 1)
    problem = Problem(operator, m, w.shape[0], w.shape[1], x.dtype, x.device.type, ranks)
    if isinstance(x, QuantisedRows):
        check_int8_weight(operator, w)
        assert isinstance(w, QuantisedWeight)
        return replace(problem, int8_input=True, scale_dtype=w.scale.dtype)
    return with_scales(problem, w) if isinstance(w, QuantisedWeight) else problem


def experts_problem(x: torch.Tensor, experts: int, group: dist.ProcessGroup) -> Problem:
    """Return the problem of an exchange of rows x [S, H] with `experts` experts on each rank of `group`."""
    return Problem(EXPERT_EXCHANGE, experts, x.shape[-1], x.shape[-1], x.dtype, x.device.type, group.size())


def heads_problem(
    operator: str, heads: int, tokens: int, features: int, x: torch.Tensor, group: dist.ProcessGroup
) -> Problem:
    """Return the problem of an exchange of heads or a gather of keys, as `Problem` counts them, of x's dtype."""
    return Problem(operator, heads, tokens, features, x.dtype, x.device.type, group.size())


def with_scales(problem: Problem, w: QuantisedWeight) -> Problem:
    """Return `problem` with the int8 weight `w` in place of a plain weight."""
    return replace(problem, antiquant=w.grain, group_size=w.group_size, scale_dtype=w.scale.dtype)


def check_operands(operator: str, x: Input, w: Weight | ModuleWeight) -> None:
    """Raise `ValueError` unless x [..., K] and w [K, N] are local tensors of the same floating dtype and device.

    An int8 weight has no dtype to compare: it is dequantised to the dtype of x.
    """
    if "DTensor" in (type(x).__name__, type(w).__name__):
        raise ValueError(f"{operator}: an operand is a DTensor; give its local shard, to_local()")
    if len(w.shape) != 2 or len(x.shape) < 1 or x.shape[-1] != w.shape[0]:
        shapes = f"x {list(x.shape)} times w {list(w.shape)}"
        raise ValueError(f"{operator}: {shapes} is not a matmul of [..., K] and [K, N]")
    w_dtype = x.dtype if isinstance(w, QuantisedWeight) else w.dtype
    if x.dtype != w_dtype or not x.dtype.is_floating_point:
        raise ValueError(f"{operator}: x is {x.dtype} and w is {w_dtype}; both must be of one floating dtype")
    if x.device != w.device:
        raise ValueError(f"{operator}: x is on {x.device} and w on {w.device}; both must be on one device")


def _check_antiquant(problem: Problem) -> None:
    if problem.operator != ALL_REDUCE:
        raise ValueError(
            f"{problem.operator} takes no int8 weight (antiquant={problem.antiquant!r}), only {ALL_REDUCE} does: "
            "dequantise the weight first"
        )
    check_group_size(problem.group_size)
    if problem.antiquant not in GRAINS or (problem.antiquant == "group") != bool(problem.group_size):
        raise ValueError(
            f"antiquant={problem.antiquant!r} with group_size={problem.group_size} is not allowed: give "
            f"one of {', '.join(GRAINS)}, and a group size with 'group' alone"
        )
