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
from ascend_parallel.patches.region_choice import now
from ascend_parallel.patches.vllm.auto import (
    COUNTS,
    CUT,
    EAGER,
    WHOLE,
    PlannedCounts,
    StepVariant,
    Sum,
    keep,
    known,
    measure,
    tried_tokens,
)
from ascend_parallel.patches.vllm.bits import LayerMatmul, Multiply, ask
from ascend_parallel.patches.vllm.chunks import LEAST_TOKENS, token_chunks
from ascend_parallel.patches.vllm.layers import Vllm
from ascend_parallel.patches.vllm.operators import (
    LAYER_NAME,
    LINEAR,
    PARALLEL_STATE,
    can_leave_graphs,
    captures_graphs,
    compilation_mode,
    engine_of,
    fusing_pass,
    give_names,
)
from ascend_parallel.patches.vllm.row_wise import method_of, multiplies_by_rows
from ascend_parallel.version import __version__

log = logging.getLogger("ascend_parallel")

# The two ends of a layer, as its attributes name them.
ENDS = ("input", "output")
# The name of our entry among vLLM's variables.
CACHE_KEY = "ASCEND_PARALLEL"


def load_model(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``WorkerWrapperBase.load_model``, which a graph follows."""

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(self, *args, **kwargs)
        config = self.vllm_config
        vllm.forget_model(engine_of(config))
        if is_compiled(config) and fusing_pass(config) is None:
            model, context = self.worker.get_model(), config.compilation_config.static_forward_context
            rows = {module for module in model.modules() if is_row_layer(module) and vllm.uncovered(module) is None}
            if rows:  # settings decide whether graphs have operators, in which ranks would wait for each other
                vllm.agree(vllm.group_of(next(iter(rows))), next(model.parameters()).device)
            vllm.own_graphs = keeps_own_graphs(config, self.worker, model, vllm)
            if not vllm.own_graphs:
                vllm.operators = give_names(model, rows, context)
        return loaded

    return load


def initialize_from_config(original: Function, vllm: Vllm) -> Function:
    """Make the method that replaces ``WorkerWrapperBase.initialize_from_config``, which follows the profile run."""

    @functools.wraps(original)
    def initialize(self: Any, kv_cache_configs: Any) -> Any:
        model, config = self.worker.get_model(), self.vllm_config
        texts = [covered(model, config, vllm)]
        if vllm.bits is not None:
            texts.append(str(vllm.bits))
        made = original(self, kv_cache_configs)
        if vllm.bits is not None and (vllm.settings.auto or vllm.settings.tune):
            texts.append(timed(self.worker.model_runner, model, config, vllm))
        if dist.is_initialized() and dist.get_rank() == 0:
            log.warning("%s", "; ".join(texts))
        return made

    return initialize


def covered(model: torch.nn.Module, config: Any, vllm: Vllm) -> str:
    """Ask which chunks keep the bits of a model's matmuls; return in words what of it runs with overlap.

    Every rank of the model's tensor-parallel group calls this.
    """
    compiled, operators = is_compiled(config), has_operators(config, vllm)
    if compiled and (fusing := fusing_pass(config)) is not None:
        return (
            f"vllm: compiled: not covered. {fusing} of pass_config fuses the all-reduces of vLLM's graphs; without it, "
            "or with --enforce-eager (enforce_eager=True), they run with overlap"
        )
    inner = (getattr(module, "base_layer", None) for module in model.modules())
    vllm.adapted.update(module for module in inner if isinstance(module, torch.nn.Module))
    rows = [module for module in model.modules() if is_row_layer(module)]
    reasons = [vllm.uncovered(module) or _untraced(module, operators) for module in rows]
    layers = covered_layers(model, vllm, operators)
    others = [f"{count}: {reason}" for reason, count in Counter(filter(None, reasons)).items()]
    if names := vllm.without_effect(next(model.parameters()).device.type):
        others.append(f"{', '.join(names)} has no effect on vLLM's layers")
    text = f"vllm: {'compiled: ' if compiled else ''}overlap covers {len(layers)} of {len(rows)} row-parallel layers"
    if operators and layers:
        text += ", each alone, as one operator of the graphs (past the layers: --enforce-eager, or auto where it gains)"
    if vllm.own_graphs and layers:
        text += ", outside vLLM's own graphs alone"
    if not layers:
        return "; ".join([text, *others])
    group, device = vllm.group_of(layers[0]), next(model.parameters()).device
    vllm.agree(group, device)
    multiplied = linear_layers(model) if vllm.leaves_rows else layers
    vllm.asked_bits(ask(matmuls_of(multiplied), vllm.ladder(device.type), most_tokens(config), group, device))
    if vllm.settings.fused and device.type == "npu":
        text += f", fused from {LEAST_TOKENS} tokens on where torch_npu's operator can run; else"
    text += f", {chunks_in_words(vllm, sums_of(layers), device.type)}"
    return "; ".join([text, *others])


def has_operators(config: Any, vllm: Vllm) -> bool:
    """Tell whether row layers run as operators of compiled graphs."""
    return is_compiled(config) and not vllm.own_graphs


def keeps_own_graphs(config: Any, worker: Any, model: torch.nn.Module, vllm: Vllm) -> bool:
    """Tell whether a compiled model keeps vLLM's own graphs, without operators, for which a small step pays.

    So it is where "auto" can time steps outside them, and no device graph hides what an operator costs.
    """
    device = next(model.parameters()).device.type
    fused = vllm.settings.fused and device == "npu"
    if not vllm.settings.auto or vllm.settings.tune or fused or not vllm.leaves_rows or captures_graphs(config, device):
        return False
    return can_leave_graphs(config) and untimed(config, worker.model_runner) is None


def untimed(config: Any, runner: Any) -> str | None:
    """Return the reason why no dummy steps can be timed, or None."""
    if not hasattr(runner, "_dummy_run"):
        return f"by {type(runner).__name__}"
    return "with data parallelism" if config.parallel_config.data_parallel_size > 1 else None


def _untraced(layer: torch.nn.Module, operators: bool) -> str | None:
    """Return the reason why vLLM's own code of a layer is in graphs that have operators, or None."""
    return "its model was loaded another way" if operators and not hasattr(layer, LAYER_NAME) else None


def timed(runner: Any, model: torch.nn.Module, config: Any, vllm: Vllm) -> str:
    """Time dummy steps, and keep the counts of chunks that they are fastest with; return these in words.

    Every rank of the model's tensor-parallel group calls this.
    """
    asked = "COC_TUNE" if vllm.settings.tune else "auto"
    device = next(model.parameters()).device
    group = importlib.import_module(PARALLEL_STATE).get_tp_group().device_group
    most, least = most_tokens(config), 2 * vllm.ladder(device.type)[0]
    if not (tokens := tried_tokens(most, least)):
        return f"{asked}: nothing is timed, since no step has {least} tokens: none is cut"
    sums = sums_of(covered_layers(model, vllm, has_operators(config, vllm)))
    decider = vllm.decider if vllm.settings.tune else None
    if decider is not None:
        planned = known(decider, sums, tokens, group, device.type)
        if planned is not None:
            vllm.keep_counts(engine_of(config), planned)
            return f"COC_TUNE: chunks known from {vllm.settings.tune}"
    if (why := untimed(config, runner)) is not None:
        return f"{asked}: nothing is timed {why}, so {vllm.in_request.number} chunks"
    like = torch.empty(0, device=device)

    def step(tokens: int, variant: StepVariant) -> None:
        with vllm.trying(variant):
            runner._dummy_run(tokens)
        now(like)

    variants = [WHOLE] if vllm.own_graphs else [WHOLE, *CUT]
    leaves = decider is None and vllm.leaves_rows and can_leave_graphs(config)
    if leaves:
        vllm.may_leave_graphs(model)
        variants += EAGER
    measured = measure(step, tokens, variants, group)
    vllm.keep_counts(engine_of(config), measured)
    if leaves:
        vllm.may_leave_graphs(model, measured)
    if decider is None:
        return f"auto, {measured}"
    keep(
        decider,
        measured,
        sums,
        functools.partial(token_chunks, device=device.type, least=vllm.least_rows),
        group,
        device.type,
    )
    return f"COC_TUNE, {measured}, written to {vllm.settings.tune}"


def chunks_in_words(vllm: Vllm, sums: list[Sum], device: str) -> str:
    """Return into what chunks the steps of row layers are cut."""
    if vllm.in_one:
        return "each in one chunk (COC_MODE=1)"
    ladder, counts = vllm.ladder(device), vllm.counts
    if vllm.settings.auto or vllm.settings.tune:
        count = f"{COUNTS[0]} to {COUNTS[-1]} chunks"
    elif isinstance(counts, PlannedCounts):
        planned = sum(bool(counts.entries_of(each)) for each in sums)
        count = f"the chunks of COC_PLAN for {planned} of {len(sums)} matmuls"
    else:
        count = f"about {vllm.in_request.number} chunks"
    return f"in steps of {2 * ladder[0]} tokens or more, in {count} of {ladder[0]} to {ladder[-1]} tokens"


def covered_layers(model: torch.nn.Module, vllm: Vllm, operators: bool) -> list[Any]:
    """Return the row layers of a model that run with overlap; operators: those of compiled graphs do."""
    rows = (module for module in model.modules() if is_row_layer(module))
    return [layer for layer in rows if (vllm.uncovered(layer) or _untraced(layer, operators)) is None]


def sums_of(layers: Iterable[Any]) -> list[Sum]:
    """Return the sums of row layers over the ranks, each once."""
    return list(
        dict.fromkeys(Sum(each.input_size_per_partition, each.output_size, each.params_dtype) for each in layers)
    )


def most_tokens(config: Any) -> int:
    """Return the largest number of tokens of a step."""
    tokens: int = config.scheduler_config.max_num_batched_tokens
    return tokens


def linear_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers that multiply rows that have arrived, or reduce under their matmul."""
    return [module for module in model.modules() if multiplies_by_rows(module)]


def matmuls_of(layers: Iterable[Any]) -> dict[LayerMatmul, Multiply]:
    """Return a layer's matmul for each shape, dtype and kind of bias."""
    found: dict[LayerMatmul, Multiply] = {}
    for layer in layers:
        k, n = (getattr(layer, f"{end}_size_per_partition", getattr(layer, f"{end}_size")) for end in ENDS)
        bias = None if layer.skip_bias_add else layer.bias
        found.setdefault(
            LayerMatmul(k, n, layer.params_dtype, bias is not None, method_of(layer)),
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
    """Tell whether vLLM compiles its models."""
    return compilation_mode(config) > 0


def mark_caches(vllm: Vllm) -> None:
    """Put settings and version among vLLM's variables: a graph that was compiled without them is another graph."""
    text = repr(sorted(vllm.settings.shared().items(), key=str))
    digest = f"{__version__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    _variables()[CACHE_KEY] = lambda: f"{digest} {vllm.operators}"


def unmark_caches() -> None:
    """Take the entry away."""
    _variables().pop(CACHE_KEY, None)


def _variables() -> dict[str, Any]:
    variables: dict[str, Any] = importlib.import_module("vllm.envs").environment_variables
    return variables
