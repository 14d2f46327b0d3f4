"""What a program puts in place of a layer's matmul on one rank alone: the ranks go on, and the numbers are right."""

import contextlib
import functools
from unittest.mock import patch

import hugging_face
import pytest
import torch
import torch.nn.functional as F
from gpt_training import megatron
from hugging_face import both, load, unequal, worst, write
from marks import promise
from megatron_cpu import finalize_gradients, next_token_loss, small_gpt
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch_parallel import decoder, parallel, step

import ascend_parallel
from ascend_parallel.ops import COUNTS
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

pytestmark = promise("one-rank-habits")


class Watching(TorchFunctionMode):
    """Counts the linear functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += func is F.linear
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched(model):
    with Watching() as mode:
        yield
    assert mode.seen


@contextlib.contextmanager
def watched_forward(model):
    """As torch leaves a single mode: it takes it off in `backward`."""
    own = model.forward

    def forward(ids):
        with Watching():
            return own(ids)

    with patch.object(model, "forward", forward):
        yield


@contextlib.contextmanager
def wrapped_function(model):
    calls, own = [], F.linear
    with patch.object(F, "linear", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)):
        yield
    assert calls


def wrapped_class(model):
    return patch.object(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))


@contextlib.contextmanager
def own_forwards(model):
    """Put forwards in place of those of linear layers."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear) and "forward" in vars(layer)]
    kept = [vars(layer).pop("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(lambda layer, x: F.linear(x, layer.weight, layer.bias), layer)
    yield
    for layer, forward in zip(layers, kept, strict=True):
        layer.forward = forward


@contextlib.contextmanager
def on_top(model):
    """Put forwards on top of those of linear layers; for others, such as 2 * x, DTensor itself would communicate."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    kept = [layer.forward for layer in layers]
    for layer, forward in zip(layers, kept, strict=True):
        layer.forward = functools.partial(lambda forward, x: forward(x.view_as(x)), forward)
    yield
    for layer, forward in zip(layers, kept, strict=True):
        layer.forward = forward


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0


@contextlib.contextmanager
def other_class(model):
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.__class__ = Subclass
    yield
    for layer in layers:
        layer.__class__ = nn.Linear


@contextlib.contextmanager
def counted(model):
    with CommDebugMode() as mode:
        yield
    assert sum(mode.get_comm_counts().values())


@contextlib.contextmanager
def hooked(model, kind):
    """Hooks that read the inputs of all modules, or their gradients."""
    seen = []

    def read(module, *values):
        for value in values:
            each = value[0] if isinstance(value, tuple) and value else value
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                local = each.to_local() if isinstance(each, DTensor) else each
                seen.append(float(local.detach().double().norm()))

    handles = [getattr(module, kind)(read) for module in model.modules()]
    yield
    for handle in handles:
        handle.remove()
    assert seen


COMMON = {"a mode": watched, "F.linear": wrapped_function, "nn.Linear.forward": wrapped_class, "CommDebugMode": counted}
HABITS = {
    **{f"transformers, {name}": ("transformers", habit) for name, habit in COMMON.items()},
    **{
        f"{plan}, {name}": (plan, habit)
        for plan in ("sequence", "plain")
        for name, habit in {**COMMON, "class": other_class, "in place": own_forwards, "on top": on_top}.items()
    },
    **{
        f"{plan}, {kind}": (plan, functools.partial(hooked, kind=f"register_{kind}"))
        for plan in ("transformers", "sequence", "plain")
        for kind in ("forward_pre_hook", "full_backward_hook")
    },
}


def collectives():
    return sum(count["collectives"] for count in COUNTS.as_dict().values())


def habits(group, names, path, region):
    """Return for each habit of rank 1 alone the worst error, and whether the ranks ran as many collectives."""
    found = {}
    settings = {"num_chunks": 4, **({"region": True, "region_rows": 16} if region else {})}
    for name in names:
        plan, habit = HABITS[name]
        ascend_parallel.configure(num_chunks=4)
        if plan == "transformers":
            model, run = load(group, path), hugging_face.step
        else:
            model, run = parallel(decoder(layers=1), init_device_mesh("cpu", (group.size(),)), plan), step

        def train(model, habit=habit, run=run):
            if ascend_parallel.status().settings.num_chunks == 1:
                return run(model)
            run(model)
            COUNTS.clear()
            with habit(model) if group.rank() == 1 else contextlib.nullcontext():
                return run(model)

        plain, overlapped = both(model, train, **settings)
        # torch makes other functions of F.linear under a dispatch mode, and adds in another order under backward hooks.
        exact = group.size() == 2 and plan == "transformers" and habit in (watched, wrapped_function)
        bits = unequal(plain, overlapped) if exact else []
        found[name] = worst(overlapped, plain)[0], bits, collectives()
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("models"), "Llama", num_hidden_layers=1)


# Each habit on 2 ranks without regions, and on 3 with them (torch's plain plan: in `make stress`); those whose bits are
# compared also on 2 with them.
WAYS = [(name, 2, False) for name in HABITS]
WAYS += [
    pytest.param(name, 3, True, marks=pytest.mark.stress if plan == "plain" else pytest.mark.slow)
    for name, (plan, _) in HABITS.items()
]
WAYS += [pytest.param(f"transformers, {name}", 2, True, marks=pytest.mark.slow) for name in ("a mode", "F.linear")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "count", "region"), WAYS)
def test_ranks_run_the_same_collectives(ranks, path, name, count, region):
    first, *others = ranks(count).run(habits, [name], path, region)
    assert {name: (error, bits) for name, (error, bits, _) in first.items() if error > 1e-5 or bits} == {}
    for other in others:
        assert {name: (first[name][2], other[name][2]) for name in first if first[name][2] != other[name][2]} == {}
    assert all(collectives for _, _, collectives in first.values())


def recomputed(group, plan, habit):
    """Return the worst error of a step with checkpoints, rank 1 alone with a habit, and the number of collectives.

    The last tensor that a block saves, and the first that its backward asks for, are its row layer's: there the block
    is computed again, and stops.
    """
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=2), init_device_mesh("cpu", (group.size(),)), plan)
    for block in model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def train(model):
        overlapped = ascend_parallel.status().settings.num_chunks > 1
        if overlapped:
            step(model)
        COUNTS.clear()
        with habit(model) if overlapped and group.rank() == 1 else contextlib.nullcontext():
            return step(model)

    plain, overlapped = both(model, train)
    return worst(overlapped, plain)[0], collectives()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("plan", ["plain", "sequence"])
@pytest.mark.parametrize("habit", [other_class, own_forwards, watched, watched_forward])
def test_checkpoints_are_computed_again_at_the_same_point_on_all_ranks(ranks, plan, habit):
    (error, first), (other_error, second) = ranks(2).run(recomputed, plan, habit)
    assert max(error, other_error) < 1e-5
    assert first == second > 0


def recomputed_after_both(group, order):
    """Return the worst error of a backward of two checkpointed forwards; rank 1 alone runs one of them under a mode."""
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=1), init_device_mesh("cpu", (group.size(),)), "plain")
    (block,) = model.layers
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    own = model.forward

    def forward(ids):
        logits = []
        for wanted in order:
            with Watching() if wanted and group.rank() == 1 else contextlib.nullcontext():
                logits.append(own(ids))
        return sum(logits)

    with patch.object(model, "forward", forward):
        plain, overlapped = both(model, step)
    return worst(overlapped, plain)[0], collectives()


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_checkpoints_remember_the_mode_of_their_own_forward(ranks, order):
    """With the mode of the last forward a checkpoint would save other tensors the second time, on that rank alone."""
    (error, first), (other_error, second) = ranks(2).run(recomputed_after_both, order)
    assert max(error, other_error) < 1e-5
    assert first == second > 0


def wrapped(owner, name):
    own = getattr(owner, name)
    return patch.object(owner, name, functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs)))


def of_megatron(group, options, early):
    """Return the worst error of two steps, rank 1 alone with a wrapper from the first or from the second."""
    from megatron.core.tensor_parallel import layers

    runs, counts = [], []
    with megatron(group.size()):
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            model, found = small_gpt(**options), []
            for number in range(2):
                COUNTS.clear()
                model.zero_grad(set_to_none=True)
                replaces = chunks > 1 and group.rank() == 1 and (early or number)
                name = "linear_with_grad_accumulation_and_async_allreduce"
                with wrapped(layers, name) if replaces else contextlib.nullcontext():
                    loss = next_token_loss(model, torch.randint(256, (4, 65), generator=torch.manual_seed(number)))
                    loss.backward()
                finalize_gradients(model)
                found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
                counts.append(collectives())
            runs.append({str(place): tensor for place, tensor in enumerate(found)})
    return worst(*reversed(runs)), counts[2:]


@pytest.mark.skipif(
    version_tuple(installed_version()) < (0, 13),
    reason="refused before 0.13: functions know their group themselves",
)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("count", "early", "sequence_parallel"),
    [
        *((2, early, parallel) for early in (True, False) for parallel in (False, True)),
        pytest.param(4, True, False, marks=pytest.mark.slow),
        pytest.param(4, False, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_megatron_run_the_same_collectives(ranks, count, early, sequence_parallel):
    found = ranks(count).run(of_megatron, {"sequence_parallel": sequence_parallel}, early)
    for (error, where), counts in found:
        assert error < 1e-5, where
        assert counts == found[0][1]
        assert all(counts)


@on_ranks(2)
def test_a_collective_replaced_after_the_first_call_is_refused(group):
    from megatron.core.tensor_parallel import mappings

    with megatron(group.size()):
        ascend_parallel.configure(num_chunks=4)
        model = small_gpt()
        tokens = torch.randint(256, (4, 65), generator=torch.manual_seed(1))
        next_token_loss(model, tokens)
        with wrapped(mappings, "_reduce"):
            with pytest.raises(Exception, match=r"_reduce is .* since the ranks were compared") as raised:
                next_token_loss(model, tokens)
            ascend_parallel.configure(num_chunks=4)
            next_token_loss(model, tokens)
    assert type(raised.value).__name__ == "ConflictError"


@on_ranks(2)
def test_a_collective_replaced_on_one_rank_is_refused_on_all(group):
    """Rank 1 alone replaces what communicates."""
    from megatron.core.tensor_parallel import mappings

    with megatron(group.size()):
        ascend_parallel.configure(num_chunks=4)
        model = small_gpt()
        replaces = wrapped(mappings, "_reduce") if group.rank() else contextlib.nullcontext()
        text = r"what communicates .* is its own on rank 0, .*_reduce is .* on rank 1"
        with replaces, pytest.raises(Exception, match=text):
            next_token_loss(model, torch.randint(256, (4, 65), generator=torch.manual_seed(1)))
