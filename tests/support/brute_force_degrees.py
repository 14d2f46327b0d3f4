"""The time of degrees from the plan of the whole model on all ranks, without the search's folding and sums.

Reads nothing of `ascend_parallel.training.degrees` but the degrees: it plans the strategy, walks over all operators of
the unfolded graph, and runs the schedule's simulation.
"""

from math import ceil, prod

from ascend_parallel.sharding.graph import CALL, PARAMETER, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.operator_cost import seconds
from ascend_parallel.sharding.planner.options import Option
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.rules import experts
from ascend_parallel.training import Strategy, plan_training
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.step_time.schedule import stages_of
from ascend_parallel.tuning.step_time.timing import StageTimes, simulate

BUCKET = 25e6


def step_of_whole_plan(tables, model, batch, **planning):
    """Return the seconds of a step of the strategy of `tables`, without recompute; fp32, Adam.

    planning: options of `plan_training`.
    """
    strategy = Strategy.from_dict(tables)
    assert not strategy.recompute.modules
    options, hardware = strategy.pipeline, find_hardware(strategy.hardware)
    planned = plan_training(strategy, model, batch, **planning)
    plan, costs = planned.plan, CostModel(hardware.of_slowest(strategy.ranks))
    stage_of = planned.stages or {name: 0 for name, node in plan.graph.nodes.items() if node.kind == CALL}
    count = max(stage_of.values()) + 1
    forward, backward, sent = [0.0] * count, [0.0] * count, [0.0] * count
    once = [0.0] * count
    for name, stage in stage_of.items():
        node = plan.graph.nodes[name]
        option = Option(plan.inputs[name], plan.output_layouts(node))
        whole = seconds(node.call, option, tuple(plan.mesh.shape), costs)
        own = [step.seconds for step in plan.op_collectives.get(name, ()) if step.mesh_dim]
        if own and node.call.name == experts.CALL:
            ahead, back = _exchange(own, whole / 3, len(node.inputs) - experts.UP, costs)
            forward[stage] += ahead
            backward[stage] += back
        else:
            forward[stage] += whole / 3 + sum(own)
            backward[stage] += whole * 2 / 3
        for value in node.values:
            last = max((stage_of[reader] for reader, _ in plan.graph.readers()[value]), default=stage)
            for passed in range(stage, last):
                sent[passed] += plan.graph.meta(value).local_bytes(plan.layouts[value], plan.mesh.shape)
    for conversion in plan.conversions:
        stage = stage_of[conversion.reader.split(", ")[0]] if conversion.reader else count - 1
        ahead, back = (
            sum(step.seconds for step in each.steps if step.mesh_dim) if each else 0.0
            for each in (conversion.ahead, conversion.back)
        )
        held = plan.graph.nodes[conversion.value.node].kind == PARAMETER
        forward[stage] += ahead
        (once if held and not ahead else backward)[stage] += back
    end = _end(strategy, plan, stage_of, count, costs, hardware)
    for stage, (elements, *_) in enumerate(end):
        if options.micro_batches > 1:  # read a gradient and its sum, write the sum, in fp32
            backward[stage] += costs.stream(3 * 4 * elements)
    if count == 1:
        elements, sums, after = end[0]
        sums += once[0]
        hidden = strategy.sharding.zero_stage <= 1
        finished = last = options.micro_batches * (forward[0] + backward[0])
        buckets = max(1, ceil(4 * elements / BUCKET))
        for bucket in range(1, buckets + 1):  # a bucket starts when backward has its gradients
            ready = last - (backward[0] * (1 - bucket / buckets) if hidden else 0.0)
            finished = (ready if bucket == 1 else max(finished, ready)) + sums / buckets
        return finished + after
    ranks = prod(plan.mesh.shape) * options.degree
    pair = MeshCosts.of(ProcessMesh([[0], [ranks - 1]], ["pp", "other"]), hardware)
    hop = pair.seconds("send", max(sent), 0)
    measured = {("F", stage): time for stage, time in enumerate(forward)}
    measured |= {("B", stage): time for stage, time in enumerate(backward)}
    measured |= {(half, stage): time / 2 for half in "IW" for stage, time in enumerate(backward)}
    times = StageTimes(send=hop, measured=measured)
    run = simulate(options.schedule, options.degree, options.count, options.micro_batches, times)
    ranks = stages_of(options.schedule, options.degree, options.count)
    mine = [[s for s in range(count) if ranks[s] == rank] for rank in range(options.degree)]
    summed = [
        slots[-1].stop + sum(end[s][1] + once[s] for s in stages) for slots, stages in zip(run.slots, mine, strict=True)
    ]
    return max(summed) + max(sum(end[s][2] for s in stages) for stages in mine)


def _exchange(sent, once, matrices, costs):
    """Return forward and backward of experts in one group: only weight gradients run under an all-to-all."""
    dispatch, combine, first, last = sent
    twice = once + once / matrices  # weight gradients, and one of the matmuls again
    host = costs.hardware.host.launch if costs.hardware.host.inline else 0.0
    assert host or not costs.hardware.host.launch, "tasks also wait for the host"
    slow, drag = costs.stretches(once + twice + 4 * host, first + last)
    before = host + drag * first + slow * once + host + host  # each launch takes the rank's time
    end = max(before + drag * last, before + slow * twice + host)
    return host + dispatch + once + host + host + combine, end


def _end(strategy, plan, stage_of, count, costs, hardware):
    """Return, per stage: elements, seconds of sums over replicas, and of gathers and the optimizer after them.

    Exact for one stage on each rank.
    """
    dp, zero, m = strategy.mesh["dp"], strategy.sharding.zero_stage, strategy.pipeline.micro_batches
    along = MeshCosts.of(plan.mesh, hardware)
    whole, own = [0] * count, [0] * count
    readers = plan.graph.readers()
    for node in plan.graph.nodes.values():
        if node.kind != PARAMETER:
            continue
        replica = (1, *plan.mesh.shape[1:])  # ZeRO-3 shards along dp too
        shape = local_shape(node.outputs[0].shape, plan.layouts[Value(node.name)], replica, (0,) * len(replica))
        longest = max(shape)
        for stage in {stage_of[name] for name, _ in readers[Value(node.name)]}:
            whole[stage] += prod(shape)
            own[stage] += prod(shape) // longest * ceil(longest / dp) if zero else prod(shape)

    def collective(kind, elements):
        parts = max(1, ceil(4 * elements / BUCKET))
        return parts * along.seconds(kind, 4 * elements / parts, 0) if dp > 1 else 0.0

    found = []
    for elements, mine in zip(whole, own, strict=True):
        gather, scatter = collective("all_gather", elements), collective("reduce_scatter", elements)
        reduce = collective("all_reduce", elements)
        sums = {0: reduce, 1: reduce, 2: m * scatter, 3: m * (2 * gather + scatter)}
        update = costs.stream(mine * (4 + 2 * 8 + 8))  # gradient, states twice, parameter twice
        found.append((elements, sums[zero], update + (gather if zero in (1, 2) else 0.0)))
    return found
