"""Published runs as data: what was measured, on what, with which degrees, and where it is published.

data/runs.toml has the rows. Nothing in the package is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from ascend_parallel.tuning.cost_model.models import Model, find_model
from ascend_parallel.tuning.cost_model.tables import PlanningError, parse_toml, read_text, require

FILE = "runs.toml"
TOKENS, SECONDS, FLOPS, MFU = "tokens/s/device", "seconds/step", "TFLOP/s/device", "MFU"
STEP_METRICS = (TOKENS, SECONDS, FLOPS, MFU)
# Presets of the models of rows that have no dimensions of their own, by a part of the row's id.
PRESETS = {
    "torchtitan-8b": "llama3-8b",
    "torchtitan-float8-llama3-70b": "llama3-70b",
    "torchtitan-70b": "llama3-70b",
    "torchtitan-float8-llama3-405b": "llama3-405b",
    "llama3-paper-table4-405b": "llama3-405b",
}
# Tokens of the vocabularies of rows that do not give it, from the models' config.json, by a part of the row's id.
VOCABULARIES = {"codellama": 32000, "llama2": 32000, "llama3": 128256, "yi": 64000, "gemma": 256000, "chatglm3": 65024}
# The hardware of a row, by how its words begin.
HARDWARE = {
    "Atlas 900 A2 PODc": "ascend-910b2",
    "Atlas 900 A2 PoDc": "ascend-910b2",
    "Atlas 800T A2": "ascend-910b3",
    "A100 80GB SXM": "a100-nvlink",
    "H100 96GB HBM2e": "h100-hbm2e",
    "H100 80GB SXM": "h100-nvlink",
}

# What rows have beside the fields that are read: of operators, gains and scaling, and for readers.
NOT_READ = "script implementation feature before gain operator m k n linearity tflops hfu memory_mb"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """The fields of a row of data/runs.toml that are read; 0, "" and None: not published.

    value
        The measurement, in the unit of `metric`.
    not_expressible
        What the run has that the cost model cannot express; "": nothing.
    layers_per_virtual_stage
        Layers of one of a rank's several pipeline stages.
    experts, top_k, shared_ffn
        Of a mixture of experts, each as wide as `ffn`.
    ep, etp
        Ranks that share the experts of a layer, and the width of each.
    activation, rotary
        How the script runs them (`Batch`).
    """

    id: str
    kind: str
    source: str
    path: str
    metric: str
    commit: str = ""
    value: float = 0.0
    value_text: str = ""
    pitfall: str = ""
    not_expressible: str = ""
    verified: bool = True
    model: str = ""
    hardware: str = ""
    devices: int = 0
    layers: int = 0
    hidden: int = 0
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    gated: bool = False
    position: str = ""
    sequence: int = 0
    micro_batch: int = 0
    global_batch: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    cp_exchange: str = ""
    dp: int = 0
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    ep: int = 0
    etp: int = 0
    virtual_stages: int = 0
    layers_per_virtual_stage: int = 0
    sequence_parallel: bool | None = None
    zero: int = 0
    dtype: str = ""
    recompute: str = ""
    flash_attention: bool | None = None
    activation: str = ""
    rotary: str = ""
    mc2_in_script: bool | None = None
    overlap_grad_reduce: bool | None = None
    flops: str = ""

    @property
    def table(self) -> str:
        """The publication that the row belongs to, for medians by source."""
        repository = self.source.partition(" (")[0].removeprefix("github.com/").partition(";")[0]
        version = self.commit if self.commit and "." in self.commit and "," not in self.commit else ""
        return f"{repository} {version}".strip()

    @property
    def chip(self) -> str | None:
        """The hardware of the cost model; None: the cost model has none."""
        return next((name for words, name in HARDWARE.items() if self.hardware.startswith(words)), None)

    @property
    def stages_of_rank(self) -> int:
        """Pipeline stages of each rank."""
        if self.layers_per_virtual_stage:
            return self.layers // self.pp // self.layers_per_virtual_stage
        return self.virtual_stages or 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica's step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence

    @property
    def preset(self) -> str | None:
        """The preset of the model; None: the row has its dimensions."""
        return next((name for part, name in PRESETS.items() if self.id.startswith(part)), None)

    @property
    def vocabulary(self) -> int:
        """Tokens of the vocabulary; 0: not known."""
        if self.preset is not None:
            return find_model(self.preset).vocab
        return self.vocab or next((size for part, size in VOCABULARIES.items() if f"-{part}" in self.id), 0)

    def transformer(self) -> Model:
        """Return the model's dimensions; raises `PlanningError` if the row does not give them."""
        if self.preset is not None:
            return find_model(self.preset)
        require(f"{self.id}: layers", self.layers, self.layers > 0, "the model's dimensions")
        require(f"{self.id}: vocab", self.vocabulary, self.vocabulary > 0, "the size of the vocabulary")
        rotary = self.position in ("", "rope") and self.gated
        return Model(
            name=self.id,
            title=self.model,
            source=self.path,
            layers=self.layers,
            hidden=self.hidden,
            ffn=self.ffn,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocabulary,
            sequence=self.sequence,
            experts=self.experts,
            top_k=self.top_k,
            shared_ffn=self.shared_ffn,
            gated=self.gated,
            bias=not self.gated,
            positions=0 if rotary or self.position == "alibi" else self.sequence,
        )


@lru_cache(maxsize=2)
def all_runs(path: Path = Path(__file__).parent / "data" / FILE) -> tuple[PublishedRun, ...]:
    """Return the published rows, in the order of the file; path: of rows in the same form that are kept elsewhere."""
    return tuple(_run(row) for row in parse_toml(read_text(path, str(path)), path.name)["row"])


def _run(row: Mapping[str, Any]) -> PublishedRun:
    known = [f.name for f in fields(PublishedRun)]
    unknown = [key for key in row if key not in (*known, *NOT_READ.split())]
    require(f"{FILE}: {row.get('id')}", unknown, not unknown, ", ".join(known))
    try:
        return PublishedRun(**{key: value for key, value in row.items() if key in known})
    except TypeError as error:
        raise PlanningError(f"{FILE}: {row.get('id')}: {error}") from error
