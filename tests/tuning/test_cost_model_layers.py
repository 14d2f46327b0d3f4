"""Layers, training steps and the data files."""

from math import ceil, pi, sqrt
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.key_gather import sent_share
from ascend_parallel.process_groups import collectives
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.hardware import all_hardware, find_hardware, read_hardware
from ascend_parallel.tuning.cost_model.layer_passes import BEST, BOUND, EQUAL, IN_TURN, MEGATRON, ChunkSchedule
from ascend_parallel.tuning.cost_model.layers import EXTRA_ACTIVATION, EXTRA_ROTARY, TransformerLayerTime
from ascend_parallel.tuning.cost_model.memory import layer_activations
from ascend_parallel.tuning.cost_model.models import Batch, all_models, find_model, layer_linears, read_model
from ascend_parallel.tuning.cost_model.step import Layout, held_weights, spread, step_time, step_work
from ascend_parallel.tuning.cost_model.tables import PlanningError
from ascend_parallel.tuning.step_time.timing import rank_ends

COSTS = {name: CostModel(hardware) for name, hardware in all_hardware().items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", sorted(all_models()))
def test_schedules_of_a_layer_stand_in_their_order(name, sequence_parallel):
    batch = Batch(sequence=4096, micro_batch=1, tp=8, sequence_parallel=sequence_parallel)
    layer = TransformerLayerTime(COSTS["ascend-910b2"], find_model(name), batch)
    order = [layer.forward(schedule) + layer.backward(schedule) for schedule in (BOUND, BEST, EQUAL, MEGATRON, IN_TURN)]
    assert order == sorted(order) and order[0] < order[-1]
    four = ChunkSchedule(name="4")
    assert layer.backward(four, "full") == pytest.approx(layer.backward(four) + layer.forward(four))
    assert layer.backward(four, "selective") == pytest.approx(layer.backward(four) + layer.attention)


def test_operators_of_a_layer_are_those_of_the_overlap_page():
    for sequence_parallel, expected in (
        (False, [(None, ALL_REDUCE), (ALL_REDUCE, None)] * 2),
        (True, [(ALL_GATHER, REDUCE_SCATTER), (REDUCE_SCATTER, ALL_GATHER)] * 2),
    ):
        batch = Batch(sequence=128, micro_batch=2, tp=2, sequence_parallel=sequence_parallel)
        linears = layer_linears(find_model("llama2-7b"), batch)
        found = [(linear.matmul("forward"), linear.matmul("backward")) for linear in linears]
        assert [tuple(problem and problem.operator for problem in pair) for pair in found] == expected
    up = found[2]
    assert (up[0].m, up[0].k, up[0].n) == (256, 4096, 11008)
    assert (up[1].m, up[1].k, up[1].n) == (256, 11008, 4096)


def test_one_rank_communicates_nothing():
    layer = TransformerLayerTime(
        COSTS["ascend-910b2"], find_model("llama2-7b"), Batch(sequence=1024, micro_batch=1, tp=1)
    )
    assert layer.forward(BEST) == layer.forward(MEGATRON) == layer.forward(IN_TURN)


def test_ten_thousand_ranks():
    """TP 8 x PP 25 x DP 50 of a model of 405B; more replicas cost the gradients' time, and a slower slowest card."""
    costs, model = COSTS["ascend-910b1"], find_model("llama3-405b")
    batch = Batch(sequence=8192, micro_batch=1, tp=8)
    few, many = (
        step_time(costs, model, batch, Layout(dp=dp, pp=25, micro_batches=100, recompute="full"), BEST)
        for dp in (1, 50)
    )
    slower = [costs.hardware.matmul.frequency / costs.hardware.of_slowest(n).matmul.frequency for n in (200, 10000)]
    assert 1 < many.pipeline / few.pipeline < slower[1] / slower[0] < 1.02
    assert few.gradients == 0 < many.gradients
    assert many.total > few.total


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "inside"),
    [(1, 8, 1, 8), (1, 16, 1, 8), (2, 8, 1, 4), (4, 4, 1, 2), (8, 4, 1, 1), (3, 8, 1, 1), (2, 2, 2, 2), (2, 2, 4, 2)],
)
def test_replicas_and_stages_that_share_a_server_use_its_links(tp, dp, pp, inside):
    """Gradients cost what plan-training says on a mesh of dp x tp; `inside`: replicas of a line in a server of 8.

    In buckets of 40 M parameters, as Megatron-core has them.
    """
    costs, model = COSTS["ascend-910b2"], find_model("llama2-7b")
    batch, layout = Batch(sequence=4096, micro_batch=1, tp=tp), Layout(dp=dp, pp=pp, micro_batches=8)
    step = step_time(costs, model, batch, layout, MEGATRON)
    nbytes = 4 * float(held_weights(costs, model, batch, layout)[0].elements.max())
    count = ceil(nbytes / 160e6)
    network = costs.network(collectives.ALL_REDUCE, nbytes / count / inside, dp // inside)
    alone = count * (costs.collective(collectives.ALL_REDUCE, nbytes / count, inside) + network)
    assert step.gradients <= alone * (1 + 1e-12) and (pp > 1 or step.gradients == pytest.approx(alone, rel=1e-12))
    ranks = [[replica * tp + rank for rank in range(tp)] for replica in range(dp)]
    planned = MeshCosts.of(ProcessMesh(ranks, ["dp", "tp"]), costs.hardware)
    assert alone == pytest.approx(count * planned.seconds("all_reduce", nbytes / count, 0), rel=1e-12)
    sent = batch.own_rows * model.hidden * 2
    in_server = costs.collective("all_gather", 2 * sent, 2)
    over_network = costs.hardware.network.latency + sent / costs.hardware.network.bandwidth
    assert over_network != pytest.approx(in_server, rel=0.1)
    hop = 0.0 if pp == 1 else in_server if tp * dp * pp <= 8 else over_network
    work = step_work(costs, model, batch, layout, MEGATRON)
    ends = rank_ends("1f1b", pp, 8, work.forward, work.backward, hop)
    assert step.pipeline == pytest.approx(max(ends), rel=1e-12)


@pytest.mark.parametrize("tp", [3, 8, 16, 64, 1000])
def test_any_number_of_ranks(tp):
    batch = Batch(sequence=4096, micro_batch=1, tp=tp)
    step = step_time(COSTS["ascend-910b2"], find_model("gpt3-175b"), batch, Layout(), BEST)
    assert 0 < step.total < float("inf")


def test_stages_share_the_layers():
    assert spread(80, 3) == [27, 27, 26] and sum(spread(126, 25)) == 126
    with pytest.raises(PlanningError, match="--pp=33 is not allowed"):
        step_time(
            COSTS["cpu-gloo"], find_model("llama2-7b"), Batch(sequence=16, micro_batch=1, tp=1), Layout(pp=33), BEST
        )


# Data


@pytest.mark.parametrize("name", sorted(all_hardware()))
def test_every_number_of_a_hardware_has_a_source(name):
    hardware = all_hardware()[name]
    assert len(hardware.numbers) > 20
    for key, number in hardware.numbers.items():
        assert number.why if number.assumed else len(number.source) > 20, key
        assert isinstance(number.value, int | float | list), key
    assert find_hardware(hardware.aliases[0]) is hardware


@pytest.mark.parametrize("name", sorted(all_models()))
def test_a_preset_has_the_published_size(name):
    model = find_model(name)
    assert model.source and model.count_parameters() == pytest.approx(model.parameters, rel=0.03)


def test_a_number_without_a_source_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "ascend-910b2"\nname = "mine"\n[matmul]\ncores = 30\n')
    with pytest.raises(PlanningError, match=r"matmul.cores = 30 needs a value and a source"):
        read_hardware(path)
    path.write_text('base = "ascend-910b2"\nname = "mine"\n[matmul]\ncores = { value = 30, source = "hearsay" }\n')
    with pytest.raises(PlanningError, match="names the source 'hearsay'"):
        read_hardware(path)
    path.write_text('base = "ascend-910b2"\n[matmul]\ncores = { value = 30, source = "assumed", why = "a try" }\n')
    assert read_hardware(path).matmul.cores == 30
    path.write_text('base = "ascend-910b2"\ndevice = "tpu"\n')
    with pytest.raises(PlanningError, match=r"device='tpu' is not allowed: give npu or cuda or cpu"):
        read_hardware(path)


def test_measured_numbers_of_a_file_replace_those_of_its_base(tmp_path):
    """The file is the example of docs/predict.md."""
    document = Path(__file__).parents[2] / "docs" / "predict.md"
    path, base = tmp_path / "here.toml", find_hardware("cpu-gloo")
    path.write_text(document.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0])
    read = read_hardware(path)
    assert (read.name, read.matmul.frequency, read.link.rate, read.link.processor) == ("my machine", 60e9, 10e9, 1e-9)
    assert read.collectives.all_reduce == ((float("inf"), 0.2e-3, 0.0, 0.0),)
    assert (read.memory, read.link.efficiency) == (base.memory, base.link.efficiency)
    assert read.numbers["link.rate"].source.startswith("one quiet machine")
    assert CostModel(read).matmul(100, 100, 100, 4) == pytest.approx(100**3 / 60e9)
    path.write_text(path.read_text().replace("1e-9", "-1e-9"))
    with pytest.raises(PlanningError, match=r"link\.processor=-1e-09 is not allowed"):
        read_hardware(path)


def test_a_model_of_one_s_own(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text("layers = 2\nhidden = 64\nffn = 256\nheads = 4\nvocab = 1000\n")
    model = read_model(path)
    assert (model.name, model.kv_heads, model.head_dim) == ("small", 4, 16)
    path.write_text("layers = 2\nhiden = 64\nffn = 256\nheads = 4\nvocab = 1000\n")
    with pytest.raises(PlanningError, match=r"'hiden' is not allowed: give .*hidden"):
        read_model(path)
    path.write_text("layers = 2\nffn = 256\nheads = 4\nvocab = 1000\n")
    with pytest.raises(PlanningError, match="has no hidden"):
        read_model(path)


class Accesses(TorchDispatchMode):
    """Counts what operators read and write, without views; and the operators."""

    def __init__(self):
        super().__init__()
        self.elements, self.operators = 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator.overloadpacket.__name__ not in ("alias", "detach", "slice", "split", "view"):
            tensors = [each for each in pytree.tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.elements += sum(each.numel() for each in tensors)
            self.operators += 1
        return out


def rotated(x, part, cos, sin):
    """Rotate as Megatron-core does, around the rotation `part` of what is not cut off."""
    x, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((part(x, cos, sin), passed), dim=-1)


def in_operators(x, cos, sin):
    first, second = torch.chunk(x, 2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gated(x, activation=torch.nn.functional.silu):
    first, second = torch.chunk(x, 2, dim=-1)
    return activation(first) * second


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * torch.pow(x, 3))))


@pytest.mark.parametrize(
    ("run", "fused", "extra", "unit"),
    [
        # a fused rotation reads and writes its tensor, a fused activation reads two widths and writes one
        (lambda x, *angles: rotated(x, in_operators, *angles), (2, 4), EXTRA_ROTARY["split"], 1),
        (lambda x, *angles: rotated(x, lambda t, *_: t.view(t.shape), *angles), (0, 0), EXTRA_ROTARY["sliced"], 1),
        (lambda x, *_: gated(x), (3, 6), EXTRA_ACTIVATION["split"], 2),
        (lambda x, *_: gated(x, gelu_tanh), (3, 6), EXTRA_ACTIVATION["tanh"], 2),
    ],
    ids=["split rotary", "sliced rotary", "activation", "gelu by tanh"],
)
def test_operators_that_are_not_fused_move_what_torch_runs(run, fused, extra, unit):
    x, angles = torch.randn(64, 2, 64, 16, requires_grad=True), (torch.randn(64, 1, 1, 16),) * 2
    with Accesses() as forward:
        y = run(x, *angles)
    gradient = torch.ones_like(y)
    with Accesses() as backward:
        torch.autograd.grad(y, x, gradient)
    for counted, kernel, (more, launches) in zip((forward, backward), fused, extra, strict=True):
        assert round(unit * counted.elements / x.numel()) == kernel + more
        assert counted.operators == launches + (kernel > 0)


def test_a_layer_takes_longer_by_what_is_not_fused():
    costs, model = COSTS["ascend-910b2"], find_model("llama2-7b")
    plain = TransformerLayerTime(costs, model, Batch(sequence=2048, micro_batch=1, tp=8))
    batch = Batch(sequence=2048, micro_batch=1, tp=8, rotary="split", activation="split")
    split = TransformerLayerTime(costs, model, batch)
    for schedule in (MEGATRON, BEST):
        # queries and keys have 512 columns each, the MLP 1376; bf16 at 75 % of 1.6 TB/s, 5 us a launch
        forward = 2048 * (10 * 1024 + 2 * 1376) * 2 / 1.2e12 + 11 * 5e-6
        backward = 2048 * (10 * 1024 + 7 * 1376) * 2 / 1.2e12 + 15 * 5e-6
        assert split.forward(schedule) - plain.forward(schedule) == pytest.approx(forward)
        assert split.backward(schedule) - plain.backward(schedule) == pytest.approx(backward)
    assert split.unfused == pytest.approx((forward, backward))


def shared_sequence(model="llama3-8b", **options):
    """Return a layer whose ranks share each sequence."""
    options = {"sequence": 32768, "micro_batch": 1, "tp": 1, "cp": 8, **options}
    return TransformerLayerTime(COSTS["ascend-910b2"], find_model(model), Batch(**options))


@pytest.mark.parametrize("exchange", ["heads", "gather"])
def test_one_part_in_so_many_groups_of_an_exchange_is_exposed(exchange):
    bare = shared_sequence(cp=2).kernel
    whole = shared_sequence(cp=2, cp_exchange=exchange)
    sent = whole.attention - bare
    assert sent > 0 and whole.context_groups == 1
    for groups in (2, 4):
        cut = shared_sequence(cp=2, cp_exchange=exchange, cp_groups=groups)
        assert cut.context_groups == groups
        group = cut.shared.seconds(exchange, groups, 0.0, "forward", cut.context_collective) / groups
        assert sent / groups < group < 1.2 * sent / groups
        assert cut.attention == pytest.approx(group + max(bare, (groups - 1) * group))
        assert cut.attention_backward < whole.attention_backward
    assert shared_sequence(cp_exchange="heads", cp_groups=4).context_groups == 1  # 8 heads of keys on 8 ranks


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_gather_sends_what_the_numbers_of_heads_say(ranks):
    """Four collectives of heads and one of keys have other latencies, so the shares of bytes order them."""
    found = [shared_sequence(cp=ranks, cp_exchange=name) for name in ("heads", "gather")]
    exchanged, gathered = (layer.attention - layer.kernel for layer in found)
    assert (gathered < exchanged) == (sent_share(32, 8, ranks) < 1) == (ranks == 2)
    assert shared_sequence().batch.context == "ring"


def test_a_plan_exchanges_heads_or_gathers_with_lent_queries():
    """A plan's ranks have one stretch of the sequence each: they lend half of the queries, which is sent as well."""
    planned = {"activation": "torch", "rotary": "torch"}
    heads, gather = (shared_sequence(**planned, cp_exchange=name) for name in ("heads", "gather"))
    assert shared_sequence(**planned).attention == heads.attention and gather.kernel == heads.kernel
    lent = 2 * COSTS["ascend-910b2"].send(4096 * 32 * 128 * 2 / 2, inside=True)
    assert gather.attention - shared_sequence(cp_exchange="gather").attention == pytest.approx(lent)


def test_ways_of_context_parallelism_that_are_not_known_are_refused():
    for options, words in (
        ({"cp_exchange": "ulysses"}, "cp_exchange='ulysses' is not allowed: give ring, heads, gather"),
        ({"cp_groups": 2}, "cp_groups=2 is not allowed: give 1 with cp_exchange='ring', which is not cut"),
        (
            {"cp_exchange": "ring", "rotary": "torch"},
            "cp_exchange='ring' is not allowed: give heads, gather, in a plan",
        ),
    ):
        with pytest.raises(PlanningError) as error:
            Batch(sequence=4096, micro_batch=1, tp=1, cp=2, **options)
        assert words in str(error.value)


def test_gathered_keys_stay_in_memory():
    heads, gather = (shared_sequence(cp_exchange=name) for name in ("heads", "gather"))
    kept = [layer_activations(layer.model, layer.batch, "none") for layer in (heads, gather)]
    assert kept[1] - kept[0] == 7 * 4096 * 8 * 2 * 128 * 2  # of 7 other ranks: tokens, heads, two of 128, bytes
