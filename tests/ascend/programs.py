"""What ranks run: layers and models on an emulated NPU, compared with the unsharded truth or with the plain run."""

import contextlib

import torch
import torch.distributed as dist

# Whether rows come later where the host is ahead alone; so small a model's host never is.
ONLY_AHEAD = False


def device():
    """Return this rank's device."""
    return torch.device("npu", dist.get_rank()) if dist.get_backend() == "hccl" else torch.device("cpu")


def on_device(tensor, dtype):
    return tensor.detach().to(dtype).to(device()).requires_grad_()


def part(tensor, dim):
    return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def whole_layer(shape, n, dtype, seed=3):
    """Return input, weight, output and output gradient of the unsharded layer in float64, of `dtype`'s precision."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape, (n, shape[-1]), (*shape[:-1], n))
    x, weight, dy = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes)
    x.requires_grad_(), weight.requires_grad_()
    y = torch.nn.functional.linear(x, weight)
    y.backward(dy)
    return x, weight, y, dy


def error(found, expected):
    """Return the largest error, relative to the largest magnitude."""
    expected = expected.detach()
    return ((found.detach().cpu().double() - expected).abs().max() / expected.abs().max()).item()


def layer_cuts(shape, n, chunks):
    """Name the matmuls of a layer, so that each is cut: chunks of so small ones would leave units of an NPU idle."""
    ranks, k = dist.get_world_size(), shape[-1]
    m = torch.Size(shape[:-1]).numel()
    gathers = dict.fromkeys([(m, k, n // ranks), (m, n, k // ranks)], gather_sizes(m, chunks))
    return {**gathers, **dict.fromkeys([(m, n // ranks, k), (m, k // ranks, n)], chunks)}


def gather_sizes(m, chunks):
    """Return the rows of each chunk of a gather: two ranks gather whole, unless they are told sizes, in sixteens."""
    rows = m // dist.get_world_size()
    step = max(16, rows // chunks // 16 * 16)
    full = min(chunks - 1, (rows - 1) // step)
    return (*[step] * full, rows - full * step) if full else 1


def gpt_cuts(config, tokens, chunks):
    """Name the matmuls of Megatron's layers in `gpt`."""
    ranks, h, ffn = dist.get_world_size(), config.hidden_size, config.ffn_hidden_size
    narrow = [h // ranks, ffn // ranks, 3 * h // ranks, 2 * ffn // ranks, 128 // ranks]
    gathers = dict.fromkeys([(tokens, h, size) for size in narrow], gather_sizes(tokens, chunks))
    return {**gathers, **dict.fromkeys([(tokens, size, h) for size in narrow], chunks)}


def layer(kind, shape, n, dtype, sequence, **settings):
    """Run a layer forward and backward; return the errors of output and gradients, and the results themselves."""
    from ascend_parallel import Settings, column_linear, row_linear

    cuts = layer_cuts(shape, n, settings["num_chunks"]) if "num_chunks" in settings else {}
    group, chosen = dist.group.WORLD, Settings(**settings, customized_coc=cuts)
    x, weight, y, dy = whole_layer(shape, n, dtype)
    if kind == "column":
        x_r, w_r = on_device(part(x, 0) if sequence else x, dtype), on_device(part(weight, 0), dtype)
        y_r = column_linear(x_r, w_r, group=group, settings=chosen, sequence_parallel=sequence)
        y_r.backward(part(dy, -1).to(dtype).to(device()))
        truth = part(y, -1), part(x.grad, 0) if sequence else x.grad, part(weight.grad, 0)
    else:
        x_r, w_r = on_device(part(x, -1), dtype), on_device(part(weight, -1), dtype)
        y_r = row_linear(x_r, w_r, group=group, settings=chosen, sequence_parallel=sequence)
        y_r.backward((part(dy, 0) if sequence else dy).to(dtype).to(device()))
        truth = part(y, 0) if sequence else y, part(x.grad, -1), part(weight.grad, -1)
    found = [y_r, x_r.grad, w_r.grad]
    return [error(a, b) for a, b in zip(found, truth, strict=True)], [each.detach().cpu() for each in found]


def counted(function, *arguments, **options):
    """Run a function; return its result, and how often each operator of CANN and HCCL was called by it."""
    from emulated_ascend import counts

    torch.npu.synchronize()
    before = counts()
    result = function(*arguments, **options)
    torch.npu.synchronize()
    return result, {
        name: number - before.get(name, 0) for name, number in counts().items() if number != before.get(name, 0)
    }


def layer_and_counts(*arguments):
    *given, settings = arguments
    return counted(layer, *given, **settings)


class PlainNorm:
    """torch's RMSNorm: Megatron's wrapper of it refuses sequence parallelism."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)


@contextlib.contextmanager
def megatron(sequence, experts, context=False, **options):
    """Megatron's groups, on an NPU as a script with transfer_to_npu has them; yield a TransformerConfig.

    context: the ranks share sequences, not layers.
    """
    import torch_npu.contrib.transfer_to_npu  # noqa: F401
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_utils.te_general_gemm = None  # 0.16.1 names it without TransformerEngine too
    ranks = dist.get_world_size()
    parallel_state.destroy_model_parallel()
    tensor_ranks = 1 if context else ranks
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks,
        context_parallel_size=ranks // tensor_ranks,
        expert_model_parallel_size=ranks if experts else 1,
        expert_tensor_parallel_size=1 if experts else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    values = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tensor_model_parallel_size": tensor_ranks,
        "context_parallel_size": ranks // tensor_ranks,
        "sequence_parallel": sequence, "use_cpu_initialization": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "bias_activation_fusion": False, "apply_rope_fusion": False, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
    }  # fmt: skip
    if experts:
        values |= {
            "num_moe_experts": 4, "expert_model_parallel_size": ranks, "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2, "expert_tensor_parallel_size": 1, "moe_ffn_hidden_size": 48,
        }  # fmt: skip
    try:
        yield TransformerConfig(**values | options)
    finally:
        parallel_state.destroy_model_parallel()


def gpt_model(config, settings, seq):
    """Return a small GPT of Megatron-core, with drawn weights, and its attention mask."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    import ascend_parallel
    from ascend_parallel.ops.host_lead import LEADS

    LEADS.asked = ONLY_AHEAD
    if settings is not None:
        chunks = settings["num_chunks"]
        cuts = {} if chunks == "auto" else {"customized_coc": gpt_cuts(config, 2 * seq, chunks)}
        ascend_parallel.configure(**settings, **cuts)
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainNorm
    spec = TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=PlainNorm)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=seq, position_embedding_type="rope")
    model = model.to(config.params_dtype).to(device())
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            drawn = torch.Generator().manual_seed(100 * index + dist.get_rank())
            weight.copy_(torch.randn(weight.shape, generator=drawn) * 0.05)
    return model, torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1).to(device())


def gpt(settings, sequence=False, experts=False, steps=2, seq=32, run_step=lambda step: step(), **options):
    """Train a small GPT of Megatron-core; return losses and gradients, and the coverage.

    run_step: runs each step, which returns loss and gradients.
    """
    import ascend_parallel

    with megatron(sequence, experts, **options) as config:
        model, mask = gpt_model(config, settings, seq)
        tokens = torch.randint(0, 128, (2, seq), generator=torch.Generator().manual_seed(2)).to(device())
        positions = torch.arange(seq).repeat(2, 1).to(device())
        stepper = torch.optim.AdamW(model.parameters(), 1e-3)

        def step():
            loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
            loss.backward()
            grads = [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None]
            stepper.step()
            stepper.zero_grad()
            return loss.detach().cpu(), grads

        results = []
        for _ in range(steps):
            loss, grads = run_step(step)
            results.append(loss)
        covered = str(ascend_parallel.coverage(model))
    return [*results, *grads], covered


def gpt_and_counts(settings, options):
    result, numbers = counted(gpt, settings, **options)
    return (*result, numbers)


def block(settings, sequence=False, captured=False, steps=4, seq=32):
    """Run the layers of a small GPT of Megatron-core; return outputs and gradients of each step, and the counts.

    captured: the third step is captured, forward and backward, and it and those behind it are replays.
    """
    from megatron.core import tensor_parallel

    import ascend_parallel

    ranks, rank = dist.get_world_size(), dist.get_rank()
    with megatron(sequence, False) as config:
        tensor_parallel.model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
        model, mask = gpt_model(config, settings, seq)
        layers, rotary = model.decoder, model.rotary_pos_emb(seq)
        x = torch.zeros(seq // ranks if sequence else seq, 2, config.hidden_size, device=device(), requires_grad=True)
        dy = torch.zeros_like(x)

        def step():
            for each in (x, *layers.parameters()):
                each.grad = None
            y = layers(x, mask, rotary_pos_emb=rotary)
            y.backward(dy)
            return y.detach()

        ascend_parallel.ops.COUNTS.clear()
        results, graph = [], torch.npu.NPUGraph()
        for number in range(steps):
            drawn = torch.Generator().manual_seed(10 * number + (rank if sequence else 0))
            with torch.no_grad():
                for each in (x, dy):
                    each.copy_(torch.randn(each.shape, generator=drawn))
            if not captured or number < 2:
                y = step()
            else:
                if number == 2:
                    with torch.npu.graph(graph):
                        y = step()
                graph.replay()
            results += [y.cpu(), x.grad.cpu(), *(weight.grad.cpu() for weight in layers.parameters())]
    return results, ascend_parallel.ops.COUNTS.as_dict()
