"""Megatron-core's output projection under the exchange of heads, with the bits of Megatron-core's own behind it."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from fused_gradients import install
from logged import logged
from marks import promise

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from gpt_training import LLAMA
from megatron_cpu import end_model_parallel, megatron_on_cpu, small_gpt

VERSION = version_tuple(importlib.metadata.version("megatron-core"))
pytestmark = pytest.mark.skipif(VERSION < (0, 13), reason="its local attention has no context parallelism before 0.13")
LENGTH, LAYERS = 96, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A GPT whose ranks share sequences, `context` of them; others are replicas.

    ddp: Megatron's DDP holds the gradients in main_grad, to which its layers add them.
    changed: changes a model after it was built, as its name says.
    multiplied: how many products run under an exchange in a step.
    """

    ranks: int = 2
    context: int = 2
    batch: int = 2
    dtype: torch.dtype = torch.float32
    groups: tuple[int, ...] = (1, 2)
    options: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    ddp: bool = False
    changed: str = ""
    multiplied: int = LAYERS


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
CASES = [
    Case(),
    Case(options={**LLAMA, "rope": True, "num_query_groups": 4, "heads": 8, "hidden": 128}, batch=3),
    Case(dtype=torch.bfloat16, options={"heads": 8}, groups=(2, 4)),
    Case(ranks=3, context=3, options={"heads": 12, "hidden": 192}, groups=(1, 2, 4), batch=1),
    Case(ranks=4, context=4, options={"heads": 8, "hidden": 128}, groups=(2,)),
    Case(options={"recompute": True}, multiplied=2 * LAYERS),
    Case(options=SELECTIVE, multiplied=0),
    Case(changed="frozen"),
    Case(changed="adds its bias"),
    Case(options={"cp_comm_type": "all_gather"}),
    Case(settings={"verify_every": 1}),
    Case(options={"gradient_accumulation_fusion": True}, ddp=True),
    Case(options={"gradient_accumulation_fusion": True}, ddp=True, settings={"verify_every": 1}),
    Case(ranks=4, options={"gradient_accumulation_fusion": True, "recompute": True}, ddp=True, multiplied=2 * LAYERS),
    Case(ranks=4, ddp=True, dtype=torch.bfloat16),
]


def layers_of(model):
    return [layer.self_attention for layer in model.decoder.layers]


def built(case):
    """Return a model, and what holds its gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = {"heads": 4, "hidden": 64, **case.options}
    model = small_gpt(seq=LENGTH, context_parallel_size=case.context, dtype=case.dtype, num_layers=LAYERS, **options)
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.02)  # biases that are told apart
    for attention in layers_of(model):
        attention.linear_proj.weight.requires_grad_(case.changed != "frozen")
        if case.changed == "adds its bias":
            attention.linear_proj.skip_bias_add = False
    if not case.ddp:
        return model, model
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=20000)
    return model, DistributedDataParallel(model.config, config, model)


def step(case, model, wrapped):
    """Return loss, gradients of embedded tokens and of weights of a step, and its collectives and products."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    from ascend_parallel.overlap import context

    own, products, kept = context.project, [], []

    def project(*operands):
        products.append(1)
        return own(*operands)

    drawn = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(256, (case.batch, LENGTH + 1), generator=drawn)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": None}
    if "recompute" in str(case.options) or case.settings:  # Megatron's own mask is made on "cuda", also in a backward
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        batch["attention_mask"] = mask.expand(case.batch, 1, LENGTH, LENGTH)
    batch["position_ids"] = torch.arange(LENGTH).expand(case.batch, LENGTH)
    asked = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    batch = get_batch_on_this_cp_rank(batch, **(asked if VERSION >= (0, 18) else {}))
    if case.ddp:
        wrapped.zero_grad_buffer()
    else:
        model.zero_grad()

    def keep(_, inputs, output):
        kept.append(output)
        if output.requires_grad:
            output.retain_grad()

    handle = model.embedding.register_forward_hook(keep)
    COUNTS.clear()
    with mock.patch.object(context, "project", project):
        losses = wrapped(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
        if torch.is_grad_enabled():
            (losses.sum() / 64).backward()
    if case.ddp:
        wrapped.finish_grad_sync()
    handle.remove()
    held = {name: weight.main_grad if case.ddp else weight.grad for name, weight in model.named_parameters()}
    found = {"losses": losses.detach(), "embedded": kept[0].grad}
    found |= {name: x.clone() for name, x in held.items() if x is not None}
    return found, COUNTS.as_dict(), len(products)


def start(case):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(context_parallel_size=case.context)
    model_parallel_cuda_manual_seed(1234)


@contextlib.contextmanager
def sharing(case):
    """Have ranks share sequences inside this context."""
    install()
    torch.set_num_threads(1)
    with megatron_on_cpu(schedules=True):
        ascend_parallel.configure(num_chunks=2, mode=2, **case.settings)
        start(case)
        torch.manual_seed(3)
        try:
            yield
        finally:
            end_model_parallel()
            ascend_parallel.configure(num_chunks=1, verify_every=0)


def watched(model):
    """Have hooks see the output projections; return their handles."""
    return [attention.linear_proj.register_forward_hook(lambda *_: None) for attention in layers_of(model)]


def compared(group, case):
    """Return what differs from projections behind one exchange, whether collectives do, and the products counted."""
    different, products = [], []
    with sharing(case):
        model, wrapped = built(case)
        handles, settings = watched(model), {"mode": 2, **case.settings}
        ascend_parallel.configure(num_chunks=1, **settings)
        plain, _, count = step(case, model, wrapped)
        assert count == 0, "hooks see the layer's own product"
        ran = []
        for groups in case.groups:
            ascend_parallel.configure(num_chunks=groups, **settings)
            ran.append(step(case, model, wrapped)[1])
        for handle in handles:
            handle.remove()
        for groups, expected in zip(case.groups, ran, strict=True):
            ascend_parallel.configure(num_chunks=groups, **settings)
            found, counts, count = step(case, model, wrapped)
            assert found.keys() == plain.keys()
            different += [(groups, name) for name, x in found.items() if not torch.equal(x, plain[name])]
            different += [(groups, "collectives")] if counts != expected else []
            products.append(count)
    return different, products


@promise("context-projection")
@pytest.mark.sample(6)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_it_has_the_bits_of_megatrons_own(ranks, case):
    for different, products in ranks(case.ranks).run(compared, case):
        assert different == []
        assert products == [case.multiplied] * len(case.groups)


class Adapter(torch.nn.Module):
    """Adds a small product to a row layer's, as adapters do."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.down = torch.nn.Parameter(torch.ones(layer.weight.shape[1], 2) * 0.01)

    def forward(self, x):
        y, bias = self.base(x)
        return y + (x @ self.down) @ self.down[: y.shape[-1]].t(), bias


def hooked(name, attach):
    """Return what puts something on a part of each attention, and takes it away."""

    def put(model):
        handles = [attach(getattr(attention, name)) for attention in layers_of(model)]
        return lambda: [handle.remove() for handle in handles]

    return put


def wraps(name):
    """Return what wraps the forward of a part of each attention, whose gradient it sees, and takes that away."""

    def put(model):
        parts = [getattr(attention, name) for attention in layers_of(model)]
        for part in parts:
            part.forward = lambda *args, own=part.forward, **kwargs: own(*args, **kwargs)
        return lambda: [vars(part).pop("forward") for part in parts]

    return put


def of_a_class(kind):
    def put(model):
        parts = [attention.linear_proj for attention in layers_of(model)]
        for part in parts:
            part.__class__ = type("Own", (type(part),), kind)
        return lambda: [setattr(part, "__class__", type(part).__mro__[1]) for part in parts]

    return put


def seen_gradients(model):
    """Wrap the class of core attentions: the gradient of each output is seen."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    own, seen = DotProductAttention.forward, []

    def forward(self, *args, **kwargs):
        o = own(self, *args, **kwargs)
        if o.requires_grad:
            o.register_hook(lambda d_o: seen.append(d_o))
        return o

    DotProductAttention.forward = forward

    def away():
        DotProductAttention.forward = own
        assert len(seen) == LAYERS

    return away


HABITS: dict[str, tuple[Callable, int, str]] = {
    "nothing": (lambda model: lambda: None, LAYERS, ""),
    "before": (
        hooked("linear_proj", lambda part: part.register_forward_pre_hook(lambda *_: None)),
        0,
        "linear_proj has hooks",
    ),
    "another input": (
        hooked("linear_proj", lambda part: part.register_forward_pre_hook(lambda _, args: (args[0] * 1,))),
        0,
        "linear_proj has hooks",
    ),
    "behind": (
        hooked("linear_proj", lambda part: part.register_full_backward_hook(lambda *_: None)),
        0,
        "linear_proj has hooks",
    ),
    "core": (
        hooked(
            "core_attention",
            lambda part: part.register_forward_hook(lambda m, i, o: o.register_hook(lambda g: None) and None),
        ),
        0,
        "core_attention has hooks",
    ),
    "wrapped": (
        wraps("linear_proj"),
        0,
        "linear_proj is a megatron.core.tensor_parallel.layers.RowParallelLinear with a forward of its own",
    ),
    "wrapped core": (wraps("core_attention"), 0, "core_attention is a "),
    "a class": (of_a_class({"forward": lambda self, x: super(type(self), self).forward(x)}), 0, "linear_proj is a "),
    "gradients": (seen_gradients, LAYERS, ""),
    "all modules": (
        lambda model: torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove,
        0,
        "all modules have hooks",
    ),
}


def on_one_rank(group, settings):
    """Return what differs, the products of rank 1, and what it said, where it alone has something around its layers."""
    case, different, products, said = Case(settings=settings), [], {}, {}
    with sharing(case):
        model, _ = built(case)
        plain, expected, _ = step(case, model, model)
        for name, (put, _, _) in HABITS.items():
            ascend_parallel.configure(num_chunks=2, mode=2, **settings)
            with logged() as lines:
                away = put(model) if group.rank() == 1 else lambda: None
                found, counts, products[name] = step(case, model, model)
                away()
            different += [(name, each) for each, x in found.items() if not torch.equal(x, plain[each])]
            different += [(name, "collectives")] if counts != expected else []
            said[name] = [line for line in lines if "projected behind" in line]
    return different, products, said


@promise("one-rank-habits")
@pytest.mark.parametrize("settings", [{}, {"verify_every": 1}], ids=["", "verified"])
def test_what_one_rank_has_around_its_layers_changes_no_collective(ranks, settings):
    (first, *_), (second, products, said) = ranks(2).run(on_one_rank, settings)
    assert first == second == []
    assert products == {name: expected for name, (_, expected, _) in HABITS.items()}
    for name, (_, _, reason) in HABITS.items():
        lines = [line.removeprefix("context_parallel_size=2: SelfAttention: ") for line in said[name]]
        assert len(lines) == bool(reason) and all(line.startswith(reason) for line in lines), (name, said[name])


def used_otherwise(group):
    """Return by name whether losses are those of a projection behind the exchange, and the products that ran."""
    found, case = {}, Case()
    with sharing(case):
        model, _ = built(case)
        handles = watched(model)
        plain = step(case, model, model)[0]["losses"]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cast = step(case, model, model)[0]["losses"]
        for handle in handles:
            handle.remove()

        def right(name, model, expected=plain):
            losses, _, products = step(case, model, model)
            found[name] = torch.equal(losses["losses"], expected), products

        with torch.no_grad():
            right("no_grad", model.eval())
            with torch.autocast("cpu", torch.bfloat16):
                right("autocast", model, cast)
        with torch.inference_mode():
            right("inference", model)
        right("training", model.train())
        for attention in layers_of(model):
            attention.linear_proj = Adapter(attention.linear_proj)
        adapted = step(case, model, model)[0]
        handles = [attention.linear_proj.base.register_forward_hook(lambda *_: None) for attention in layers_of(model)]
        expected = step(case, model, model)[0]
        found["an adapter"] = all(torch.equal(adapted[name], x) for name, x in expected.items()), 0
    return found


@promise("context-projection")
def test_evaluation_and_adapters(ranks):
    expected = {"no_grad": LAYERS, "autocast": 0, "inference": LAYERS, "training": LAYERS, "an adapter": 0}
    for found in ranks(2).run(used_otherwise):
        assert found == {name: (True, products) for name, products in expected.items()}


def wrong(group):
    """Return whether a wrong product is seen in the losses, and a wrong weight gradient in the gradients."""
    from ascend_parallel.overlap import context

    case = Case()
    with sharing(case):
        model, _ = built(case)
        plain = step(case, model, model)[0]
        with mock.patch.object(context, "project", lambda *given, own=context.project: own(*given) * 1.1):
            losses = step(case, model, model)[0]["losses"]
        gradient = context.projection_gradients
        with mock.patch.object(context, "projection_gradients", lambda *given: (gradient(*given)[0] * 1.1, None)):
            found = step(case, model, model)[0]
    changed = {name for name, x in plain.items() if not torch.equal(x, found[name])}
    return torch.equal(losses, plain["losses"]), changed


def test_faults_are_seen(ranks):
    for same, changed in ranks(2).run(wrong):
        assert not same
        assert changed == {f"decoder.layers.{number}.self_attention.linear_proj.weight" for number in range(LAYERS)}
