"""Hugging Face's decoders, traced as they are, and the regions of their forwards: against one card in float64."""

from dataclasses import replace

import hf_decoders as example
import pytest
import torch
from decoders import EXACT, check_step, decoder, in_float64
from marks import promise
from pool import on_ranks
from sharded_models import compare, made, mesh_of
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.rules import registry
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing import function_calls
from ascend_parallel.sharding.tracing.trace import TraceError, trace
from ascend_parallel.training import OverlapOptions

# Mixtral's router computes its softmax in float32.
ROUNDED = {"rtol": 1e-5, "atol": 1e-8}
VARIANTS = {
    "Qwen2": {},
    "Llama": {},
    "Mistral": {"attn_implementation": "eager"},
    "Mixtral": {},
    "GPT2": {},
}


def trained(group, name, dp, tp, stages, changes, of_one_card=None):
    strategy = example.strategy_of(name, dp, tp, stages, **changes)
    return check_step(name, strategy, changes, of_one_card, ROUNDED if name == "Mixtral" else EXACT)


def union(held):
    return set().union(*held)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_decoder_trains_data_and_tensor_parallel(ranks, name):
    held = ranks(4).run(trained, name, 2, 2, 1, VARIANTS[name])
    assert union(held) == set(dict(decoder(name).named_parameters()))


def test_a_decoder_trains_tensor_and_pipeline_parallel(ranks):
    held = ranks(4).run(trained, "GPT2", 1, 2, 2, {})
    assert union(held) == set(dict(decoder("GPT2").named_parameters()))
    assert held[0] != held[-1]


@promise("planned-decoders")
@pytest.mark.slow
def test_a_decoder_trains_data_tensor_and_pipeline_parallel(ranks):
    held = ranks(8).run(trained, "Llama", 2, 2, 2, {})
    assert union(held) == set(dict(decoder("Llama").named_parameters()))


@pytest.mark.slow
@on_ranks(2)
def test_a_bias_added_twice_is_seen(group):
    """Without overlapped matmuls, which add a bias themselves."""
    strategy = replace(example.strategy_of("GPT2", 1, 2, 1), overlap=OverlapOptions(operators=False))
    kept = registry.ENTRIES["aten.addmm"]
    registry.ENTRIES["aten.addmm"] = registry.RegisteredRule(kept.rule)
    try:
        with pytest.raises(AssertionError, match="not close"):
            check_step("GPT2", strategy, {}, None, EXACT)
    finally:
        registry.ENTRIES["aten.addmm"] = kept


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_the_experts_of_transformers_train(ranks, experts):
    """On one card the experts are gathered for each token: torch's grouped matmul knows no float64."""
    ranks(4).run(trained, "Mixtral", 2, 2, 1, *({"experts_implementation": name} for name in (experts, "batched_mm")))


@pytest.mark.slow
@on_ranks(4)
def test_the_example_has_the_losses_of_one_process(group):
    """Within float32, in which the model computes its norms."""
    losses, expected = example.train("Llama", example.strategy_of("Llama", 2, 2), steps=3)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert losses[-1] < losses[0]


WIDE = {"hidden_size": 128, "intermediate_size": 1024}


def planned(model, args, kwargs, mesh):
    graph = trace(model, args, kwargs)
    return propagate(graph, mesh, example.tensor_parallel(model), data_dim="dp", objective="redistribution")


@on_ranks(2)
def test_the_models_own_loss(group):
    """The model's own loss, by the functions of the package; its last layers contract over 1024."""
    tokens = torch.cat([example.batch_of(seed)[0] for seed in range(2)])
    with in_float64("Llama"):
        model = decoder("Llama", **WIDE)
        kwargs = {"input_ids": tokens, "labels": tokens}
        sharded = ShardedModule(model, planned(model, (), kwargs, mesh_with_tp((1, 2))))
        found, expected = sharded(**kwargs), model(**kwargs)
        found.loss.backward()
        expected.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, **EXACT)
    torch.testing.assert_close(found.loss, expected.loss)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(sharded.full_gradients(), gradients, **ROUNDED)
    assert sum(fusion.operator is not None for fusion in sharded.fused) >= 4


def mesh_with_tp(shape):
    return ProcessMesh(torch.arange(shape[0] * shape[1]).reshape(shape), ["dp", "tp"])


@on_ranks(4)
def test_a_decoder_runs_eagerly_with_its_mask_as_an_input(group):
    """The model's own Python, where the mask is an input: while it is traced it would make another mask."""
    tokens = example.batch_of(0)[0]
    length = tokens.shape[1]
    kwargs = {"input_ids": tokens, "attention_mask": torch.ones(8, 1, length, length).tril().bool()}
    with in_float64("Llama"):
        whole, model = decoder("Llama"), decoder("Llama")
        plan = planned(model, (), kwargs, mesh_with_tp((2, 2)))
        found = parallelize(model, plan)(**kwargs).logits
        expected = whole(**kwargs).logits
        found.square().sum().backward()
        expected.square().sum().backward()
    torch.testing.assert_close(found, expected, **EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, **EXACT)


class Regions(nn.Module):
    """Regions with and without gradients, a decorated function, and autocast that is off."""

    def __init__(self, width=12):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            frozen = self.second(h).sin()
            self.seen.mul_(0.5).add_(h.mean((0, 1)))
            same = h.to(h.dtype)  # h itself, with its gradient
            with torch.enable_grad():
                h = h * self.third.weight[0] * frozen
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            fixed = self.third(h)
        return self.second(h) * frozen + self.third(same) + self.decorated(h) * fixed

    @torch.no_grad()
    def decorated(self, x):
        return self.first(x).cos()


class Mapped(Regions):
    """A mask made by torch.vmap, as older versions of transformers make theirs."""

    def forward(self, x):
        h = super().forward(x)
        at_or_before = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))
        places = torch.arange(x.shape[1])
        return F.scaled_dot_product_attention(h, h, h, attn_mask=at_or_before(places, places)) + h


def columns(graph, mesh):
    return propagate(graph, mesh, {"first": ([None, ("mp", 1), None], None)}, objective="redistribution")


@promise("no-grad-scopes")
@pytest.mark.parametrize("kind", [Regions, Mapped])
@on_ranks(2)
def test_regions_have_the_gradients_of_one_card(group, kind):
    x = torch.linspace(-1, 1, 2 * 6 * 12, dtype=torch.float64).reshape(2, 6, 12)
    model, whole = made(kind), made(kind)
    with torch.no_grad():
        graph = trace(model, (x.clone().requires_grad_(),))
    assert any(node.call is not None and node.call.name == "aten.detach.default" for node in graph.nodes.values())
    sharded = ShardedModule(model, columns(graph, mesh_of((2,))))
    compare(whole, sharded, x)
    torch.testing.assert_close(sharded.full_state_dict()["seen"], whole.seen, **EXACT)
    if kind is Regions:
        eager, whole = parallelize(model, columns(graph, mesh_of((2,)))), made(kind)
        for each in (eager, whole):
            each(x).sum().backward()
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, **EXACT)


@on_ranks(2)
def test_a_gradient_through_a_region_without_is_seen(group):
    kept, function_calls.detached = function_calls.detached, lambda returned, leaves: returned
    try:
        x = torch.ones(2, 6, 12, dtype=torch.float64)
        model = made(Regions)
        sharded = ShardedModule(model, columns(trace(model, (x.requires_grad_(),)), mesh_of((2,))))
        with pytest.raises(AssertionError, match="not close"):
            compare(model, sharded, x)
    finally:
        function_calls.detached = kept


def test_what_depends_on_data_is_named_with_the_line():
    tokens = example.batch_of(0)
    with pytest.raises(TraceError, match=r"modeling_mixtral\.py:\d+: .*shape of a tensor depends.*batched_mm"):
        trace(decoder("Mixtral", experts_implementation="eager"), tokens)
    with pytest.raises(TraceError, match=r"DynamicCache.*config\.use_cache = False"):
        trace(decoder("Llama", use_cache=True), tokens)


class Counted(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Chosen(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


class Numpy(nn.Module):
    def forward(self, x):
        return x * float(x.numpy().sum())


class Cast(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            return x @ x


@promise("planned-decoders")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counted, r"runs aten\.item\.default.*argument of the forward"),
        (Chosen, r"runs aten\.index\.Tensor: the shape of a tensor depends"),
        (Numpy, r".*numpy computes outside of torch"),
        (Cast, r"autocast inside the forward.*x\.to\(dtype\)"),
    ],
)
def test_the_line_and_the_remedy(kind, reason):
    with pytest.raises(TraceError, match=rf"test_hf_decoders\.py:\d+: .*{reason}"):
        trace(kind(), (torch.ones(2, 2),))
