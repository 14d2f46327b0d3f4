"""Strategy: allowed options, alone and together, from Python and TOML; graph passes; a model with its loss."""

import pytest
import small_models
import torch
from torch import nn
from torch.nn import functional as F

from ascend_parallel.sharding.graph import PARAMETER
from ascend_parallel.training import Strategy, StrategyOptionError
from ascend_parallel.training.graph_passes import fuse_operators
from ascend_parallel.training.loss import mean_loss, trace_with_loss
from ascend_parallel.training.options import AmpOptions, ShardingOptions
from ascend_parallel.training.pipeline.options import PipelineOptions

TOML = """
mode = "semi_auto"
fused_passes = ["matmul_add"]
max_norm = 1.0

[mesh]
dp = 2
tp = 2

[operators."layers.*.up"]
in = [[], ["tp", 1]]

[pipeline]
degree = 2
stages = { "tokens" = 0, "layers.*" = 1 }
micro_batches = 4

[recompute]
modules = ["layers.*"]

[sharding]
zero_stage = 1
"""


def test_a_strategy_is_read_from_toml(tmp_path):
    file = tmp_path / "strategy.toml"
    file.write_text(TOML)
    found = Strategy.from_toml(file)
    assert found.mode == "semi_auto"
    assert found.ranks == 8
    assert [mesh.process_ids for mesh in found.meshes()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.operators == {"layers.*.up": ([None, ("tp", 1)], [])}
    assert found.pipeline == PipelineOptions(degree=2, stages={"tokens": 0, "layers.*": 1}, micro_batches=4)
    assert found.recompute.modules == ("layers.*",)
    assert (found.sharding.zero_stage, found.max_norm, found.fused_passes) == (1, 1.0, ("matmul_add",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('mode = "automatic"', "mode='automatic': give one of data, semi_auto, auto, hybrid"),
        ('mode = "sharding_propagation"', "what MindSpore calls so is mode 'auto' here; give one of data, semi_auto"),
        ('mode = "recursive_programming"', "what MindSpore calls so is mode 'auto' here"),
        ('mode = "semi_auto_parallel"', "what MindSpore calls so is mode 'semi_auto' here"),
        ('mod = "auto"', "there is no 'mod'; did you mean mode?"),
        ("[pipeline]\nmicrobatches = 2", "did you mean micro_batches?"),
        ("pipeline = 2", "pipeline=2: give a table"),
        ("[pipeline]\ndegree = 0", "pipeline.degree=0: give a whole number of 1 or more"),
        ('[pipeline]\nschedule = "2f2b"', "give one of gpipe, 1f1b"),
        ("[pipeline]\ndegree = 2\nvirtual_stages = 2", "pipeline.virtual_stages=2 with the schedule 1f1b"),
        ('[pipeline]\ndegree = 2\nschedule = "zbv"', "zbv has 2 stages on each group"),
        ("[pipeline]\nvirtual_stages = 2\nschedule = 'interleaved_1f1b'", "need pipeline.degree of 2 or more"),
        ("[pipeline]\ndegree = 2\nmicro_batches = 2\nstages = { a = 2 }", "'a': 2; give 0 to 1"),
        ("[sharding]\nzero_stage = 4", "sharding.zero_stage=4: give one of 0, 1, 2, 3"),
        ('[sharding]\nzero_stage = 3\npartition_by = "parameters"', "with zero_stage 3"),
        ('[sharding]\nzero_stage = 1\ndim = "mp"', "sharding.dim='mp': the mesh has dp"),
        ('[amp]\ndtype = "float8"', "amp.dtype='float8': give one of bfloat16, float16"),
        ("[gradient_merge]\nsteps = true", "gradient_merge.steps=True"),
        ("[comm_fusion]\nbucket_mb = -1", "comm_fusion.bucket_mb=-1"),
        ("[overlap]\noperators = 1", "overlap.operators=1: give true or false"),
        ("max_norm = 0", "max_norm=0: give a number above 0"),
        ('fused_passes = ["gemm"]', "fused_passes='gemm': give one of"),
        ("[mesh]\ndp = 0", "give sizes by name"),
        ('mode = "data"\ndata_dim = "x"', "data_dim='x': the mesh has dp"),
        ("[operators]\na = 3", '"a": give a table with "in", "out" or both, not 3'),
        ("mode = ", "is no valid TOML"),
    ],
)
def test_what_is_not_allowed_is_named(tmp_path, text, message):
    file = tmp_path / "strategy.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        Strategy.from_toml(file)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StrategyOptionError, match="cannot be read"):
        Strategy.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "data", "mesh": {"dp": 2, "tp": 2}}, 'mode="data" with the mesh dimension tp'),
        ({"mode": "data", "operators": {"a": ([None], None)}}, 'mode="data" with strategies of operators'),
        ({"mode": "semi_auto", "data_dim": None}, "mode='semi_auto' needs data_dim"),
        ({"mode": "hybrid", "pipeline": PipelineOptions(micro_batches=2)}, 'mode="hybrid" with pipeline'),
        ({"mode": "hybrid", "operators": {"a": ([None], None)}}, 'mode="hybrid" with operators'),
        ({"mode": "hybrid", "fused_passes": ("matmul_add",)}, 'mode="hybrid" with fused_passes'),
        ({"mode": "hybrid", "sharding": ShardingOptions(zero_stage=3)}, 'mode="hybrid" with sharding.zero_stage=3'),
        ({"sharding": {"zero_stage": 1}}, "give a ShardingOptions"),
    ],
)
def test_what_cannot_be_mixed_is_named(options, message):
    with pytest.raises(StrategyOptionError) as error:
        Strategy(**options)
    assert message in str(error.value)


def test_parts_are_values():
    assert Strategy() == Strategy(amp=AmpOptions())
    with pytest.raises(AttributeError):
        Strategy().mode = "data"


class Additions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.bias, self.weight, self.other = (nn.Parameter(torch.randn(size)) for size in ((8,), (8, 4), (4,)))

    def forward(self, x):
        kept = self.linear(x)
        return self.other + (self.linear(x) + self.bias) @ self.weight, kept + self.bias, kept


def test_a_bias_is_added_by_the_matmul():
    def loss(model, x):
        first, second, third = model(x)
        return first.square().mean() + second.mean() * third.mean()

    graph = trace_with_loss(Additions(), loss, (torch.randn(3, 8),))
    fused, ops_fused = fuse_operators(graph, ("matmul_add",))
    before, after = (
        [node.call.name.split(".")[1] for node in traced.nodes.values() if node.call] for traced in (graph, fused)
    )
    assert ops_fused == {"matmul_add": 2}  # not the linear whose result is read without the bias too
    assert (before.count("add"), after.count("add")) == (4, 2)
    assert (after.count("linear"), after.count("addmm"), after.count("matmul")) == (2, 1, 0)


def test_the_loss_joins_the_graph_and_names_stay_the_models():
    model = small_models.GPT()
    tokens = torch.zeros(4, 16, dtype=torch.long)
    graph = trace_with_loss(model, mean_loss, (tokens, tokens))
    found = {node.source for node in graph.nodes.values() if node.kind == PARAMETER}
    assert found == {name for name, _ in model.named_parameters()}
    assert "layers.1.up" in {node.module for node in graph.nodes.values()}


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the loss has to be one number"):
        trace_with_loss(nn.Linear(4, 4), lambda model, x: F.relu(model(x)), (torch.randn(2, 4),))
