"""Adapters of rank 16 on the models of frameworks.py, as three kinds of users make them; the models are frozen.

peft_adapters      PEFT's wrappers on a tp_plan
class_adapters     the class swap of examples/frameworks/torch_tp.py, on torch's styles
bridge_adapters    wrappers as Megatron-Bridge makes them, on Megatron-core's layers
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ascend_parallel
from ascend_parallel.diagnostics.intervals import length, union, within
from ascend_parallel.diagnostics.timeline.files import read_run
from ascend_parallel.diagnostics.timeline.table import communicating

RANK = 16
Adapt = Callable[[nn.Module], nn.Module]
# In the names of layers that are parts of adapters.
OWN = (".lora_", ".adapter.")
# The modules that are adapters, of the model that was adapted last.
ADAPTERS: list[nn.Module] = []


def adapted(model: nn.Module, adapt: Adapt | None) -> nn.Module:
    """Return the model, frozen and with adapters; None: as it is."""
    ADAPTERS.clear()
    if adapt is None:
        return model
    model.requires_grad_(requires_grad=False)
    return adapt(model)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def peft_adapters(model: nn.Module) -> nn.Module:
    """Return a model of transformers, whose linear layers PEFT wraps.

    PEFT gives A of a row layer this rank's number of features, where its weight has all: the plain forward fails on it.
    """
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names))
    for module in made.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            a, b = module.lora_A["default"], module.lora_B["default"]
            a.in_features = a.weight.shape[1]
            ADAPTERS.extend((a, b))
    return made


def class_adapters(model: nn.Module) -> nn.Module:
    """Return the decoder of torch_tp.py with its own class of adapters."""
    example: Any = sys.modules["torch_tp"]
    example.args.lora = RANK
    (mesh,) = {layer.weight.device_mesh for layer in model.layers.modules() if isinstance(layer, nn.Linear)}
    example.add_adapters(model, mesh)
    return model


def bridge_adapters(model: nn.Module) -> nn.Module:
    """Return a GPT of Megatron-core with wrappers of its linear layers, but for the output layer."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) and name != "output_layer":
                wrapper = BridgeLinear(layer, isinstance(layer, ColumnParallelLinear))
                setattr(parent, name, wrapper)
                ADAPTERS.append(wrapper.adapter)
    return model


class BridgeLinear(nn.Module):
    """A layer and its adapter, as LoRALinear of Megatron-Bridge: the layer first, then what the adapter adds."""

    def __init__(self, layer: Any, column: bool) -> None:
        """Wrap a layer of Megatron-core."""
        super().__init__()
        self.to_wrap, self.adapter = layer, BridgeAdapter(layer, column)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum, and the bias of a layer that does not add it."""
        y, bias = self.to_wrap(x, *args, **kwargs)
        return y + self.adapter(x.contiguous()).reshape(y.shape), bias


class BridgeAdapter(nn.Module):
    """B(A(x)) as ParallelLinearAdapter of Megatron-Bridge: A is cut as the layer is, B along its outputs."""

    def __init__(self, layer: Any, column: bool) -> None:
        """Make the adapter of a column or row layer."""
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self._gathers, self._scatters = column and layer.sequence_parallel, not column and layer.sequence_parallel
        options = {"config": layer.config, "bias": False, "init_method": lambda w: nn.init.normal_(w, std=0.02)}
        if column:
            self.linear_in = ColumnParallelLinear(layer.input_size, RANK, gather_output=True, **options)
        else:
            self.linear_in = RowParallelLinear(
                layer.input_size, RANK, input_is_parallel=True, skip_bias_add=True, **options
            )
        self.linear_out = ColumnParallelLinear(RANK, layer.output_size, gather_output=not column, **options)
        self.linear_in.sequence_parallel = self.linear_out.sequence_parallel = False
        for part in (self.linear_in, self.linear_out):
            if isinstance(part, ColumnParallelLinear):
                part.allreduce_dgrad = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output."""
        from megatron.core.tensor_parallel import mappings

        if self._gathers:
            x = mappings.gather_from_sequence_parallel_region(x)
        x = self.linear_out(self.linear_in(x)[0])[0]
        return mappings.scatter_to_sequence_parallel_region(x) if self._scatters else x


def under_collectives(run: Callable[[], object]) -> str:
    """Return in words how much of the adapters' forward ran under their layers' collectives, in one step."""
    spans: list[tuple[int, int]] = []
    begun: list[int] = []
    hooks = [each.register_forward_pre_hook(lambda *_: begun.append(time.monotonic_ns())) for each in ADAPTERS]
    hooks += [
        each.register_forward_hook(lambda *_: spans.append((begun.pop(), time.monotonic_ns()))) for each in ADAPTERS
    ]
    with tempfile.TemporaryDirectory() as folder:
        with ascend_parallel.timeline.record(folder):
            run()
        # A run whose layers are all left whole records nothing.
        files = read_run(Path(folder))[0] if any(Path(folder).iterdir()) else []
    for hook in hooks:
        hook.remove()
    if not files:
        return "every layer is left whole"
    adapters = union(spans)
    layers = [each for each in files[0].passes if each.layer and not any(part in each.layer for part in OWN)]
    collectives = union(span for each in layers for span in communicating(each))
    hidden = length(within(adapters, collectives))
    under = f"{hidden / 1e6:.1f} of them under their layers' collectives"
    return f"adapters take {length(adapters) / 1e6:.1f} ms of a forward, {under}"
