"""Passes that fuse operators: what they fuse, and that the fused graph computes the same."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ascend_parallel.sharding import shard
from ascend_parallel.sharding.graph import Ref
from ascend_parallel.training.graph_passes import fuse_operators
from ascend_parallel.training.loss import trace_with_loss

B, H, L, S, E = 2, 4, 5, 6, 8


def run(graph, model, batch):
    """Run a graph's operators in order."""
    inputs, values = iter(batch), {}
    for node in graph.nodes.values():
        if node.call is None:
            known = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
            values[node.name, 0] = next(inputs) if node.kind == "input" else known[node.source]
            continue
        read = [values[value.node, value.index] for value in node.inputs]
        args, kwargs = pytree.tree_map(
            lambda leaf: read[leaf.index] if isinstance(leaf, Ref) else leaf,  # noqa: B023
            (tuple(node.call.args), dict(node.call.kwargs)),
        )
        found = node.call.target(*args, **kwargs)
        found = [value for value in (found if isinstance(found, (list, tuple)) else [found]) if value is not None]
        assert [tuple(value.shape) for value in found] == [meta.shape for meta in node.outputs]
        values |= {(node.name, index): value for index, value in enumerate(found)}
    return values[graph.outputs.node, graph.outputs.index]


def squared(model, *batch):
    return model(*batch).square().mean()


def check(model, batch, name, ops_fused):
    """Merge; compare value and every gradient with the model's own; return the merged operators' names."""
    graph = trace_with_loss(model, squared, batch)
    fused, found = fuse_operators(graph, (name,))
    assert found == {name: ops_fused}
    wants = [*model.parameters(), *(tensor for tensor in batch if tensor.requires_grad)]
    expected, got = squared(model, *batch), run(fused, model, batch)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for gradient, truth in zip(torch.autograd.grad(got, wants), torch.autograd.grad(expected, wants), strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-9, atol=1e-12)
    return [node.call.name.split(".")[1] for node in fused.nodes.values() if node.call]


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.bias = how, nn.Parameter(torch.randn(H, L, S).double())
        self.register_buffer("mask", torch.ones(L, S).bool().tril().logical_not())
        self.register_buffer("wide", self.mask.expand(3, 1, L, S).clone())

    def forward(self, q, k, v):
        return getattr(self, self.how)(q, k, v)

    def plain(self, q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    def divided(self, q, k, v):
        return torch.matmul(F.softmax(q @ k.permute(0, 1, 3, 2) / math.sqrt(E), dim=3), v)

    def filled(self, q, k, v):
        scores = (q @ k.transpose(2, 3)) * 0.3
        return scores.masked_fill(self.mask, float("-inf")).softmax(-1) @ v

    def biased(self, q, k, v):
        return (self.bias + (q @ k.transpose(2, 3)) * 0.3).softmax(-1) @ v

    def dropped(self, q, k, v):
        return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 0.5, False) @ v

    def kept(self, q, k, v):
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return weights @ v + weights.mean()

    def almost(self, q, k, v):
        scores = (q @ k.transpose(2, 3)).masked_fill(self.mask, -1e9)
        return scores.softmax(-1) @ v

    def wide_mask(self, q, k, v):
        return (q[:1] @ k[:1].transpose(2, 3)).masked_fill(self.wide, float("-inf")).softmax(-1) @ v[:1]

    def over_queries(self, q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1), 2) @ v

    def broadcast(self, q, k, v):
        return torch.softmax(q @ k[:, :1].transpose(-2, -1), -1) @ v

    def other_scale(self, q, k, v):
        return (torch.softmax((q @ k.transpose(-2, -1)) * self.bias, -1) @ v) * 2


def qkv():
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, length, E).double().requires_grad_() for length in (L, S, S))


@pytest.mark.parametrize(
    ("how", "ops_fused"), [("plain", 3), ("divided", 4), ("filled", 4), ("biased", 5), ("dropped", 4)]
)
def test_attention_becomes_one_operator(how, ops_fused):
    names = check(Attention(how), qkv(), "attention", ops_fused) if how == "biased" else unbiased(how, ops_fused)
    assert (names.count("scaled_dot_product_attention"), names.count("matmul"), names.count("softmax")) == (1, 0, 0)


def unbiased(how, ops_fused):
    model = Attention(how)
    model.bias.requires_grad_(False)
    del model.bias
    return check(model, qkv(), "attention", ops_fused)


@pytest.mark.parametrize("how", ["kept", "almost", "over_queries", "broadcast", "wide_mask"])
def test_other_attention_stays_as_it_is(how):
    assert "scaled_dot_product_attention" not in unbiased(how, 0)


def test_scores_times_a_tensor_stay_as_they_are():
    assert "scaled_dot_product_attention" not in check(Attention("other_scale"), qkv(), "attention", 0)


def test_what_has_a_strategy_of_its_own_stays_as_it_is():
    class Marked(nn.Module):
        def forward(self, q, k, v):
            matmul = shard(torch.matmul, in_strategy=[("mp", 1, 1, 1), None])
            return matmul(torch.softmax(q @ k.transpose(-2, -1), -1), v)

    graph = trace_with_loss(Marked(), squared, qkv())
    assert fuse_operators(graph, ("attention",))[1] == {"attention": 0}


class Norm(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(E).double())

    def forward(self, x):
        return getattr(self, self.how)(x)

    def llama(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def squared(self, x):
        return (torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-3) * x) * self.weight

    def of_another(self, x):
        return self.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-5))

    def cubed(self, x):
        return self.weight * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5))

    def over_rows(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))

    def shared(self, x):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (x * root) + root


def rows():
    torch.manual_seed(0)
    return (torch.randn(2, 3, E).double().requires_grad_(),)


@pytest.mark.parametrize("how", ["llama", "squared"])
def test_an_rms_norm_becomes_one_operator(how):
    names = check(Norm(how), rows(), "rms_norm", 5)
    assert (names.count("rms_norm"), names.count("rsqrt"), names.count("mean")) == (1, 0, 1)  # the loss's mean


@pytest.mark.parametrize("how", ["of_another", "cubed", "over_rows", "shared"])
def test_another_norm_stays_as_it_is(how):
    assert "rms_norm" not in check(Norm(how), rows(), "rms_norm", 0)
