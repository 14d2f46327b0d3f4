"""The three operators as torch_npu's fused kernels on Ascend NPUs.

    matmul_all_reduce      npu_mm_all_reduce_base
    matmul_reduce_scatter  npu_mm_reduce_scatter_base
    all_gather_matmul      npu_all_gather_base_mm

a matmul beside an all-to-all, npu_all_to_all_matmul and npu_matmul_all_to_all, and the exchange around experts, in
inference: npu_alltoallv_gmm and npu_gmm_alltoallv.

Call an operator only if `supports` returns None: torch_npu checks few limits. The fused kernels cut rows on
the device, so `sizes` is unused. Results are `Pending` without works: later kernels on the same stream see them
finished.

Only this file imports torch_npu, at the first call. The limits are in ops/npu_limits.py and ops/soc.py, their sources
also in docs/npu.md.
None of this was run on an NPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Exchange, ExchangedMatmul, Matmul
from ascend_parallel.ops.comm_scales import CommScales
from ascend_parallel.ops.counts import COUNTS
from ascend_parallel.ops.npu_limits import (
    EXCHANGED_OPERATORS,
    EXPERT_OPERATORS,
    FUSED_OPERATORS,
    K_RANGE,
    engine,
    supports,
    takes_bias,
)
from ascend_parallel.ops.pending import Pending, run_collective
from ascend_parallel.ops.quantised import QuantisedWeight, Weight
from ascend_parallel.ops.quantised_rows import Input, QuantisedRows
from ascend_parallel.ops.rows import Sizes
from ascend_parallel.ops.soc import GENERATIONS
from ascend_parallel.process_groups import describe
from ascend_parallel.process_groups.consistency import is_capturing

__all__ = [
    "adds_bias",
    "all_gather_matmul",
    "all_to_all_expert_matmul",
    "all_to_all_matmul",
    "arguments",
    "arguments_of",
    "ask",
    "ask_exchanged",
    "ask_experts",
    "expert_matmul_all_to_all",
    "hccl_name",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "soc_name",
    "supports",
]

Counts = Sequence[Sequence[int]]
"""Rows by rank and expert, as of ops/expert_exchange.py."""

# HCCL names by group. They live as long as the group, because the operators keep a pointer to the characters.
_HCCL_NAMES: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
# Whether the reduce-scatter adds a bias on this machine, by group, then by dtype and engine.
_ADDS_BIAS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[torch.dtype, str | None], bool]] = WeakKeyDictionary()
# The first CANN whose reduce-scatter is asked whether it adds a bias: older pages allow none.
BIAS_CANN = (9, 1)


def matmul_all_reduce(
    x_m: Input,
    w: Weight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    comm_mode: str | None = None,
    comm_scales: CommScales | None = None,
    bias: torch.Tensor | None = None,
) -> Pending:
    """Start ``y_m = all_reduce(x_m @ w)``: x_m [M, K], w [K, N]; pending [M, N]. An int8 weight is not dequantised.

    x_m may be in int8 if w is. `comm_mode` is passed on unless it is None; with `comm_scales` the ranks exchange int8.
    `bias` [N] is added to the sum, once.
    """
    y_m = _torch_npu().npu_mm_all_reduce_base(
        (x_m.values if isinstance(x_m, QuantisedRows) else x_m).contiguous(),
        _weight(w.values if isinstance(w, QuantisedWeight) else w),
        hccl_name(group),
        reduce_op="sum",
        comm_turn=0,
        **(_dequant(x_m, w, comm_scales) if isinstance(x_m, QuantisedRows) else _antiquant(w)),
        **_mode(comm_mode),
        **_bias(bias, group),
    )
    COUNTS.add(ALL_REDUCE, 1, 1)
    return Pending(y_m, ALL_REDUCE, group)


def matmul_reduce_scatter(
    x_m: Input,
    w: Weight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    after: Pending | None = None,
    *,
    comm_mode: str | None = None,
    bias: torch.Tensor | None = None,
) -> Pending:
    """Start ``y_shard_m = reduce_scatter(x_m @ w)``: x_m [M, K], w [K, N], or both in int8; pending [M / R, N].

    HCCL runs the collectives of a group in order, so `after` needs no wait. `comm_mode`: "ai_cpu", "aiv", "ccu", or
    None for the operator's default. `bias` [N] is added to the sum, once.
    """
    left, right, scales = _int8_operands(x_m, w)
    y_shard_m = _torch_npu().npu_mm_reduce_scatter_base(
        left.contiguous(),  # positional: the schema names it `input`, the documentation also x1
        _weight(right),
        hccl_name(group),
        group.size(),
        reduce_op="sum",
        comm_turn=0,
        **scales,
        **_mode(comm_mode),
        **_bias(bias, group),
    )
    COUNTS.add(REDUCE_SCATTER, 1, 1)
    return Pending(y_shard_m, REDUCE_SCATTER, group)


def all_gather_matmul(
    x_shard_m: Input,
    w: Weight,
    group: dist.ProcessGroup,
    sizes: Sizes,
    *,
    keep_gathered: bool = True,
    comm_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``x_m @ w`` [M, N] and ``x_m = all_gather(x_shard_m)`` [M, K]: x_shard_m [M / R, K], w [K, N].

    x_shard_m and w may both be in int8: the operator gathers the scales too, and the second result is in int8. With
    keep_gathered=False, for a column layer that gathers again in backward, the gathered rows are not stored: the
    second result is None. `comm_mode`: "ai_cpu", "aiv", "ccu", or None for the operator's default.
    """
    left, right, scales = _int8_operands(x_shard_m, w)
    y_m, gathered_m = _torch_npu().npu_all_gather_base_mm(
        left.contiguous(),
        _weight(right),
        hccl_name(group),
        group.size(),
        gather_index=0,
        gather_output=keep_gathered,
        comm_turn=0,
        **scales,
        **_mode(comm_mode),
    )
    COUNTS.add(ALL_GATHER, 1, 1)
    return y_m, gathered_m if keep_gathered else None


def adds_bias(matmul: Matmul, bias: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Tell whether the fused operator of `matmul` adds `bias` [N]; every rank of `group` calls this alike.

    The all-reduce's bias is documented for every CANN. Of the reduce-scatter the first call on a group asks the
    machine: it scatters zeros with a bias, and looks at the sums of all ranks.
    """
    if not takes_bias(matmul, bias):
        return False
    if matmul.operator == ALL_REDUCE:
        return True
    key, known = (matmul.dtype, engine(matmul)), _ADDS_BIAS.setdefault(group, {})
    if key not in known:
        cann = cann_version()
        known[key] = (not cann or cann >= BIAS_CANN) and _scatters_bias(bias, group, engine(matmul))
    return known[key]


def _scatters_bias(like: torch.Tensor, group: dist.ProcessGroup, comm_mode: str | None) -> bool:
    """Tell whether every rank's rows of a scattered sum of zeros have the bias, once."""
    bias = torch.arange(1, 17, dtype=like.dtype, device=like.device)
    k = K_RANGE[REDUCE_SCATTER][0]
    x_m, w = like.new_zeros(2 * group.size(), k), like.new_zeros(k, 16)
    rows = matmul_reduce_scatter(x_m, w, group, (), comm_mode=comm_mode, bias=bias).wait()
    right = (rows == bias).all().to(torch.int32)
    run_collective(
        "the answer whether a reduce-scatter adds a bias", dist.all_reduce, right, group=group, op=dist.ReduceOp.MIN
    )
    return bool(right.item())


def hccl_name(group: dist.ProcessGroup) -> str:
    """Return HCCL's name of `group`, from its NPU backend; cached."""
    name = _HCCL_NAMES.get(group)
    if name is None:
        backend: Any = group._get_backend(torch.device("npu"))
        name = str(backend.get_hccl_comm_name(dist.get_rank()))
        _HCCL_NAMES[group] = name
    return name


@lru_cache(maxsize=1)
def soc_name() -> str:
    """Return the name of this machine's chip, such as ``"Ascend910B1"``; without a chip torch_npu raises its error."""
    name: str = _torch_npu().npu.get_device_name()
    return name


@lru_cache(maxsize=1)
def cann_version() -> tuple[int, ...]:
    """Return the numbers of CANN's version, such as (9, 0, 0); empty if CANN does not say."""
    return tuple(int(number) for number in re.findall(r"\d+", _torch_npu().npu.utils.get_cann_version()))


@lru_cache(maxsize=len(FUSED_OPERATORS))
def arguments(operator: str) -> frozenset[str]:
    """Return the names of the arguments of the installed fused operator; none if torch_npu has no such operator."""
    return arguments_of(FUSED_OPERATORS[operator])


def arguments_of(name: str) -> frozenset[str]:
    """Return the names of the arguments of an operator by torch_npu's name for it; none if it has no such operator."""
    _torch_npu()
    packet = getattr(torch.ops.npu, name, None)
    return frozenset() if packet is None else frozenset(argument.name for argument in packet.default._schema.arguments)


def ask_experts(exchange: Exchange) -> Exchange:
    """Return an exchange with `matmuls` as `ask` returns a matmul: with the arguments that both operators have."""
    assert exchange.matmuls is not None
    named = frozenset.intersection(*map(arguments_of, EXPERT_OPERATORS))
    return replace(exchange, matmuls=replace(exchange.matmuls, soc=soc_name(), arguments=named))


@lru_cache(maxsize=1)
def _exchanged_arguments() -> frozenset[str]:
    return frozenset.intersection(*map(arguments_of, EXCHANGED_OPERATORS.values()))


def ask_exchanged(matmul: ExchangedMatmul, group: dist.ProcessGroup) -> ExchangedMatmul:
    """Return a matmul beside an all-to-all as `ask` returns a matmul: with the arguments that both operators have."""
    elsewhere = next((other for other in _HCCL_NAMES if other is not group), None)
    return replace(
        matmul,
        soc=soc_name(),
        cann=cann_version(),
        arguments=_exchanged_arguments(),
        captured=is_capturing(),
        elsewhere="" if elsewhere is None else describe(elsewhere),
    )


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    comm_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x_m @ w + bias`` [M, N] and x_m [M, K], which has the M rows that each rank sends to this one.

    x [R M, K / R], rank after rank: the rows that go to each, with this rank's features; w [K, N], whose rows follow
    the ranks' features.
    """
    y, x_m = _torch_npu().npu_all_to_all_matmul(
        x.contiguous(),
        _exchanged_weight(w),
        hccl_name(group),
        group.size(),
        bias=None if bias is None else _wide_bias(bias),
        all2all_out_flag=True,
        **_mode(comm_mode),
    )
    return y, x_m


def matmul_all_to_all(
    x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, *, comm_mode: str | None = None
) -> torch.Tensor:
    """Return of the products ``x @ w`` of all ranks this one's N / R features, [R M, N / R], rank after rank.

    x [M, K]; w [K, N], whose columns follow the ranks.
    """
    y: torch.Tensor = _torch_npu().npu_matmul_all_to_all(
        x.contiguous(), _exchanged_weight(w), hccl_name(group), group.size(), **_mode(comm_mode)
    )
    return y


def _exchanged_weight(w: torch.Tensor) -> torch.Tensor:
    """Return the right operand of a matmul beside an all-to-all: 950 alone takes a transposed view."""
    return _weight(w) if GENERATIONS.get(soc_name()) == "950" else w.contiguous()


def _wide_bias(bias: torch.Tensor) -> torch.Tensor:
    """Return a bias in the dtype that every chip takes: of bf16 fp32."""
    return bias.float().contiguous() if bias.dtype == torch.bfloat16 else bias.contiguous()


def all_to_all_expert_matmul(
    x: torch.Tensor, w: torch.Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup, *, transposed: bool
) -> torch.Tensor:
    """Return the product of each of this rank's experts, [expert][source], with the rows that ranks send it.

    x [S, H], sorted by the rank and the number of their expert; w [E, H, N], or with `transposed` [E, N, H]. The counts
    are those of `RowCounts`.
    """
    y, _, _ = _torch_npu().npu_alltoallv_gmm(
        x.contiguous(),
        w.contiguous(),
        hccl_name(group),
        group.size(),
        [count for of_rank in sent for count in of_rank],
        [count for of_rank in received for count in of_rank],
        trans_gmm_weight=transposed,
    )
    result: torch.Tensor = y
    return result


def expert_matmul_all_to_all(
    x: torch.Tensor, w: torch.Tensor, sent: Counts, received: Counts, group: dist.ProcessGroup, *, transposed: bool
) -> torch.Tensor:
    """Return the products with this rank's experts at the places of the rows that `all_to_all_expert_matmul` sent.

    x [A, K], in the order [expert][source]; w [E, K, H], or with `transposed` [E, H, K]; returns [S, H].
    """
    y, _ = _torch_npu().npu_gmm_alltoallv(
        x.contiguous(),
        w.contiguous(),
        hccl_name(group),
        group.size(),
        [count for of_rank in received for count in of_rank],
        [count for of_rank in sent for count in of_rank],
        trans_gmm_weight=transposed,
    )
    result: torch.Tensor = y
    return result


def ask(matmul: Matmul) -> Matmul:
    """Return `matmul` with this machine's chip and the arguments of the installed operator.

    Both are the same on every rank: ranks of one group run on one kind of chip, with one torch_npu.
    """
    return replace(matmul, soc=soc_name(), arguments=arguments(matmul.operator))


def _torch_npu() -> Any:
    """Import torch_npu; the import also registers its operators."""
    import torch_npu

    return torch_npu


def _weight(w: torch.Tensor) -> torch.Tensor:
    """Return the right operand if it or its transpose is contiguous, else a copy; the left has to be contiguous."""
    return w if w.is_contiguous() or w.t().is_contiguous() else w.contiguous()


def _dequant(x_m: QuantisedRows, w: Weight, comm_scales: CommScales | None) -> dict[str, torch.Tensor]:
    """Return the arguments of an all-reduce of int8 by int8.

    The dtype of dequant_scale sets that of the result: bf16 for bf16, fp32 for fp16. `supports` refuses scales that
    this would round.
    """
    assert isinstance(w, QuantisedWeight), "an int8 input needs an int8 weight"
    dequant_scale = w.scale.to(torch.bfloat16 if x_m.dtype == torch.bfloat16 else torch.float32)
    scales = {"dequant_scale": dequant_scale.contiguous(), "pertoken_scale": x_m.scale.reshape(-1).contiguous()}
    if comm_scales is not None:
        scales["comm_quant_scale_1"] = comm_scales.partial.contiguous()
        scales["comm_quant_scale_2"] = comm_scales.total.contiguous()
    return scales


def _antiquant(w: Weight) -> dict[str, Any]:
    """Return the arguments that describe an int8 weight of a floating input; none for a plain weight."""
    if not isinstance(w, QuantisedWeight):
        return {}
    offset = {} if w.offset is None else {"antiquant_offset": w.offset.contiguous()}
    return {"antiquant_scale": w.scale.contiguous(), **offset, "antiquant_group_size": w.group_size}


def _int8_operands(x_m: Input, w: Weight) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return both operands as tensors, and the arguments that describe them; none for plain operands."""
    if not isinstance(x_m, QuantisedRows):
        assert isinstance(w, torch.Tensor), "an int8 weight needs an int8 input here"
        return x_m, w, {}
    assert isinstance(w, QuantisedWeight), "an int8 input needs an int8 weight"
    x2_scale = w.scale.float().reshape(-1).expand(w.shape[1]).reshape(1, -1).contiguous()
    return x_m.values, w.values, {"x1_scale": x_m.scale.contiguous(), "x2_scale": x2_scale, "output_dtype": x_m.dtype}


def _bias(bias: torch.Tensor | None, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Return the argument `bias`, which the operators add to each rank's product: on all ranks but the first zeros."""
    if bias is None:
        return {}
    return {"bias": bias.contiguous() if group.rank() == 0 else torch.zeros_like(bias)}


def _mode(comm_mode: str | None) -> dict[str, str]:
    """Return the argument `comm_mode`, or none if it is None: plain torch_npu 2.7.1's all-reduce does not know it."""
    return {} if comm_mode is None else {"comm_mode": comm_mode}
