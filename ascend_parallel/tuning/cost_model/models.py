"""Transformers by their dimensions, and the tensor-parallel linear layers that one rank runs.

data/models.toml has the presets, each with its source and its published size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any

import torch

from ascend_parallel.ops.call import Matmul
from ascend_parallel.ops.key_gather import EXCHANGES, HEADS
from ascend_parallel.overlap.layer_shape import COLUMN, ROW, LayerShape
from ascend_parallel.tuning.cost_model.tables import lookup, need_keys, parse_toml, read_text, require
from ascend_parallel.tuning.cost_model.transformers_config import dimensions_of, dimensions_of_config

# How a planned model runs what surrounds its matmuls (`Batch`).
TORCH = "torch"
# Keys and values of a sequence that ranks share go round a ring (arXiv:2310.01889).
RING = "ring"
MOST = 1 << 40
DIMENSIONS = ("layers", "hidden", "ffn", "heads", "vocab")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    q_rank, kv_rank, rotary_dim
        Latent attention (DeepSeek): lengths of the vectors that queries, and keys and values, are projected from.
        All are 0 for usual attention.
    experts, top_k, expert_ffn
        A mixture of experts: the routed experts of a layer, how many of them a token passes, and their width (0: ffn).
        experts is 0 for a dense model.
    shared_ffn
        The width of the expert that every token passes beside them; 0: none.
    dense_layers
        The first layers, which have an MLP of width ffn in place of experts.
    """

    name: str
    title: str
    source: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rotary_dim: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    positions: int = 0
    sequence: int = 0
    gated: bool = False
    bias: bool = False
    tied: bool = False
    parameters: float = 0.0

    def __post_init__(self) -> None:
        """Fill in derived dimensions, and refuse impossible values."""
        for f in fields(self):
            value = getattr(self, f.name)
            least = 1 if f.name in DIMENSIONS else 0
            allowed, expected = {
                "int": (type(value) is int and least <= value <= MOST, f"a whole number from {least} to {MOST}"),
                "float": (type(value) in (int, float) and 0 <= value < inf, "a number of 0 or more"),
                "bool": (type(value) is bool, "true or false"),
                "str": (isinstance(value, str), "a text"),
            }[str(f.type)]
            require(f"model {self.name}: {f.name}", value, allowed, expected)
        defaults = {"kv_heads": self.heads, "head_dim": self.hidden // self.heads}
        for name, value in (defaults | {"value_dim": self.head_dim or defaults["head_dim"]}).items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.experts and not self.expert_ffn:
            object.__setattr__(self, "expert_ffn", self.ffn)
        self._check_experts()

    def _check_experts(self) -> None:
        """Refuse numbers that no mixture of experts has."""
        most_dense = self.layers - 1 if self.experts else 0
        for name, least, most in (
            ("top_k", min(1, self.experts), self.experts),
            ("expert_ffn", 0, MOST if self.experts else 0),
            ("shared_ffn", 0, MOST if self.experts else 0),
            ("dense_layers", 0, most_dense),
        ):
            value = getattr(self, name)
            expected = f"a whole number from {least} to {most}, with {self.experts} experts in {self.layers} layers"
            require(f"model {self.name}: {name}", value, least <= value <= most, expected)

    @property
    def sparse_layers(self) -> int:
        """The layers with experts, which follow the dense ones."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def latent(self) -> bool:
        """Whether attention is latent."""
        return self.kv_rank > 0

    def attention_weights(self) -> int:
        """Return the number of weights of one layer's attention."""
        out = self.heads * self.value_dim * self.hidden
        if self.latent:
            down = self.hidden * (self.q_rank + self.kv_rank + self.rotary_dim)
            keys = self.head_dim - self.rotary_dim
            up = self.q_rank * self.heads * self.head_dim + self.kv_rank * self.heads * (keys + self.value_dim)
            return down + up + out
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim + out

    def dense_weights(self) -> int:
        """Return the number of weights of a layer with an MLP, with biases and norms."""
        biases = self.ffn if self.bias else 0
        return self._weights_around_mlp() + self._mlp_weights(self.ffn) + biases

    def sparse_weights(self) -> int:
        """Return the number of weights of a layer with experts, without the routed experts' own."""
        return self._weights_around_mlp() + self.hidden * self.experts + self._mlp_weights(self.shared_ffn)

    def expert_weights(self) -> int:
        """Return the number of weights of a routed expert."""
        return self._mlp_weights(self.expert_ffn)

    def _mlp_weights(self, width: int) -> int:
        return (3 if self.gated else 2) * self.hidden * width

    def _weights_around_mlp(self) -> int:
        norms = 2 * self.hidden * (2 if self.bias else 1)
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim + 2 * self.hidden if self.bias else 0
        return self.attention_weights() + norms + biases

    def macs_per_token(self, sequence: int) -> float:
        """Return the multiply-adds of a token's forward: each weight of a matmul once, and all scores of attention."""
        scores = sequence * self.heads * (self.head_dim + self.value_dim)
        return self._layers_weights(self.top_k) + self.layers * scores + self.vocab * self.hidden

    def count_parameters(self) -> int:
        """Return the number of weights of the whole model."""
        return self._count(self.experts)

    def count_active(self) -> int:
        """Return the number of weights of which a token's forward reads: with `top_k` experts of each layer."""
        return self._count(self.top_k)

    def _count(self, experts: int) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + self._layers_weights(experts) + self.hidden

    def _layers_weights(self, experts: int) -> int:
        """Return the number of weights of all layers, with `experts` experts in those that have any."""
        dense = (self.layers - self.sparse_layers) * self.dense_weights()
        return dense + self.sparse_layers * (self.sparse_weights() + experts * self.expert_weights())


@dataclass(frozen=True)
class ModelLinear:
    """A tensor-parallel linear layer of a described model, or of a shape that a user gives, with its name.

    widths
        The columns of each product, if several layers of one input run one by one; their sum is n.
    """

    name: str
    shape: LayerShape
    widths: tuple[int, ...] = ()

    @property
    def products(self) -> tuple[int, ...]:
        """The columns of each product."""
        return self.widths or (self.shape.n,)

    def matmul(self, direction: str) -> Matmul | None:
        """Return the operator of "forward" or "backward"; None if it has no collective."""
        operator = self.shape.operator(direction) if self.shape.ranks > 1 else None
        return operator and operator.matmul


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The work of one tensor-parallel group: sequence length, sequences per micro-batch, and their distribution.

    cp
        Ranks that share each sequence (context parallel); the linear layers see `sequence / cp` of it.
    cp_exchange
        How keys reach the queries: "ring"; "heads" (Ulysses: each rank gets whole sequences of some heads); "gather"
        (each rank gets the keys and values of all tokens). "": as the runtime does, a ring in Megatron-core, heads in a
        plan.
    cp_groups
        In how many groups of heads an exchange or a gather runs, under the attention of another; 1: nothing is hidden.
    ep, etp
        Ranks that share the experts of each layer (expert parallel), and ranks that share each expert's width.
    fused_attention
        False: attention writes its scores to memory.
    activation
        "fused": a gated activation is one kernel; "split": two operators; "tanh": gelu's approximation runs as nine.
    rotary
        "fused": one kernel; "sliced": one kernel between a slice and a concatenation; "split": single operators.
        `TORCH` for both: all that surrounds the matmuls runs as torch's own operators, as in a planned model.
    """

    sequence: int
    micro_batch: int
    tp: int
    sequence_parallel: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: str = "npu"
    cp: int = 1
    cp_exchange: str = ""
    cp_groups: int = 1
    ep: int = 1
    etp: int = 1
    fused_attention: bool = True
    activation: str = "fused"
    rotary: str = "fused"

    def __post_init__(self) -> None:
        """Refuse values below 1."""
        for option in ("sequence", "micro_batch", "tp", "cp", "cp_groups", "ep", "etp"):
            require(option, getattr(self, option), getattr(self, option) >= 1, "a whole number of 1 or more")
        known = EXCHANGES if self.single_operators else (RING, *EXCHANGES)
        where = ", in a plan" if self.single_operators else ""
        words = f"{', '.join(known)}{where}"
        require("cp_exchange", self.cp_exchange, self.cp_exchange in ("", *known), words)
        cuts = self.context in EXCHANGES
        words = f"1 with cp_exchange={self.context!r}, which is not cut"
        require("cp_groups", self.cp_groups, self.cp_groups == 1 or cuts, words)

    @property
    def single_operators(self) -> bool:
        """Whether torch's own operators run one by one, as in a planned model."""
        return self.rotary == TORCH

    @property
    def context(self) -> str:
        """How keys reach the queries of ranks that share a sequence: `RING`, `HEADS` or `GATHER`."""
        return self.cp_exchange or (HEADS if self.single_operators else RING)

    @property
    def rows(self) -> int:
        """Rows of all ranks, rounded up to a multiple of the ranks."""
        return self.tp * -(-self.own_sequence * self.micro_batch // self.tp)

    @property
    def own_sequence(self) -> int:
        """Tokens of a sequence on this context-parallel rank."""
        return -(-self.sequence // self.cp)

    @property
    def own_rows(self) -> int:
        """Rows of one rank outside the linear layers."""
        return self.rows // self.tp if self.sequence_parallel else self.rows


def layer_linears(model: Model, batch: Batch, *, sparse: bool | None = None) -> list[ModelLinear]:
    """Return the tensor-parallel linear layers of one transformer layer, in the order of forward.

    sparse: of a layer with experts: a shared expert stands in the MLP's place. None: of the model's last layers.

    Heads and widths that the ranks do not divide are rounded up: the rank with the most work sets the pace.
    """
    linear = partial(_linear, batch)
    heads = -(-model.heads // batch.tp)
    kv_heads = -(-model.kv_heads // batch.tp)
    if model.latent:
        keys = model.head_dim - model.rotary_dim
        attention = [
            linear("q up", COLUMN, model.q_rank, heads * model.head_dim),
            linear("kv up", COLUMN, model.kv_rank, heads * (keys + model.value_dim)),
        ]
    else:
        widths = heads * model.head_dim, kv_heads * model.head_dim, kv_heads * model.head_dim
        attention = [linear("qkv", COLUMN, model.hidden, sum(widths), widths=widths)]
    width = model.shared_ffn if (model.sparse_layers > 0 if sparse is None else sparse) else model.ffn
    ffn = -(-width // batch.tp)
    mlp = [
        linear("up", COLUMN, model.hidden, ffn * (2 if model.gated else 1), widths=(ffn,) * (2 if model.gated else 1)),
        linear("down", ROW, ffn, model.hidden),
    ]
    return [*attention, linear("proj", ROW, heads * model.value_dim, model.hidden), *(mlp if width else [])]


def head_linear(model: Model, batch: Batch) -> ModelLinear:
    """Return the layer that computes the logits, on the last stage."""
    return _linear(batch, "logits", COLUMN, model.hidden, -(-model.vocab // batch.tp))


def uneven_splits(model: Model, batch: Batch) -> list[str]:
    """Return, in words, the dimensions that the ranks do not divide and that are rounded up."""
    sizes = {"heads": model.heads, "ffn": model.ffn, "rows": batch.sequence * batch.micro_batch}
    if model.kv_heads >= batch.tp:
        sizes["kv_heads"] = model.kv_heads
    return [f"{name} {size} / {batch.tp} ranks" for name, size in sizes.items() if size % batch.tp]


@lru_cache(maxsize=1)
def all_models() -> Mapping[str, Model]:
    """Return the presets by name."""
    text = (resources.files("ascend_parallel.tuning.cost_model") / "data" / "models.toml").read_text(encoding="utf-8")
    return {name: _model(name, values, "models.toml") for name, values in parse_toml(text, "models.toml").items()}


def find_model(name: str) -> Model:
    """Return a preset; raises `PlanningError` with the known names and the nearest."""
    result: Model = lookup("--model", name, all_models())
    return result


def read_model(path: Path) -> Model:
    """Read a user's model: a TOML file with the keys of `Model`, or a config.json of transformers."""
    place = f"--model-file {path}"
    text = read_text(path, place)
    if path.suffix == ".json":
        return _model(path.parent.name if path.stem == "config" else path.stem, dimensions_of(text, place), place)
    return _model(path.stem, parse_toml(text, place), place)


def model_of_config(config: Mapping[str, Any], name: str, place: str) -> Model:
    """Return the model whose sizes have the names of transformers' config.json; errors name `place`."""
    return _model(name, dimensions_of_config(config, place), place)


def _model(name: str, values: Mapping[str, Any], place: str) -> Model:
    known = [f.name for f in fields(Model)]
    for key in values:
        require(f"{place}: key", key, key in known, ", ".join(known))
    need_keys(place, values, DIMENSIONS)
    return Model(**({"name": name, "title": name, "source": place} | dict(values)))


def _linear(batch: Batch, name: str, kind: str, k: int, n: int, *, widths: tuple[int, ...] = ()) -> ModelLinear:
    """Return a layer; widths: of the layers that a framework joins to one, and single operators do not."""
    shape = LayerShape.of_rows(
        kind,
        batch.rows,
        batch.tp,
        batch.sequence_parallel and batch.tp > 1,
        k=k,
        n=n,
        dtype=batch.dtype,
        device=batch.device,
    )
    return ModelLinear(name, shape, widths if batch.single_operators else ())
