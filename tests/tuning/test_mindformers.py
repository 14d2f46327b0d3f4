"""Configurations of MindFormers: what is read of them, that no key is lost, and that a hostile file does no harm."""

import random
from pathlib import Path

import pytest
import yaml

from ascend_parallel.training import Strategy
from ascend_parallel.training.options import StrategyOptionError
from ascend_parallel.tuning.cost_model.mindformers import read_mindformers
from ascend_parallel.tuning.cost_model.tables import PlanningError

STATIC = """
use_parallel: True
seed: 42
runner_config: {epochs: 2, batch_size: 2, gradient_accumulation_steps: 3}
runner_wrapper: {type: MFTrainOneStepCell, use_clip_grad: True}
optimizer: {type: AdamW, swap: True}
train_dataset: &data
  input_columns: ["input_ids", "labels"]
train_dataset_task: {dataset_config: *data}
context: {mode: 0, max_device_memory: "58GB"}
parallel_config:
  data_parallel: &dp 2
  model_parallel: 4
  pipeline_stage: 2
  micro_batch_num: 8
  use_seq_parallel: True
  gradient_aggregation_group: 4
  vocab_emb_dp: False
micro_batch_interleave_num: 1
parallel:
  parallel_mode: 1
  full_batch: False
  dataset_strategy: [[*dp, 1], [*dp, 1]]
  search_mode: sharding_propagation
  enable_parallel_optimizer: True
  parallel_optimizer_config: {gradient_accumulation_shard: True, parallel_optimizer_threshold: 64}
  pipeline_config: {pipeline_interleave: True, pipeline_scheduler: seqpipe}
recompute_config:
  recompute: [[2, 1], [0, 1]]
  select_recompute: {'feed_forward\\.mul': True}
  a_key_of_tomorrow: 7
model:
  model_config:
    type: LlamaConfig
    num_layers: 10
    hidden_size: 512
    intermediate_size: 1536
    num_heads: 8
    vocab_size: 1000
    seq_length: 128
    offset: [[1, 0], [0, 1]]
    pp_interleave_num: 2
    compute_dtype: bfloat16
    param_init_type: float32
callbacks: [{type: MFLossMonitor}]
"""
PYNATIVE = """
training: {steps: 10, local_batch_size: 2, global_batch_size: 16, max_norm: 0.5}
parallelism:
  tensor_parallel: 2
  pipeline_parallel: 2
  pipeline_parallel_schedule: 1f1b
  pipeline_parallel_microbatch_size: 5
  sequence_parallel: true
  cpu_offload: true
recompute: {mode: full, full_recompute_layer: [0-3, 6]}
recompute_comm: {enable: true}
model: {model_type: qwen3, seq_length: 64}
"""


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a text as a file of MindFormers."""

    def read_text(text, ranks=None):
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return read_mindformers(file, ranks)

    return read_text


def leaves(value, path=""):
    if not isinstance(value, dict):
        return {path}
    return set().union(*(leaves(entry, f"{path}.{key}" if path else key) for key, entry in value.items()))


def changed(text, path, value):
    """The text with one key set."""
    tables = yaml.safe_load(text)
    table = tables
    *sections, key = path.split(".")
    for section in sections:
        table = table.setdefault(section, {})
    table[key] = value
    return yaml.safe_dump(tables)


def test_ulysses_is_an_exchange_of_heads(read):
    static = changed(changed(STATIC, "parallel_config.context_parallel", 2), "parallel_config.data_parallel", 1)
    pynative = changed(PYNATIVE, "parallelism.context_parallel", 2)
    for text, key, names in (
        (static, "parallel_config.context_parallel_algo", {"ulysses_cp": "heads", "colossalai_cp": None}),
        (pynative, "parallelism.context_parallel_method", {"ulysses": "heads", "colossal": None}),
    ):
        for name, exchange in names.items():
            run = read(changed(text, key, name), 16)
            strategy = Strategy.from_dict(run.tables("model.layers"))
            assert (strategy.sequence_dim, strategy.sequence_exchange) == ("cp", exchange)
            (use,) = (use for use in run.keys if use.key == key)
            assert ('sequence_exchange = "heads"' in use.words) == (exchange is not None)


def test_the_degrees_the_batch_and_the_stages_are_those_of_the_file(read):
    run = read(STATIC)
    assert (run.dp, run.tp, run.pp, run.virtual_stages, run.ranks) == (2, 4, 2, 2, 16)
    assert (run.micro_batches, run.micro_batch, run.batch, run.sequence) == (8, 2, 2 * 2 * 8, 128)
    assert run.stage_layers == (3, 2, 2, 3)  # 10 // 4 and the offset, in the order of the model
    assert (run.model().layers, run.model().heads, run.model().kv_heads) == (10, 8, 8)
    strategy = Strategy.from_dict(run.tables("model.layers"))
    assert (strategy.mode, strategy.mesh, strategy.ranks) == ("auto", {"dp": 2, "tp": 4}, 16)
    assert strategy.pipeline.stages == {
        "model.layers.0-2": 0,
        "model.layers.3-4": 1,
        "model.layers.5-6": 2,
        "model.layers.7-9": 3,
    }
    assert strategy.recompute.modules == ("model.layers.0-1", "model.layers.3", "model.layers.7")
    assert strategy.recompute.collectives == "recompute"  # MindFormers' default, not that of a Strategy
    assert (strategy.sharding.zero_stage, strategy.max_norm) == (2, 1.0)
    assert (strategy.amp.dtype, strategy.amp.level) == ("bfloat16", "O1")


def with_model(text, **values):
    """The text with these sizes of the model; None takes one out."""
    tables = yaml.safe_load(text)
    config = tables["model"]["model_config"]
    tables["model"]["model_config"] = {k: v for k, v in (config | values).items() if v is not None}
    return yaml.safe_dump(tables)


def test_experts_of_the_table_at_the_top_are_the_models(read):
    moe = {"expert_num": 8, "num_experts_chosen": 2, "capacity_factor": 1.1, "first_k_dense_replace": True}
    sizes = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "n_kv_heads": 8, "intermediate_size": 14336}
    text = changed(with_model(STATIC, **sizes, vocab_size=32000, offset=0), "recompute_config.recompute", False)
    run = read(changed(changed(text, "moe_config", moe), "parallel_config.expert_parallel", 2))
    model = run.model()
    assert (model.experts, model.top_k, model.expert_ffn, model.dense_layers) == (8, 2, 14336, 0)
    assert round(model.count_parameters() / 1e9, 1) == 46.7  # Mixtral 8x7B
    assert {use.key: use.use for use in run.keys}["moe_config.expert_num"] == "used"
    assert run.notes(model) == []
    dense = read(changed(text, "parallel_config.expert_parallel", 2))
    with pytest.raises(PlanningError, match=r"parallel_config\.expert_parallel=2 is not allowed: give 1: run"):
        dense.notes(dense.model())
    assert read(changed(text, "moe_config", {"expert_num": 1})).model().experts == 0


@pytest.mark.parametrize(
    ("sizes", "width"),
    [
        ({"hidden_size": 8192, "ffn_dim_multiplier": 1.3, "multiple_of": 256}, 28672),  # Llama 3, 70B
        ({"hidden_size": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}, 14336),  # Llama 3, 8B
        ({"hidden_size": 4096}, 11008),  # Llama 2, 7B
    ],
)
def test_a_llamas_inner_width_is_derived_where_the_file_has_none(read, sizes, width):
    assert read(with_model(STATIC, intermediate_size=None, **sizes)).model().ffn == width


def test_older_classes_are_read_by_their_own_names(read):
    own = {"type": "ChatGLM2Config", "ffn_hidden_size": 13696, "multi_query_group_num": 2, "kv_channels": 128}
    none = dict.fromkeys(("intermediate_size", "num_heads", "vocab_size"))
    sizes = {"hidden_size": 4096, "num_layers": 40, "num_attention_heads": 32, "padded_vocab_size": 151552, "offset": 0}
    text = changed(with_model(STATIC, **own, **none, **sizes), "recompute_config.recompute", False)
    model = read(text).model()
    assert (model.ffn, model.heads, model.kv_heads, model.head_dim) == (13696, 32, 2, 128)
    assert round(model.count_parameters() / 1e9, 1) == 9.4  # GLM-4-9B


def test_an_offset_may_count_layers_that_predict_ahead(read):
    run = read(with_model(STATIC, mtp_depth=1, offset=[[1, 0], [1, 1]]))  # 11 // 4 and the offset; one is no layer
    assert run.stage_layers == (3, 2, 3, 2)
    with pytest.raises(PlanningError, match="10 together"):
        read(with_model(STATIC, offset=[[1, 0], [1, 1]]))


def test_inference_is_refused_and_what_the_time_is_not_of_is_noted(read):
    for mode in ("predict", "eval", 3):
        with pytest.raises(PlanningError, match=r"run_mode=.* is not allowed: give the file of a training"):
            read(changed(STATIC, "run_mode", mode))
    lora = changed(changed(STATIC, "run_mode", "finetune"), "model.model_config.pet_config", {"pet_type": "lora"})
    experts = changed(changed(lora, "moe_config.expert_num", 8), "parallel_config.expert_parallel", 4)
    run = read(experts)
    assert {use.key: use.use for use in run.keys}["model.model_config.pet_config.pet_type"] == "differs"
    ranks, adapters = run.notes(run.model())
    assert ranks.startswith("experts over 2 ranks in place of 4 (parallel_config.expert_parallel): time and memory")
    assert "pet_config" in adapters


def test_a_model_that_is_not_named_can_be_given_beside_the_file(read):
    for kind, words in ((None, "has no model_type"), ("FooConfig", "model_type='FooConfig' is not allowed")):
        with pytest.raises(PlanningError, match=words + r".*or give --model or --model-file beside --mindformers"):
            read(with_model(STATIC, type=kind)).model()


@pytest.mark.parametrize(("text", "ranks"), [(STATIC, None), (PYNATIVE, 8)])
def test_every_key_is_said_to_be_used_or_not(read, text, ranks):
    run = read(text, ranks)
    given = [use.key for use in run.keys if use.given]
    assert sorted(given) == sorted(leaves(yaml.safe_load(text)))  # each once
    report = run.report()
    for use in run.keys:
        assert (use.key if use.use != "elsewhere" else use.key.partition(".")[0]) in report


def test_what_differs_and_what_has_no_counterpart_is_named(read):
    uses = {use.key: use for use in read(STATIC).keys}
    assert uses["recompute_config.mp_comm_recompute"].use == "differs"  # not in the file: its default differs
    assert not uses["recompute_config.mp_comm_recompute"].given
    for key in (
        "parallel.pipeline_config.pipeline_scheduler",
        "recompute_config.a_key_of_tomorrow",
        r"recompute_config.select_recompute.feed_forward\.mul",
        "parallel_config.gradient_aggregation_group",
        "optimizer.swap",
    ):
        assert uses[key].use == "none", key
    assert "interleaved_1f1b in its place" in uses["parallel.pipeline_config.pipeline_scheduler"].words
    assert uses["callbacks"].use == "elsewhere"


def test_the_other_dialect_takes_its_replicas_from_the_ranks(read):
    run = read(PYNATIVE, 8)
    assert (run.dp, run.tp, run.pp, run.micro_batches, run.zero_stage) == (2, 2, 2, 16 // (2 * 2), 3)
    strategy = Strategy.from_dict(run.tables())
    assert strategy.recompute.modules == ("layers.0-3", "layers.6")
    assert (strategy.recompute.collectives, strategy.max_norm) == ("recompute", 0.5)
    with pytest.raises(PlanningError, match=r"data_parallel_shard=-1.*--ranks"):
        read(PYNATIVE)
    with pytest.raises(PlanningError, match="6 ranks"):
        read(PYNATIVE, 6)


@pytest.mark.parametrize(
    ("dp", "ep", "mesh", "expert_dim"),
    [
        (4, 2, {"dp": 2, "ep": 2, "tp": 4}, "ep"),
        (4, 4, {"dp": 4, "tp": 4}, "dp"),
        (4, 16, {"dp": 4, "tp": 4}, "dp"),
        (1, 4, {"dp": 1, "tp": 4}, None),
    ],
)
def test_experts_lie_over_replicas(read, dp, ep, mesh, expert_dim):
    text = changed(changed(STATIC, "parallel_config.expert_parallel", ep), "parallel_config.data_parallel", dp)
    tables = read(text).tables()
    assert (tables["mesh"], tables.get("expert_dim")) == (mesh, expert_dim)
    assert Strategy.from_dict(tables).ranks == dp * 4 * 2


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("parallel_config.data_parallel", 0, "a whole number from 1"),
        ("parallel_config.model_parallel", True, "a whole number from 1"),
        ("parallel_config.pipeline_stage", "2", "a whole number from 1"),
        ("parallel_config.expert_parallel", 3, "a divisor of the 2 replicas"),
        ("parallel.parallel_mode", 4, "one of 0, 1, 2, 3"),
        ("parallel.parallel_mode", [1], "one of 0, 1, 2, 3"),
        ("parallel.enable_parallel_optimizer", "yes please", "True or False"),
        ("parallel.parallel_optimizer_config.optimizer_weight_shard_size", 1, "-1, or data_parallel=2"),
        ("parallel.parallel_optimizer_config.optimizer_level", "level4", "level1, level2, level3"),
        ("parallel.pipeline_config.pipeline_scheduler", "seq2pipe", "1f1b, gpipe"),
        ("model.model_config.offset", [1, 0, 1], "4 numbers"),
        ("model.model_config.offset", [[1, 0], [0, 0]], "10 together"),
        ("model.model_config.offset", [[-2, 2], [1, 1]], "1 layer or more"),
        ("model.model_config.offset", "all", "a number for each stage"),
        ("model.model_config.num_layers", None, "the number of layers"),
        ("model.model_config.hidden_size", [512], "a whole number"),
        ("model.model_config.compute_dtype", "int4", "bfloat16"),
        ("recompute_config.recompute", [1, 1, 1], "for each of 4 stages"),
        ("recompute_config.recompute", "most", "True, False"),
        ("runner_config.batch_size", 1 << 80, "a whole number from 1"),
        ("runner_wrapper.max_grad_norm", float("nan"), "a number above 0"),
        ("context.max_device_memory", 58, "a size such as '58GB'"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_its_key(read, key, value, allowed):
    with pytest.raises(PlanningError) as error:
        read(changed(STATIC, key, value))
    named = key if key != "model.model_config.num_layers" else "num_hidden_layers"
    assert named in str(error.value)
    assert allowed in str(error.value)
    assert len(str(error.value)) < 500


def test_sums_of_gradients_over_replicas_are_refused(read):
    text = changed(STATIC, "parallel.parallel_mode", 0)
    with pytest.raises(PlanningError, match=r"gradients_mean=False with parallel_mode 0"):
        read(text)
    run = read(changed(changed(text, "parallel.gradients_mean", True), "recompute_config.recompute", True))
    assert (run.tables()["mode"], run.ranks) == ("data", 2)
    assert {use.key: use.use for use in run.keys}["parallel_config.model_parallel"] == "none"


BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else '1'}]" for n in range(12))
TABLES = "\n".join(
    f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9)) if n else 'k: 1'}}}" for n in range(12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than 100000 values"),
        (TABLES, "more than 100000 values"),
        ("parallel: &a\n  x: *a\n", "tables in each other"),
        ("parallel: &a [*a]\n", "tables in each other"),
        ("parallel: &a {x: 1}\nparallel_config:\n  <<: *a\n", "merges"),
        ("parallel_config: {model_parallel: 2, model_parallel: 4}", "'model_parallel' stands twice"),
        ("x: !!python/object/apply:os.system ['true']", "no valid YAML"),
        ("[" * 5000, "no valid YAML"),
        ("x: " + "9" * 10_000, "no valid YAML"),
        ("x: 2020-99-99", "no valid YAML"),
        ("? [1, 2]\n: 3", "a text as key"),
        ("- 1\n- 2", "a list in place of a table"),
        ("", "nothing in place of a table"),
        ("a: 1\n---\nb: 2", "no valid YAML"),
        ("x: \x07", "no valid YAML"),
    ],
    ids=range(15),
)
def test_a_hostile_file_is_refused_in_a_line(read, text, words):
    with pytest.raises(PlanningError) as error:
        read(text)
    assert words in str(error.value)
    assert len(str(error.value)) < 600


def test_mutated_files_are_read_or_refused_with_reason(read):
    """Values of other types in every place, and bytes changed: a PlanningError, or a run whose strategy is checked."""
    generator = random.Random(0)
    values = (None, -1, 0, 3, 1 << 70, True, "x", 1.5, [], [1], {}, {"y": 2}, [[None]], float("inf"))
    keys = sorted(leaves(yaml.safe_load(STATIC)))
    refused = 0
    for _ in range(60):
        if generator.random() < 0.7:
            text = changed(STATIC, generator.choice(keys).replace("\\", ""), generator.choice(values))
        else:
            place = generator.randrange(len(STATIC))
            text = STATIC[:place] + chr(generator.randrange(32, 127)) + STATIC[place + 1 :]
        try:
            run = read(text)
            run.report()
            Strategy.from_dict(run.tables())
        except (PlanningError, StrategyOptionError) as error:
            refused += 1
            assert str(error)
    assert 8 < refused < 56


def test_a_strategy_is_made_of_a_file_and_rank_0_says_what_differs(tmp_path, caplog):
    file = Path(tmp_path, "run.yaml")
    file.write_text(changed(STATIC, "parallel_config.pipeline_stage", 1).replace("offset", "unused"))
    text = file.read_text()
    file.write_text(changed(changed(text, "recompute_config.recompute", True), "parallel.pipeline_config", {}))
    columns = {"layers.*.up": ([("dp", 1), ("tp", 1)], None)}
    strategy = Strategy.from_mindformers(file, operators=columns)
    assert (strategy.mode, strategy.pipeline.micro_batches, strategy.operators) == ("semi_auto", 3, columns)
    assert Strategy.from_mindformers(file).mode == "auto"
    assert "without counterpart" in caplog.text
    assert "recompute_config.a_key_of_tomorrow=7" in caplog.text
    with pytest.raises(StrategyOptionError, match=r"no\.yaml cannot be read"):
        Strategy.from_mindformers(tmp_path / "no.yaml")
