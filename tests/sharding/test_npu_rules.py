"""Rules of torch_npu's fused operators, under the schemas and meta kernels of the real wheel, on CPU kernels.

Nothing here runs on an NPU. The tests show that the rules are right if the operators compute what their pages say.
"""

import os
from math import prod
from pathlib import Path

import npu_wheel
import pytest
import torch
from launch import launch
from torch import nn

B, N, S, D = 2, 4, 6, 8


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def bools(*shape):
    return torch.rand(shape) < 0.3


def attention(order, kv_heads=N, ops="npu_fusion_attention", **more):
    shapes = {"BNSD": (B, 0, S, D), "BSND": (B, S, 0, D), "TND": (B * S, 0, D), "BSH": (B, S, 0), "SBH": (S, B, 0)}

    def of(heads):
        heads = heads * D if order in ("BSH", "SBH") else heads
        return normal(*(heads if size == 0 else size for size in shapes[order]))

    tensors = (of(N), of(kv_heads), of(kv_heads))
    return (getattr(torch.ops.npu, ops).default, *tensors, N, order), {"scale": 0.3, **more}


def cases():
    """Operator, positional and keyword arguments; and strategies that the rule has to give beside whole tensors."""
    npu, whole = torch.ops.npu, "R R R -> R R R R"
    batch, heads = "S({0}) S({0}) S({0}) -> S({0}) S(0) S(0) R", "S({0}) S({0}) S({0}) -> S({0}) S(1) S(1) R"
    for order, dims in {"BNSD": (0, 1), "BSND": (0, 2), "BSH": (0, 2), "SBH": (1, 2)}.items():
        expected = [whole, batch.format(dims[0]), heads.format(dims[1])]
        yield f"attention {order}", *attention(order), expected
    yield "attention, 2 heads of keys", *attention("BNSD", 2), [batch.format(0), heads.format(1)]
    yield "attention, 1 head of keys", *attention("BNSD", 1), ["S(1) R* R* -> S(1) S(1) S(1) R"]
    yield (
        "attention BSH, 2 heads of keys",
        *attention("BSH", 2),
        [batch.format(0)],
    )  # and no heads: test_heads_stay_whole
    ends = {"actual_seq_qlen": [4, B * S], "actual_seq_kvlen": [4, B * S]}
    yield "attention TND", *attention("TND", **ends), ["S(1) S(1) S(1) -> S(1) S(1) S(1) R"]
    mask = attention("BNSD", atten_mask=bools(B, 1, S, S), pse=normal(1, N, S, S))
    yield "attention, mask, pse", *mask, ["S(0) S(0) S(0) S(0) R* -> S(0) S(0) S(0) R"]
    yield "attention, square mask", *attention("SBH", atten_mask=bools(S, S)), ["S(1) S(1) S(1) R -> S(1) S(0) S(0) R"]
    yield "attention, sink", *attention("BNSD", sink=normal(N)), ["S(1) S(1) S(1) S(0) -> S(1) S(1) S(1) R"]
    yield "attention v2", *attention("BNSD", ops="npu_fusion_attention_v2"), [heads.format(1)]
    x, halves = normal(B, S, N, D), normal(B, S, 2 * D)
    tables = normal(1, S, 1, D), normal(1, S, 1, D)
    yield "rms_norm", (npu.npu_rms_norm.default, x, normal(D)), {}, ["S(2) R* -> S(2) S(2)"]
    yield "rms_norm of 2 dims", (npu.npu_rms_norm.default, x, normal(N, D)), {}, ["S(1) R* -> S(1) S(1)"]
    yield "add_rms_norm", (npu.npu_add_rms_norm.default, x, x + 1, normal(D)), {}, ["S(0) S(0) R* -> S(0) S(0) S(0)"]
    yield "rotary_mul", (npu.npu_rotary_mul.default, x, *tables), {}, ["S(2) R* R* -> S(2)", "S(1) S(1) S(1) -> S(1)"]
    turned = (npu.npu_rotary_mul.default, x, *tables), {"rotate": normal(D, D), "rotary_mode": "interleave"}
    yield "rotary_mul, interleaved", *turned, ["S(1) S(1) S(1) R* -> S(1)"]
    both = (npu.npu_apply_rotary_pos_emb.default, x, normal(B, S, 2, D), *tables)
    yield "apply_rotary", both, {}, ["S(2) S(2) R* R* -> S(2) S(2)", "S(1) S(1) S(1) S(1) -> S(1) S(1)"]
    yield "swiglu", (npu.npu_swiglu.default, halves), {}, ["S(0) -> S(0)", "S(1) -> S(1)"]
    yield "swiglu of dim 0", (npu.npu_swiglu.default, halves, 0), {}, ["S(2) -> S(2)"]
    yield "geglu", (npu.npu_geglu.default, halves), {}, ["S(1) -> S(1) S(1)"]
    for name in ("gelu", "fast_gelu", "silu"):
        yield name, (getattr(npu, f"npu_{name}").default, halves), {}, ["S(2) -> S(2)"]
    yield "dtype_cast", (npu.npu_dtype_cast.default, halves, torch.float64), {}, ["S(2) -> S(2)", "P(sum) -> P(sum)"]
    scores = normal(B, N, S, S), bools(B, 1, S, S)
    yield (
        "masked softmax",
        (npu.npu_scaled_masked_softmax.default, *scores),
        {},
        ["S(1) R -> S(1)", "S(2) S(2) -> S(2)"],
    )
    causal = (npu.npu_scaled_masked_softmax.default, *scores), {"fixed_triu_mask": True}
    yield "causal softmax", *causal, ["S(0) S(0) -> S(0)"]
    biased = (npu.npu_linear.default, normal(S, D), normal(N, D), normal(N))
    yield "linear", biased, {}, ["R* S(0) S(0) -> S(1)", "S(1) S(1) R* -> P(sum)"]
    yield "bmm", (npu.npu_bmmV2.default, normal(B, S, D), normal(B, D, S), []), {}, ["S(0) S(0) -> S(0)"]


def every_strategy_gives_the_whole():
    """On 2 and 3 simulated ranks, and on 2 x 2."""
    import npu_operators
    from brute_force import call_of, check_all, describe

    from ascend_parallel.sharding.rules import strategies

    npu_operators.knows_the_chip()
    meta = {name: outputs_on_meta(args, named) for name, args, named, _ in cases()}
    kept = npu_operators.register()
    for name, (target, *args), named, expected in cases():
        call, tensors = call_of(target, *args, **named)
        assert [tuple(output.shape) for output in call.outputs] == meta[name], name  # the wheel's own shapes
        found = {describe([strategy]) for strategy in strategies(call)}
        assert set(expected) <= found, f"{name}: {sorted(found)}"
        for mesh in ((2,), (3,), (2, 2)):
            check_all(call, tensors, mesh)
    print("every check was made", kept is not None)


def outputs_on_meta(args, named):
    from torch.utils import _pytree as pytree

    (target, *args), named = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (list(args), named))
    results = target(*args, **named)
    results = results if isinstance(results, tuple) else (results,)
    return [tuple(result.shape) for result in results if isinstance(result, torch.Tensor)]


class Block(nn.Module):
    """A Llama block as MindSpeed's layers run it: sequence first, its norms, rotation, attention and MLP fused."""

    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.Parameter(torch.rand(hidden) + 0.5) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x, cos, sin, mask):
        npu = torch.ops.npu
        y, _ = npu.npu_rms_norm(x, self.norm1)
        q, k, v = (proj(y).unflatten(-1, (self.heads, -1)) for proj in (self.q, self.k, self.v))
        q, k = npu.npu_rotary_mul(q, cos, sin), npu.npu_rotary_mul(k, cos, sin)
        q, k, v = (t.flatten(2) for t in (q, k, v))
        y = npu.npu_fusion_attention(q, k, v, self.heads, "SBH", atten_mask=mask, scale=0.25)[0]
        x = x + self.o(y)
        y, _ = npu.npu_rms_norm(x, self.norm2)
        return x + self.down(npu.npu_swiglu(self.up(y)))


class Blocks(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(Block(**sizes) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return x.square().mean()


def blocks(seq, batch, hidden, heads, ffn):
    torch.manual_seed(5)
    x, tables = torch.randn(seq, batch, hidden), [torch.randn(seq, 1, 1, hidden // heads) for _ in range(2)]
    return Blocks(hidden=hidden, heads=heads, ffn=ffn), (x, *tables, torch.ones(seq, seq, dtype=torch.bool).triu(1))


def every_fused_operator_is_cut():
    """Each rank of dp 2 x tp 2 runs a quarter of attention and rotations. Without the rules it runs all."""
    import npu_operators

    from ascend_parallel.sharding import ProcessMesh, propagate, trace
    from ascend_parallel.sharding.layout import cuts
    from ascend_parallel.sharding.rules import registry

    npu_operators.knows_the_chip()
    model, batch = blocks(2048, 2, hidden=1024, heads=16, ffn=2816)
    graph, mesh = trace(model, batch), ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    fused = [node for node in graph.nodes.values() if node.call is not None and node.call.name.startswith("npu.")]
    assert len(fused) == 2 * 6

    def slices():
        plan = propagate(graph, mesh)
        of = [(plan.layouts[node.values[0]], len(node.outputs[0].shape)) for node in fused]
        return plan.cost, sorted(prod(cuts(layout, mesh.shape, dims)) for layout, dims in of)

    cost, found = slices()
    assert found.count(4) >= 2 * 3  # attention and rotations, at least
    for name in [name for name in registry.ENTRIES if name.startswith("npu.")]:
        del registry.ENTRIES[name]
    cost_before, found = slices()
    assert set(found) == {1}
    print(f"predicted step, ms: {1e3 * cost_before:.1f} without the rules, {1e3 * cost:.1f} with them")
    assert cost < cost_before
    print("every check was made")


def a_planned_model_trains_like_one_card():
    """4 ranks, dp 2 x tp 2: losses and parameters after three steps against one card in float64."""
    import npu_operators
    import torch.distributed as dist
    from one_card import losses_of

    from ascend_parallel.sharding import ProcessMesh, ShardedModule, propagate, trace

    npu_operators.knows_the_chip()
    dist.init_process_group("gloo")
    whole, batch = blocks(16, 4, hidden=64, heads=4, ffn=96)
    whole, batch = whole.double(), tuple(t.double() if t.is_floating_point() else t for t in batch)
    graph, mesh = trace(whole, batch), ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    kept = npu_operators.register()
    heads = {"layers.*:npu_fusion_attention": (([(None, "dp", "tp")] * 3 + [None]), None)}
    sharded = ShardedModule(whole, propagate(graph, mesh, heads, objective="time"))
    attention = next(node for node in graph.nodes.values() if node.call and "attention" in node.call.name)
    assert [str(placed) for placed in sharded.plan.layouts[attention.values[0]]] == ["S(1)", "S(2)"]
    losses = [  # not foreach, for which torch_npu asks the chip
        losses_of(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), [batch] * 3)
        for model in (whole, sharded)
    ]
    assert losses[0][0] > losses[0][-1]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(sharded.full_state_dict(), whole.state_dict(), rtol=1e-8, atol=1e-10)
    print("every check was made", kept is not None)


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """The variables of a process that has the real torch_npu."""
    try:
        found = npu_wheel.environment(tmp_path_factory.mktemp("stubs"))
    except npu_wheel.Missing as reason:
        pytest.skip(str(reason))
    return found | {"PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(Path(__file__).parent)])}


def run(environ, function, ranks=1):
    code = f"import test_npu_rules as tests; tests.{function.__name__}()"
    for rank, ended in enumerate(launch(code, [environ] * ranks, fresh=True, timeout=240)):
        assert ended.returncode == 0, f"rank {rank}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        assert "every check was made" in ended.stdout


@pytest.mark.slow
def test_every_strategy_gives_the_whole(environ):
    run(environ, every_strategy_gives_the_whole)


@pytest.mark.slow
def test_every_fused_operator_is_cut(environ):
    run(environ, every_fused_operator_is_cut)


@pytest.mark.slow
def test_a_planned_model_trains_like_one_card(environ):
    run(environ, a_planned_model_trains_like_one_card, ranks=4)
