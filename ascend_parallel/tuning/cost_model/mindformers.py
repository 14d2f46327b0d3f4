"""Read the configuration of a MindFormers training: degrees, sizes, and for each of its keys what became of it.

Two dialects: that of the static graph (`parallel_config`), and that of PyNative, told by its section `parallelism`.
The keys and their defaults are those of mindspore-ai/mindformers at commit 167a50d (July 2026). A file is data:
YAML's plain types alone, of limited size, each value checked where it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from ascend_parallel.ops.key_gather import HEADS
from ascend_parallel.text import shown
from ascend_parallel.tuning.cost_model.models import Model, model_of_config
from ascend_parallel.tuning.cost_model.tables import PlanningError, need_table, read_text, require
from ascend_parallel.tuning.step_time.schedule import SPLIT

USED, DIFFERS, NONE, ELSEWHERE = "used", "differs", "none", "elsewhere"
WORDS = {
    USED: "used",
    DIFFERS: "used, or a default, and different here",
    NONE: "without counterpart",
    ELSEWHERE: "belong elsewhere",
}
MOST_VALUES, MOST_DEPTH = 100_000, 50
MOST_RANKS, MOST_ROWS = 1 << 20, 1 << 30
MODES = {0: "data", 1: "semi_auto", 2: "auto", 3: "hybrid"}
MODE_NAMES = {"data_parallel": 0, "semi_auto_parallel": 1, "auto_parallel": 2, "hybrid_parallel": 3}
SEQUENCE_SCHEDULES = ("seqpipe", "seqvpp", "seqsmartvpp")
SCHEDULERS = ("1f1b", "gpipe", "zero_bubble_v", *SEQUENCE_SCHEDULES)
LEVELS = {"level1": 1, "level2": 2, "level3": 3}
HALVES = {"bfloat16": "bfloat16", "float16": "float16", "bf16": "bfloat16", "fp16": "float16"}
FULL = ("float32", "fp32")
CONFIG = "model.model_config."
FACTOR = "ffn_dim_multiplier"
ADAPTERS = f"{CONFIG}pet_config"
STATIC = "static graph"
DEGREES = {"dp": "mesh dp", "tp": "mesh tp", "cp": "mesh cp, sequence_dim", "ep": "expert_dim"}
DEGREES["pp"] = "[pipeline] degree"
# A model's sizes in the names of transformers' config.json, with the names of MindFormers' older classes.
SIZES = {
    "model_type": ("type",),
    "num_hidden_layers": ("num_layers", "n_layer"),
    "num_attention_heads": ("num_heads", "n_head"),
    "num_key_value_heads": ("n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("ffn_hidden_size",),
    "head_dim": ("kv_channels",),
    "vocab_size": ("padded_vocab_size",),
    "num_local_experts": ("num_experts", "n_routed_experts", "expert_num"),
    "num_experts_per_tok": ("num_experts_chosen",),
    "n_shared_experts": ("shared_expert_num",),
}
ALIKE = (
    *("hidden_size", "multiple_of", "ffn_dim_multiplier", "tie_word_embeddings", "q_lora_rank", "kv_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq"),
)
SIZES |= dict.fromkeys(ALIKE, ())
SIZE_PLACES = (CONFIG, "model.", f"{CONFIG}moe_config.", "moe_config.")
# Decoders with gated MLPs, RMS norms and rotary embeddings, as a Llama.
OLDER_TYPES = dict.fromkeys(("LlamaConfig", "ChatGLM2Config", "TelechatConfig"), "llama")
# Keys of parallelism that nothing here stands for, and why or what comes nearest.
WITHOUT = {
    "parallel_config.seq_split_num": "a sequence is not cut into parts that pass the stages one after the other",
    "parallel_config.gradient_aggregation_group": "gradients are summed in buckets of [comm_fusion] bucket_mb",
    "parallel_config.context_parallel_algo": "keys and values are gathered, or heads exchanged: what costs less",
    "parallel_config.ulysses_degree_in_cp": "the plan exchanges heads where that costs less",
    "parallel_config.recompute": "read from recompute_config",
    "parallel.enable_alltoall": "the plan uses all-to-alls where they cost less",
    "parallel.strategy_ckpt_config.save_file": "a checkpoint here has its layouts in itself",
    "parallel.strategy_ckpt_config.load_file": "strategy files are not read; see docs/from-mindspore.md",
    "parallel.strategy_ckpt_config.only_trainable_params": "a checkpoint here has its layouts in itself",
    "parallel.strategy_ckpt_save_file": "a checkpoint here has its layouts in itself",
    "parallel.parallel_optimizer_config.parallel_optimizer_threshold": "parameters of every size are partitioned",
    "parallel.loss_repeated_mean": "the loss is the mean over the global batch",
    "recompute_config.parallel_optimizer_comm_recompute": "ZeRO 3 gathers weights again in backward, the others never",
    "recompute_config.recompute_slice_activation": "kept activations are not sliced over the tensor-parallel ranks",
    "optimizer.swap": "the optimizer's state stays on the device",
    "parallelism.data_parallel_shard_strategy": "parameters, gradients and states are partitioned: zero_stage 3",
    "parallelism.cpu_offload": "nothing is offloaded to the host",
    "parallelism.dense_fsdp_shard_size": "parameters are partitioned over all of dp",
    "parallelism.reshard_after_forward_policy": "ZeRO 3 gathers a layer's weights for forward and again for backward",
    "parallelism.context_parallel_method": "keys and values are gathered, or heads exchanged: what costs less",
    "parallelism.ulysses_degree_in_cp": "the plan exchanges heads where that costs less",
    "parallelism.enable_mc2": "USE_COC_FUSED_KERNEL=1 requests the fused operators",
    "parallelism.pipeline_parallel_overlap_p2p": "the schedule decides what stages send beside their work",
    "parallelism.pipeline_parallel_layers_per_stage": "stages of about equal work; [pipeline] stages names yours",
    "recompute.exclude_op": "name operators to keep in [recompute] keep",
}
WITHOUT |= dict.fromkeys(
    ("vocab_emb_dp", "parallel_config.vocab_emb_dp"),
    "the plan chooses the embedding's layout, or weights:... of `operators`",
)
# Sections that are not about parallelism, and where what they say goes.
SECTIONS = {
    section: where
    for where, sections in {
        "your model's own code": ("model",),
        "the torch optimizer that you pass": ("optimizer",),
        "torch's scheduler over step.optimizer": ("lr_schedule", "lr_scheduler"),
        "MindSpore's runtime": ("context",),
        "step.save and step.load": ("checkpoint",),
        "step.load": ("load_checkpoint", "resume_training"),
        "your training loop": ("callbacks", "monitor", "training", "runner_config", "runner_wrapper"),
        "your data loader": (
            *("train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task", "processor"),
        ),
    }.items()
    for section in sections
}
OTHER_SECTION = "your script"
PARALLEL = (
    *("parallel", "parallel_config", "moe_config", "recompute_config", "swap_config", "micro_batch_interleave_num"),
    *("parallelism", "recompute", "recompute_comm", "swap"),
)
TRAINS = (None, "train", "finetune")


@dataclass(frozen=True)
class KeyUse:
    """What became of a key: `use` is "used", "differs", "none" (no counterpart) or "elsewhere"; `words` says how.

    given: whether the file has the key; otherwise `value` is MindFormers' default, and different here.
    """

    key: str
    value: Any
    use: str
    words: str
    given: bool = True

    def __str__(self) -> str:
        """Return the key and its value, as in "parallel_config.model_parallel=8"."""
        default = "" if self.given else " (MindFormers' default)"
        return f"{self.key}={shown(self.value)}{default}"


@dataclass(frozen=True, kw_only=True)
class MindFormersRun:
    """A training as MindFormers configures it.

    mode
        That of a `Strategy` by `parallel_mode`.
    exchange
        How `cp` ranks bring a sequence together: "heads" for Ulysses; "": the plan chooses.
    batch, sequence, micro_batch
        The sequences of a step over all replicas, their length (None: not in the file), the sequences of a micro-batch.
    stage_layers
        The layers of each pipeline stage in the order of the model; () without an `offset`.
    recomputed
        The number of layers that each stage recomputes; () for all or none (`recompute_all`).
    config
        The sizes of the model in the names of transformers' config.json.
    """

    path: str
    dialect: str
    mode: str
    dp: int
    tp: int
    cp: int
    exchange: str
    ep: int
    pp: int
    virtual_stages: int
    schedule: str
    micro_batches: int
    batch: int
    micro_batch: int
    sequence: int | None
    sequence_parallel: bool
    recompute_all: bool
    recomputed_collectives: bool
    zero_stage: int
    amp: Mapping[str, Any]
    max_norm: float | None
    memory: str | None
    config: Mapping[str, Any]
    keys: tuple[KeyUse, ...] = field(repr=False)
    stage_layers: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    recomputed_ranges: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def most_recomputed(self) -> int:
        """The layers that the stage which recomputes most recomputes; 0 for all of them, or none."""
        return 0 if self.recompute_all else max(self.recomputed, default=0)

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed."""
        return self.recompute_all or self.most_recomputed > 0 or bool(self.recomputed_ranges)

    @property
    def expert_ranks(self) -> int:
        """The ranks that share experts here: replicas alone, also where MindFormers lays experts over dp and tp."""
        return min(self.ep, self.dp)

    def model(self) -> Model:
        """Return the model of the file; raises `PlanningError` for one that `predict` does not know."""
        try:
            return model_of_config(dict(self.config), Path(self.path).stem, f"{self.path}, model.model_config")
        except PlanningError as error:
            raise PlanningError(f"{error}; or give --model or --model-file beside --mindformers") from error

    def notes(self, model: Model) -> list[str]:
        """Return what the prediction of `model` has otherwise than the file; refuses ranks of experts it has not."""
        name = "parallel_config.expert_parallel" if self.dialect == STATIC else "parallelism.expert_parallel"
        require(f"{self.path}: {name}", self.ep, bool(self.ep == 1 or model.experts), f"1: {model.name} has no experts")
        found = []
        if self.expert_ranks < self.ep:
            ranks = f"{self.expert_ranks} ranks in place of {self.ep}"
            found.append(f"experts over {ranks} ({name}): time and memory are of another layout than the file's")
        if any(use.key.startswith(ADAPTERS) for use in self.keys):
            found.append("the file trains adapters (pet_config): time and memory are of a training of all weights")
        return found

    def tables(self, layers: str = "layers", *, named: bool = False) -> dict[str, Any]:
        """Return the tables of a `Strategy`.

        layers
            The path of the list of layers in the model, such as "model.layers".
        named
            Whether strategies of operators are given beside the file: then parallel_mode 1 is "semi_auto"; otherwise
            "auto", or "data" with data parallelism alone.
        """
        mode = self.mode
        if mode == "semi_auto" and not named:
            mode = "auto" if self.tp * self.cp * self.ep > 1 else "data"
        mesh = {"dp": self.dp}
        tables: dict[str, Any] = {"mode": mode, "mesh": mesh}
        if self.ep > 1 and self.dp > 1 and mode == "auto":
            if self.dp % self.ep == 0 and self.dp > self.ep:
                mesh |= {"dp": self.dp // self.ep, "ep": self.ep}
                tables["expert_dim"] = "ep"
            else:
                tables["expert_dim"] = "dp"
        if self.cp > 1:
            mesh["cp"] = self.cp
            tables["sequence_dim"] = "cp"
            tables |= {"sequence_exchange": self.exchange} if self.exchange else {}
        if self.tp > 1 or mode in ("semi_auto", "hybrid"):
            mesh["tp"] = self.tp
        pipeline: dict[str, Any] = {"micro_batches": self.micro_batches}
        if self.pp > 1:
            pipeline |= {"degree": self.pp, "schedule": self.schedule, "virtual_stages": self.virtual_stages}
            if self.stage_layers:
                parts = _ranges(layers, self.stage_layers)
                pipeline["stages"] = {part: stage for stage, part in enumerate(parts)}
        tables["pipeline"] = pipeline
        if self.recomputes:
            tables["recompute"] = {
                "modules": self._recomputed_patterns(layers),
                "collectives": "recompute" if self.recomputed_collectives else "keep",
            }
        if self.zero_stage:
            tables["sharding"] = {"zero_stage": self.zero_stage, "dim": "dp"}
        if self.amp:
            tables["amp"] = dict(self.amp)
        if self.pp > 1 and self.schedule in SPLIT:
            tables["overlap"] = {"operators": False}
        if self.max_norm is not None:
            tables["max_norm"] = self.max_norm
        return tables

    def _recomputed_patterns(self, layers: str) -> list[str]:
        if self.recompute_all:
            return [f"{layers}.*"]
        if self.recomputed_ranges:
            return [f"{layers}.{part}" for part in self.recomputed_ranges]
        stages = self.stage_layers or (self.config.get("num_hidden_layers", 0) // len(self.recomputed),) * len(
            self.recomputed
        )
        firsts = [0, *accumulate(stages)]
        pairs = zip(firsts, self.recomputed, strict=False)
        return [_range(layers, first, count) for first, count in pairs if count]

    def report(self, *, used: bool = True) -> str:
        """Return the use of each key, as text: a line for each key about parallelism, then the other sections.

        used: False leaves out the keys that have the same meaning here.
        """
        counts = Counter(use.use for use in self.keys if use.given)
        summary = ", ".join(f"{counts[kind]} {WORDS[kind]}" for kind in WORDS if counts[kind])
        lines = [f"{self.path}: {counts.total()} keys of MindFormers ({self.dialect}): {summary}"]
        for kind in (USED, DIFFERS, NONE)[not used :]:
            alike: dict[str, list[str]] = {}
            for use in self.keys:
                if use.use == kind:
                    alike.setdefault(use.words, []).append(str(use))
            lines += [f"  {kind:8}{', '.join(uses)}: {words}" for words, uses in alike.items()]
        others: dict[str, list[str]] = {}
        for use in self.keys:
            if use.use == ELSEWHERE:
                others.setdefault(use.words, []).append(use.key.partition(".")[0])
        lines += [f"  to {where}: {', '.join(dict.fromkeys(names))}" for where, names in others.items()]
        return "\n".join(lines)

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the use of each key, as plain values."""
        return [{**vars(use), "value": _plain(use.value)} for use in self.keys]


def read_mindformers(path: str | Path, ranks: int | None = None) -> MindFormersRun:
    """Read a MindFormers YAML file.

    ranks
        The number of ranks of the job, where the file does not tell it (PyNative, and parallel_mode 0); elsewhere it
        must be the product of the file's degrees.

    Raises `PlanningError` with the file, the key, its value and what is allowed; also where PyYAML is missing.
    """
    place = str(path)
    tables = _parsed(read_text(Path(path), place), place)
    mode = tables.get("run_mode")
    require(f"{place}: run_mode", mode, mode in TRAINS, "the file of a training (train, finetune), not of inference")
    keys = _Keys(place, tables)
    run = _pynative(keys, tables, ranks) if "parallelism" in tables else _static(keys, ranks)
    if ranks not in (None, run.ranks):
        raise PlanningError(f"{place}: its degrees have {run.ranks} ranks, not {ranks}: change one of them")
    require(f"{place}: ranks", run.ranks, run.ranks <= MOST_RANKS, f"degrees of at most {MOST_RANKS} ranks together")
    return run


class _Keys:
    """The leaves of a file by dotted path; each is read once, or named as unread."""

    def __init__(self, place: str, tables: Mapping[str, Any]) -> None:
        self.place = place
        self.unread = _leaves(tables, place)
        self.uses: list[KeyUse] = []

    def say(self, key: str, use: str, words: str, default: Any = None) -> None:
        """Note what becomes of a key; one that the file does not have only where its default differs here."""
        given = key in self.unread
        value = self.unread.pop(key, default)
        if given or use == DIFFERS:
            self.uses.append(KeyUse(key, value, use, words, given))

    def correct(self, key: str, use: str, words: str) -> None:
        """Note something else of a key that was noted."""
        self.uses = [replace(each, use=use, words=words) if each.key == key else each for each in self.uses]

    def count(self, key: str, words: str, default: int = 1, least: int = 1, most: int = MOST_ROWS) -> int:
        """Return a whole number, and note its use."""
        value = self.unread.get(key, default)
        allowed = type(value) is int and least <= value <= most
        self.check(key, value, allowed, f"a whole number from {least} to {most}")
        self.say(key, USED, words)
        return int(value)

    def flag(self, key: str, words: str, *, default: bool = False) -> bool:
        """Return true or false, and note its use."""
        value = self.unread.get(key, default)
        self.check(key, value, isinstance(value, bool), "True or False")
        self.say(key, USED, words)
        return bool(value)

    def name(self, key: str, words: str, allowed: Sequence[Any], default: Any) -> Any:
        """Return one of `allowed`, and note its use."""
        value = self.unread.get(key, default)
        plain = isinstance(value, (str, int)) and not isinstance(value, bool)
        self.check(key, value, plain and value in allowed, f"one of {', '.join(map(str, allowed))}")
        self.say(key, USED, words)
        return value

    def number(self, key: str, words: str, default: float, *, zero: bool = False) -> float:
        """Return a number above 0, or 0 too, and note its use."""
        value = self.unread.get(key, default)
        allowed = type(value) in (int, float) and 0 <= value < inf and (zero or value > 0)
        self.check(key, value, allowed, "a number of 0 or more" if zero else "a number above 0")
        self.say(key, USED, words)
        return float(value)

    def check(self, key: str, value: object, allowed: bool, expected: str) -> None:
        """Raise `PlanningError` with file, key and value unless `allowed`."""
        require(f"{self.place}: {key}", value, allowed, expected)

    def finish(self) -> tuple[KeyUse, ...]:
        """Name all unread keys, and return what became of every key."""
        for key in sorted(self.unread):
            section = key.partition(".")[0]
            if key in WITHOUT:
                self.say(key, NONE, WITHOUT[key])
            elif section in PARALLEL:
                self.say(key, NONE, "no counterpart here")
            else:
                self.say(key, ELSEWHERE, SECTIONS.get(section, OTHER_SECTION))
        return tuple(self.uses)


def _parsed(text: str, place: str) -> dict[str, Any]:
    """Return the tables of a YAML text of plain types, without duplicate keys and merges."""
    try:
        import yaml
    except ImportError as error:
        raise PlanningError(f'{place} needs PyYAML: pip install --no-build-isolation ".[mindformers]"') from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML's plain types; a key that stands twice, or a merge, would hide a value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise PlanningError(f"{place}, line {key.start_mark.line + 1}: merges (<<) are not read")
                if not isinstance(key, yaml.ScalarNode):
                    raise PlanningError(f"{place}, line {key.start_mark.line + 1}: give a text as key")
                if key.value in seen:
                    raise PlanningError(f"{place}, line {key.start_mark.line + 1}: {shown(key.value)} stands twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: Any) -> None:
            """Leave merges, which `construct_mapping` refuses."""

    try:
        values = yaml.load(text, Loader)
    except PlanningError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise PlanningError(f"{place} is no valid YAML: {words[:300]}") from error
    need_table(place, values, "tables of a MindFormers run")
    result: dict[str, Any] = values
    return result


def _leaves(tables: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the values by dotted path. An alias may repeat a value without end: their number has a limit."""
    found: dict[str, Any] = {}
    seen = 0
    pending: list[tuple[str | None, Any, int]] = [("", tables, 0)]  # None: inside a list, which is one value
    while pending:
        path, value, depth = pending.pop()
        seen += 1
        if seen > MOST_VALUES or depth > MOST_DEPTH:
            raise PlanningError(f"{place}: more than {MOST_VALUES} values, or {MOST_DEPTH} tables in each other")
        if isinstance(value, dict) and (value or not path):
            for key, entry in value.items():
                below = None if path is None else f"{path}.{key}" if path else str(key)
                pending.append((below, entry, depth + 1))
            continue
        if path is not None:
            found[path] = value
        if isinstance(value, (list, dict, set)):
            pending += [(None, entry, depth + 1) for entry in value]
    return dict(sorted(found.items()))


def _degrees(keys: _Keys, section: str, names: Iterable[str], words: Iterable[str]) -> list[int]:
    return [keys.count(f"{section}.{name}", word, most=MOST_RANKS) for name, word in zip(names, words, strict=True)]


def _flat(value: Any) -> list[Any]:
    """Return a value, a list, or the values of a list of lists, as one list."""
    rows = value if isinstance(value, list) else [value]
    return [count for row in rows for count in (row if isinstance(row, list) else [row])]


def _static(keys: _Keys, ranks: int | None) -> MindFormersRun:
    """Return the run of a file for the static graph."""
    parallel = keys.flag("use_parallel", "several ranks, or one", default=True)
    mode_value = keys.name("parallel.parallel_mode", "the mode", (*MODES, *MODE_NAMES), 0 if not parallel else 1)
    mode = MODES[MODE_NAMES.get(mode_value, mode_value)] if parallel else "data"
    names = ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage")
    degrees = dict(zip(DEGREES, _degrees(keys, "parallel_config", names, DEGREES.values()), strict=True))
    if mode == "data":
        words = "parallel_mode 0 has data parallelism alone" if parallel else "use_parallel=False is one rank"
        keys.uses = [replace(use, use=NONE, words=words) if _is_degree(use, parallel) else use for use in keys.uses]
        degrees = dict.fromkeys(degrees, 1) | {"dp": (ranks or degrees["dp"]) if parallel else 1}
    dp, tp, pp = degrees["dp"], degrees["tp"], degrees["pp"]
    _check_mean(keys, mode, dp)
    _check_experts(keys, "parallel_config.expert_parallel", dp, tp, degrees["ep"])
    sequence_parallel = keys.flag("parallel_config.use_seq_parallel", "predict; in a Strategy the search chooses it")
    micro_batch = keys.count("runner_config.batch_size", "sequences of a micro-batch")
    merged = keys.count("runner_config.gradient_accumulation_steps", "micro-batches without a pipeline")
    interleaved = keys.count("micro_batch_interleave_num", "the batch has so many times the sequences")
    if interleaved > 1:
        keys.correct("micro_batch_interleave_num", NONE, "the batch has so many times the rows")
    stage_batches = keys.count("parallel_config.micro_batch_num", "[pipeline] micro_batches with a pipeline")
    micro_batches = stage_batches if pp > 1 else merged
    virtual, schedule = _static_schedule(keys, pp)
    config = _config(keys)
    stage_layers = _stage_layers(keys, config, pp, virtual, schedule)
    recompute_all, recomputed = _static_recompute(keys, pp * virtual, config)
    again = keys.flag("recompute_config.mp_comm_recompute", "[recompute] collectives", default=True)
    _differs(
        keys, "recompute_config.mp_comm_recompute", again, True, 'collectives run again; the default here is "keep"'
    )
    zero = _static_zero(keys, dp)
    if zero and 1 < degrees["ep"] < dp:
        words = f"[sharding] over the {dp // degrees['ep']} ranks of dp beside ep"
        _differs(keys, "parallel.enable_parallel_optimizer", True, True, words)
    _data(keys)
    return _run(
        keys,
        dialect=STATIC,
        mode=mode,
        **degrees,
        exchange=_exchange(keys, "parallel_config.context_parallel_algo", "ulysses_cp", degrees["cp"]),
        virtual_stages=virtual,
        schedule=schedule,
        micro_batches=micro_batches,
        batch=micro_batch * dp * micro_batches * interleaved,
        micro_batch=micro_batch,
        sequence_parallel=sequence_parallel,
        stage_layers=stage_layers,
        recompute_all=recompute_all,
        recomputed=recomputed,
        recomputed_collectives=again and (recompute_all or any(recomputed)),
        zero_stage=zero,
        max_norm=_static_norm(keys),
        config=config,
    )


def _run(keys: _Keys, **read: Any) -> MindFormersRun:
    """Return the run of what a dialect has `read`, with what both read alike."""
    read |= {"path": keys.place, "sequence": _length(keys), "amp": _amp(keys), "memory": _memory(keys)}
    return MindFormersRun(**read, keys=_finished(keys, read["tp"], read["mode"]))


def _is_degree(use: KeyUse, parallel: bool) -> bool:
    """Whether a key gives a degree above 1 that a run of data parallelism, or of one rank, does not have."""
    degree = use.key.startswith("parallel_config.") and use.value != 1
    return degree and not (parallel and use.key == "parallel_config.data_parallel")


def _finished(keys: _Keys, tp: int, mode: str) -> tuple[KeyUse, ...]:
    if mode == "semi_auto" and tp > 1:
        words = (
            "MindFormers' layers have strategies in their code: without `operators` of yours the mode is "
            '"auto", which searches them'
        )
        _differs(keys, "parallel.parallel_mode", mode, mode, words)
    for key in [name for name in keys.unread if name.startswith(("recompute_config.select", "recompute.select"))]:
        off = keys.unread[key] is False or keys.unread[key] is None
        words = "off" if off else "MindFormers' module paths and operators: name yours in [recompute] modules"
        keys.say(key, USED if off else NONE, words)
    for key in [name for name in keys.unread if name.startswith(ADAPTERS)]:
        keys.say(key, DIFFERS, "the plan is of a training of all weights")
    for key in [name for name in keys.unread if name.startswith(("swap", "recompute_config.swap"))]:
        keys.say(key, NONE, "activations stay on the device, or are recomputed")
    return keys.finish()


def _differs(keys: _Keys, key: str, value: object, when: object, words: str) -> None:
    """Note that a value, given or the default, differs from the default here."""
    if value != when:
        return
    if any(use.key == key for use in keys.uses):
        keys.correct(key, DIFFERS, words)
    else:
        keys.uses.append(KeyUse(key, value, DIFFERS, words, given=False))


def _check_mean(keys: _Keys, mode: str, dp: int) -> None:
    """Refuse sums of gradients over replicas where the loss of each is a mean of its own."""
    key = "parallel.gradients_mean"
    mean = keys.flag(key, "gradients are those of the mean over the global batch")
    if mode == "data" and dp > 1 and not mean:
        raise PlanningError(
            f"{keys.place}: {key}=False with parallel_mode 0 sums the gradients of {dp} replicas, whose means are "
            "averaged here: give True, and the learning rate that belongs to a mean"
        )


def _check_experts(keys: _Keys, key: str, dp: int, tp: int, ep: int) -> None:
    """Say how experts lie; refuse a number of ranks that neither divides the replicas nor is made of them."""
    fits = dp % ep == 0 or (ep % dp == 0 and (dp * tp) % ep == 0)
    keys.check(key, ep, fits, f"a divisor of the {dp} replicas, or a multiple of them that divides {dp * tp}")
    words = f"MindFormers lays experts over dp and tp: here over dp={dp}, each divided along tp where that costs less"
    if ep > 1 and dp % ep:
        keys.correct(key, DIFFERS, words)


def _static_schedule(keys: _Keys, pp: int) -> tuple[int, str]:
    """Return the virtual stages and the schedule; one without counterpart is replaced, which changes no number."""
    key = "parallel.pipeline_config.pipeline_scheduler"
    scheduler = keys.name(key, "[pipeline] schedule", SCHEDULERS, "1f1b")
    interleave = keys.flag("parallel.pipeline_config.pipeline_interleave", "[pipeline] virtual_stages")
    virtual = keys.count(f"{CONFIG}pp_interleave_num", "[pipeline] virtual_stages", most=1024)
    if scheduler == "zero_bubble_v" and pp > 1:
        return 2, "zbv"
    virtual = virtual if interleave and pp > 1 else 1
    plain = "gpipe" if scheduler == "gpipe" and virtual == 1 else "1f1b"
    schedule = "interleaved_1f1b" if virtual > 1 else plain
    if scheduler in SEQUENCE_SCHEDULES or (scheduler == "gpipe" and virtual > 1):
        words = f"{schedule} in its place: the numbers of a step do not change, its bubble and memory do"
        keys.correct(key, NONE, words)
    return virtual, schedule


def _stage_layers(keys: _Keys, config: Mapping[str, Any], pp: int, virtual: int, schedule: str) -> tuple[int, ...]:
    """Return the layers of each stage by `offset`: layers // stages + offset; () where nothing is offset."""
    key = f"{CONFIG}offset"
    offset = keys.unread.get(key, 0)
    flat = _flat(offset)
    whole = all(type(count) is int and abs(count) <= MOST_ROWS for count in flat)
    keys.check(key, offset, whole, "0, a number for each stage, or a list of these for each virtual stage")
    if not any(flat) or pp == 1:
        keys.say(key, USED, "none: stages of about equal work, which may not be of equally many layers")
        return ()
    if schedule == "zbv":
        keys.say(key, NONE, "stages of about equal work: [pipeline] stages names yours")
        return ()
    layers, stages = config.get("num_hidden_layers"), pp * virtual
    keys.check(key, offset, len(flat) == stages, f"{stages} numbers: {virtual} virtual stages of {pp} ranks")
    keys.check(f"{CONFIG}num_hidden_layers", layers, type(layers) is int, "the number of layers, beside an offset")
    assert isinstance(layers, int)
    for more in (0, *_predicted_ahead(keys)):  # those stand in the last stage
        counts = [(layers + more) // stages + count for count in flat]
        fits = sum(counts) == layers + more
        counts[-1] -= more
        if fits and min(counts) >= 1:
            break
    else:
        keys.check(key, offset, False, f"numbers that leave 1 layer or more to each stage, and {layers} together")
    keys.say(key, USED, f"[pipeline] stages of {', '.join(map(str, counts))} layers")
    return tuple(counts)


def _predicted_ahead(keys: _Keys) -> list[int]:
    """Return the layers that predict further tokens (`mtp_depth`), which an offset may count."""
    depths = [keys.unread.get(f"{CONFIG}{name}") for name in ("mtp_depth", "num_nextn_predict_layers")]
    return [depth for depth in depths if type(depth) is int and 0 < depth <= MOST_ROWS]


def _static_recompute(keys: _Keys, stages: int, config: Mapping[str, Any]) -> tuple[bool, tuple[int, ...]]:
    """Return whether all layers are recomputed, and otherwise how many of each stage."""
    key = "recompute_config.recompute"
    value = keys.unread.get(key, False)
    if isinstance(value, bool):
        keys.say(key, USED, "[recompute] modules: all layers" if value else "off")
        return value, ()
    flat = _flat(value)
    fits = len(flat) == stages and all(type(count) is int and 0 <= count <= MOST_ROWS for count in flat)
    keys.check(key, value, fits, f"True, False, or a number of layers for each of {stages} stages")
    layers = config.get("num_hidden_layers")
    keys.check(f"{CONFIG}num_hidden_layers", layers, type(layers) is int, "the number of layers, beside recompute")
    keys.say(key, USED, "[recompute] modules: so many first layers of each stage")
    return False, tuple(flat)


def _static_zero(keys: _Keys, dp: int) -> int:
    """Return the ZeRO stage of the parallel optimizer."""
    on = keys.flag("parallel.enable_parallel_optimizer", "[sharding]")
    table = "parallel.parallel_optimizer_config."
    level = keys.name(f"{table}optimizer_level", "[sharding] zero_stage", tuple(LEVELS), "level1")
    shard = keys.flag(f"{table}gradient_accumulation_shard", "[sharding] zero_stage 2: gradients too")
    size = keys.count(f"{table}optimizer_weight_shard_size", "states over all of dp", default=-1, least=-1)
    keys.check(
        f"{table}optimizer_weight_shard_size", size, not on or size == -1 or size >= dp, f"-1, or data_parallel={dp}"
    )
    return max(LEVELS[level], 2 if shard else 1) if on else 0


def _static_norm(keys: _Keys) -> float | None:
    clip = keys.flag("runner_wrapper.use_clip_grad", "max_norm")
    norm = keys.number("runner_wrapper.max_grad_norm", "max_norm", 1.0)
    return norm if clip else None


def _data(keys: _Keys) -> None:
    """Say who cuts the batch."""
    whole = keys.flag("parallel.full_batch", "train_step takes the global batch")
    words = "train_step(..., local_batches=True): each replica reads its own part"
    strategy = keys.unread.get("parallel.dataset_strategy", "full_batch" if whole else None)
    if "parallel.dataset_strategy" in keys.unread:
        same = strategy == "full_batch"
        keys.say("parallel.dataset_strategy", USED if same else DIFFERS, "the global batch" if same else words)
    if strategy != "full_batch":
        _differs(keys, "parallel.full_batch", whole, False, words)
    words = (
        'mode auto searches exactly, by time; propagate(..., objective="redistribution") has the published objective'
    )
    if "parallel.search_mode" in keys.unread:
        keys.say("parallel.search_mode", DIFFERS, words)


def _length(keys: _Keys) -> int | None:
    key = f"{CONFIG}seq_length"
    return keys.count(key, "the sequence length of predict and plan-training") if key in keys.unread else None


def _memory(keys: _Keys) -> str | None:
    key = "context.max_device_memory"
    memory = keys.unread.get(key)
    if memory is None:
        return None
    keys.check(key, memory, isinstance(memory, str) and len(memory) < 40, "a size such as '58GB'")
    keys.say(key, USED, "plan-training --memory; in a Strategy memory_limit")
    return str(memory)


def _amp(keys: _Keys) -> dict[str, Any]:
    """Return the table amp: matmuls in 16 bits, with weights in fp32 (level O1) or in 16 bits too (O2)."""
    compute = keys.unread.get(f"{CONFIG}compute_dtype")
    held = next((keys.unread[name] for name in _HELD if name in keys.unread), "float32")
    known = (*HALVES, *FULL)
    for key, value in ((f"{CONFIG}compute_dtype", compute), *((name, held) for name in _HELD if name in keys.unread)):
        if value is not None:
            keys.check(key, value, isinstance(value, str) and value in known, f"one of {', '.join(known)}")
            keys.say(key, USED, "[amp]")
    if compute not in HALVES:
        return {}
    dtype = HALVES[compute]
    if held in FULL:
        return {"dtype": dtype, "level": "O1"}
    return {"dtype": dtype, "level": "O2", "master_weights": False}


_HELD = (f"{CONFIG}params_dtype", f"{CONFIG}param_init_type")


def _config(keys: _Keys) -> dict[str, Any]:
    """Return the model's sizes in the names of transformers' config.json."""
    config: dict[str, Any] = {}
    for name, others in SIZES.items():
        for key in (f"{place}{each}" for each in (name, *others) for place in SIZE_PLACES):
            if key not in keys.unread:
                continue
            value = keys.unread[key]
            plain = value is None or isinstance(value, (int, str)) or (name == FACTOR and isinstance(value, float))
            keys.check(key, value, plain and len(str(value)) < 100, "a whole number, a flag or a name")
            if value is not None:
                config.setdefault(name, value)
            keys.say(key, USED, "a size of the model, for predict and plan-training")
    if config.get("num_local_experts") == 1:  # MindFormers' word for a dense model
        del config["num_local_experts"]
    elif any(use.key.endswith(".expert_num") for use in keys.uses):
        config.setdefault("num_experts_per_tok", 1)  # MindFormers' default
    if isinstance(config.get("first_k_dense_replace"), bool):
        del config["first_k_dense_replace"]
    multiple, factor = config.pop("multiple_of", 256), config.pop(FACTOR, None)
    if config.get("model_type") == "LlamaConfig" and "intermediate_size" not in config:
        config["intermediate_size"] = _inner_width(keys, config.get("hidden_size"), multiple, factor)
    if (kind := config.get("model_type")) in OLDER_TYPES:
        config["model_type"] = OLDER_TYPES[kind]
    return config


def _inner_width(keys: _Keys, hidden: Any, multiple: Any, factor: Any) -> int | None:
    """Return the width of a Llama's MLP that gives none: 2 / 3 of 4 x hidden x factor, rounded up to a multiple."""
    if hidden is None:
        return None
    for name, value in (("hidden_size", hidden), ("multiple_of", multiple)):
        whole = type(value) is int and 1 <= value <= MOST_ROWS
        keys.check(f"{CONFIG}{name}", value, whole, f"a whole number from 1 to {MOST_ROWS}")
    number = factor is None or (type(factor) in (int, float) and 0 < factor <= MOST_RANKS)
    keys.check(f"{CONFIG}{FACTOR}", factor, number, "a number above 0")
    width = int(2 * (int((factor + 0.01) * 4 * hidden) if factor is not None else 4 * hidden) / 3)
    return int(multiple * -(-width // multiple))


def _ranges(layers: str, counts: Sequence[int]) -> list[str]:
    """Return a pattern for the layers of each stage."""
    return [_range(layers, first, count) for first, count in zip([0, *accumulate(counts)], counts, strict=False)]


def _range(layers: str, first: int, count: int) -> str:
    return f"{layers}.{first}" if count == 1 else f"{layers}.{first}-{first + count - 1}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else shown(value)


def _exchange(keys: _Keys, key: str, ulysses: str, cp: int) -> str:
    """Return "heads" if a file asks for Ulysses; else "", and the plan chooses: it runs no ring."""
    if cp == 1 or keys.unread.get(key) != ulysses:
        return ""
    keys.say(key, USED, 'sequence_exchange = "heads"')
    return HEADS


def _pynative(keys: _Keys, tables: Mapping[str, Any], ranks: int | None) -> MindFormersRun:
    """Return the run of a file for PyNative, whose replicas are the ranks that its other degrees leave."""
    section = tables["parallelism"]
    keys.check("parallelism", section, isinstance(section, dict), "a table of degrees")
    names = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
    tp, cp, ep, pp = _degrees(keys, "parallelism", names, list(DEGREES.values())[1:])
    key = "parallelism.data_parallel_shard"
    shard = keys.count(key, "[sharding] zero_stage 3 over dp, or 0 for 1", default=-1, least=-1, most=MOST_RANKS)
    keys.check(key, shard, shard != 0, "-1 for all replicas, or a number from 1")
    if ranks is None and shard == -1:
        raise PlanningError(f"{keys.place}: {key}=-1 leaves the replicas to the launch: give ranks (--ranks)")
    dp = shard if ranks is None else ranks // (tp * cp * pp)
    if ranks is not None and (dp < 1 or dp * tp * cp * pp != ranks or (shard > 1 and dp % shard)):
        raise PlanningError(f"{keys.place}: {ranks} ranks are no multiple of its degrees {tp}, {cp}, {pp} and {shard}")
    if 1 < shard < dp:
        _differs(keys, key, shard, shard, f"parameters are partitioned over all {dp} replicas")
    local = keys.count("training.local_batch_size", "sequences of a micro-batch")
    batch = keys.count("training.global_batch_size", "sequences of a step")
    fits = batch % (dp * local) == 0
    keys.check("training.global_batch_size", batch, fits, f"a multiple of {dp} replicas of {local} sequences")
    micro = "parallelism.pipeline_parallel_microbatch_size"
    keys.say(micro, NONE, "MindFormers overwrites it too: the micro-batches are those of the batch")
    virtual = keys.count("parallelism.pipeline_parallel_interleave_num", "[pipeline] virtual_stages", most=1024)
    known = ("1f1b", "interleaved_1f1b", "gpipe")
    schedule = keys.name("parallelism.pipeline_parallel_schedule", "[pipeline] schedule", known, "1f1b")
    virtual = virtual if pp > 1 else 1
    schedule = "interleaved_1f1b" if virtual > 1 else ("1f1b" if schedule == "interleaved_1f1b" else schedule)
    config = _config(keys)
    layers = keys.unread.get("parallelism.pipeline_parallel_layers_per_stage", "auto")
    if layers in ("auto", None):
        keys.say("parallelism.pipeline_parallel_layers_per_stage", USED, "stages of about equal work")
    all_layers, ranges = _pynative_recompute(keys)
    again = keys.flag("recompute_comm.enable", "[recompute] collectives")
    mean = keys.flag("parallelism.disable_gradient_division", "gradients of the mean over the batch", default=True)
    _differs(
        keys, "parallelism.disable_gradient_division", mean, False, "the mean over the global batch, as always here"
    )
    if "training.max_norm" not in keys.unread:
        keys.say("training.max_norm", DIFFERS, "gradients are clipped; here by max_norm", 1.0)
    norm = keys.number("training.max_norm", "max_norm; 0: none", 1.0, zero=True)
    sequence_parallel = keys.flag("parallelism.sequence_parallel", "predict; in a Strategy the search chooses it")
    _check_experts(keys, "parallelism.expert_parallel", dp, tp, ep)
    return _run(
        keys,
        dialect="PyNative",
        mode="semi_auto",
        dp=dp,
        tp=tp,
        cp=cp,
        exchange=_exchange(keys, "parallelism.context_parallel_method", "ulysses", cp),
        ep=ep,
        pp=pp,
        virtual_stages=virtual,
        schedule=schedule,
        micro_batches=batch // (dp * local),
        batch=batch,
        micro_batch=local,
        sequence_parallel=sequence_parallel,
        recompute_all=all_layers,
        recomputed_ranges=ranges,
        recomputed_collectives=again and (all_layers or bool(ranges)),
        zero_stage=0 if shard == 1 else 3,
        max_norm=norm or None,
        config=config,
    )


def _pynative_recompute(keys: _Keys) -> tuple[bool, tuple[str, ...]]:
    """Return whether all layers are recomputed, and otherwise the layers as "3" and "0-3"."""
    mode = keys.unread.get("recompute.mode", "None")
    keys.check("recompute.mode", mode, mode in (None, "None", "full", "select"), "None, full or select")
    mode = keys.unread.get("recompute.mode") or "None"
    keys.say("recompute.mode", USED if mode != "select" else NONE, "[recompute] modules")
    key = "recompute.full_recompute_layer"
    layers = keys.unread.get(key)
    fits = layers is None or (isinstance(layers, list) and all(_is_range(part) for part in layers))
    keys.check(key, layers, fits, "layers and ranges, such as [0-3, 7]")
    keys.say(key, USED, "[recompute] modules")
    if mode != "full":
        return False, ()
    return layers is None, tuple(map(str, layers or ()))


def _is_range(part: object) -> bool:
    if type(part) is int:
        return part >= 0
    first, dash, last = part.partition("-") if isinstance(part, str) else ("", "", "")
    numbers = [first, last] if dash else [first]
    return all(number.isascii() and number.isdecimal() and len(number) < 10 for number in numbers)
