"""Meshes, placements, redistribution, and the sharding of a whole model from a few annotations.

layout, mesh     placements and layouts, the part of a tensor that a rank holds; ProcessMesh
graph            a model's forward as a list of operators
bucketing        which tensors share a bucket, whose collective runs as one
tracing/         torch.export of the forward into a Graph
redistribute/    the cheapest collectives between two layouts; DTensors on meshes
rules/           the placements that an operator allows, and how a rank runs its part
planner/         strategies of a few operators in, layouts of least cost for all tensors out: a ShardingPlan
visualize/       the plan as text and as a picture; advice on what to configure
runtime/         runs a rank's part of the planned model, with overlapped collectives
marked/          shard_tensor, shard_layer and their relatives; functions of DTensors, laid out one by one
"""

from torch.distributed.tensor import Partial, Replicate, Shard

from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.marked.dtensors import (
    dtensor_from_fn,
    dtensor_from_local,
    reshard,
    shard_tensor,
    unshard,
)
from ascend_parallel.sharding.marked.local_map import local_map
from ascend_parallel.sharding.marked.shard_dataloader import ShardedLoader, shard_dataloader
from ascend_parallel.sharding.marked.shard_layer import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    clip_grad_value_,
    shard_layer,
    shard_optimizer,
)
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner.annotate import annotated, read_strategies, shard
from ascend_parallel.sharding.planner.operator_strategy import OperatorStrategy, StrategyError
from ascend_parallel.sharding.planner.propagate import MemoryLimitError, propagate
from ascend_parallel.sharding.planner.sharding_plan import ShardingPlan
from ascend_parallel.sharding.rules import mixture_of_experts, register_rule
from ascend_parallel.sharding.runtime.parallelize import collective_counts, parallelize
from ascend_parallel.sharding.runtime.randomness import manual_seed
from ascend_parallel.sharding.runtime.sharded_module import ShardedModule
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.sharding.tracing.trace import TraceError, trace
from ascend_parallel.sharding.visualize.advice import Advice, advise
from ascend_parallel.sharding.visualize.explain import diff, explain
from ascend_parallel.sharding.visualize.page import to_html

__all__ = [
    "Advice",
    "Graph",
    "MemoryLimitError",
    "OperatorStrategy",
    "Partial",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "ShardedLoader",
    "ShardedModule",
    "ShardingPlan",
    "ShardingStage1",
    "ShardingStage2",
    "ShardingStage3",
    "StrategyError",
    "TensorShard",
    "TraceError",
    "advise",
    "annotated",
    "clip_grad_value_",
    "collective_counts",
    "diff",
    "dtensor_from_fn",
    "dtensor_from_local",
    "explain",
    "local_map",
    "manual_seed",
    "mixture_of_experts",
    "parallelize",
    "propagate",
    "read_strategies",
    "register_rule",
    "reshard",
    "shard",
    "shard_dataloader",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "to_html",
    "trace",
    "unshard",
]
