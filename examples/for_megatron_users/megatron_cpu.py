"""Train the real Megatron-core on a CPU over gloo; for examples and tests.

Megatron-core asks CUDA for a device and for random states even in code that needs no GPU. The context
`megatron_on_cpu` answers on CUDA's behalf. Importing this module changes nothing and imports no Megatron. The other
functions are the parts of a small training script:

    with megatron_on_cpu():
        start_model_parallel(tensor_parallel=2)       # one process per rank, RANK and so on set
        model = small_gpt(sequence_parallel=True)
        next_token_loss(model, tokens).backward()
        finalize_gradients(model)
        stop_model_parallel()

Tried with megatron-core 0.10 to 0.19. No line below depends on the version: the shims replace functions of torch.cuda
or stable names of Megatron. Put a difference between versions into a separate function.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

__all__ = [
    "PlainNorm",
    "end_model_parallel",
    "finalize_gradients",
    "megatron_on_cpu",
    "next_token_loss",
    "small_gpt",
    "start_model_parallel",
    "stop_model_parallel",
]


@contextlib.contextmanager
def megatron_on_cpu(*, schedules: bool = False) -> Iterator[None]:
    """Run Megatron-core on the CPU inside this context; restore everything on exit.

    schedules
        Also support `megatron.core.pipeline_parallel`. Off by default: it intercepts every call of a torch
        function, which costs about a microsecond each.

    Nested contexts change nothing, except that an inner context may add `schedules`.
    """
    with contextlib.ExitStack() as stack:
        if torch.cuda.current_device is not _current_device:
            for owner, name, value in _shims():
                stack.enter_context(mock.patch.object(owner, name, value))
            # Megatron warns when drawing from its CUDA states changes the CPU's state; here this is intended.
            tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
            tracker_log.addFilter(_is_not_about_cpu_state)
            stack.callback(tracker_log.removeFilter, _is_not_about_cpu_state)
        if schedules:
            # p2p communication synchronises the device before it returns received tensors.
            stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *_, **__: None))
            stack.enter_context(_CudaMeansCpu())
        yield


def _shims() -> list[tuple[Any, str, Any]]:
    """Return the replacements: owner, name, new value."""
    from megatron.core.tensor_parallel import random

    return [
        # Megatron allocates communication buffers, rotary tables and attention scores on this device.
        (torch.cuda, "current_device", _current_device),
        # Since 0.19 Megatron asks for the stream of CUDA graphs before it reduces gradients.
        (torch.cuda, "current_stream", torch.cpu.current_stream),
        # Megatron keeps a state of the CUDA generator for each kind of parallelism (and, to recompute,
        # for each layer) and swaps them in and out. On a CPU these names use torch's default generator,
        # so Megatron's own tracker works: dropout differs between ranks where it must, is equal where it
        # must, and repeats when recomputed.
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda.random, "get_rng_state", _get_rng_state),
        (torch.cuda, "manual_seed", _manual_seed),
        # torch.cuda would delay this until a GPU is first used: never.
        (random, "_set_cuda_rng_state", _set_rng_state),
        # Without these two, a tracker filled with the states of this context would outlive it.
        (random, "_CUDA_RNG_STATE_TRACKER", None),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False),
    ]


def _current_device() -> Any:
    return torch.device("cpu")


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _is_not_about_cpu_state(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


class _CudaMeansCpu(TorchFunctionMode):
    """Redirect ``device="cuda"``, ``.cuda()`` and pinned memory to the CPU: the schedules count tokens on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):  # the slices of rotary embeddings
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def start_model_parallel(tensor_parallel: int, *, pipeline_parallel: int = 1, seed: int = 1234) -> None:
    """Create Megatron's groups over gloo and seed its random states; every rank makes the same call.

    Initialises torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless it is initialised.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel, pipeline_model_parallel_size=pipeline_parallel
    )
    model_parallel_cuda_manual_seed(seed)


def end_model_parallel() -> None:
    """Destroy all groups except the default group; keep torch.distributed initialised.

    Megatron only drops its references. A gloo group that stays alive keeps its threads, and these spin after a peer
    has closed its end.
    """
    from megatron.core import parallel_state

    from ascend_parallel.sharding.mesh import forget_groups  # needs scipy, which training with Megatron does not

    parallel_state.destroy_model_parallel()
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    forget_groups()


def stop_model_parallel() -> None:
    """Destroy Megatron's groups and shut torch.distributed down."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class PlainNorm:
    """Torch's LayerNorm or RMSNorm for Megatron's layer specs: Megatron's wrapper refuses sequence parallel."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return the norm that `config` names, its parameters marked with `config.sequence_parallel`."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm: Any = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def small_gpt(
    *,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    vocab: int = 256,
    seq: int = 64,
    sequence_parallel: bool = False,
    tied: bool = True,
    rope: bool = False,
    recompute: bool = False,
    seed: int = 1234,
    dtype: torch.dtype = torch.float32,
    change_layer: Callable[[Any], None] | None = None,
    **config_overrides: Any,
) -> torch.nn.Module:
    """Return Megatron's GPTModel, built from its local layers, small enough for a CPU.

    ``tied`` shares the embedding's weight with the output layer; ``rope`` turns queries and keys by their positions in
    place of learned embeddings of positions; ``recompute`` recomputes every layer in backward; ``change_layer``
    changes the submodules of a layer's spec; ``config_overrides`` go to TransformerConfig. The norms are Megatron's
    own, or `PlainNorm` with sequence parallel. The weights depend only on ``seed``: tensor-parallel ranks hold slices
    of the same whole model. The caller's random state is unchanged. With pipeline parallel each stage
    holds its share of the layers and draws its own weights.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = _small_config(num_layers, hidden, heads, sequence_parallel, recompute, dtype, config_overrides)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    spec = _with_plain_norms(layer, config) if sequence_parallel else layer
    if change_layer is not None:
        change_layer(layer.submodules)
    with torch.random.fork_rng(devices=[]):
        _manual_seed(seed)
        model: torch.nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=seq,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope" if rope else "learned_absolute",
        )
    return model.to(dtype)  # the position embedding ignores params_dtype


def _with_plain_norms(layer: Any, config: Any) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = PlainNorm
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=PlainNorm)


def _small_config(
    num_layers: int,
    hidden: int,
    heads: int,
    sequence_parallel: bool,
    recompute: bool,
    dtype: torch.dtype,
    overrides: Mapping[str, Any],
) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Fused kernels that exist only for CUDA.
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    if recompute:
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**(values | dict(overrides)))


def next_token_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of next-token prediction.

    tokens  [batch, seq + 1]  the same on every tensor-parallel rank
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    hidden_from = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
    losses: torch.Tensor = model(inputs, positions, hidden_from, labels=labels)
    return losses.mean()


def finalize_gradients(model: torch.nn.Module) -> None:
    """All-reduce the partial gradients over tensor-parallel ranks; call this after backward.

    With sequence parallel a rank sees only some rows, so replicated norms and row-parallel biases get partial
    gradients. Megatron's finalize_model_grads does this (and more), but only for a model inside Megatron's
    DistributedDataParallel.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
