"""Hugging Face transformers: layers of a `tp_plan`, experts of an `ep_plan` and shared attention.

attention  the implementation of attention that COC_DETERMINISTIC=invariant needs
invariant  what else it asks of a model, at each call
layers   the forward that is installed on each linear layer, and which layers and calls it covers
experts  the replaced call of a module of experts, and which modules it covers
context  attention of a sequence that ranks share, run inside the model's own attention implementation:
         its mask (sequence_mask), the proof of a model (context_proof), and what its forward refuses (shared_forward)
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ascend_parallel.patches.base import Patch, PatchSet, in_range
from ascend_parallel.patches.dtensor_linear import InstalledLayers
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch
from ascend_parallel.patches.transformers import attention, experts, invariant
from ascend_parallel.patches.transformers.context import ContextParallel, context_parallel
from ascend_parallel.patches.transformers.layers import ACTIVE_PATCH, install_forward, install_head_norm
from ascend_parallel.settings import Settings
from ascend_parallel_autoload import frameworks

__all__ = ["ContextParallel", "context_parallel", "on_one_rank", "patches"]

MODULE = frameworks.TRANSFORMERS.module
VERSIONS = ">=5.16,<5.24"
NEWEST = "5.23.0"


def patches(settings: Settings) -> AppliedPatches:
    """Return the patches of the installed transformers."""
    version = importlib.metadata.version("transformers")
    framework = Transformers(settings, "transformers", version, ACTIVE_PATCH)
    # Older versions exchange no rows, or in another way.
    others = {"experts of transformers": experts_patch_set()} if in_range(version, experts.VERSIONS) else {}
    on_top = [attention.REGISTRIES, invariant.CALLS]
    return AppliedPatches("transformers", version, patch_set(), framework, others, on_top=on_top)


class Transformers(InstalledLayers):
    """The installed transformers; with COC_DETERMINISTIC=invariant it has an implementation of attention too."""

    def put_in_force(self) -> None:
        """Have installed forwards run with these settings."""
        super().put_in_force()
        if self.settings.arithmetic.fixed_tiles:
            attention.register()

    def put_out_of_force(self) -> None:
        """Have installed forwards run transformers' own."""
        super().put_out_of_force()
        attention.unregister()


def patch_set() -> PatchSet:
    """Return the patches of the method with which styles install forwards."""
    patch = Patch(
        target=f"{MODULE}.TensorParallelLayer.install_forward",
        replacement=install_forward,
        parameters=("self", "module", "mesh"),
        reason="reduces under a row layer's matmul, and the input gradient under a column layer's weight gradient",
    )
    of_heads = Patch(
        target=f"{MODULE}.ReplicatedWithGradAllReduce.install_forward",
        replacement=install_head_norm,
        parameters=("self", "module", "mesh"),
        reason="with COC_DETERMINISTIC=tp sums the gradients of norms of queries and keys in blocks of heads",
    )
    return PatchSet("transformers", VERSIONS, [patch, of_heads], newest=NEWEST)


def on_one_rank(model: Any) -> Any:
    """Apply the `tp_plan` of a loaded model on this process alone, and return the model: tensor-parallel degree 1.

    transformers leaves a model as it is with ``tp_size=1``. COC_DETERMINISTIC=tp needs its layers to be tensor-parallel
    at that degree too. Tied parameters stay tied. Needs an initialised default group of one rank; raises `ValueError`
    for another one.
    """
    if dist.get_world_size() != 1:
        raise ValueError(f"on_one_rank: the default group has {dist.get_world_size()} ranks: load with tp_size instead")
    styles = importlib.import_module(MODULE)
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,), mesh_dim_names=("tp",))
    with _each_its_own(model):
        plan = dict(model.tp_plan)
        expand = getattr(model, "_expand_parallel_plan", lambda own: own)  # transformers 5.23 has it
        return styles.apply_tensor_parallelism(model, mesh, expand(plan))


@contextmanager
def _each_its_own(model: Any) -> Iterator[None]:
    """Give each name of a tied parameter a parameter of its own in this context; then they have that of the first name.

    transformers applies a plan before it ties parameters; a plan that names one twice finds it under one name alone.
    """
    names: dict[torch.nn.Parameter, list[tuple[Any, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append((module, name))
    tied = [places for places in names.values() if len(places) > 1]
    for parameter, (_, *others) in names.items():
        for module, name in others:
            module._parameters[name] = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for (first, first_name), *others in tied:
            for module, name in others:
                module._parameters[name] = first._parameters[first_name]


def experts_patch_set() -> PatchSet:
    """Return the patches of the experts that an `ep_plan` dispatches rows to."""
    noted = Patch(
        target=f"{experts.MODULE}.EpDispatchExpertsParallel.install_forward",
        replacement=experts.install_forward,
        parameters=("self", "module", "ep_mesh", "tp_mesh", "ep_implementation"),
        reason="notes the experts of an ep_plan, for coverage",
    )
    called = Patch(
        target=f"{experts.MODULE}.AllToAllEP.__call__",
        replacement=experts.call_experts,
        parameters=("self", "hidden_states", "top_k_index", "top_k_weights"),
        reason="exchanges rows with other experts' ranks under groups of experts",
    )
    return PatchSet("transformers", experts.VERSIONS, [noted, called], newest=NEWEST)


TRANSFORMERS = FrameworkPatch.of(frameworks.TRANSFORMERS, patches, on_top=[attention.MODELS])
