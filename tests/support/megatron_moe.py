"""Train Megatron-core's mixture of experts on a CPU over gloo: what CUDA has to answer, a small GPT, and steps.

Megatron's all-to-all dispatcher copies its counts on a CUDA stream, and makes numpy arrays of tensors on the GPU only.
Tried with megatron-core 0.13 to 0.19.
"""

import contextlib
import functools
import importlib
from unittest import mock

import torch
from grouped_experts import grouped_experts_on_cpu, te_grouped_mlp
from megatron_cpu import (
    _with_plain_norms,
    end_model_parallel,
    finalize_gradients,
    megatron_on_cpu,
    next_token_loss,
)

import ascend_parallel

MOE = "megatron.core.transformer.moe"


class NoStream:
    """Stands for a CUDA stream: everything has been done when it is asked."""

    def wait_stream(self, other):
        """Wait for nothing."""

    def record_event(self, event=None):
        """Return an event that has happened."""
        return self

    def synchronize(self):
        """Wait for nothing."""


STREAM = NoStream()


def _on_host(tensor, as_numpy=False, record_stream=False):
    """Return what Megatron makes of a tensor on the GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


ALL_GATHER = torch.distributed.all_gather


def _all_gather(outs, x, group=None, **options):
    """Gather rows of which ranks have different numbers: gloo takes equal ones."""
    if len({len(out) for out in outs}) == 1:
        return ALL_GATHER(outs, x, group=group, **options)
    for rank, out in enumerate(outs):
        if rank == group.rank():
            out.copy_(x)
        torch.distributed.broadcast(out, group=group, group_src=rank)
    return None


def _reduce_scatter(out, parts, group=None, **_):
    """Sum parts of different sizes, which gloo does not."""
    for rank, part in enumerate(parts):
        summed = part.clone()
        torch.distributed.reduce(summed, group=group, group_dst=rank)
        if rank == group.rank():
            out.copy_(summed)


@contextlib.contextmanager
def moe_on_cpu(*, schedules=False):
    """Run Megatron-core's mixture of experts on the CPU inside this context; with schedules, its optimizers too."""
    dispatcher = importlib.import_module(f"{MOE}.token_dispatcher")
    utils = importlib.import_module(f"{MOE}.moe_utils")
    with megatron_on_cpu(schedules=schedules), contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Stream", lambda *_, **__: STREAM),
            (torch.cuda, "current_stream", lambda *_, **__: STREAM),
            (dispatcher, "maybe_move_tensor_to_cpu", _on_host),
            (torch.distributed, "all_gather", _all_gather),
            (torch.distributed, "reduce_scatter", _reduce_scatter),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(grouped_experts_on_cpu())
        # Up to 0.16 a router without TransformerEngine reads a name that is not there.
        stack.enter_context(mock.patch.object(utils, "te_general_gemm", None, create=True))
        yield


@contextlib.contextmanager
def expert_parallel(ep, tp=1, etp=1, *, schedules=False, seed=1234):
    """Run with Megatron's groups of `ep` expert-parallel and `tp` tensor-parallel ranks; experts have TP `etp`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with moe_on_cpu(schedules=schedules):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
        )
        model_parallel_cuda_manual_seed(seed)
        try:
            yield
        finally:
            ascend_parallel.configure(num_chunks=1)
            end_model_parallel()


def moe_config(*, hidden=64, heads=4, experts=8, ffn=96, top_k=2, tp=1, ep=2, dtype=torch.float32, **overrides):
    """Return a TransformerConfig of two layers with a mixture of experts."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": 2,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "num_moe_experts": experts,
        "moe_router_topk": top_k,
        "moe_router_pre_softmax": top_k == 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(values | overrides))


def small_moe_gpt(config, *, vocab=256, seq=32, seed=1234, te=False):
    """Return Megatron's GPTModel with its local layers; every layer has experts. The weights depend on `seed` only.

    te: the experts are a TEGroupedMLP
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    if te:
        mlp = layer.submodules.mlp
        parts = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules  # since 0.18
        parts.experts = te_grouped_mlp()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTModel(
            config=config,
            transformer_layer_spec=_with_plain_norms(layer, config) if config.sequence_parallel else layer,
            vocab_size=vocab,
            max_sequence_length=seq,
        )
    return model.to(config.params_dtype)


def skew(model):
    """Make the routers choose among the first four experts with top-2, so that the others get no rows."""
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            with torch.no_grad():
                for expert, scale in ((0, 8.0), (2, 3.0)):  # one of the pair has a positive score
                    parameter[expert] *= scale
                    parameter[expert + 1] = -parameter[expert]
                parameter[4:] = 0


def tokens_of(step, seq=32, batch=2, vocab=256):
    """Return a rank's own batch: every data-parallel rank draws another."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(step + 100 * parallel_state.get_data_parallel_rank())
    return torch.randint(vocab, (batch, seq + 1), generator=generator)


def train(options, settings, steps=3):
    """Train from scratch; return everything that a step computes, the exchanges' counts, and the coverage.

    options: those of `moe_config`, and "skewed" routers, and "te" of `small_moe_gpt`
    """
    options = dict(options)
    skewed, te, outputs = options.pop("skewed", False), options.pop("te", False), []
    ascend_parallel.configure(**settings)
    ascend_parallel.ops.COUNTS.clear()
    model = small_moe_gpt(moe_config(**options), te=te)
    if skewed:
        skew(model)
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(lambda module, x, y: outputs.append(y[0].detach().clone()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {}
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(2):
            loss = next_token_loss(model, tokens_of(step + 10 * micro_batch))
            loss.backward()
            found[f"loss {step}.{micro_batch}"] = loss.detach()
        finalize_gradients(model)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            found[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    found |= {f"weight {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    found |= {f"output {index}": output for index, output in enumerate(outputs)}
    return found, ascend_parallel.ops.COUNTS.as_dict().get("expert_exchange", {}), ascend_parallel.coverage(model)


def compared(group, options, group_counts, tp=1):
    """Return for each number of groups the names that differ from the unpatched run, and the exchanges."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    ep, etp = options.get("ep", group.size() // tp), options.get("expert_tensor_parallel_size", 1)
    options = {"ep": ep, "tp": tp, **options}
    answers = []
    with expert_parallel(ep, tp, etp):
        plain, none, _ = train(options, {"num_chunks": 1})
        assert none == {}
        for count in group_counts:
            model_parallel_cuda_manual_seed(1234)
            found, counts, coverage = train(options, {"num_chunks": count})
            different = [name for name in plain if not torch.equal(plain[name], found[name])]
            answers.append((different, counts, str(coverage), len(plain)))
    return answers
