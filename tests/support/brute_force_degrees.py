"""The time of degrees from the plan of the whole model on all ranks, without the search's folding and sums.

Reads nothing of `ascend_parallel.training.degrees` but the degrees: it plans the strategy, walks over all operators of
the unfolded graph, and runs the schedule's simulation.
"""

from collections import Counter
from math import ceil, prod

from ascend_parallel.sharding.graph import CALL, PARAMETER, Value
from ascend_parallel.sharding.layout import local_shape
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.gradient_sums import summed_dims
from ascend_parallel.sharding.planner.operator_cost import passes
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
    once = [{} for _ in range(count)]
    for name, stage in stage_of.items():
        node = plan.graph.nodes[name]
        option = Option(plan.inputs[name], plan.output_layouts(node))
        ahead, back = passes(node.call, option, tuple(plan.mesh.shape), costs)
        own = [step.seconds for step in plan.op_collectives.get(name, ()) if step.mesh_dim]
        if own and node.call.name == experts.CALL:
            ahead, back = _exchange(own, ahead, back / 2, len(node.inputs) - experts.UP, costs)
            forward[stage] += ahead
            backward[stage] += back
        elif (
            own and node.call.sequence
        ):  # heads in groups: one of them is exposed, the rest where it outlasts attention
            groups, half = node.call.sequence.groups, len(own) // 2
            for seconds, kernel, of_pass in ((forward, ahead, own[:half]), (backward, back, own[half:])):
                sent_once = sum(of_pass) / groups
                seconds[stage] += sent_once + max(kernel, sum(of_pass) - sent_once)
        else:
            forward[stage] += ahead + sum(own)
            backward[stage] += back
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
        if held and not ahead:  # summed once, with all others that are summed over the same ranks
            dims = tuple(dim for dim in summed_dims(conversion.source, conversion.target) if dim)
            (found,) = {plan.graph.meta(conversion.value).local_bytes(conversion.source, plan.mesh.shape)}
            once[stage].setdefault(dims, {})[conversion.value] = found
        else:
            backward[stage] += back
    along = MeshCosts.of(plan.mesh, hardware)
    over = [{value: dims for dims, of in each.items() for value in of} for each in once]
    once = [sum(_summed(along, dims, sum(of.values())) for dims, of in each.items()) for each in once]
    end = _end(strategy, plan, stage_of, over, costs, hardware)
    zero = strategy.sharding.zero_stage
    for stage, (elements, own, *_) in enumerate(end):
        if options.micro_batches > 1:  # read a gradient and its sum, write the sum, in fp32; ZeRO 2 keeps a part
            backward[stage] += costs.stream(3 * 4 * (own if zero >= 2 else elements))
    if count == 1:
        elements, _, sums, (gather, scatter), after = end[0]
        forwards, backwards = forward[0], backward[0]
        if zero >= 2:  # each backward sums; nothing of it is counted as hidden
            backwards += scatter
        if zero == 3:  # both passes gather
            forwards, backwards = forwards + gather, backwards + gather
        passed = options.micro_batches * (forwards + backwards)
        if zero >= 2:
            return passed + once[0] + after
        return passed + _left(sums + once[0], elements, backward[0]) + after
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
        slots[-1].stop + sum(end[s][2] + once[s] for s in stages) for slots, stages in zip(run.slots, mine, strict=True)
    ]
    return max(summed) + max(sum(end[s][-1] for s in stages) for stages in mine)


def _summed(along, dims, nbytes):
    """Return the seconds of sums over mesh dimensions, in buckets."""
    parts = max(1, ceil(nbytes / BUCKET))
    return sum(parts * along.seconds("all_reduce", nbytes / parts, dim) for dim in dims)


def _left(sums, elements, backward):
    """Return by how much sums in buckets outlast a backward; a bucket starts when backward has its gradients."""
    buckets, finished = max(1, ceil(4 * elements / BUCKET)), 0.0
    for bucket in range(1, buckets + 1):
        finished = max(finished, backward * bucket / buckets) + sums / buckets
    return finished - backward


def _exchange(sent, once, half, matrices, costs):
    """Return forward and backward of experts in one group: only weight gradients run under an all-to-all."""
    dispatch, combine, first, last = sent
    twice = half + half / matrices  # weight gradients, and one of the matmuls again
    host = costs.hardware.host.launch if costs.hardware.host.inline else 0.0
    assert host or not costs.hardware.host.launch, "tasks also wait for the host"
    slow, drag = costs.stretches(half + twice + 4 * host, first + last)
    before = host + drag * first + slow * half + host + host  # each launch takes the rank's time
    end = max(before + drag * last, before + slow * twice + host)
    return host + dispatch + once + host + host + combine, end


def _end(strategy, plan, stage_of, over, costs, hardware):
    """Return, per stage: elements, the rank's own, seconds of sums over replicas, of a gather and a scatter of all
    weights, and of gathers and the optimizer after the sums.

    Exact for one stage on each rank.
    """
    dp, zero = strategy.mesh["dp"], strategy.sharding.zero_stage
    along = MeshCosts.of(plan.mesh, hardware)
    whole, own = [Counter() for _ in over], [Counter() for _ in over]
    readers = plan.graph.readers()
    for node in plan.graph.nodes.values():
        if node.kind != PARAMETER:
            continue
        replica = (1, *plan.mesh.shape[1:])  # ZeRO-3 shards along dp too
        shape = local_shape(node.outputs[0].shape, plan.layouts[Value(node.name)], replica, (0,) * len(replica))
        longest = max(shape)
        for stage in {stage_of[name] for name, _ in readers[Value(node.name)]}:
            dims = over[stage].get(Value(node.name), ())  # a bucket has gradients that are summed over the same ranks
            whole[stage][dims] += prod(shape)
            own[stage][dims] += prod(shape) // longest * ceil(longest / dp) if zero else prod(shape)

    def collective(kind, kinds):
        parts = [(max(1, ceil(4 * elements / BUCKET)), elements) for elements in kinds.values()]
        return sum(n * along.seconds(kind, 4 * elements / n, 0) for n, elements in parts) if dp > 1 else 0.0

    found = []
    for elements, mine in zip(whole, own, strict=True):
        gather, scatter = collective("all_gather", elements), collective("reduce_scatter", elements)
        sums = collective("all_reduce", elements) if zero <= 1 else 0.0
        elements, mine = elements.total(), mine.total()
        update = costs.stream(mine * (4 + 2 * 8 + 8))  # gradient, states twice, parameter twice
        found.append((elements, mine, sums, (gather, scatter), update + (gather if zero in (1, 2) else 0.0)))
    return found
