"""Elementwise operators of torch on CPUs without tails: an element's bits do not depend on where it lies.

A loop of torch computes whole vectors, and the last elements of a tensor, or of a thread's share, one by one. For
sigmoid, silu, gelu, softplus, powers and others the two ways have other bits (`WITH_TAILS`; tests/ops/ compares them).
Between a column and a row layer a tensor is [tokens, N / R]: which elements come last depends on the degree. With
COC_DETERMINISTIC=tp these operators run kernels of this module for CPU tensors, in forward and backward, whoever calls
them: torch's own kernels on whole vectors, the last elements in a padded copy. Sums over rows [M, N / R] have
the property for their last columns, which are padded too.

`ELEMENTWISE` registers the kernels, for all CPU tensors of the process: what computes between two layers is not ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

# A multiple of the elements that a loop computes at once: two vectors of 512 bits, of 16-bit elements.
VECTOR = 64
# Elements of a share of a thread at least (at::internal::GRAIN_SIZE).
GRAIN = 32768

Kernel = Callable[..., Any]

aten = torch.ops.aten


def _to_out(operator: Any) -> Kernel:
    """Make a backward's operator, which writes to `grad_input`, one that writes to `out`."""
    return lambda *args, out, **kwargs: operator(*args, **kwargs, grad_input=out)


# Operators whose last elements have other bits than the others: the functional operator, and the one that has `out`.
WITH_TAILS: dict[str, Any] = {
    "atan2": aten.atan2.out,
    "atanh": aten.atanh.out,
    "cosh": aten.cosh.out,
    "elu": aten.elu.out,  # celu and selu call it
    "elu_backward": _to_out(aten.elu_backward.grad_input),
    "exp2": aten.exp2.out,
    "gelu": aten.gelu.out,
    "gelu_backward": _to_out(aten.gelu_backward.grad_input),
    "hypot": aten.hypot.out,
    "logaddexp": aten.logaddexp.out,
    "logaddexp2": aten.logaddexp2.out,
    "logit": aten.logit.out,
    "logit_backward": _to_out(aten.logit_backward.grad_input),
    "mish": aten.mish.out,
    "pow.Scalar": aten.pow.Scalar_out,
    "pow.Tensor_Scalar": aten.pow.Tensor_Scalar_out,
    "pow.Tensor_Tensor": aten.pow.Tensor_Tensor_out,
    "rsqrt": aten.rsqrt.out,
    "sigmoid": aten.sigmoid.out,
    "sigmoid_backward": _to_out(aten.sigmoid_backward.grad_input),
    "silu": aten.silu.out,
    "silu_backward": _to_out(aten.silu_backward.grad_input),
    "sinh": aten.sinh.out,
    "softplus": aten.softplus.out,
    "softplus_backward": _to_out(aten.softplus_backward.grad_input),
    "special_i0e": aten.special_i0e.out,
}
POWERS = (aten.pow.Scalar_out, aten.pow.Tensor_Scalar_out, aten.pow.Tensor_Tensor_out)
# The operators that write to their first operand.
IN_PLACE = {
    "atan2_": "atan2",
    "atanh_": "atanh",
    "cosh_": "cosh",
    "elu_": "elu",
    "exp2_": "exp2",
    "gelu_": "gelu",
    "hypot_": "hypot",
    "logit_": "logit",
    "mish_": "mish",
    "pow_.Scalar": "pow.Tensor_Scalar",
    "pow_.Tensor": "pow.Tensor_Tensor",
    "rsqrt_": "rsqrt",
    "sigmoid_": "sigmoid",
    "silu_": "silu",
    "sinh_": "sinh",
}
NARROW = (torch.bfloat16, torch.float16)
# Sums of scaled operands: 16 bits alone, and with another alpha than 1.
SCALED_SUMS = {"add.Tensor": aten.add.out, "sub.Tensor": aten.sub.out}
# Sums over dimensions; where among the arguments after the tensor the dimensions stand.
REDUCTIONS = {
    "linalg_vector_norm": (aten.linalg_vector_norm.out, 1),
    "mean.dim": (aten.mean.out, 0),
    "sum.dim_IntList": (aten.sum.IntList_out, 0),
}
# The steps of optimizers with fused=True, which read and write lists of tensors.
FUSED_STEPS = [f"_fused_{name}_{lr}" for name in ("adagrad", "adam", "adamw", "sgd") for lr in ("", ".tensor_lr")]


class ElementwiseKernels:
    """The kernels of this module in torch's dispatcher, for CPU tensors of this process: there or not."""

    def __init__(self) -> None:
        """Start with torch's own kernels."""
        self._library: Any = None

    def follow(self, wanted: bool) -> None:
        """Put the kernels in, or take them out; a second call does nothing."""
        if wanted and self._library is None:
            kernels = _kernels()
            self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():  # torch says that a kernel of its own is replaced
                warnings.simplefilter("ignore", UserWarning)
                for name, kernel in kernels.items():
                    self._library.impl(name, kernel, "CPU", with_keyset=name in FUSED_STEPS)
        elif not wanted and self._library is not None:
            self._library._destroy()
            self._library = None


ELEMENTWISE = ElementwiseKernels()


def _kernels() -> dict[str, Kernel]:
    kernels = {name: _without_tail(operator) for name, operator in WITH_TAILS.items()}
    kernels |= {name: _in_place(WITH_TAILS[functional]) for name, functional in IN_PLACE.items()}
    for name, operator in SCALED_SUMS.items():
        kernels[name], kernels[name.replace(".", "_.")] = _scaled_sum(operator), _scaled_sum_in_place(operator)
    kernels |= {name: _of_whole_columns(*reduction) for name, reduction in REDUCTIONS.items()}
    if hasattr(torch.library, "get_kernel"):
        kernels |= {name: _fused_step(name) for name in FUSED_STEPS if hasattr(aten, name.partition(".")[0])}
    return kernels | {"mish_backward": _mish_backward, "glu": _glu, "glu_backward": _glu_backward}


def _without_tail(operator: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        return computed(operator, args, kwargs)

    return kernel


def _in_place(operator: Any) -> Kernel:
    def kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not x.is_floating_point():
            result: torch.Tensor = operator(x, *args, **kwargs, out=x)
            return result
        return x.copy_(computed(operator, (x, *args), kwargs))

    return kernel


def _scaled_sum(operator: Any) -> Kernel:
    def kernel(x: Any, y: Any, *, alpha: Any = 1) -> torch.Tensor:  # torch hands over a number as a number
        dtype = torch.result_type(x, y)
        if alpha != 1 and dtype in NARROW:
            return computed(operator, (x, y), {"alpha": alpha})
        found: torch.Tensor = operator(x, y, alpha=alpha, out=torch.empty(0, dtype=dtype))
        return found

    return kernel


def _scaled_sum_in_place(operator: Any) -> Kernel:
    def kernel(x: torch.Tensor, y: Any, *, alpha: Any = 1) -> torch.Tensor:
        if alpha != 1 and x.dtype in NARROW:
            return x.copy_(computed(operator, (x, y), {"alpha": alpha}))
        operator(x, y, alpha=alpha, out=x)
        return x

    return kernel


def _mish_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x * tanh(softplus(x))``, of operators that are kernels of this module."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    bounded = torch.tanh(torch.nn.functional.softplus(wide))
    return (dy * (bounded + wide * torch.sigmoid(wide) * (1 - bounded.square()))).to(dy.dtype)


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return computed(_stacked_glu, _halves(x, dim), {})


def _stacked_glu(value: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    aten.glu.out(torch.cat([value, gate]), 0, out=out)


def _glu_backward(dy: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    value, gate = (half.to(torch.promote_types(x.dtype, torch.float32)) for half in _halves(x, dim))
    opened = torch.sigmoid(gate)
    return torch.cat([dy * opened, dy * value * opened * (1 - opened)], dim).to(dy.dtype)


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.ndim or x.shape[dim] % 2:
        raise RuntimeError(f"glu of a tensor {list(x.shape)}: dimension {dim} has to be even, to be cut into halves")
    first, second = x.chunk(2, dim)
    return first, second


def _of_whole_columns(operator: Any, place: int) -> Kernel:
    """Make the kernel of a reduction: the last dimension, unless it is reduced, is padded to whole vectors."""

    def kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dims: Sequence[int] = (args[place] if len(args) > place else None) or ()
        dtype = kwargs.get("dtype") or _reduced_dtype(operator, x.dtype)
        columns = x.shape[-1] if x.ndim else 0
        stays = len(dims) > 0 and -1 not in dims and x.ndim - 1 not in dims
        if not (stays and columns % VECTOR and x.is_floating_point()):
            found: torch.Tensor = operator(x, *args, **kwargs, out=torch.empty(0, dtype=dtype))
            return found
        padded = x.new_zeros(*x.shape[:-1], columns + -columns % VECTOR)
        padded[..., :columns].copy_(x)
        y: torch.Tensor = operator(padded, *args, **kwargs, out=torch.empty(0, dtype=dtype))
        return y[..., :columns].clone(memory_format=torch.contiguous_format)

    return kernel


def _reduced_dtype(operator: Any, dtype: torch.dtype) -> torch.dtype:
    if operator is aten.linalg_vector_norm.out:
        return dtype.to_real()
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def _fused_step(name: str) -> Kernel:
    """Make the kernel of an optimizer's fused step: tensors that end with a tail are updated in padded copies."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> None:
        lists: list[Any] = list(args)
        updated: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, tensors in enumerate(args):
            if isinstance(tensors, list | tuple) and tensors and isinstance(tensors[0], torch.Tensor):
                lists[index] = [_padded(x) for x in tensors]
                updated += zip(tensors, lists[index], strict=True)
        own.call_boxed(keys, *lists, **kwargs)
        for x, copy in updated:
            if copy is not x:
                x.copy_(copy[: x.numel()].view(x.shape))

    return kernel


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy of its elements in whole vectors; a number of steps has no dimensions, and stays."""
    if not x.ndim or x.numel() % VECTOR == 0:
        return x
    return torch.cat([x.reshape(-1), x.new_zeros(-x.numel() % VECTOR)])


def computed(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return ``operator(*args, **kwargs)``, each element as in a whole vector.

    operator
        Of torch, with `out`, that computes elements of tensors in `args`, and no others.
    """
    operands = {index: arg for index, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.ndim}
    dtype = _result_dtype(operator, args)
    floating = all(x.is_floating_point() for x in operands.values())
    if not operands or not floating:
        found: torch.Tensor = operator(*args, **kwargs, out=torch.empty(0, dtype=dtype))
        return found
    y = _result(list(operands.values()), dtype)
    flat = {index: _flat_as(y, x) for index, x in operands.items()}

    def run(out: torch.Tensor, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        pieces = [cut(flat[index]) if index in flat else arg for index, arg in enumerate(args)]
        operator(*pieces, **kwargs, out=out)

    elements, out = y.numel(), y.as_strided((y.numel(),), (1,))
    whole = elements_in_whole_vectors(elements, torch.get_num_threads())
    if whole:
        run(out[:whole], lambda x: x[:whole])
    if rest := elements - whole:
        padded = y.new_empty(-(-rest // VECTOR) * VECTOR)
        run(padded, lambda x: torch.cat([x[whole:], x.new_zeros(padded.numel() - rest)]))
        out[whole:] = padded[:rest]
    return y


def elements_in_whole_vectors(elements: int, threads: int) -> int:
    """Return the largest number, at most `elements`, that gives every thread a share of whole vectors."""
    while True:
        shares = max(1, min(threads, -(-elements // GRAIN)))
        whole = elements - elements % (VECTOR * shares)
        if whole == elements:
            return elements
        elements = whole


def _result_dtype(operator: Any, args: Sequence[Any]) -> torch.dtype:
    """Return the dtype of the result of an elementwise operator; powers of integers are integers, all else floating."""
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    power = operator in POWERS
    dtype = torch.result_type(args[0], args[1]) if power else torch.result_type(given[0], given[-1])
    return dtype if power or dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _result(operands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor for the result: dense, laid out as the first operand that has its shape."""
    shape: torch.Size = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
    for x in operands:
        if x.shape == shape:
            return torch.empty_like(x, dtype=dtype)
    return operands[0].new_empty(shape, dtype=dtype)


def _flat_as(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of x in the order in which those of y lie in memory; a copy unless x is laid out as y."""
    if x.shape != y.shape or x.stride() != y.stride():
        x = torch.empty_like(y, dtype=x.dtype).copy_(x)
    return x.as_strided((x.numel(),), (1,))
