"""The tensors that autograd saves of an operator's call: asked of torch, on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import OpCall, Ref


@dataclass(frozen=True)
class AutogradSaves:
    """What the backward of a call reads.

    inputs, outputs
        Indices of `OpCall.inputs` and `OpCall.outputs` that are saved, or views of them.
    inside
        Bytes of the tensors that the operator makes for its backward alone: the steps of an LSTM, the statistics of a
        norm, a mask. Of the whole tensors, before sharding.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]
    inside: int


ATTENTION = "scaled_dot_product_attention"


def attention_saves(call: OpCall) -> AutogradSaves:
    """Return what a fused attention kernel saves, which devices have: queries, keys, values, the result, and its sums.

    torch's own choice of a kernel depends on the device, and its unfused one saves the scores too.
    """
    (result,) = call.outputs
    return AutogradSaves(frozenset({0, 1, 2}), frozenset({0}), 4 * prod(result.shape[:-1]))


def autograd_saves(call: OpCall, requires_grad: Sequence[bool]) -> AutogradSaves | None:
    """Return what autograd saves of a call; None for an operator that cannot run on fake tensors.

    requires_grad: of each tensor of `call.inputs`. Not counted: the workspace of oneDNN's LSTM and GRU, fp32 on CPUs.
    """
    key = call.target, repr((call.args, call.kwargs)), call.inputs, tuple(requires_grad)
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _ask(call, requires_grad)
        except Exception:  # noqa: BLE001 - any operator's own: it has no fake kernel, or reads values
            _KNOWN[key] = None
    return _KNOWN[key]


_KNOWN: dict[Any, AutogradSaves | None] = {}


def _ask(call: OpCall, requires_grad: Sequence[bool]) -> AutogradSaves:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with _torch_kernels(), FakeTensorMode(), torch.enable_grad():
        inputs = [
            torch.empty(meta.shape, dtype=meta.dtype).requires_grad_(needs)
            for meta, needs in zip(call.inputs, requires_grad, strict=True)
        ]

        def filled(leaf: Any) -> Any:
            return inputs[leaf.index] if isinstance(leaf, Ref) else leaf

        args, kwargs = pytree.tree_map(filled, (tuple(call.args), dict(call.kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call.target(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        read = frozenset(place for place, tensor in enumerate(inputs) if _storage(tensor) in saved)
        made = frozenset(place for place, tensor in enumerate(outputs) if _storage(tensor) in saved)
        known = {_storage(tensor) for tensor in (*inputs, *outputs)}
        inside = sum(nbytes for storage, nbytes in saved.items() if storage not in known)
    return AutogradSaves(read, made, inside)


@contextmanager
def _torch_kernels() -> Iterator[None]:
    """Inside, torch's own kernels run: the workspace of oneDNN's LSTM is empty among fake tensors."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
