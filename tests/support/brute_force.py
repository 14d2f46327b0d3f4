"""Rules held against brute force: every rank's part run in one process, put together and compared with the whole."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
from layout_definition import close, gradient_layout, join_all, split_all
from torch.utils import _pytree as pytree

from ascend_parallel.sharding.graph import OpCall, Ref, TensorMeta
from ascend_parallel.sharding.layout import is_even
from ascend_parallel.sharding.rules import local_call, own_collectives, strategies

SEED = 11


def call_of(target, *args, **kwargs):
    """Return the `OpCall` of an operator on whole tensors, and these tensors."""
    tensors = []

    def replaced(argument):
        tensors.append(argument)
        return Ref(len(tensors) - 1)

    own, named = pytree.tree_map_only(torch.Tensor, replaced, (args, kwargs))
    outputs = whole_outputs(OpCall(target, own, named, (), ()), tensors)
    return OpCall(target, own, named, tuple(map(meta_of, tensors)), tuple(map(meta_of, outputs))), tensors


def meta_of(tensor):
    return TensorMeta(tuple(tensor.shape), tensor.dtype)


def whole_outputs(call, tensors):
    args, kwargs = pytree.tree_map_only(Ref, lambda ref: tensors[ref.index].clone(), (call.args, dict(call.kwargs)))
    torch.default_generator.manual_seed(SEED)  # not torch.manual_seed, which takes 3 ms for each absent accelerator
    return tensors_of(call.target(*args, **kwargs))


def tensors_of(result):
    results = result if isinstance(result, (tuple, list)) else [result]
    return [one for one in results if isinstance(one, torch.Tensor)]


def layouts_of(call, chosen):
    """Turn one strategy per mesh dimension into layouts of inputs and outputs."""
    inputs = [tuple(one.inputs[index] for one in chosen) for index in range(len(call.inputs))]
    outputs = [tuple(one.outputs[index] for one in chosen) for index in range(len(call.outputs))]
    return inputs, outputs


def fits(call, chosen, mesh_shape):
    """Tell whether every tensor is cut evenly."""
    layouts = [one for side in layouts_of(call, chosen) for one in side]
    pairs = zip((*call.inputs, *call.outputs), layouts, strict=True)
    cut = [(meta, layout) for meta, layout in pairs if any(state.kind == "shard" for state in layout)]
    return all(is_even(meta.shape, layout, mesh_shape) for meta, layout in cut)


def check(call, tensors, chosen, mesh_shape, constants=()):
    """Assert that a call run in parts, one strategy per mesh dimension, gives the whole call's values and gradients."""
    generator = torch.Generator().manual_seed(SEED)
    leaves = [leaf(one, index not in constants) for index, one in enumerate(tensors)]
    outputs = whole_outputs(call, leaves)
    input_layouts, output_layouts = layouts_of(call, chosen)
    parts = [split_all(one, layout, mesh_shape, generator) for one, layout in zip(tensors, input_layouts, strict=True)]
    ranks = list(product(*map(range, mesh_shape)))
    local_leaves = {at: [leaf(part[at], index not in constants) for index, part in enumerate(parts)] for at in ranks}
    local = run_all(call, local_leaves, input_layouts, output_layouts, mesh_shape)
    for index, (output, layout) in enumerate(zip(outputs, output_layouts, strict=True)):
        found = join_all({at: local[at][index].detach() for at in ranks}, layout, mesh_shape)
        close(found, output.detach(), f"output {index}")
    given = [one for one, output in enumerate(outputs) if output.requires_grad]
    wholes = {one: torch.randn(outputs[one].shape, dtype=outputs[one].dtype, generator=generator) for one in given}
    grads = {one: split_all(wholes[one], gradient_layout(output_layouts[one]), mesh_shape, generator) for one in given}
    expected = gradients({one: outputs[one] for one in given}, wholes, leaves)

    def backward(at):
        return gradients(
            {one: local[at][one] for one in given}, {one: grads[one][at] for one in given}, local_leaves[at]
        )

    with ThreadPoolExecutor(len(ranks)) as pool:  # an operator's backward may have collectives of its own
        own = dict(zip(ranks, pool.map(backward, ranks), strict=True))
    for index, layout in enumerate(input_layouts):
        if expected[index] is not None:
            connected = {found[index] is not None for found in own.values()}
            assert connected == {True}, f"input {index} has no gradient on some ranks"
            found = join_all({at: own[at][index] for at in ranks}, gradient_layout(layout), mesh_shape)
            close(found, expected[index], f"gradient of input {index}")


def run_all(call, local_leaves, input_layouts, output_layouts, mesh_shape):
    """Return what each rank computes: one after the other, or, with collectives of the operator itself, in threads."""
    meeting = Meeting(list(local_leaves)) if own_collectives(call, input_layouts, mesh_shape) else None

    def run(at):
        if meeting is None:
            torch.default_generator.manual_seed(SEED)
        reduce = meeting and partial(meeting.all_reduce, at)
        return local_call(call, input_layouts, output_layouts, mesh_shape, at)(local_leaves[at], reduce, "one")

    if meeting is None:
        return {at: run(at) for at in local_leaves}
    with ThreadPoolExecutor(len(local_leaves)) as pool:
        return dict(zip(local_leaves, pool.map(run, local_leaves), strict=True))


class Meeting:
    """All-reduces among ranks that are threads."""

    def __init__(self, ranks):
        self.ranks, self.given, self.barrier = ranks, {}, threading.Barrier(len(ranks), timeout=30)

    def all_reduce(self, at, tensor, mesh_dim, op, direction="forward"):
        self.given[at] = tensor
        self.barrier.wait()
        line = [one for one in self.ranks if one[:mesh_dim] + one[mesh_dim + 1 :] == at[:mesh_dim] + at[mesh_dim + 1 :]]
        given = torch.stack([self.given[one] for one in line])
        self.barrier.wait()
        return given.sum(0) if op == "sum" else given.amax(0)


def leaf(tensor, differentiable=True):
    return tensor.detach().clone().requires_grad_(differentiable and tensor.is_floating_point())


def gradients(outputs, grads, leaves):
    """Return the leaves' gradients, None where there is none."""
    wanted = [one for one in leaves if one.requires_grad]
    used = [one for one in outputs if outputs[one].requires_grad]
    if not wanted or not used:
        return [None] * len(leaves)
    found = torch.autograd.grad([outputs[one] for one in used], wanted, [grads[one] for one in used], allow_unused=True)
    by_place = iter(found)
    return [next(by_place) if one.requires_grad else None for one in leaves]


def check_all(call, tensors, mesh_shape, constants=(), limit=None, random=None):
    """Check every combination of strategies that fits, `limit` of them drawn by `random`; return those checked."""
    single = strategies(call)
    combinations = [one for one in product(single, repeat=len(mesh_shape)) if fits(call, one, mesh_shape)]
    if limit is not None and len(combinations) > limit:
        combinations = random.sample(combinations, limit)
    for chosen in combinations:
        try:
            check(call, tensors, chosen, mesh_shape, constants)
        except Exception as error:
            raise AssertionError(f"{call.name} {call.inputs} {call.args} {describe(chosen)}: {error}") from error
    return combinations


def describe(chosen):
    """Return strategies as "S(0) R* -> S(0)"."""
    return "; ".join(f"{' '.join(map(str, one.inputs))} -> {' '.join(map(str, one.outputs))}" for one in chosen)
