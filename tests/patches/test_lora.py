"""LoRA on tensor-parallel layers: by class swap, and by wrappers whose collectives are as narrow as the rank."""

import functools

import pytest
import torch
import torch.nn.functional as F
from gpt_training import REGION, megatron
from hugging_face import both, unequal, worst
from marks import promise
from megatron_cpu import next_token_loss, small_gpt
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch_parallel import decoder, parallel, step

import ascend_parallel
from ascend_parallel.diagnostics.verify import LEDGER
from ascend_parallel.ops import COUNTS
from ascend_parallel.ops.unfinished import is_unfinished

RANK = 8
COLUMNS, ROWS = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")


class LoRALinear(nn.Linear):
    """The layer's product and that of each adapter, as torchtitan writes it."""

    def forward(self, x):
        y = super().forward(x)
        for name in self.adapters:
            a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
            y = y + 0.5 * F.linear(F.linear(self.given(x), a), b)
        return y

    def given(self, x):
        return x


def add_adapters(layer, kind, adapters=("first",), mesh=None, frozen=True):
    """Make a linear layer one with adapters; with a mesh its parameters are DTensors."""
    layer.__class__ = kind
    layer.adapters = adapters
    layer.weight.requires_grad_(not frozen)
    column = mesh is not None and layer.weight.placements == (Shard(0),)
    places = (Replicate(), Shard(0)) if column else (Shard(1), Replicate())
    for name in adapters:
        for part, shape, place in (
            ("a", (RANK, layer.in_features), places[0]),
            ("b", (layer.out_features, RANK), places[1]),
        ):
            value = torch.randn(shape) / shape[1] ** 0.5
            value = value if mesh is None else distribute_tensor(value, mesh, [place])
            setattr(layer, f"{name}_{part}", nn.Parameter(value))


def adapted(model, kind=LoRALinear, names=COLUMNS + ROWS, **options):
    """Freeze a decoder, and give its layers adapters."""
    torch.manual_seed(5)
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in names:
            add_adapters(layer, kind, **options)
    return model


def compared(model, whole_model):
    """Return the names whose bits differ from plain, the counts of a step, the coverage, and the worst error."""
    COUNTS.clear()
    plain, overlapped = both(model, step)
    counts = COUNTS.as_dict()
    ascend_parallel.configure(num_chunks=4)
    covered = str(ascend_parallel.coverage(model))
    ascend_parallel.configure(num_chunks=1)
    return unequal(plain, overlapped), counts, covered, worst(overlapped, step(whole_model))


def swapped_after_styles(group, plan, options):
    ascend_parallel.configure(num_chunks=4)
    mesh = init_device_mesh("cpu", (group.size(),))
    model = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh, **options)
    return compared(model, adapted(decoder(layers=1), **options))


# The operators of a step: calls, and chunks that are multiplied under the last chunk's collective. With "sequence" the
# gather of two or three column layers runs under the first one's product.
PLANS = {
    "plain": {"matmul_all_reduce": (7, 28)},
    "sequence": {"all_gather_matmul": (5, 20), "matmul_reduce_scatter": (5, 20)},
    "layers": {"all_gather_matmul": (8, 32), "matmul_reduce_scatter": (8, 32)},
}


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("plain", {"adapters": ("first", "second")}),
        ("sequence", {}),
        ("sequence", {"adapters": ("first", "second"), "frozen": False}),
        ("sequence", {"names": ("wk", "wo", "w3")}),  # beside layers of torch's own class
        ("layers", {}),
        pytest.param("plain", {"frozen": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_class_swap_after_styles_is_overlapped(ranks, plan, options):
    for different, counts, covered, (error, where) in ranks(2).run(swapped_after_styles, plan, options):
        assert different == []
        assert error < 2e-5, where
        assert covered.startswith("7 of 8" if plan == "plain" else "8 of 8"), covered
        for operator, (calls, chunks) in PLANS[plan].items():
            found = counts[operator]
            assert (found["calls"], found["collectives"]) == (calls, 4 * calls)
            assert found["chunks"] == chunks or "names" in options


@pytest.mark.slow
def test_class_swaps_on_four_ranks(ranks):
    for _, counts, _, (error, where) in ranks(4).run(swapped_after_styles, "sequence", {}):
        assert error < 2e-5, where
        assert counts["matmul_reduce_scatter"] == {"calls": 5, "chunks": 15, "collectives": 15}  # 48 rows a rank


def swapped_before_styles(group, plan):
    ascend_parallel.configure(num_chunks=4)
    model = parallel(adapted(decoder(layers=1)), init_device_mesh("cpu", (group.size(),)), plan)
    return compared(model, adapted(decoder(layers=1)))


@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_a_class_swap_before_styles_is_overlapped(ranks, plan):
    for different, counts, covered, (error, where) in ranks(2).run(swapped_before_styles, plan):
        assert different == []
        assert error < 2e-5, where
        assert covered.startswith("7 of 8" if plan == "plain" else "8 of 8"), covered
        assert {name: (count["calls"], count["chunks"]) for name, count in counts.items()} == PLANS[plan]


class Dropped(LoRALinear):
    """Drops elements before the adapters, alike on all ranks, and computes what a run without adapters does not."""

    def given(self, x):
        torch.manual_seed(len(self.adapters) + self.in_features)
        return F.dropout(x, 0.1)


class AddsFirst(LoRALinear):
    def forward(self, x):
        a, b = self.first_a, self.first_b
        return F.linear(F.linear(x, a), b) + super().forward(x)


class InPlace(LoRALinear):
    def forward(self, x):
        y = super().forward(x)
        y += F.linear(F.linear(x, self.first_a), self.first_b)
        return y


class Scaled(LoRALinear):
    """Reads the product itself, twice."""

    def forward(self, x):
        y = super().forward(x)
        return y * 1.5 + y


class Doubles(LoRALinear):
    """Changes the gradient of the product in place: it is a DTensor, and no version of its rows moves."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.mul_(2))
        return y


class AddsToView(LoRALinear):
    """Adds in place to a tensor that has the product's memory."""

    def forward(self, x):
        y = nn.Linear.forward(self, x)
        y.view(y.shape).add_(F.linear(F.linear(x, self.first_a), self.first_b))
        return y


class ScalesDetached(LoRALinear):
    def forward(self, x):
        y = nn.Linear.forward(self, x)
        y.detach().mul_(1.5)
        return y


class AddsToTransposed(LoRALinear):
    def forward(self, x):
        y = nn.Linear.forward(self, x)
        y.transpose(0, 1).add_(F.linear(F.linear(x, self.first_a), self.first_b).transpose(0, 1))
        return y


class ReturnsAlias(LoRALinear):
    def forward(self, x):
        y = nn.Linear.forward(self, x)
        alias = y.view_as(y)
        y += F.linear(F.linear(x, self.first_a), self.first_b)
        return alias


class Disabled(nn.Linear):
    def forward(self, x):
        return super().forward(x)


WRITING = (AddsToView, ScalesDetached, AddsToTransposed, ReturnsAlias)


def checkpointed(model):
    for block in model.layers:
        own = block.forward
        block.forward = functools.partial(checkpoint, own, use_reentrant=False)
    return model


def unusual(group, plan):
    """Return the names whose bits differ from plain, for each class."""
    mesh, found = init_device_mesh("cpu", (group.size(),)), {}
    for kind in (Dropped, AddsFirst, InPlace, Scaled, Doubles, *WRITING, Disabled, "checkpointed"):
        ascend_parallel.configure(num_chunks=4)
        model = parallel(decoder(layers=1), mesh, plan)
        model = adapted(model, mesh=mesh, kind=LoRALinear if kind == "checkpointed" else kind)
        if kind == "checkpointed":
            model = checkpointed(model)
        found[str(kind)] = unequal(*both(model, step))
    return found


@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_what_adapters_do_keeps_the_bits(ranks, plan):
    for found in ranks(2).run(unusual, plan):
        assert {name: different for name, different in found.items() if different} == {}


def swapped_on_one_rank(group, plan):
    """Return the worst error and the collectives of a step, rank 1 alone with layers of another class."""
    ascend_parallel.configure(num_chunks=4)
    mesh = init_device_mesh("cpu", (group.size(),))
    model = parallel(decoder(layers=1), mesh, plan)
    ascend_parallel.configure(num_chunks=1)
    plain = step(model)
    ascend_parallel.configure(num_chunks=4)
    if group.rank() == 1:
        for name, layer in model.named_modules():
            if name.rpartition(".")[2] in COLUMNS + ROWS:
                layer.__class__ = Disabled
    COUNTS.clear()
    overlapped = step(model)
    ascend_parallel.configure(num_chunks=1)
    return unequal(plain, overlapped), {name: count["collectives"] for name, count in COUNTS.as_dict().items()}


@promise("one-rank-habits")
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_a_class_swap_on_one_rank_changes_no_collective(ranks, plan):
    (first, counts), (second, others) = ranks(2).run(swapped_on_one_rank, plan)
    assert counts == others
    if plan == "plain":  # of a shared gather the sums of gradients have another order on that rank
        assert first == second == []


@on_ranks(2)
def test_an_input_that_changes_before_the_sum_is_refused(group):
    class Changes(LoRALinear):
        def forward(self, x):
            y = super(LoRALinear, self).forward(x)
            x.mul_(2)
            return y

    class ChangesAndAdds(LoRALinear):
        def forward(self, x):
            y = super(LoRALinear, self).forward(x)
            a = F.linear(F.linear(x.mul_(2), self.first_a), self.first_b)
            return y + a

    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    for kind in (Changes, ChangesAndAdds):
        model = adapted(parallel(decoder(layers=1), mesh, "plain"), mesh=mesh, kind=kind, names=("wo",))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"an operand of shape .* was changed in place before"):
            model(torch.zeros(2, 96, dtype=torch.long))
    ascend_parallel.configure(num_chunks=1)


class DropsInPlace(LoRALinear):
    def forward(self, x):
        torch.manual_seed(self.in_features)
        return super().forward(F.dropout(x, 0.1, inplace=True))


class ScalesLocal(LoRALinear):
    def forward(self, x):
        with torch.no_grad():
            x.to_local().mul_(1.5)
        return super().forward(x)


# Attention, and other layers, have saved what the others get: autograd sees that it changed.
@pytest.mark.parametrize(("kind", "names"), [(DropsInPlace, ("wq", "w1", "w3", "wo")), (ScalesLocal, ("wq",))])
@pytest.mark.parametrize("plan", ["plain", "sequence", "layers"])
@on_ranks(2)
def test_an_input_that_changes_before_the_product_is_multiplied_as_it_is_then(group, plan, kind, names):
    """With sequence parallelism the gather has multiplied the input before the class changes it."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    if plan == "sequence":  # w3's would change what w1 has saved
        names = [name for name in names if name not in ("w1", "w3")]
    model = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh, kind=kind, names=names)
    assert unequal(*both(model, step)) == []


def refused(group, plan):
    """Return for each layer whether backward refuses a weight that has changed since forward, plain and overlapped."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    model = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh)

    def changed(name, model):
        loss = model(torch.zeros(2, 96, dtype=torch.long)).sum()
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(1.5)
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    names = [f"layers.0.{name}" for name in ("attention.wq", "attention.wo", "feed_forward.w2", "feed_forward.w3")]
    return {name: both(model, functools.partial(changed, name)) for name in names}


@promise("changed-operands")
@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_a_weight_that_changes_before_backward_is_refused_as_plain_does(ranks, plan):
    for found in ranks(2).run(refused, plan):
        assert set(found.values()) == {(True, True)}, found


def stepped_in_backward(group):
    """Return the error of a backward in which a column layer's weight takes its step before the input's gradient."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    model = adapted(parallel(decoder(layers=1), mesh, "plain"), mesh=mesh, frozen=False)
    weight = model.get_submodule("layers.0.feed_forward.w1").weight

    def halve(weight):
        weight.detach().mul_(0.5)

    weight.register_post_accumulate_grad_hook(halve)
    try:
        step(model)
    except RuntimeError as error:
        return str(error)
    return "none"


@promise("changed-operands")
def test_a_step_inside_backward_is_refused_where_the_input_gradient_waits(ranks):
    """Of an optimizer in a hook: the gradient would be that of the new weight."""
    for error in ranks(2).run(stepped_in_backward):
        assert "was changed in place before the layer's product was summed" in error


class Keeps(LoRALinear):
    """Keeps its product for a monitor, which reads it after the step."""

    def forward(self, x):
        y = nn.Linear.forward(self, x)
        self.kept = y.detach()
        return y


class ReadsAndKeeps(Keeps):
    def forward(self, x):
        y = super().forward(x)
        self.kept.to_local().norm()
        return y


class KeepsOutput(LoRALinear):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class KeepsBase(LoRALinear):
    def forward(self, x):
        self.kept = nn.Linear.forward(self, x).detach()
        return super().forward(x)


class KeepsAndAdds(LoRALinear):
    def forward(self, x):
        self.kept = nn.Linear.forward(self, x)
        return self.kept + F.linear(F.linear(x, self.first_a), self.first_b)


class KeepsAndReturns(LoRALinear):
    def forward(self, x):
        self.kept = nn.Linear.forward(self, x)
        return self.kept


class KeepsOwn(LoRALinear):
    def forward(self, x):
        y = F.linear(x, 1.5 * self.weight)
        self.kept = y.detach()
        return y


class KeepsGradient(LoRALinear):
    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda dx: setattr(self, "kept", dx.detach()))
        return super().forward(x)


def kept(group, plan, kind):
    """Return what row and column layers have kept, read after their weights have changed, plain and overlapped."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    model = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh, kind=kind)
    layers = {name: layer for name, layer in model.named_modules() if name.rpartition(".")[2] in COLUMNS + ROWS}

    def read(model):
        step(model)
        weights = [layer.weight.detach().clone() for layer in layers.values()]
        torch._foreach_mul_([layer.weight.detach() for layer in layers.values()], 2.0)  # raises no version of theirs
        found = {
            name: layer.kept.detach().to_local().clone() for name, layer in layers.items() if hasattr(layer, "kept")
        }
        for layer, weight in zip(layers.values(), weights, strict=True):
            layer.weight.detach().copy_(weight)
        return found

    return unequal(*both(model, read))


KEEPING = (Keeps, ReadsAndKeeps, KeepsOutput, KeepsBase, KeepsAndAdds, KeepsAndReturns, KeepsOwn, KeepsGradient)


@pytest.mark.parametrize("plan", ["plain", "sequence"])
def test_a_product_that_is_kept_has_its_own_numbers_after_the_step(ranks, plan):
    for kind in KEEPING:
        assert ranks(2).run(kept, plan, kind) == [[], []]


class DropsAnew(LoRALinear):
    def given(self, x):
        return F.dropout(x, 0.3)


@promise("verify-bits")
@pytest.mark.parametrize("plan", ["plain", "sequence"])
@on_ranks(2)
def test_a_check_drops_what_the_call_has_dropped(group, plan):
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4)
    model, steps = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh, kind=DropsAnew), []
    for every in (0, 1):
        ascend_parallel.configure(num_chunks=4, verify_every=every)
        torch.manual_seed(7)
        steps.append(step(model))
    report = ascend_parallel.verification()
    LEDGER.clear()
    ascend_parallel.configure(num_chunks=1, verify_every=0)
    assert unequal(*steps) == []
    assert sum(layer.backwards for layer in report.layers) >= 3  # both row layers and another


@on_ranks(2)
def test_a_class_swap_has_no_tree(group):
    mesh = init_device_mesh("cpu", (group.size(),))
    ascend_parallel.configure(num_chunks=4, deterministic="tp")
    model = adapted(parallel(decoder(layers=1), mesh, "plain"), mesh=mesh, names=("wo",))
    with pytest.raises(ascend_parallel.ops.DegreeError, match=r"its class is test_lora\.LoRALinear now"):
        model(torch.zeros(2, 96, dtype=torch.long))
    ascend_parallel.configure(num_chunks=1, deterministic=False)


class AdaptedLinear(nn.Module):
    """A wrapper of a layer of Megatron-core, with adapters as PEFT's LoraParallelLinear has them."""

    dropout, enabled = 0.0, True

    def __init__(self, base, layers, count=1):
        super().__init__()
        self.base_layer = base
        self.adapters = nn.ModuleList(narrow_pair(base, layers, seed) for seed in range(count))

    def forward(self, x):
        y, bias = self.base_layer(x)
        self.on_their_way = is_unfinished(y)
        return self.adapted(y, x), bias

    def adapted(self, y, x):
        for index, (a, b) in enumerate(self.adapters if self.enabled else ()):
            torch.manual_seed(index)  # alike on all ranks, plain and overlapped
            y = y + output_of(b, output_of(a, F.dropout(x, self.dropout)))
        return y

    def merge(self, sign=1):
        """Add the adapters to the base's weight, or take them away, as PEFT's merge and unmerge do."""
        self.enabled = sign < 0
        with torch.no_grad():
            for a, b in self.adapters:
                self.base_layer.weight += sign * (b.weight @ a.weight)


def output_of(part, x):
    y = part(x)
    return y[0] if isinstance(y, tuple) else y  # without the bias, of Megatron-core's layers


def narrow_pair(base, layers, seed):
    """Return A and B of an adapter: the one beside the collective's end is parallel."""
    options = {"config": base.config, "init_method": nn.init.ones_, "bias": False, "skip_bias_add": False}
    if isinstance(base, layers.ColumnParallelLinear):
        a = nn.Linear(base.input_size, RANK, bias=False)
        b = layers.ColumnParallelLinear(RANK, base.output_size, **options)
    else:
        a = layers.RowParallelLinear(base.input_size, RANK, input_is_parallel=True, **options)
        b = nn.Linear(RANK, base.output_size, bias=False)
    with torch.no_grad():
        for weight in (a.weight, b.weight):
            weight.normal_(generator=torch.Generator().manual_seed(weight.numel() + seed), std=0.2)
    return nn.ModuleList([a, b])


def by_class(layers):
    """Return the classes whose forward adds what the adapters, which are no modules of the model, give."""

    def forward(self, x):
        y, bias = super(type(self), self).forward(x)
        self.on_their_way = is_unfinished(y)
        return self.adapter[0].adapted(y, x), bias

    return {
        base: type(f"LoRA{base.__name__}", (base,), {"forward": forward})
        for base in (layers.ColumnParallelLinear, layers.RowParallelLinear)
    }


def adapted_gpt(sequence_parallel, swaps, count=1):
    """Return a GPT of one layer whose linear layers have adapters, and these."""
    from megatron.core.tensor_parallel import layers

    model, adapted = small_gpt(num_layers=1, hidden=256, sequence_parallel=sequence_parallel), []
    classes = by_class(layers)
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if type(layer) in classes and name != "output_layer":
                adapted.append(AdaptedLinear(layer, layers, count))
                if swaps:
                    layer.adapter = (adapted[-1],)
                    layer.__class__ = classes[type(layer)]
                else:
                    setattr(parent, name, adapted[-1])
    return model, adapted


def train_gpt(adapted, model):
    """Return the loss and all gradients of a step, also those of adapters that are no modules of the model."""
    parameters = dict(model.named_parameters())
    of_model = set(parameters.values())
    for index, each in enumerate(adapted):
        parameters |= {f"{index} {name}": p for name, p in each.named_parameters() if p not in of_model}
    for parameter in parameters.values():
        parameter.grad = None
    loss = next_token_loss(model, torch.randint(256, (4, 65), generator=torch.manual_seed(1)))
    loss.backward()
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def of_megatron(group, sequence_parallel, swaps, settings):
    """Return the names whose bits differ from plain, the counts, the coverage, and the bases on their way."""
    with megatron(group.size()):
        ascend_parallel.configure(num_chunks=4)
        model, adapted = adapted_gpt(sequence_parallel, swaps)
        COUNTS.clear()
        plain, overlapped = both(model, functools.partial(train_gpt, adapted), **settings)
        counts = COUNTS.as_dict()
        ascend_parallel.configure(num_chunks=4)
        waiting = [name for name, module in model.named_modules() if getattr(module, "on_their_way", False)]
        return unequal(plain, overlapped), counts, str(ascend_parallel.coverage(model)), waiting


@pytest.mark.parametrize("swaps", [False, True], ids=["wrapper", "class"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_narrow_collectives_of_adapters_on_megatron_stay_whole(ranks, sequence_parallel, swaps):
    """A layer of four layers with adapters, and the output layer; an adapter has one collective, or with SP two."""
    for different, counts, covered, _ in ranks(2).run(of_megatron, sequence_parallel, swaps, {}):
        assert different == []
        calls = {name: count["calls"] for name, count in counts.items()}
        collectives = {name: count["collectives"] for name, count in counts.items()}
        if sequence_parallel:  # bases: 3 gathers and 2 scatters in forward, the same in backward
            assert calls == {"all_gather_matmul": 5 + 4, "matmul_reduce_scatter": 5 + 4}
            assert collectives["matmul_reduce_scatter"] == 4 * 5 + 4
        else:
            assert calls == {"matmul_all_reduce": 5 + 4}
            assert collectives == {"matmul_all_reduce": 4 * 5 + 4}
        layers = "5 of 5 linear layers covered" if swaps else "9 of 9 linear layers covered; 4 replicated adapters"
        assert covered.startswith(layers)


@pytest.mark.parametrize("swaps", [False, True], ids=["wrapper", "class"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_in_regions_an_adapter_runs_under_the_rows_of_its_base(ranks, sequence_parallel, swaps):
    for different, _, _, waiting in ranks(2).run(of_megatron, sequence_parallel, swaps, REGION):
        assert different == []
        assert {"linear_proj", "linear_fc2"} <= {name.rpartition(".")[2] for name in waiting}


def states_on_megatron(group, swaps, sequence_parallel=True, settings=None):
    """Return for each state of two adapters the names whose bits differ from plain, their error, and the loss."""
    found = {}
    with megatron(group.size()):
        ascend_parallel.configure(num_chunks=4)
        model, adapted = adapted_gpt(sequence_parallel, swaps, count=2)
        layer = model.decoder.layers[0]

        def compared_in(state):
            plain, overlapped = both(model, functools.partial(train_gpt, adapted), **(settings or {}))
            found[state] = unequal(plain, overlapped), worst(overlapped, plain), len(plain), float(overlapped["loss"])

        def set_all(**attributes):
            for each in adapted:
                vars(each).update(attributes)

        compared_in("two adapters")
        set_all(dropout=0.1)
        compared_in("dropout")
        own = layer.forward
        layer.forward = functools.partial(checkpoint, own, use_reentrant=False)
        compared_in("checkpointed")
        layer.forward = own
        set_all(dropout=0.0, enabled=False)
        compared_in("disabled")
        set_all(enabled=True)
        for each in adapted:
            each.merge()
        compared_in("merged")
        for each in adapted:
            each.merge(-1)
            each.base_layer.requires_grad_(False)  # of a frozen weight's bias Megatron-core forgets the gradient
        compared_in("unmerged, frozen base")
    return found


@pytest.mark.parametrize(
    ("swaps", "sequence_parallel", "settings"),
    [
        (False, True, None),
        (True, True, None),
        (False, False, REGION),
        pytest.param(True, False, REGION, marks=pytest.mark.slow),
    ],
    ids=["wrapper", "class", "wrapper, regions", "class, regions"],
)
def test_states_of_adapters_on_megatron_keep_the_bits(ranks, swaps, sequence_parallel, settings):
    for found in ranks(2).run(states_on_megatron, swaps, sequence_parallel, settings):
        assert {state: different for state, (different, *_) in found.items() if different} == {}
        losses = {state: loss for state, (*_, loss) in found.items()}
        gradients = {state: count for state, (_, _, count, _) in found.items()}
        assert len({losses[state] for state in ("two adapters", "dropout", "disabled")}) == 3
        assert losses["checkpointed"] == losses["dropout"]
        assert losses["merged"] == pytest.approx(losses["unmerged, frozen base"], rel=1e-5)
        assert gradients["merged"] == gradients["disabled"] == gradients["two adapters"] - 4 * 2 * 2
        assert gradients["unmerged, frozen base"] == gradients["two adapters"] - 4 * 2


@pytest.mark.slow
def test_states_of_adapters_on_megatron_with_four_ranks(ranks):
    for found in ranks(4).run(states_on_megatron, False):
        assert all(error < 2e-5 for _, (error, _), *_ in found.values()), found


class Switched(LoRALinear):
    """Merges its adapter into the weight, or leaves it out, as PEFT's layers do."""

    state = "enabled"

    def forward(self, x):
        if self.state == "merged":
            return F.linear(x, self.weight + 0.5 * (self.first_b @ self.first_a))
        return nn.Linear.forward(self, x) if self.state == "disabled" else super().forward(x)


def switched(group, plan):
    """Return for each state the names whose bits differ from plain, the loss, and the chunks of the collectives."""
    found = {}
    ascend_parallel.configure(num_chunks=4)
    mesh = init_device_mesh("cpu", (group.size(),))
    model = adapted(parallel(decoder(layers=1), mesh, plan), mesh=mesh, kind=Switched)
    for state in ("enabled", "merged", "disabled", "unmerged"):
        Switched.state = state
        COUNTS.clear()
        plain, overlapped = both(model, step)
        counts = {name: count["chunks"] for name, count in COUNTS.as_dict().items()}
        found[state] = unequal(plain, overlapped), float(plain["loss"]), counts
    return found


def test_adapters_that_are_merged_or_disabled_keep_the_bits(ranks):
    for found in ranks(2).run(switched, "sequence"):
        assert {state: different for state, (different, _, _) in found.items() if different} == {}
        losses = {state: loss for state, (_, loss, _) in found.items()}
        assert losses["merged"] == pytest.approx(losses["enabled"], rel=1e-5)
        assert losses["disabled"] != losses["enabled"] == losses["unmerged"]
        chunks = {state: sum(counts.values()) for state, (_, _, counts) in found.items()}
        assert chunks["merged"] < chunks["disabled"] == chunks["enabled"] == chunks["unmerged"]


def counted_hooks(group):
    """Return how often hooks of parameters ran in two micro-batches, and what FSDP2 gives that plain does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=1, hidden=96, inner=192, heads=4), mesh["tp"], "sequence")
    model = adapted(model, mesh=mesh["tp"], frozen=False)
    for block in model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ran = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    plain, overlapped = both(model, functools.partial(step, micro_batches=2))
    return unequal(plain, overlapped), [ran.count(name) for name, _ in model.named_parameters()]


def test_hooks_of_fsdp_run_once_for_an_adapted_layer(ranks):
    for different, ran in ranks(4).run(counted_hooks):
        assert different == []
        assert set(ran) == {2 * 2}  # micro-batches, plain and overlapped


@on_ranks(2)
def test_megatrons_data_parallel_hooks_run_once_for_an_adapted_layer(group):
    """Its overlapped reductions refuse a parameter whose hook runs twice."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    for swaps in (False, True):
        runs = []
        with megatron(group.size()):
            for chunks in (1, 4):
                ascend_parallel.configure(num_chunks=chunks)
                model, _ = adapted_gpt(True, swaps)
                config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
                wrapped, ran = DistributedDataParallel(model.config, config, model), []
                for name, parameter in wrapped.named_parameters():
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name, ran=ran: ran.append(name))
                wrapped.zero_grad_buffer()
                next_token_loss(wrapped, torch.randint(256, (4, 65), generator=torch.manual_seed(1))).backward()
                finalize_model_grads([wrapped])
                assert len(ran) == len(set(ran)) == len([*wrapped.parameters()])
                runs.append({name: p.main_grad.clone() for name, p in wrapped.named_parameters()})
        assert unequal(*runs) == []
