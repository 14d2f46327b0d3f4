"""Products beside an all-to-all, with the limits of CANN's pages: aclnnAlltoAllMatmul, aclnnMatmulAlltoAll, V2 of both.

AlltoAllMatmul     x1 [R s, H] -> all-to-all of its R parts -> [s, R H], rank after rank in the columns, times x2
MatmulAlltoAll     x1 [s, H] times x2 [H, R n] -> all-to-all of its R parts of columns -> [R s, n], rank after rank
"""

from collections.abc import Callable
from typing import Any

import torch

from .fused import FLOATS, collective, generation, needs_buffer
from .table import kernel, library

Tensor = torch.Tensor
RANKS = {"A2": (2, 4, 8), "A3": (2, 4, 8, 16), "950": (2, 4, 8, 16)}
# The engine that the first version takes, then others that the second may be told.
ENGINES = {"A2": ("aiv",), "A3": ("ai_cpu",), "950": ("ai_cpu", "ccu")}
LARGEST = 2**31 - 1
# The contracted features of AlltoAllMatmul; those of MatmulAlltoAll, and its columns on A2.
K_AFTER = {"A2": (1, 35000), "A3": (2, 65535), "950": (2, 65535)}
K_BEFORE, MOST_COLUMNS_A2 = (1, 65535), 368640
# Of one device: fused operators may not run beside each other.
running: list[str] = []


def ranks_of(name: str, group: str, mode: str | None) -> int:
    """Return the ranks of a group, and refuse numbers and engines that are not documented for the chip."""
    ranks, engines = library().emulated_ranks(group.encode()), ENGINES[generation()]
    if not 0 < len(group) < 128 or not ranks:
        raise ValueError(f"{name}: no group has the HCCL name {group!r}")
    if ranks not in RANKS[generation()]:
        raise ValueError(f"{name}: {ranks} ranks; allowed are {RANKS[generation()]} on {generation()}")
    if mode is not None and mode not in engines:
        raise ValueError(f"{name}: comm_mode {mode!r}; allowed is {' or '.join(engines)} on {generation()}")
    if generation() == "A2":
        needs_buffer(name)
    return int(ranks)


def check(name: str, x1: Tensor, x2: Tensor, k: int, bias: Any, transposed: tuple[bool, bool], axes: Any) -> None:
    """Refuse what both pages exclude; k: the features over which x2 is contracted."""
    if x1.dim() != 2 or x2.dim() != 2 or x2.shape[0] != k:
        raise ValueError(f"{name}: x1 {tuple(x1.shape)}, x2 {tuple(x2.shape)}")
    if x1.dtype not in FLOATS or x2.dtype != x1.dtype:
        raise ValueError(f"{name}: x1 {x1.dtype}, x2 {x2.dtype}; allowed are fp16 and bf16, both alike")
    if not x1.is_contiguous() or (not x2.is_contiguous() and not (generation() == "950" and x2.t().is_contiguous())):
        raise ValueError(f"{name}: strides {x1.stride()} and {x2.stride()}; on 950 alone x2 may be transposed")
    if any(transposed):
        raise ValueError(f"{name}: transposed {transposed}; x1 must not be, and torch_npu names no x2 so")
    expected = [-2, -1] if name.startswith("AlltoAll") else [-1, -2]
    if axes is not None and list(axes) not in ([], expected):
        raise ValueError(f"{name}: all2all_axes {axes}; allowed is {expected}")
    if 0 in x1.shape or 0 in x2.shape:
        raise ValueError(f"{name}: an empty operand, x1 {tuple(x1.shape)} or x2 {tuple(x2.shape)}")
    if max(x1.shape[0], x2.shape[1]) > LARGEST:
        raise ValueError(f"{name}: {x1.shape[0]} rows, {x2.shape[1]} columns; at most {LARGEST}")
    check_bias(name, x1, x2, bias)


def check_bias(name: str, x1: Tensor, x2: Tensor, bias: Any) -> None:
    """Refuse a bias of another length or dtype: of bf16 it is fp32, of fp16 fp16; on 950 also the other one."""
    if bias is None or not bias.numel():
        return
    taken = [torch.float32 if x1.dtype == torch.bfloat16 else torch.float16]
    taken += [x1.dtype, torch.float32] if generation() == "950" else []
    if bias.dtype not in taken or tuple(bias.shape) != (x2.shape[1],) or not bias.is_contiguous():
        raise ValueError(f"{name}: a bias {bias.dtype} {tuple(bias.shape)}; allowed is [{x2.shape[1]}] of {taken}")


def between(name: str, k: int, limits: tuple[int, int]) -> None:
    """Refuse contracted features outside of the page's limits."""
    if not limits[0] <= k <= limits[1]:
        raise ValueError(f"{name}: K is {k}; allowed is {limits[0]} to {limits[1]} on {generation()}")


def product(x1: Tensor, x2: Tensor, bias: Any) -> Tensor:
    """Multiply and add in fp32, round once."""
    y = x1.float() @ x2.float()
    return (y if bias is None or not bias.numel() else y + bias.float()).to(x1.dtype)


def all_to_all_matmul(
    name: str, x1: Tensor, x2: Tensor, bias: Any, axes: Any, group: str, mode: str | None, *rest: Any
) -> None:
    """Exchange the parts of rows, put each rank's columns beside those of the rank before it, and multiply."""
    transposed, out, gathered = rest[:2], rest[2], rest[3]
    ranks = ranks_of(name, group, mode)
    check(name, x1, x2, x1.shape[-1] * ranks, bias, transposed, axes)
    between(name, x2.shape[0], K_AFTER[generation()])
    if x1.shape[0] % ranks:
        raise ValueError(f"{name}: {x1.shape[0]} rows are not divisible by {ranks} ranks")
    came = torch.empty_like(x1)
    collective("all-to-all", group, x1, came, x1.numel() // ranks)
    whole = came.view(ranks, -1, x1.shape[1]).transpose(0, 1).flatten(1)
    out.copy_(product(whole, x2, bias))
    if gathered is not None and gathered.numel():
        gathered.copy_(whole)


def matmul_all_to_all(
    name: str, x1: Tensor, x2: Tensor, bias: Any, axes: Any, group: str, mode: str | None, *rest: Any
) -> None:
    """Multiply, send each rank its columns, and put the rows of each rank behind those of the rank before it."""
    transposed, out = rest[:2], rest[2]
    ranks = ranks_of(name, group, mode)
    check(name, x1, x2, x1.shape[-1], bias, transposed, axes)
    between(name, x2.shape[0], K_BEFORE)
    if x2.shape[1] % ranks or (generation() == "A2" and x2.shape[1] > MOST_COLUMNS_A2) or len(x1) * ranks > LARGEST:
        raise ValueError(f"{name}: {x2.shape[1]} columns, {len(x1)} rows; columns are divisible by {ranks} ranks")
    y = product(x1, x2, bias)
    sent = y.view(len(x1), ranks, -1).transpose(0, 1).contiguous()
    came = torch.empty_like(sent)
    collective("all-to-all", group, sent, came, sent.numel() // ranks)
    out.copy_(came.view(out.shape))


def first_version(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel of the first version, to which nobody names an engine."""
    return lambda x1, x2, bias, axes, group, *rest: alone(name, function, x1, x2, bias, axes, group, None, *rest)


def second_version(name: str, function: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel of the second version, which is told an engine."""
    return lambda *given: alone(name, function, *given)


def alone(name: str, function: Callable[..., None], *given: Any) -> None:
    """Run a fused operator; refuse it beside another one."""
    if running:
        raise RuntimeError(f"{name} runs beside {running[0]}: fused operators may not run at the same time")
    running.append(name)
    try:
        function(name, *given)
    finally:
        running.clear()


kernel("AlltoAllMatmul", "ttopcbb to", first_version("AlltoAllMatmul", all_to_all_matmul))
kernel("AlltoAllMatmulV2", "ttopccbb to", second_version("AlltoAllMatmulV2", all_to_all_matmul))
kernel("MatmulAlltoAll", "ttopcbb t", first_version("MatmulAlltoAll", matmul_all_to_all))
kernel("MatmulAlltoAllV2", "ttopccbb t", second_version("MatmulAlltoAllV2", matmul_all_to_all))
