"""Models of the frameworks on emulated NPUs against the same ranks on CPU and gloo: losses and gradients."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from emulated_ascend.ranks import Ranks, preload

preload("torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._inductor.compile_fx")


def device():
    return torch.device("npu", dist.get_rank()) if dist.get_backend() == "hccl" else torch.device("cpu")


@pytest.fixture(scope="module")
def pools():
    made = {}

    def pool(backend, count=2):
        if (backend, count) not in made or not made[backend, count].alive:
            made[backend, count] = Ranks(count, backend=backend)
        return made[backend, count]

    yield pool
    for each in made.values():
        each.close()


def compare(pools, program, *arguments, near=1e-5):
    """Run a program on both kinds of ranks; its tensors have to agree."""
    found, expected = (pools(backend).run(program, *arguments) for backend in ("hccl", "gloo"))
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=near, atol=near)


def full(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(model, x, steps=2, **options):
    stepper = torch.optim.AdamW(model.parameters(), 1e-2, **options)
    losses = []
    for _ in range(steps):
        loss = model(x).float().pow(2).mean()
        loss.backward()
        losses.append(full(loss))
        grads = [full(weight.grad) for weight in model.parameters()]
        stepper.step()
        stepper.zero_grad()
    return [*losses, *grads, *(full(weight) for weight in model.parameters())]


def torch_styles(sequence):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device())
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    rows = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    for block in model:
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel(),
            "down": RowwiseParallel(**rows),
        }
        if sequence:
            plan["norm"] = SequenceParallel()
        parallelize_module(block, mesh, plan)
    if sequence:
        whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model, mesh, whole)
    return trained(model, x, foreach=False)


@pytest.mark.parametrize("sequence", [False, True])
def test_torch_tensor_parallel(pools, sequence):
    compare(pools, torch_styles, sequence)


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device())
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1 + dist.get_rank())).to(device())
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, x)


def test_fsdp2(pools):
    compare(pools, fsdp)


class PlainNorm:
    """torch's RMSNorm: Megatron's wrapper of it refuses sequence parallelism."""

    def __new__(cls, config, hidden_size, eps=1e-5, **_):
        return nn.RMSNorm(hidden_size, eps=eps)


def megatron(sequence):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    npu = device().type == "npu"
    if npu:
        import torch_npu.contrib.transfer_to_npu  # noqa: F401
    else:
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.Tensor.cuda = lambda self, *_, **__: self
        tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    ranks = dist.get_world_size()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    if npu:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=ranks,
        sequence_parallel=sequence,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainNorm
    spec = TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=PlainNorm)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=16, position_embedding_type="rope").to(device())
    with torch.no_grad():  # the same weights on both kinds of ranks
        for index, weight in enumerate(model.parameters()):
            weight.copy_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 * index + dist.get_rank())) * 0.05
            )
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2)).to(device())
    positions = torch.arange(16).repeat(2, 1).to(device())
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1).to(device())
    stepper = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(2):
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
        loss.backward()
        losses.append(full(loss))
        grads = [full(weight.grad) for weight in model.parameters() if weight.grad is not None]
        stepper.step()
        stepper.zero_grad()
    return [*losses, *grads]


@pytest.mark.parametrize("sequence", [False, True])
def test_megatron_gpt(pools, sequence):
    compare(pools, megatron, sequence, near=2e-5)


def hugging_face(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "qwen3":
        options |= {"head_dim": 16}
    if family == "mixtral":
        options |= {"num_local_experts": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).to(device())
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2)).to(device())
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [full(loss), *(full(weight.grad) for weight in model.parameters())]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_transformers(pools, family):
    compare(pools, hugging_face, family, near=5e-5)
