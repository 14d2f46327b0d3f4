"""COC_DETERMINISTIC=tp in Megatron-core: a GPT trains with the same bits at every tensor-parallel degree."""

import os
import subprocess

import pytest
import torch
import torch.distributed as dist
from every_degree import at_degrees, digest, refused_in_the_tree
from gpt_training import LLAMA, megatron
from launch import forked_python
from marks import promise
from megatron_cpu import finalize_gradients, megatron_on_cpu, next_token_loss, small_gpt
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

PACKED_IS_KNOWN = pytest.mark.skipif(
    version_tuple(installed_version()) < (0, 16), reason="does not tell which weights are packed as [gate; up]"
)
STEPS, FEW = 5, 3  # those of a second comparison, whose first is a test of its own
TREE = {"deterministic": "tp"}
# Fused [gate; up] and grouped queries, dropout, an untied output layer.
GPT = {"hidden": 128, "heads": 16, "ffn_hidden_size": 512, "tied": False, **LLAMA, "num_query_groups": 8}
GPT |= {"attention_dropout": 0.1, "hidden_dropout": 0.1}
BIASES = {"hidden": 128, "heads": 8, "ffn_hidden_size": 512}


def of_all_ranks(parameter, tensor, group):
    """The weight or gradient of all ranks, packed as that of one rank."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    if not getattr(parameter, "tensor_model_parallel", False):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    dim, stride = parameter.partition_dim, parameter.partition_stride
    packed = zip(*(part.chunk(stride, dim) for part in parts), strict=True)
    return torch.cat([torch.cat(of_ranks, dim) for of_ranks in packed], dim)


class ClippingOptimizer:
    """Megatron's DDP and optimizer in fp32. Its scaling and its 16-bit optimizer take CUDA tensors alone."""

    def __init__(self, model):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, params_dtype=torch.float32)
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def zero_grad(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self):
        """Scale the gradients by Megatron's norm, and step; return the norm."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.model])
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        for parameter in self.model.parameters():
            parameter.main_grad.mul_(min(1.0, 0.1 / norm))
        self.optimizer.step()
        return norm


class PlainOptimizer(torch.optim.AdamW):
    def __init__(self, model):
        super().__init__(model.parameters(), lr=1e-2)
        self.model = model

    def step(self):
        finalize_gradients(self.model)
        super().step()
        return 1.0


def train(group, options, settings, dtype=torch.float32, steps=STEPS, batch=(4, 32)):
    """The losses and norms of some steps of [sequences, tokens], and digests of all weights after them, of all ranks.

    Megatron-core has no sequence parallelism on one rank.
    """
    if group.size() == 1:
        options = {**options, "sequence_parallel": False}

    with megatron(group.size()), megatron_on_cpu(schedules=True):
        ascend_parallel.configure(**settings)
        model = small_gpt(seq=32, dtype=dtype, **options)
        optimizer = ClippingOptimizer(model) if dtype is torch.float32 else PlainOptimizer(model)
        torch.manual_seed(11)
        losses, norms = [], []
        for _ in range(steps):
            tokens = torch.randint(256, (batch[0], batch[1] + 1))
            optimizer.zero_grad()
            loss = next_token_loss(optimizer.model, tokens)
            loss.backward()
            norms.append(optimizer.step())
            losses.append(loss.item().hex())
        found = {name: digest(of_all_ranks(p, p.data, group)) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, **found}


@promise("degree-megatron")
@pytest.mark.sample("swiglu")
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(GPT, torch.float32, id="swiglu", marks=PACKED_IS_KNOWN),
        pytest.param(BIASES, torch.bfloat16, id="biases, bf16"),
    ],
)
def test_a_gpt_trains_alike_at_every_degree(ranks, options, dtype):
    one, two, four = at_degrees(ranks, train, options, TREE, dtype)
    assert two == one
    assert four == one
    assert len(set(one["losses"])) == STEPS
    assert all(norm > 0.1 for norm in one["norms"])  # all steps clip


def of_batches(group, cases):
    return [train(group, options, TREE, torch.float32, 2, batch) for options, batch in cases]


@PACKED_IS_KNOWN
@promise("degree-tails")
def test_batches_and_features_that_are_no_whole_vectors(ranks):
    """SwiGLU, and gelu with biases: which elements come last depends on the degree."""
    gated, biased = {**GPT, "hidden": 64, "heads": 8, "ffn_hidden_size": 344}, {**BIASES, "hidden": 64, "heads": 8}
    cases = [(gated, (1, 7)), ({**biased, "ffn_hidden_size": 344}, (3, 13))]
    one, two, four = at_degrees(ranks, of_batches, cases)
    assert two == one
    assert four == one


@promise("degree-megatron-sequence")
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(
            {**GPT, "hidden_dropout": 0.0, "qk_layernorm": True},
            torch.float32,
            id="swiglu, query norms",
            marks=PACKED_IS_KNOWN,
        ),
        pytest.param(
            {**BIASES, "recompute": True}, torch.bfloat16, id="biases, recompute, bf16", marks=pytest.mark.slow
        ),
    ],
)
def test_sequence_parallelism_changes_nothing(ranks, options, dtype):
    """The gradients of norms and row-parallel biases are summed over tokens in the tree, on one rank as on several."""
    (one,) = at_degrees(ranks, train, options, TREE, dtype, FEW, degrees=(1,))
    shared = {**options, "sequence_parallel": True}
    assert at_degrees(ranks, train, shared, TREE, dtype, FEW, degrees=(2, 4)) == [one, one]


@PACKED_IS_KNOWN
@promise("degree-megatron")
@pytest.mark.slow
def test_chunks_and_eight_ranks_change_nothing(ranks):
    (one,) = at_degrees(ranks, train, GPT, TREE, torch.float32, FEW, degrees=(1,))
    chunks = {**TREE, "num_chunks": 4}
    assert at_degrees(ranks, train, GPT, chunks, torch.float32, FEW, degrees=(2, 8)) == [one, one]


@pytest.mark.slow
def test_without_it_degrees_differ(ranks):
    """The comparison above can fail, also without dropout."""
    options = {**GPT, "attention_dropout": 0.0}
    one, two = at_degrees(ranks, train, options, {"deterministic": True}, torch.float32, FEW, degrees=(1, 2))
    assert one["losses"] != two["losses"]


IMPORTS = """
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.optimizer.optimizer import MegatronOptimizer
import ascend_parallel
print(sorted(patch.target.split(".")[-2] for patch in ascend_parallel.status().patches if patch.applied))
"""


@pytest.mark.slow
def test_an_exported_variable_patches_what_is_imported_later():
    """The modules of the sums import the layers themselves: they cannot be imported while the layers are."""
    environ = {**os.environ, "COC_DETERMINISTIC": "tp"}
    done = subprocess.run([forked_python(), "-c", IMPORTS], env=environ, capture_output=True, text=True)
    for name in ("VocabParallelCrossEntropy", "_VocabParallelCrossEntropy", "DotProductAttention", "MegatronOptimizer"):
        assert repr(name) in done.stdout, done.stderr


REFUSALS = {
    "dropout of rows": ({"sequence_parallel": True, "hidden_dropout": 0.1}, "hidden_dropout=0.1"),
    "rows": (
        {"sequence_parallel": True, "seq": 6, "heads": 8},
        "12 rows of a norm or a bias, which ranks share, are not a multiple of 8",
    ),
    "features": ({"hidden": 68, "heads": 4}, "decoder.layers.0.self_attention.linear_qkv (ColumnParallelLinear): 102"),
    "fused loss": ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion=True"),
}


@on_ranks(2)
def test_a_layer_of_a_class_that_is_not_known_is_an_error(group):
    kind = type("MambaMixer", (torch.nn.Module,), {"__module__": "megatron.core.ssm.mamba_mixer"})
    with megatron(group.size()):
        ascend_parallel.configure(**TREE)
        mixer = kind()
        mixer.in_proj = small_gpt().decoder.layers[0].mlp.linear_fc1
        found = refused_in_the_tree(lambda: mixer.in_proj(torch.randn(4, 64)))
    assert "how megatron.core.ssm.mamba_mixer.MambaMixer packs its weight is not known" in found


@promise("degree-refusals")
@pytest.mark.parametrize(("options", "words"), REFUSALS.values(), ids=REFUSALS)
@on_ranks(2)
def test_what_has_no_tree_is_an_error(group, options, words):
    options = {"seq": 32, **options}
    tokens = torch.randint(256, (2, options["seq"] + 1))
    with megatron(group.size()):
        text = refused_in_the_tree(lambda: next_token_loss(small_gpt(**options), tokens))
        assert "COC_DETERMINISTIC=tp" in text
        assert words in text
