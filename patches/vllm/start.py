"""What happens once a worker has loaded its model: a line in the log; and what vLLM's caches have to know."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.vllm.bits import Matmul, Multiply, ask
from ascend_parallel.patches.vllm.layers import BY_ROWS, Vllm
from ascend_parallel.version import __version__

log = logging.getLogger("ascend_parallel")

# The two ends of a layer, as its attributes name them.
ENDS = ("input", "output")
LINEAR = "vllm.model_executor.layers.linear"
# The name of our entry among vLLM's variables.
CACHE_KEY = "ASCEND_PARALLEL"


def initialize_from_config(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``WorkerWrapperBase.initialize_from_config``, which follows the profile run."""

    @functools.wraps(original)
    def initialize(self: Any, kv_cache_configs: Any) -> Any:
        text = started(self.worker.get_model(), self.vllm_config, vllm)
        if dist.is_initialized() and dist.get_rank() == 0:
            log.warning("%s", text)
        return original(self, kv_cache_configs)

    return initialize


def started(model: torch.nn.Module, config: Any, vllm: Vllm) -> str:
    """Ask which chunks keep the bits of a model's matmuls; return in words what of it runs with overlap.

    Every rank of the model's tensor-parallel group calls this.
    """
    if is_compiled(config):
        return (
            "vllm: compiled: not covered. vLLM compiles this model, and overlap is not in compiled graphs; "
            "--enforce-eager (enforce_eager=True) runs it with overlap"
        )
    rows = [module for module in model.modules() if is_row_layer(module)]
    reasons = [vllm.uncovered(module) for module in rows]
    covered = [module for module, reason in zip(rows, reasons, strict=True) if reason is None]
    named = Counter(filter(None, reasons))
    text = f"vllm: overlap covers {len(covered)} of {len(rows)} row-parallel layers"
    others = "".join(f"; {count}: {reason}" for reason, count in named.items())
    if not covered:
        return text + others
    group, device = vllm.group_of(covered[0]), next(model.parameters()).device
    vllm.confirm(group)()
    multiplied = linear_layers(model) if vllm.leaves_rows else covered
    tokens = config.scheduler_config.max_num_batched_tokens
    vllm.bits = ask(matmuls_of(multiplied), vllm.ladder(device.type), tokens, group, device)
    ladder = vllm.ladder(device.type)
    return (
        f"{text}, in steps of {2 * ladder[0]} tokens or more, in about {vllm.settings.num_chunks} chunks of "
        f"{ladder[0]} to {ladder[-1]} tokens{others}; {vllm.bits}"
    )


def linear_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers that multiply rows that have arrived, or reduce under their matmul."""
    return [module for module in model.modules() if type(getattr(module, "quant_method", None)).__name__ in BY_ROWS]


def matmuls_of(layers: Iterable[Any]) -> dict[Matmul, Multiply]:
    """Return a layer's matmul for each shape, dtype and kind of bias."""
    found: dict[Matmul, Multiply] = {}
    for layer in layers:
        k, n = (getattr(layer, f"{end}_size_per_partition", getattr(layer, f"{end}_size")) for end in ENDS)
        bias = None if layer.skip_bias_add else layer.bias
        found.setdefault(
            Matmul(k, n, layer.params_dtype, bias is not None),
            functools.partial(_multiply, layer, bias),
        )
    return found


def _multiply(layer: Any, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer.quant_method.apply(layer, x, bias)
    return y


def is_row_layer(module: torch.nn.Module) -> bool:
    """Tell whether a module is a row-parallel layer, of vLLM or derived from it."""
    return any((kind.__module__, kind.__name__) == (LINEAR, "RowParallelLinear") for kind in type(module).__mro__)


def is_compiled(config: Any) -> bool:
    """Tell whether vLLM compiles its models; 0.11 calls the mode a level."""
    compilation = config.compilation_config
    mode = getattr(compilation, "mode", getattr(compilation, "level", 0))
    return bool(int(mode or 0))


def mark_caches(vllm: Vllm) -> None:
    """Put settings and version among vLLM's variables: a graph that was compiled without them is another graph."""
    text = repr(sorted(vllm.asked.shared().items(), key=str))
    digest = f"{__version__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _variables()[CACHE_KEY] = lambda: digest


def unmark_caches() -> None:
    """Take the entry away."""
    _variables().pop(CACHE_KEY, None)


def _variables() -> dict[str, Any]:
    variables: dict[str, Any] = importlib.import_module("vllm.envs").environment_variables
    return variables
