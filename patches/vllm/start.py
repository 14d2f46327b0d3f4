"""What happens once a worker has loaded its model: a line in the log; and what vLLM's caches have to know."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ascend_parallel.patches.base import Function
from ascend_parallel.patches.vllm.chunks import ladder_of, least_tokens
from ascend_parallel.version import __version__

if TYPE_CHECKING:
    from ascend_parallel.patches.vllm.layers import Vllm

log = logging.getLogger("ascend_parallel")

LINEAR = "vllm.model_executor.layers.linear"
# The name of our entry among vLLM's variables.
CACHE_KEY = "ASCEND_PARALLEL"


def initialize_from_config(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``WorkerWrapperBase.initialize_from_config``, which follows the profile run."""

    @functools.wraps(original)
    def initialize(self: Any, kv_cache_configs: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 0:
            log.warning("%s", covered(self.worker.get_model(), self.vllm_config, vllm))
        return original(self, kv_cache_configs)

    return initialize


def covered(model: torch.nn.Module, config: Any, vllm: Vllm) -> str:
    """Return a sentence: how many layers of a model run with overlap, from which number of tokens on."""
    if is_compiled(config):
        return (
            "vllm: compiled: not covered. vLLM compiles this model, and overlap is not in compiled graphs; "
            "--enforce-eager (enforce_eager=True) runs it with overlap"
        )
    layers = [module for module in model.modules() if is_row_layer(module)]
    reasons = Counter(filter(None, map(vllm.uncovered, layers)))
    others = "".join(f"; {count}: {reason}" for reason, count in reasons.items())
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return (
        f"vllm: overlap covers {len(layers) - sum(reasons.values())} of {len(layers)} row-parallel layers, in steps of "
        f"{least_tokens(device)} tokens or more, in about {vllm.settings.num_chunks} chunks of "
        f"{ladder_of(device)[0]} to {ladder_of(device)[-1]} tokens{others}"
    )


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
