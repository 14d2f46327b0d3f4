"""What users do with models of transformers and torch beside training them, with overlap as without."""

import contextlib
import copy
import functools
import weakref
from unittest.mock import patch

import hugging_face
import pytest
import torch
import torch.nn.functional as F
from hugging_face import both, full_tensor, load, unequal, worst, write
from marks import promise
from pool import on_ranks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch_parallel import decoder, parallel, step

import ascend_parallel


def scaled(model, x):
    return model.last(torch.relu(model.a(x)) * model.b(x)) + (x * 2).to_local().mean(-1, keepdim=True)


def residual(model, x):
    y = DTensor.from_local(model.last(model.a(x) * model.b(x)), x.device_mesh, x.placements)
    return (x + y).to_local()


def local(model, x):
    assert x.shape == (2, 48, 64) == x._local_tensor.shape
    return model.last(model.a(x) * model.b(x)) + x._local_tensor.sum() + x.full_tensor().detach().sum()


def gated_without_gradients(model, x):
    with torch.no_grad():
        gate = torch.sigmoid(model.a(x))
    return model.last(gate * model.b(x) + model.a(x))


def gated_in_16_bits(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        gate = model.a(x)
    return model.last(gate.float() * model.b(x))


def recomputed(model, x):
    return model.last(checkpoint(lambda x: torch.relu(model.a(x)) * model.b(x), x, use_reentrant=False))


def first_recomputed(model, x):
    return model.last(checkpoint(lambda x: torch.relu(model.a(x)), x, use_reentrant=False) * model.b(x))


def recomputed_by_reentry(model, x):
    return model.last(checkpoint(lambda x: torch.relu(model.a(x)) * model.b(x), x, use_reentrant=True))


def changed_in_place(model, x):
    gate = torch.sigmoid(model.a(x)).detach()
    x.mul_(2)
    return model.last(gate * model.b(x))


def hooked(model, x):
    x.register_hook(lambda gradient: gradient * 3)
    return model.last(model.a(x) * model.b(x))


def differentiated(model, x):
    y = model.last(model.a(x) * model.b(x))
    (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y + full_tensor(dx)


BODIES = [scaled, residual, local, gated_without_gradients, gated_in_16_bits, recomputed, first_recomputed]
BODIES += [recomputed_by_reentry, hooked, differentiated, changed_in_place]


class Two(nn.Module):
    """Two column layers that read the same input, and a row layer; `body` is the forward."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.last = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def read(group, hooks):
    """Return the worst difference from plain for each body."""
    rows = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    found = {}
    for body in BODIES[:-1] if hooks else BODIES:  # torch's hooks forbid changes in place
        ascend_parallel.configure(num_chunks=4)
        styles = {"": PrepareModuleInput(**rows), "a": ColwiseParallel(), "b": ColwiseParallel()}
        model = parallelize_module(
            Two(body), init_device_mesh("cpu", (group.size(),)), styles | {"last": RowwiseParallel()}
        )
        if hooks:
            model.register_full_backward_hook(lambda *_: None)
        error, where = worst(*reversed(both(model, lambda model: used(group, model))))
        found[body.__name__] = (error, where)
    return found


def used(group, model):
    model.zero_grad()
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(7)).chunk(group.size(), 1)[group.rank()]
    x = x.clone().requires_grad_()
    y = full_tensor(model(x))
    y.square().sum().backward()
    gradients = {name: full_tensor(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "x": x.grad, **gradients}


@pytest.mark.sample("True")
@pytest.mark.parametrize("hooks", [False, True])
def test_a_module_reads_its_gathered_input_in_any_way(ranks, hooks):
    for found in ranks(2).run(read, hooks):
        assert found.pop("gated_in_16_bits")[0] < 0.02
        assert {name: error for name, error in found.items() if error[0] > 1e-6} == {}


def refused(model, x, change):
    """Return whether backward refuses what `change` does after a forward: plain, and with overlap."""

    def run(model):
        model.zero_grad()
        y = model(x)
        y = full_tensor(y if isinstance(y, torch.Tensor) else y.logits).square().sum()
        with torch.no_grad():
            change(model)
        try:
            y.backward()
            return False
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            return True

    return both(model, run)


def multiplied(name):
    def change(model):
        (model.h if name == "h" else getattr(model, name).weight).mul_(1.5)

    return change


def stepped(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters()).step()


CHANGES = {name: multiplied(name) for name in ("a", "b", "last", "h")} | {"step": stepped}


def keeping(model, x):
    model.h = torch.relu(model.a(x)) * model.b(x)
    return model.last(model.h)


def changed_before_backward(group, shared):
    """Return what plain and overlap refuse, by change; `shared`: the two column layers share a gather."""
    ascend_parallel.configure(num_chunks=4)
    mesh = init_device_mesh("cpu", (group.size(),))
    rows = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    columns = {name: ColwiseParallel(use_local_output=False) for name in ("a", "b")}
    styles = {"": PrepareModuleInput(**rows)} if shared else {}
    model = parallelize_module(Two(keeping), mesh, {**styles, **columns, "last": RowwiseParallel()})
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(7))
    x = (x.chunk(group.size(), 1)[group.rank()] if shared else x).clone().requires_grad_()
    found = {name: refused(model, x, change) for name, change in CHANGES.items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return {**found, "frozen": refused(model, x, CHANGES["last"]), "frozen, h": refused(model, x, CHANGES["h"])}


@promise("changed-operands")
@pytest.mark.parametrize("shared", [False, True])
def test_a_weight_or_input_that_changes_before_backward_is_refused_as_plain_does(ranks, shared):
    changes = dict.fromkeys((*CHANGES, "frozen"), (True, True))
    assert ranks(2).run(changed_before_backward, shared) == [{**changes, "frozen, h": (False, False)}] * 2


def twice(x, weight, bias=None):
    return 2 * torch._C._nn.linear(x, weight, bias)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        return 2 * y if func is torch.nn.functional.linear else y


@contextlib.contextmanager
def on_instances(model, decorate):
    """Replace the forwards of linear layers on these themselves."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    own = [layer.forward for layer in layers]
    for layer, forward in zip(layers, own, strict=True):
        layer.forward = decorate(forward)(lambda x, forward=forward: 4 * forward(x * 0.5))
    yield
    for layer, forward in zip(layers, own, strict=True):
        layer.forward = forward


REPLACED = {
    "nn.Linear.forward": lambda _: patch.object(nn.Linear, "forward", lambda self, x: 2 * F.linear(x, self.weight)),
    "F.linear": lambda _: patch.object(F, "linear", twice),
    "mode": lambda _: Doubling(),
    "default device": lambda _: torch.device("cpu"),
    "wrapped": lambda model: on_instances(model, functools.wraps),
    "hidden": lambda model: on_instances(model, lambda _: lambda forward: forward),
}


def replacing(group, make):
    """Return what differs from plain under each replacement."""
    found, (model, run) = {}, make(group)
    for name, replace in REPLACED.items():
        with replace(model):
            found[name] = unequal(*both(model, run))
    return found


def of_torch(plan, group):
    ascend_parallel.configure(num_chunks=4)
    return parallel(decoder(layers=1), init_device_mesh("cpu", (group.size(),)), plan), step


def of_transformers(path, group):
    return load(group, path), hugging_face.step


@promise("replaced-torch")
@pytest.mark.sample("transformers")
@pytest.mark.parametrize("framework", ["torch plain", "torch sequence", "transformers"])
def test_what_was_replaced_below_a_layer_stays_in_force(ranks, tmp_path, framework):
    path = write(tmp_path, "Llama", num_hidden_layers=1) if framework == "transformers" else ""
    make = functools.partial(of_transformers, path) if path else functools.partial(of_torch, framework.split()[1])
    assert ranks(2).run(replacing, make) == [{name: [] for name in REPLACED}] * 2


def counted(group, make):
    """Return the collectives that torch's CommDebugMode counts in a step, plain and with overlap."""
    model, run = make(group)

    def count(model):
        with CommDebugMode() as mode:
            run(model)
        return {str(operator): calls for operator, calls in mode.get_comm_counts().items()}

    return both(model, count)


def test_torch_counts_the_collectives_that_run(ranks, tmp_path):
    path = write(tmp_path, "Llama", num_hidden_layers=1)
    for plain, overlapped in ranks(2).run(counted, functools.partial(of_transformers, path)):
        whole_calls = plain["c10d_functional.all_reduce"] - overlapped["c10d_functional.all_reduce"]
        assert overlapped["c10d.allreduce_"] == 4 * whole_calls == 32


def loaded_and_stepped(group, path):
    return refused(load(group, path), torch.randint(480, (2, 96)), stepped)


@promise("changed-operands")
def test_a_step_of_transformers_between_forward_and_backward_is_refused_as_plain_does(ranks, tmp_path):
    assert ranks(2).run(loaded_and_stepped, write(tmp_path, "Llama", num_hidden_layers=1)) == [(True, True)] * 2


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("plan", ["plain", "sequence"])
@on_ranks(2)
def test_copies_and_other_classes_run_with_their_own_weights_and_forward(group, plan):
    def average(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5)
        return step(twin)

    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=1), init_device_mesh("cpu", (group.size(),)), plan)
    found = unequal(*both(model, average))
    for layer in (model.layers[0].attention.wk, model.layers[0].attention.wo):
        layer.__class__ = Doubled
    whole_model = decoder(layers=1)
    for layer in (whole_model.layers[0].attention.wk, whole_model.layers[0].attention.wo):
        layer.__class__ = Doubled
    plain, overlapped = both(model, step)
    copies, classes, error = found, unequal(plain, overlapped), worst(overlapped, step(whole_model))[0]
    assert copies == classes == []
    assert error < 2e-5


def freed(group, path):
    """Tell whether a column and a row layer let go of their input when hooks have taken the saved tensors."""
    mlp = load(group, path).model.layers[0].mlp
    found = []
    for layer in (mlp.up_proj, mlp.down_proj):
        x = torch.ones(4, 32, layer.weight.to_local().shape[1]).requires_grad_() * 2
        rows = weakref.ref(x.untyped_storage())
        with saved_tensors_hooks(lambda _: None, lambda _: None):
            y = layer(x)
        del x
        found.append(rows() is None)
        del y
    return found


def test_a_layer_holds_no_rows_but_those_it_saves(ranks, tmp_path):
    path = write(tmp_path, "Llama", num_hidden_layers=1)
    assert ranks(2).run(freed, path) == [[True, True]] * 2


@pytest.mark.slow
@on_ranks(4)
def test_linear_layers_that_are_units_of_fsdp_are_covered(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=1), mesh["tp"], "sequence")
    for layer in [each for each in model.modules() if type(each) is nn.Linear]:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    ascend_parallel.configure(num_chunks=4)
    assert str(ascend_parallel.coverage(model)) == "8 of 8 linear layers covered"
    assert unequal(*both(model, step)) == []


@on_ranks(2)
def test_a_compiled_forward_in_a_module_that_is_not_gets_its_input_gathered(group):
    ascend_parallel.configure(num_chunks=4)
    model = parallel(decoder(layers=1), init_device_mesh("cpu", (group.size(),)), "sequence")
    mlp = model.layers[0].feed_forward
    mlp.forward = torch.compile(mlp.forward, backend="aot_eager")
    error, where = worst(*reversed(both(model, step)))
    assert error < 1e-6, where
