"""torch.autograd.backward and torch.autograd.grad of DTensors.

They run on the edges of autograd's graph. A call on the tensors would keep torch's overrides off while backward runs,
and a checkpoint that runs a forward again there would lay out its functions by torch's rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor, Replicate

from ascend_parallel.sharding.marked.torch_call import as_replicated
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.edges import layout_of, leaf, spec_of


def tensor_backward(
    tensor: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run ``tensor.backward(...)``."""
    backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run ``torch.autograd.backward(...)``."""
    roots = _sequence(tensors)
    gradients = _gradients(roots, grad_tensors if grad_variables is None else grad_variables)
    into = None if inputs is None else [_edge(each) for each in _sequence(inputs)]
    torch.autograd.backward([_edge(root) for root in roots], gradients, retain_graph, create_graph, inputs=into)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """Return ``torch.autograd.grad(...)``; raises `ValueError` for batched gradients."""
    if is_grads_batched:
        raise ValueError("is_grads_batched=True of DTensors: call torch.autograd.grad for each gradient")
    roots, into = _sequence(outputs), _sequence(inputs)
    found = torch.autograd.grad(
        [_edge(root) for root in roots],
        [_edge(each) for each in into],
        _gradients(roots, grad_outputs),
        retain_graph,
        create_graph,
        allow_unused=materialize_grads or allow_unused,
    )
    if not materialize_grads:
        return tuple(found)
    return tuple(torch.zeros_like(each) if got is None else got for each, got in zip(into, found, strict=True))


def _sequence(given: Any) -> list[Any]:
    return [given] if isinstance(given, (torch.Tensor, GradientEdge)) else list(given)


def _edge(tensor: Any) -> GradientEdge:
    if isinstance(tensor, GradientEdge):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


def _gradients(roots: Sequence[Any], given: Any) -> list[Any]:
    """Return the gradients of the roots: those given, or for a scalar a one on every rank."""
    gradients = [None] * len(roots) if given is None else _sequence(given)
    return [_gradient(root, gradient) for root, gradient in zip(roots, gradients, strict=True)]


def _gradient(root: Any, given: Any) -> Any:
    if isinstance(root, DTensor) and isinstance(given, torch.Tensor):
        return as_replicated(given, root.device_mesh, torch.autograd.backward)
    if given is not None or isinstance(root, GradientEdge):
        return given
    if root.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if not isinstance(root, DTensor):
        return torch.ones_like(root)
    mesh = ProcessMesh.of(root.device_mesh)
    whole = layout_of([Replicate()] * mesh.ndim, mesh, root.ndim)
    local = torch.ones(root.shape, dtype=root.dtype, device=root._local_tensor.device)
    return leaf(DTensor, local, spec_of(mesh, whole, root.shape, root.dtype))
