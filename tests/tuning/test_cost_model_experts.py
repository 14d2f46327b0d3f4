"""Models with experts in the cost model: against counting by hand, event simulation, and transformers' own modules."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import COMMUNICATE, COMPUTE, Task, length, simulate

from ascend_parallel.overlap.layer_shape import BACKWARD, FORWARD
from ascend_parallel.process_groups.collectives import ALL_GATHER, REDUCE_SCATTER
from ascend_parallel.tuning.cost_model.cost import CostModel
from ascend_parallel.tuning.cost_model.experts import ExchangeWork, ExpertsTime
from ascend_parallel.tuning.cost_model.hardware import find_hardware
from ascend_parallel.tuning.cost_model.layer_passes import BEST, BOUND, MEGATRON, ChunkSchedule
from ascend_parallel.tuning.cost_model.layers import TransformerLayerTime
from ascend_parallel.tuning.cost_model.memory import step_memory
from ascend_parallel.tuning.cost_model.models import Batch, Model, find_model, read_model
from ascend_parallel.tuning.cost_model.region import Lanes
from ascend_parallel.tuning.cost_model.step import Layout, step_time
from ascend_parallel.tuning.cost_model.tables import PlanningError

SECONDS = st.floats(min_value=1e-3, max_value=1, allow_nan=False)
COSTS = CostModel(find_hardware("910b"))
SMALL = Model(
    name="small",
    title="",
    source="",
    layers=4,
    hidden=256,
    ffn=1024,
    heads=8,
    vocab=1000,
    gated=True,
    experts=16,
    top_k=2,
    expert_ffn=128,
    shared_ffn=256,
    dense_layers=1,
)


def exchange_tasks(groups, send, compute, tail, again, copy, first):
    """Return the tasks of an exchange in equal groups, as docs/moe.md draws them."""
    share = 1 / groups
    computing, sending = [], []

    def run(name, seconds, *after):
        computing.append(Task(name, COMPUTE, seconds, after))

    def start(name, seconds):
        sending.append(Task(name, COMMUNICATE, seconds, (computing[-1].name,) if computing else ()))

    def dispatch(group, *after):
        if groups > 1:
            run(f"join {group}", copy * share, *after)
        start(f"D{group}", send * share)

    dispatch(0)
    if groups > 1:
        dispatch(1)
    run("shared", first)
    for group in range(groups):
        if group + 2 < groups:
            dispatch(group + 2, f"D{group}")
        last = group == groups - 1
        run(f"experts {group}", share * (compute if last else compute + tail), f"D{group}")
        start(f"C{group}", send * share)
    run("weight gradients", share * (tail + again))
    if groups > 1:
        run("place", copy, f"C{groups - 1}")
    return [*computing, *sending]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_groups_take_what_the_simulation_finds(groups, send, compute, tail, again, copy, first):
    work = ExchangeWork(
        experts=2 * groups, send=lambda share: send * share, compute=compute, tail=tail, again=again, copy=copy
    )
    lanes = Lanes()
    work.run(lanes, (2,) * groups, first)
    tasks = exchange_tasks(groups, send, compute, tail, again, copy, first)
    assert lanes.estimate.seconds == pytest.approx(length(simulate(tasks)), rel=1e-9)


@pytest.mark.parametrize(("ranks", "in_domain"), [(4, 4), (8, 8), (16, 8), (64, 8), (6, 2), (5, 1)])
def test_an_all_to_all_sends_what_each_pair_of_ranks_exchanges(ranks, in_domain):
    size = 64e6
    pairs = [size / ranks for other in range(1, ranks)]  # what rank 0 sends to each other rank
    inside, outside = sum(pairs[: in_domain - 1]), sum(pairs[in_domain - 1 :])
    expected = 0.0
    if in_domain > 1:  # an all-gather of n ranks and S bytes sends S (n - 1) / n
        expected += COSTS.collective(ALL_GATHER, inside * in_domain / (in_domain - 1), in_domain)
    if outside:
        network = COSTS.hardware.network
        expected += (ranks // in_domain - 1) * network.latency + outside / network.bandwidth
    assert COSTS.all_to_all(size, ranks, in_domain) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "dp", "pp", "ep", "etp"), [(1, 8, 1, 4, 1), (2, 4, 2, 8, 1), (2, 4, 1, 4, 2)])
def test_a_rank_holds_the_weights_that_counting_gives(tp, dp, pp, ep, etp, zero):
    """Counts matrices of each rank: bf16 weights, fp32 gradients, Adam's two states and fp32 masters."""
    h, f, width = SMALL.hidden, SMALL.ffn, SMALL.expert_ffn
    layers = [[] for _ in range(pp)]
    for layer in range(SMALL.layers):
        layers[layer * pp // SMALL.layers].append(layer)
    found = []
    for stage, own in enumerate(layers):
        shared = experts = 0
        for layer in own:
            shared += 4 * h * h + 2 * h  # q, k, v, o and both norms
            if layer < SMALL.dense_layers:
                shared += 3 * h * f
            else:
                shared += SMALL.experts * h + 3 * h * SMALL.shared_ffn
                experts += sum(3 * h * width / etp for expert in range(SMALL.experts) if expert % ep == 0)
        shared += SMALL.vocab * h * ((stage == 0) + (stage == pp - 1))
        of_all, of_experts = dp, tp * dp // (ep * etp)
        kinds = [(shared / tp, of_all), (experts, of_experts)]
        found.append(
            [
                sum(n * size / (ranks if zero >= least else 1) for n, ranks in kinds)
                for size, least in ((2, 3), (4, 2), (12, 1))
            ]
        )
    batch = Batch(sequence=512, micro_batch=1, tp=tp, ep=ep, etp=etp)
    held = step_memory(SMALL, batch, Layout(dp=dp, pp=pp, micro_batches=8, zero=zero))
    assert [held.parameters, held.gradients, held.optimizer] in [pytest.approx(each) for each in found]


def test_activations_of_a_layer_with_experts_are_its_tensors():
    """One layer more: norms, attention, the shared expert, rows of top_k experts, twice as wide before activation."""
    batch = Batch(sequence=512, micro_batch=2, tp=1, ep=2)
    more, less = (step_memory(replace(SMALL, layers=layers), batch, Layout(dp=2, micro_batches=1)) for layers in (5, 4))
    rows, h = 1024, SMALL.hidden
    kept = rows * (4 * h + 3 * h + h + 3 * SMALL.shared_ffn)
    kept += rows * SMALL.top_k * (h + 3 * SMALL.expert_ffn + h)
    statistics = SMALL.heads * rows * 2 * 8 * 4
    assert more.activations - less.activations == pytest.approx(2 * kept + statistics)


@pytest.mark.parametrize(("ep", "etp", "inside"), [(8, 1, 8), (16, 1, 8), (4, 2, 4), (8, 2, 4)])
def test_a_layer_in_turn_adds_experts_and_all_to_alls(ep, etp, inside):
    """Against the same layer without experts: router, sort, two all-to-alls a pass, and each expert's matmuls."""
    model = replace(SMALL, shared_ffn=0)
    batch = Batch(sequence=4096, micro_batch=1, tp=2, ep=ep, etp=etp)
    rows = 4096 // 2
    nbytes = rows * 2 * SMALL.hidden * 2
    sent = COSTS.all_to_all(nbytes, ep, inside)
    sent += (COSTS.collective(ALL_GATHER, nbytes * etp, etp) + COSTS.collective(REDUCE_SCATTER, nbytes * etp, etp)) / 2
    got, width = rows * 2 * ep * etp // 16, 128 // etp
    up, down = COSTS.matmul(got, 256, width, 2), COSTS.matmul(got, width, 256, 2)
    matmuls = 16 // ep * (2 * up + down)
    wide = COSTS.matmul(got, width, 256, 2) + COSTS.matmul(width, got, 256, 2)  # gradients of the input and the weight
    narrow = COSTS.matmul(got, 256, width, 2) + COSTS.matmul(256, got, width, 2)
    backwards = 16 // ep * (2 * wide + narrow)
    activation = COSTS.stream(3 * 16 // ep * got * width * 2)
    around = COSTS.matmul(rows, 256, 16, 2) + COSTS.stream(4 * nbytes)
    sparse, dense = (
        TransformerLayerTime(COSTS, model if each else replace(model, ffn=1), batch, sparse=each)
        for each in (True, False)
    )
    mlp = [sum(MEGATRON.seconds(part) for part in dense.linear_passes[way][-2:]) for way in (FORWARD, BACKWARD)]
    act = dense.elementwise - sparse.elementwise
    forward, backward = sparse.forward(MEGATRON), sparse.backward(MEGATRON)
    assert forward == pytest.approx(dense.forward(MEGATRON) - mlp[0] - act + matmuls + activation + 2 * sent + around)
    twice = backwards + 2 * (activation + around)
    assert backward == pytest.approx(dense.backward(MEGATRON) - mlp[1] - 2 * act + twice + 2 * sent)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_groups_stand_between_the_bound_and_the_serial_layer(name, direction):
    experts = ExpertsTime(COSTS, find_model(name), Batch(sequence=4096, micro_batch=1, tp=1, ep=4))
    bound, best, serial = (experts.seconds(direction, schedule, 1e-3) for schedule in (BOUND, BEST, MEGATRON))
    assert bound < best < serial
    assert best <= experts.seconds(direction, ChunkSchedule(name="2"), 1e-3) < serial
    whole = replace(experts.batch, etp=2)
    assert ExpertsTime(COSTS, experts.model, whole).best_groups(direction) is None


def test_experts_make_a_large_model_fit_and_a_step_shorter_than_on_every_rank():
    """DeepSeek-V3 on 512 ranks: more expert parallelism, less memory; and groups hide a part of the all-to-alls."""
    model, layout = find_model("deepseek-v3"), Layout(dp=64, pp=8, micro_batches=64, zero=1)
    batches = [Batch(sequence=4096, micro_batch=1, tp=1, ep=ep) for ep in (1, 8, 64)]
    held = [step_memory(model, batch, layout).parameters for batch in batches]
    assert held == sorted(held, reverse=True) and held[0] > 7 * held[1]
    serial, four = (
        step_time(COSTS, model, batches[1], layout, each).total for each in (MEGATRON, ChunkSchedule(name="4"))
    )
    assert four < serial


CONFIGS = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
    "DeepseekV3": {
        **{"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1},
    },
    "Glm4Moe": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "head_dim": 64},
        **{"moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1},
    },
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"head_dim": 64},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_has_the_size_of_its_model(name, tmp_path):
    """Total and active parameters of the modules that transformers makes; its small biases and norms are left out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    if name in ("Qwen2Moe",):
        sizes["shared_expert_intermediate_size"] = 192
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=1000, **CONFIGS[name])
    config.save_pretrained(tmp_path / "mine")
    with torch.device("meta"):
        module = getattr(transformers, f"{name}ForCausalLM")(config)
    model = read_model(tmp_path / "mine" / "config.json")
    counts = {path: weight.numel() for path, weight in module.named_parameters()}
    routed = sum(count for path, count in counts.items() if ".experts." in path)
    assert model.name == "mine"
    assert model.count_parameters() == pytest.approx(sum(counts.values()), rel=2e-3)
    active = sum(counts.values()) - routed * (1 - model.top_k / model.experts if model.experts else 0)
    assert model.count_active() == pytest.approx(active, rel=4e-3)
    assert (model.experts > 0) == (routed > 0)


REFUSED = [
    ({"model_type": "gpt2"}, r"model_type='gpt2' is not allowed: give one of .*mixtral"),
    ({"decoder_sparse_step": 2}, r"decoder_sparse_step=2, mlp_only_layers=\[\]' is not allowed: give experts in all"),
    ({"num_experts_per_tok": 9}, r"top_k=9 is not allowed: give a whole number from 1 to 8, with 8 experts"),
    ({"vocab_size": None}, "has no vocab_size"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_a_config_that_cannot_be_expressed_is_refused(change, message, tmp_path):
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2, **change}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(PlanningError, match=message):
        read_model(path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"ep": 3}, "--ep=3 is not allowed: give a divisor of the 16 experts"),
        ({"ep": 16}, "--ep=16 is not allowed: give a number whose product with --etp divides tp x cp x dp = 8 ranks"),
        ({"ep": 2, "etp": 3}, "divides tp x cp x dp = 8 ranks"),
        ({"ep": 2, "sequence_parallel": False}, "--no-sequence-parallel='true' is not allowed: give it with --tp 1"),
    ],
)
def test_degrees_of_experts_that_do_not_fit_are_refused(batch, message):
    layout = Layout(dp=4, micro_batches=4)
    with pytest.raises(PlanningError, match=message):
        step_time(COSTS, SMALL, Batch(**{"sequence": 128, "micro_batch": 1, "tp": 2, **batch}), layout, MEGATRON)
    with pytest.raises(PlanningError, match="1: llama2-7b has no experts"):
        step_memory(find_model("llama2-7b"), Batch(sequence=128, micro_batch=1, tp=2, ep=2), layout)
