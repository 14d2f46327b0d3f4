"""vLLM with COC_DETERMINISTIC=invariant: the logprobs of a trainer that has the same arithmetic, bit for bit.

replaced        by
linear methods  products in tiles (ops/row_tiles.py), of weights as they were loaded
row layers      the blocks and the tree, in chunks whose exchange runs under the next one's products
norms, rotary   torch's operators, in transformers' order
attention       a backend of vLLM's registry (invariant_attention.py)
log-softmax     ops/log_softmax.py

A model that has anything else is refused when a worker has loaded it, with the module's name (`refuse_unproved`).
Written against vLLM 0.32; what runs is proved by tests/vllm/test_invariant.py.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ascend_parallel.ops.blocks import BlockedFeatures
from ascend_parallel.ops.degree_error import DegreeError
from ascend_parallel.ops.log_softmax import log_softmax
from ascend_parallel.ops.row_tiles import ROWS, multiply_tiles
from ascend_parallel.ops.rows import split_rows
from ascend_parallel.ops.tree import matmul_all_reduce
from ascend_parallel.patches.base import Function, Patch, PatchError, PatchSet, full_name, in_range
from ascend_parallel.patches.framework_patch import OnTop
from ascend_parallel.patches.vllm.layers import Vllm
from ascend_parallel.patches.vllm.operators import LINEAR, compilation_mode

VERSIONS = ">=0.32,<0.33"
LAYERS = "vllm.model_executor.layers"
EMBEDDING = f"{LAYERS}.vocab_parallel_embedding"
ROTARY = f"{LAYERS}.rotary_embedding.base"
SAMPLER = "vllm.v1.sample.sampler"
REGISTRY = "vllm.v1.attention.backends.registry"
SELECTOR = "vllm.v1.attention.selector"
BACKEND = "ascend_parallel.patches.vllm.invariant_attention.InvariantBackend"

# The models that tests have compared with a trainer.
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# The layers of vLLM that they are made of, whose arithmetic is replaced or is exact.
PROVED = (
    f"{LINEAR}.QKVParallelLinear",
    f"{LINEAR}.MergedColumnParallelLinear",
    f"{LINEAR}.ColumnParallelLinear",
    f"{LINEAR}.RowParallelLinear",
    f"{EMBEDDING}.VocabParallelEmbedding",
    f"{EMBEDDING}.ParallelLMHead",
    f"{LAYERS}.layernorm.RMSNorm",
    f"{ROTARY}.RotaryEmbedding",
    f"{LAYERS}.activation.SiluAndMul",
    f"{LAYERS}.attention.attention.Attention",
    f"{LAYERS}.logits_processor.LogitsProcessor",
)
# Modules that compute nothing themselves, and the files of the models, whose modules call those above.
WITHOUT_ARITHMETIC = (f"{LAYERS}.rotary_embedding.common.ApplyRotaryEmb", "torch.nn.modules.container.ModuleList")
FILES = tuple(f"vllm.model_executor.models.{name}" for name in ("llama", "mistral", "qwen2", "qwen3"))
METHODS = (f"{LINEAR}.UnquantizedLinearMethod", f"{EMBEDDING}.UnquantizedEmbeddingMethod")


class InvariantVllm(Vllm):
    """The installed vLLM, whose layers have the arithmetic of COC_DETERMINISTIC=invariant."""

    def put_in_force(self) -> None:
        """Have models built from now on take this package's attention."""
        super().put_in_force()
        registry = importlib.import_module(REGISTRY)
        registry.register_backend(registry.AttentionBackendEnum.CPU_ATTN, BACKEND)
        _forget_selected()

    def put_out_of_force(self) -> None:
        """Have models built from now on take vLLM's own."""
        super().put_out_of_force()
        importlib.import_module(REGISTRY).AttentionBackendEnum.CPU_ATTN.clear_override()
        _forget_selected()

    def uncovered(self, layer: Any) -> str | None:
        """Return None: every row layer runs here, or its model is refused."""
        return None

    def uncovered_everywhere(self) -> str | None:
        """Return None."""
        return None


def _forget_selected() -> None:
    """Have vLLM select the backend anew: it keeps what it has selected for the process."""
    if SELECTOR in sys.modules:
        sys.modules[SELECTOR]._cached_get_attn_backend.cache_clear()


def refuse_other_versions(version: str, package: str) -> None:
    """Raise `PatchError` for a version of vLLM whose layers were not compared with a trainer."""
    if not in_range(version, VERSIONS):
        raise PatchError(
            f"vllm: COC_DETERMINISTIC=invariant needs a version {VERSIONS}, found {version}, whose layers were not "
            f"compared with a trainer: install one (pip install '{package}{VERSIONS}'), or unset COC_DETERMINISTIC"
        )


def patches(vllm: InvariantVllm, worker: str) -> list[Patch]:
    """Return the patches of the layers that are known once vLLM's linear layers are imported.

    worker: the class that wraps a worker.
    """
    return [
        _patch(f"{LINEAR}.UnquantizedLinearMethod.apply", lambda _: _apply, ("self", "layer", "x", "bias")),
        _patch(f"{LINEAR}.UnquantizedLinearMethod.process_weights_after_loading", lambda _: _leave, ("self", "layer")),
        _patch(f"{LINEAR}.RowParallelLinear.forward", lambda _: row_forward(vllm), ("self", "input_")),
        _patch(f"{worker}.load_model", lambda original: load_model(original, vllm), None, inherited=True),
    ]


def _patch(
    target: str,
    replacement: Callable[[Function], Function],
    parameters: tuple[str, ...] | None,
    inherited: bool = False,
) -> Patch:
    reason = "computes as a trainer with COC_DETERMINISTIC=invariant"
    return Patch(target=target, replacement=replacement, parameters=parameters, reason=reason, inherited=inherited)


def _later(module: str, made: Callable[[], list[Patch]]) -> OnTop:
    """Return the patches of a module, once the program has imported it; none without COC_DETERMINISTIC=invariant."""

    def patch_set(vllm: Any) -> PatchSet:
        return PatchSet("vllm", None, made() if isinstance(vllm, InvariantVllm) else [])

    return OnTop(module, patch_set)


LATER = [
    _later(
        EMBEDDING,
        lambda: [
            _patch(f"{EMBEDDING}.UnquantizedEmbeddingMethod.apply", lambda _: _apply, ("self", "layer", "x", "bias")),
            _patch(
                f"{EMBEDDING}.UnquantizedEmbeddingMethod.process_weights_after_loading",
                lambda _: _leave,
                ("self", "layer"),
            ),
        ],
    ),
    _later(
        f"{LAYERS}.layernorm",
        lambda: [_patch(f"{LAYERS}.layernorm.RMSNorm.forward", lambda _: norm_forward, None, inherited=True)],
    ),
    _later(
        ROTARY,
        lambda: [
            _patch(
                f"{ROTARY}.RotaryEmbedding.forward",
                lambda _: rotary_forward,
                None,
                inherited=True,
            )
        ],
    ),
    _later(SAMPLER, lambda: [_patch(f"{SAMPLER}.Sampler.compute_logprobs", lambda _: log_softmax, ("logits",))]),
]


def _leave(self: Any, layer: Any) -> None:
    """Leave the weight as it was loaded: vLLM would pack it for its own matmul."""


def _apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ layer.weight.t() + bias`` [..., N], in tiles."""
    y = x.new_empty(x.shape[:-1].numel(), layer.weight.shape[0])
    multiply_tiles(x.reshape(y.shape[0], x.shape[-1]), layer.weight.t(), y)
    return (y if bias is None else y + bias).view(*x.shape[:-1], y.shape[1])


def row_forward(vllm: InvariantVllm) -> Function:
    """Make the method that replaces ``RowParallelLinear.forward``."""

    def forward(self: Any, input_: torch.Tensor) -> Any:
        x = input_.reshape(-1, input_.shape[-1])
        y = matmul_all_reduce(
            x,
            self.weight.t(),
            vllm.group_of(self),
            split_rows(len(x), vllm.in_request.number, ROWS),
            row_tile=ROWS,
            features=BlockedFeatures((x.shape[1],), self.tp_size, True),
        ).wait()
        added = None if self.skip_bias_add else self.bias
        y = (y if added is None else y + added).view(*input_.shape[:-1], y.shape[1])
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    vars(forward)["ascend_parallel"] = vllm
    return forward


def norm_forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Return the norm of x, as transformers has it; beside it the sum with a residual, if there is one."""
    added = x if residual is None else x + residual
    wide = added.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    y = self.weight * scaled.to(x.dtype)
    return y if residual is None else (y, added)


def rotary_forward(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return query and key [tokens, heads * D], rotated in transformers' order."""
    cos, sin = self.cos_sin_cache.to(query.dtype)[positions.flatten()].chunk(2, -1)
    cos, sin = (torch.cat([each, each], -1).unsqueeze(1) for each in (cos, sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(cos), -1, self.head_size)
        first, second = heads.chunk(2, -1)
        return ((heads * cos) + (torch.cat([-second, first], -1) * sin)).view(x.shape)

    return rotated(query), None if key is None else rotated(key)


def load_model(original: Function, vllm: InvariantVllm) -> Function:
    """Make the method that replaces ``WorkerWrapperBase.load_model``: it refuses a model that is not proved."""

    @functools.wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_options(self.vllm_config)
        loaded = original(self, *args, **kwargs)
        model = self.worker.get_model()
        for reason in unproved(model):
            raise DegreeError(f"vllm: {reason}")
        vllm.used = True
        rows = [module for module in model.modules() if full_name(type(module)) == f"{LINEAR}.RowParallelLinear"]
        vllm.agree(vllm.group_of(rows[0]), next(model.parameters()).device)
        return loaded

    return load


def refuse_options(config: Any) -> None:
    """Raise `DegreeError` for an option of an engine whose arithmetic is not that of a trainer."""
    parallel, model = config.parallel_config, config.model_config
    cache = config.cache_config.cache_dtype
    ranks, heads = parallel.tensor_parallel_size, model.get_total_num_kv_heads()
    reasons = {
        "compiled graphs: give --enforce-eager (enforce_eager=True)": compilation_mode(config) > 0,
        "speculative decoding": config.speculative_config is not None,
        "adapters (LoRA)": config.lora_config is not None,
        "quantised weights": config.quant_config is not None,
        f"kv_cache_dtype={cache}": cache not in ("auto", model.dtype),
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        f"devices of type {config.device_config.device_type}": config.device_config.device_type != "cpu",
        f"{heads} heads of keys on {ranks} ranks": heads % ranks != 0,
    }
    for reason, asked in reasons.items():
        if asked:
            raise DegreeError(f"vllm: {reason} is not proved to have the bits of a trainer")


def unproved(model: torch.nn.Module) -> Iterator[str]:
    """Yield why a model is refused, with the name of the module."""
    kind = type(model).__name__
    if kind not in MODELS:
        yield f"{kind} was not compared with a trainer: {', '.join(MODELS)} were"
    for name, module in model.named_modules():
        path = full_name(type(module))
        described = f"{name} ({type(module).__name__})"
        if path not in (*PROVED, *WITHOUT_ARITHMETIC) and type(module).__module__ not in FILES:
            yield f"{described} has an arithmetic that was not compared with a trainer's"
        method = getattr(module, "quant_method", None)
        if method is not None and path in PROVED[:6] and full_name(type(method)) not in METHODS:
            yield f"{described} multiplies with {type(method).__name__}"
        if path == f"{LINEAR}.RowParallelLinear":
            if refusal := BlockedFeatures((module.input_size_per_partition,), module.tp_size, True).refusal:
                yield f"{described}: {refusal}"
            if not module.input_is_parallel or not module.reduce_results:
                yield f"{described} cuts its input, or leaves its sum to others"
        if getattr(module, "do_llama_4_scaling", False):
            yield f"{described} scales queries by their position"
        if path == f"{LAYERS}.layernorm.RMSNorm" and (module.variance_size_override or not module.has_weight):
            yield f"{described} has another form"
        if path == f"{ROTARY}.RotaryEmbedding" and not _is_plain_rotary(module):
            yield f"{described} rotates a part of a head, or pairs side by side"
        if path == f"{LAYERS}.attention.attention.Attention" and (asked := _asked_of_attention(module.impl)):
            yield f"{described}: {asked}"


def _is_plain_rotary(module: Any) -> bool:
    return bool(module.is_neox_style and module.rotary_dim == module.head_size)


def _asked_of_attention(impl: Any) -> str:
    """Return the options of an attention that are not computed, in words; "": nothing."""
    if type(impl).__name__ != BACKEND.rpartition(".")[2].replace("Backend", "Impl"):
        return f"its attention runs in {type(impl).__name__}"
    asked = {
        "a sliding window": impl.sliding_window not in (None, -1),
        "a soft cap": bool(impl.logits_soft_cap),
        "ALiBi": impl.alibi_slopes is not None,
        "sinks": impl.sinks is not None,
        f"attention of type {impl.attn_type}": impl.attn_type != "decoder",
        "keys of another layer": impl.kv_sharing_target_layer_name is not None,
    }
    return ", ".join(name for name, given in asked.items() if given)
