"""Random models with random strategies on random meshes, as graph and eager, against the unsharded model."""

import copy
from random import Random

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import Drawn, models
from sharded_models import mesh_of

from ascend_parallel import Settings
from ascend_parallel.sharding import propagate, unshard
from ascend_parallel.sharding.graph import BUFFER, CALL, PARAMETER
from ascend_parallel.sharding.layout import AVERAGE, REPLICATE, is_even, shard
from ascend_parallel.sharding.planner.operator_strategy import (
    OperatorStrategy,
    TensorPlacements,
    named_nodes,
    operator_name,
)
from ascend_parallel.sharding.rules import strategies
from ascend_parallel.sharding.runtime.parallelize import parallelize
from ascend_parallel.sharding.runtime.recompute_config import Recompute
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tracing.trace import trace

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
MESHES = {2: [(2,)], 4: [(4,), (2, 2)]}


def options(bucket_bytes):
    """Draw how a model is sharded and run; the numbers of the steps to recompute, or True for the whole model."""
    return st.fixed_dictionaries(
        {
            "overlap": st.booleans(),
            "num_chunks": st.integers(1, 3),
            "bucket_bytes": st.just(bucket_bytes),
            "prefetch": st.booleans(),
            "recompute": st.one_of(st.just(True), st.lists(st.integers(0, 7), max_size=4, unique=True)),
            "collectives": st.sampled_from(["keep", "recompute"]),
            "objective": st.sampled_from(["redistribution", "time"]),
            "choices": st.integers(0, 1 << 30),
            "share": st.sampled_from([0.7, 1.0, 0.3]),
        }
    )


def drawn_strategies(graph, mesh, options):
    """Choose placements for a share of the operators, parameters and inputs, by their patterns."""
    chance, found = Random(options["choices"]), {}
    for node in graph.nodes.values():
        if chance.random() > options["share"] or (node.kind == BUFFER and node.source in graph.updates):
            continue
        pattern = pattern_of(node)
        if len(named_nodes(graph, pattern)) > 1:
            continue
        choices = of_call(node.call) if node.kind == CALL else of_tensor(node.outputs[0])
        per_mesh_dim = [chance.choice(choices) for _ in mesh.shape]
        inputs, outputs = (list(zip(*each, strict=True)) for each in zip(*per_mesh_dim, strict=True))
        given = zip(node.call.inputs if node.kind == CALL else (), inputs, strict=True)
        pairs = [*given, *zip(node.outputs, outputs, strict=True)]
        if all(is_even(meta.shape, layout, mesh.shape) for meta, layout in pairs):
            found[pattern] = OperatorStrategy(placements(inputs), placements(outputs))
    return found


def pattern_of(node):
    if node.kind == CALL:
        return f"{node.module}:{operator_name(node)}"
    return f"{'weights' if node.kind in (PARAMETER, BUFFER) else 'inputs'}:{node.source}"


def of_call(call):
    """Return the strategies of a call on one mesh dimension; no operator is configured for averages."""
    found = [(each.inputs, each.outputs) for each in strategies(call)]
    return [each for each in found if AVERAGE not in (*each[0], *each[1])]


def of_tensor(meta):
    return [((), (placement,)) for placement in (REPLICATE, *map(shard, range(len(meta.shape))))]


def placements(layouts):
    return tuple(TensorPlacements(tuple(each.placement for each in layout)) for layout in layouts)


def batches(shape):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]


def two_steps(model, shape):
    """Return all that two steps give, with a forward without gradients between: gradients add up."""
    found = []
    for x in batches(shape):
        x.requires_grad_()
        outputs = model(x)
        found.append([output.detach().clone() for output in outputs])
        terms = [output * torch.linspace(-1, 2, output.numel()).to(x).view_as(output) for output in outputs]
        sum(term.sum() for term in terms).backward()
        found.append(x.grad)
        with torch.no_grad():
            found.append(model(x.detach() + 1))
    return found


def compare(group, spec, mesh_shape, variants):
    """Compare a model with its parts, for each of the options; return its collectives, and if it ran eagerly."""
    whole, mesh = Drawn(spec).double(), mesh_of(mesh_shape)
    graph = trace(copy.deepcopy(whole), (batches(spec["shape"])[0].requires_grad_(),))
    truth = copy.deepcopy(whole)
    expected = two_steps(truth, spec["shape"])
    expected += [gradients(truth), truth.state_dict()]
    collectives = sum(check(whole, expected, graph, mesh, spec, options) for options in variants)
    return collectives, not isinstance(graph.calls, str)


def check(whole, expected, graph, mesh, spec, options):
    plan = propagate(graph, mesh, drawn_strategies(graph, mesh, options), objective=options["objective"])
    numbers, count = options["recompute"], len(spec["steps"])
    modules = [""] if numbers is True else [f"steps.{number}" for number in numbers if number < count]
    static = ShardedModule(
        whole,
        plan,
        overlap=options["overlap"],
        settings=Settings(num_chunks=options["num_chunks"]),
        bucket_bytes=options["bucket_bytes"],
        prefetch=options["prefetch"],
        recompute=Recompute(modules=modules, collectives=options["collectives"]),
    )
    found = two_steps(static, spec["shape"])
    found += [static.full_gradients(), static.full_state_dict()]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    if not isinstance(graph.calls, str):  # else the model's in-place operators rule out the eager form
        eager = parallelize(copy.deepcopy(whole), plan)
        found = two_steps(eager, spec["shape"])
        found += [whole_of(gradients(eager)), whole_of(eager.state_dict())]
        torch.testing.assert_close(found, expected, **TOLERANCE)
    return sum(static.collective_counts.values())


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def whole_of(tensors):
    return {name: unshard(tensor) for name, tensor in tensors.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.stress)])
@pytest.mark.parametrize("count", MESHES)
def test_a_random_plan_computes_what_the_model_does(ranks, count, number):
    ran = []

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(models(), st.sampled_from(MESHES[count]), st.tuples(options(64), options(1 << 20), options(0)))
    def run(spec, mesh_shape, variants):
        ran.append(max(ranks(count).run(compare, spec, mesh_shape, variants)))

    if settings.default.derandomize:
        run = hypothesis.seed(number)(run)
    run()
    collectives, eager = zip(*ran, strict=True)
    assert sum(found > 0 for found in collectives) > 2  # else the models are too small to be cut
    assert sum(eager) > 1
