"""Regions under what users wrap around a model, on all ranks or on one: everybody sees finished numbers.

Each habit trains a real GPT plain and in regions, whose rows are NaN until their collective has been waited for.
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from delayed_collectives import DelayedWork, delayed_collectives
from gpt_training import REGION, megatron
from marks import promise
from megatron_cpu import next_token_loss, small_gpt
from pool import on_ranks
from torch.nn.modules import module as modules

import ascend_parallel
from ascend_parallel.patches.base import version_tuple
from ascend_parallel.patches.megatron import installed_version

SCALE = 1.01


def scaled(value):
    """Return what a wrapper that scales tensors makes of a call's results or arguments."""
    if isinstance(value, torch.Tensor):
        return value * SCALE if value.is_floating_point() else value
    return tuple(map(scaled, value)) if isinstance(value, tuple) else value


def scaling(method):
    @functools.wraps(method)
    def run(self, *args, **kwargs):
        kwargs = {name: scaled(value) if name == "hidden_states" else value for name, value in kwargs.items()}
        return method(self, *map(scaled, args), **kwargs)

    return run


def unmarked(method):
    """A wrapper that copies no attribute of what it wraps."""
    return lambda self, *args, **kwargs: method(self, *map(scaled, args), **kwargs)


@contextlib.contextmanager
def on_class(model, find, wrapper=scaling):
    """Wrap the forward of a module's class."""
    kind = type(find(model))
    with mock.patch.object(kind, "forward", wrapper(kind.forward)):
        yield


@contextlib.contextmanager
def on_object(model, name, find=lambda model: model.decoder.layers[1]):
    """Wrap a method of one object."""
    owner = find(model)
    method = getattr(type(owner), name)
    setattr(owner, name, functools.partial(scaling(method), owner))
    yield


def layer(model):
    return model.decoder.layers[0]


PARTS = {
    "layer": layer,
    "attention": lambda model: layer(model).self_attention,
    "qkv": lambda model: layer(model).self_attention.linear_qkv,
    "proj": lambda model: layer(model).self_attention.linear_proj,
    "norm": lambda model: layer(model).pre_mlp_layernorm,
    "mlp": lambda model: layer(model).mlp,
    "fc1": lambda model: layer(model).mlp.linear_fc1,
    "fc2": lambda model: layer(model).mlp.linear_fc2,
}


def tensor_of(value):
    return value[0] if isinstance(value, tuple) and value else value


@contextlib.contextmanager
def monitored(model, seen):
    """Wrap `nn.Module.__call__`, and note the norm of every result."""
    call = torch.nn.Module.__call__

    def run(self, *args, **kwargs):
        found = call(self, *args, **kwargs)
        if isinstance(tensor_of(found), torch.Tensor):
            seen.append(tensor_of(found).detach().double().norm().item())
        return found

    with mock.patch.object(torch.nn.Module, "__call__", run):
        yield


@contextlib.contextmanager
def doubled_norm_gradients(model, seen):
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.register_hook(lambda gradient: seen.append(1) or gradient * 2)
    yield


@contextlib.contextmanager
def another_residual(model, seen):
    from megatron.core.fusions import fused_bias_dropout

    def add(x_with_bias, residual, prob, training):
        x, bias = x_with_bias
        return residual + 0.5 * (x if bias is None else x + bias)

    with mock.patch.object(fused_bias_dropout, "_bias_dropout_add_func", add):
        yield


@contextlib.contextmanager
def recorded_with_global_hooks(model, seen):
    handle = modules.register_module_forward_pre_hook(lambda module, args: scaled(args))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        on = ascend_parallel.status().settings.num_chunks > 1
        with ascend_parallel.timeline.record(folder) if on else contextlib.nullcontext():
            yield
    handle.remove()


@contextlib.contextmanager
def dtype_by_array(model, seen):
    """A hook that reads results as NumPy does, and by raw values."""

    def read(module, args, output):
        value = tensor_of(output).detach()
        seen.append(float(value.numpy().sum()))
        seen.append(value.flatten()[:3].tolist())

    handles = [PARTS[name](model).register_forward_hook(read) for name in ("proj", "fc2", "norm")]
    yield
    for handle in handles:
        handle.remove()


def without_list(context, *args):
    return lambda model, seen: context(model, *args)


# The halves of a layer, which are methods from 0.12 on.
HALVES = ("_forward_mlp", "_forward_attention") if version_tuple(installed_version()) >= (0, 12) else ()
HABITS = {
    **{f"{name} replaced on a layer": without_list(on_object, name) for name in HALVES},
    "qkv tensors replaced on an attention": without_list(
        on_object, "get_query_key_value_tensors", lambda model: model.decoder.layers[1].self_attention
    ),
    **{f"{name}'s class wrapped": without_list(on_class, PARTS[name]) for name in ("layer", "mlp", "fc1", "proj")},
    "fc2's class wrapped without marks": without_list(on_class, PARTS["fc2"], unmarked),
    "every call monitored": monitored,
    "norm gradients doubled": doubled_norm_gradients,
    "another residual": another_residual,
    "global hooks with a timeline": recorded_with_global_hooks,
    "read as arrays": dtype_by_array,
}


def tokens():
    return torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(1))


def trained(model, habit, seen):
    with habit(model, seen):
        loss = next_token_loss(model, tokens())
        loss.backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
    return [loss, *(parameter.grad for parameter in model.parameters())]


def in_turn(habits):
    """Return habits with and without sequence parallelism in turn; each the other way in `make stress`."""
    return [
        pytest.param(habit, parallel, marks=[] if parallel == (place % 2 == 1) else pytest.mark.stress)
        for place, habit in enumerate(habits)
        for parallel in (False, True)
    ]


@promise("unfinished-rows")
@pytest.mark.sample(6)
@pytest.mark.parametrize(("habit", "sequence_parallel"), in_turn(HABITS))
@on_ranks(2)
def test_wrappers_see_finished_numbers(group, habit, sequence_parallel):
    runs, seen = [], []
    with megatron(group.size()):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            seen.append([])
            with delayed_collectives() if runs else contextlib.nullcontext():
                runs.append(trained(small_gpt(sequence_parallel=sequence_parallel), HABITS[habit], seen[-1]))
    assert [place for place, (a, b) in enumerate(zip(*runs, strict=True)) if not torch.equal(a, b)] == []
    assert seen[0] == seen[1]
    assert DelayedWork.unfinished == 0


@contextlib.contextmanager
def logging_hook(model, part, register):
    """Read what a module gets or gives, as logging does."""
    seen = []

    def read(module, *values):
        seen.extend(tensor_of(value).norm().item() for value in values if isinstance(tensor_of(value), torch.Tensor))

    handle = getattr(PARTS[part](model), register)(read)
    yield
    handle.remove()
    assert seen


@contextlib.contextmanager
def global_hook(model):
    seen = []

    def read(module, args, output):
        if isinstance(tensor_of(output), torch.Tensor):
            seen.append(tensor_of(output).double().sum().item())

    handle = modules.register_module_forward_hook(read)
    yield
    handle.remove()
    assert seen


@contextlib.contextmanager
def own_forward(model):
    mlp = PARTS["mlp"](model)
    forward = mlp.forward
    mlp.forward = lambda *args, **kwargs: tuple(None if each is None else each + 0 for each in forward(*args, **kwargs))
    yield


@contextlib.contextmanager
def saved_on_cpu(model):
    with torch.autograd.graph.save_on_cpu():
        yield


@contextlib.contextmanager
def read_gradients(model, register):
    """Read every parameter's gradient when it comes, as DDP and monitors do."""
    seen = []

    def read(value):
        seen.append((value if value.grad is None else value.grad).double().norm().item())

    handles = [getattr(parameter, register)(read) for parameter in model.parameters()]
    yield
    for handle in handles:
        handle.remove()
    assert len(seen) == len(handles)


ON_ONE_RANK = {
    **{
        f"hook on {part}": functools.partial(logging_hook, part=part, register="register_forward_hook")
        for part in PARTS
    },
    "pre-hook on fc2": functools.partial(logging_hook, part="fc2", register="register_forward_pre_hook"),
    "backward hook": functools.partial(logging_hook, part="mlp", register="register_full_backward_hook"),
    "backward hook on a norm": functools.partial(logging_hook, part="norm", register="register_full_backward_hook"),
    "hooks on gradients": functools.partial(read_gradients, register="register_hook"),
    "hooks after accumulation": functools.partial(read_gradients, register="register_post_accumulate_grad_hook"),
    "global hook": global_hook,
    "own forward": own_forward,
    "save_on_cpu": saved_on_cpu,
}


@promise("region-one-rank")
@pytest.mark.sample(5)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("habit", "sequence_parallel"), in_turn(ON_ONE_RANK))
@on_ranks(2)
def test_a_habit_of_one_rank_costs_time_and_nothing_else(group, habit, sequence_parallel):
    """Two steps, of which the second meets shapes whose bits have been probed; the habit is rank 0's alone."""
    runs = []
    with megatron(group.size()):
        for settings in ({"num_chunks": 1}, REGION):
            ascend_parallel.configure(**settings)
            model = small_gpt(sequence_parallel=sequence_parallel)
            mine = ON_ONE_RANK[habit] if group.rank() == 0 else lambda model: contextlib.nullcontext()
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                found = trained(model, lambda model, seen: mine(model), [])  # noqa: B023
            runs.append(found)
    assert [place for place, (a, b) in enumerate(zip(*runs, strict=True)) if not torch.equal(a, b)] == []


@on_ranks(2)
def test_checked_runs_with_frozen_layers(group):
    """COC_VERIFY with the lower layers frozen."""
    runs = []
    with megatron(group.size()):
        for settings in ({"num_chunks": 1}, {**REGION, "verify_every": 1}):
            ascend_parallel.configure(**settings)
            model = small_gpt()
            for parameter in (*model.embedding.parameters(), *layer(model).parameters()):
                parameter.requires_grad_(False)
            loss = next_token_loss(model, tokens())
            loss.backward()
            runs.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
        report = ascend_parallel.verification()
    assert all(map(torch.equal, *runs))
    assert report.passed
    assert len(report.layers) == 9
