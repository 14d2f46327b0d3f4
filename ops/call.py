"""What runs next to collectives, in plain, checked values: a matmul, or parts that are exchanged."""

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
# A matmul fused with an all-to-all: the way back of heads and their projection, its input's gradient and its dispatch.
ALL_TO_ALL_MATMUL, MATMUL_ALL_TO_ALL = "all_to_all_matmul", "matmul_all_to_all"
# What computes the parts of an exchange, and a part: the names of what a timeline shows.
PART_NAMES = {
    EXPERT_EXCHANGE: ("experts", "expert"),
    HEAD_EXCHANGE: ("attention", "head"),
    KEY_GATHER: ("attention", "key"),
}

# Allowed values of the setting `fused_ranks`; the first is the default.
FUSED_RANKS = (8, 16, 32, 64)
# HCCL's own default of HCCL_BUFFSIZE, in megabytes.
HCCL_BUFFSIZE = 200


@dataclass(frozen=True)
class Matmul:
    """A matmul next to a collective.

    m, k, n
        This rank's matmul ``[m, k] x [k, n]``; m counts gathered rows of all_gather_matmul, and rows before the
        scatter of matmul_reduce_scatter.
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
    comm_mode, fused_ranks, hccl_buffsize
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
    hccl_buffsize: int = HCCL_BUFFSIZE
    arguments: frozenset[str] | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for an int8 weight or a communication in int8 that the operator cannot take."""
        if self.operator not in OPERATORS:
            raise ValueError(f"operator={self.operator!r} is not allowed: give one of {', '.join(OPERATORS)}")
        if self.antiquant or self.group_size:
            _check_antiquant(self)
        if self.comm_quant and not (self.int8_input and self.operator == ALL_REDUCE):
            given = "with an int8 input" if self.int8_input else "with a floating input"
            raise ValueError(f"{self.operator} {given} takes no comm_scales, only {ALL_REDUCE} of int8 by int8 does")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The key of plans and of customized_coc: m, k and n."""
        return self.m, self.k, self.n

    @property
    def rows(self) -> int:
        """The number of rows to split into chunks: m for matmul_all_reduce, m / R for the other two."""
        return self.m if self.operator == ALL_REDUCE else self.m // self.ranks

    @property
    def arithmetic(self) -> Arithmetic:
        """How the product is formed and the sum taken."""
        return arithmetic_of(self.deterministic)

    @property
    def cut(self) -> int:
        """The number of rows to cut; of columns for an int8 weight, so that each column is dequantised once."""
        return self.n if self.antiquant else self.rows

    @property
    def product_in_words(self) -> str:
        """The rank's matmul in words."""
        return f"[{self.m}, {self.k}] x [{self.k}, {self.n}]"

    @property
    def in_words(self) -> str:
        """Operator, matmul, dtype, ranks and device."""
        weight = f" and int8 weight per {self.antiquant}" if self.antiquant else ""
        weight = " of int8 by int8" if self.int8_input else weight
        weight += " with communication in int8" if self.comm_quant else ""
        return f"{self.operator} {list(self.shape)} {_of_ranks(self, weight)}"


@dataclass(frozen=True)
class ExpertMatmuls:
    """What the experts of an exchange multiply, where a fused operator may do it: two products, one behind the other.

    inner
        The features that the first product makes, and those that the second contracts over.
    top_k
        The experts of each token.
    inference
        Whether no gradient follows.
    soc, arguments
        As in `Matmul`, of both operators.
    """

    inner: tuple[int, int]
    top_k: int
    inference: bool
    soc: str = ""
    arguments: frozenset[str] | None = None


@dataclass(frozen=True)
class ExchangedMatmul:
    """A matmul beside an all-to-all (ops/exchanged_matmul.py), where a fused operator may do both.

    operator
        `ALL_TO_ALL_MATMUL`: this rank's rows [m, k] come from all ranks, each with its features of k.
        `MATMUL_ALL_TO_ALL`: of this rank's products [m, n] each rank gets its features of n.
    m, k, n
        The rank's matmul ``[m, k] x [k, n]``; m are this rank's tokens, k or n the features of all heads.
    soc, cann, arguments
        The chip, the version of CANN, the arguments of the installed operator as in `Matmul`; empty or None: unknown.
    captured
        Whether a graph is captured.
    elsewhere
        Another process group on which this process has run fused operators; empty: none.
    deterministic, comm_mode, hccl_buffsize
        As in `Matmul`.
    """

    operator: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    device: str
    ranks: int
    soc: str = ""
    cann: tuple[int, ...] = ()
    arguments: frozenset[str] | None = None
    captured: bool = False
    elsewhere: str = ""
    deterministic: bool | str = False
    comm_mode: str | None = None
    hccl_buffsize: int = HCCL_BUFFSIZE

    @property
    def shape(self) -> tuple[int, int, int]:
        """m, k and n."""
        return self.m, self.k, self.n

    @property
    def backward(self) -> ExchangedMatmul:
        """The product of the output's gradient with the weight, and its all-to-all: of the way back and projection."""
        return replace(self, operator=MATMUL_ALL_TO_ALL, k=self.n, n=self.k)


@dataclass(frozen=True)
class Exchange:
    """An exchange around independent parts (ops/part_exchange.py): it multiplies and sums nothing, and cuts no part.

    parts
        The experts of a rank, the heads of keys of a rank (head_exchange), or all heads of keys (key_gather).
    tokens
        The tokens of all ranks; of experts None: the number of rows differs between ranks, and no choice may depend on
        it.
    features
        What is sent of a token: the width of a row of experts, or the features of queries, keys and values.
    matmuls
        What the experts multiply; None: only their module knows.
    projection
        The way back of all heads and the linear layer that reads them, the same on all ranks; None: it is not known.
    """

    operator: str
    parts: int
    tokens: int | None
    features: int
    dtype: torch.dtype
    device: str
    ranks: int
    matmuls: ExpertMatmuls | None = None
    projection: ExchangedMatmul | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for an operator that is no exchange."""
        if self.operator not in PART_NAMES:
            raise ValueError(f"operator={self.operator!r} is not allowed: give one of {', '.join(PART_NAMES)}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The key of plans and of customized_coc: parts, tokens (of experts features) and features."""
        return self.parts, self.features if self.tokens is None else self.tokens, self.features

    @property
    def cut(self) -> int:
        """The number of parts to split into groups."""
        return self.parts

    @property
    def worker(self) -> str:
        """What computes the parts, in words."""
        return PART_NAMES[self.operator][0]

    @property
    def parts_in_words(self) -> str:
        """What is split into groups, in words."""
        return {EXPERT_EXCHANGE: "experts a rank", HEAD_EXCHANGE: "heads of keys a rank"}.get(
            self.operator, "heads of keys"
        )

    @property
    def in_words(self) -> str:
        """Operator, parts, what is sent, dtype, ranks and device."""
        tokens = f"{self.tokens} tokens of {self.features} features"
        sent = f"rows of {self.features}" if self.tokens is None else tokens
        return f"{self.operator} of {self.parts} {self.parts_in_words}, {sent} {_of_ranks(self)}"


Call = Matmul | Exchange
"""What runs next to collectives: the only input of a decision beside the settings."""


def _of_ranks(call: Call, weight: str = "") -> str:
    dtype = str(call.dtype).removeprefix("torch.")
    return f"{dtype}{weight} on {call.ranks} {call.device} ranks"


def matmul_of(operator: str, x: Input, w: Weight | ModuleWeight, group: dist.ProcessGroup) -> Matmul:
    """Check the operands of an operator and return its matmul.

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
    matmul = Matmul(operator, m, w.shape[0], w.shape[1], x.dtype, x.device.type, ranks)
    if isinstance(x, QuantisedRows):
        check_int8_weight(operator, w)
        assert isinstance(w, QuantisedWeight)
        return replace(matmul, int8_input=True, scale_dtype=w.scale.dtype)
    return with_scales(matmul, w) if isinstance(w, QuantisedWeight) else matmul


def experts_exchange(
    x: torch.Tensor, experts: int, group: dist.ProcessGroup, matmuls: ExpertMatmuls | None = None
) -> Exchange:
    """Return the exchange of rows x [S, H] with `experts` experts on each rank of `group`."""
    return Exchange(EXPERT_EXCHANGE, experts, None, x.shape[-1], x.dtype, x.device.type, group.size(), matmuls)


def heads_exchange(
    operator: str, heads: int, tokens: int, features: int, x: torch.Tensor, group: dist.ProcessGroup
) -> Exchange:
    """Return an exchange of heads or a gather of keys, as `Exchange` counts them, of x's dtype."""
    return Exchange(operator, heads, tokens, features, x.dtype, x.device.type, group.size())


def with_scales(matmul: Matmul, w: QuantisedWeight) -> Matmul:
    """Return `matmul` with the int8 weight `w` in place of a plain weight."""
    return replace(matmul, antiquant=w.grain, group_size=w.group_size, scale_dtype=w.scale.dtype)


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


def _check_antiquant(matmul: Matmul) -> None:
    if matmul.operator != ALL_REDUCE:
        raise ValueError(
            f"{matmul.operator} takes no int8 weight (antiquant={matmul.antiquant!r}), only {ALL_REDUCE} does: "
            "dequantise the weight first"
        )
    check_group_size(matmul.group_size)
    if matmul.antiquant not in GRAINS or (matmul.antiquant == "group") != bool(matmul.group_size):
        raise ValueError(
            f"antiquant={matmul.antiquant!r} with group_size={matmul.group_size} is not allowed: give "
            f"one of {', '.join(GRAINS)}, and a group size with 'group' alone"
        )
