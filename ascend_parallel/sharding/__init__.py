"""Where tensors live: mesh, placements, redistribution, and the sharding of a whole model from a few annotations.

layout, mesh      states, layouts, what of a tensor a rank holds; ProcessMesh
redistribution    the cheapest collectives from one layout to another (costs), and running them (movement)
reshard, across   shard_tensor, reshard and their kin on DTensor, also across meshes
graph, trace      a model's forward as operators
rules             which states an operator can have, and how a rank runs its part
options, strategies, annotate   what can be chosen, and what users fix
propagate         the layouts of least cost for all the rest (conversions, work, elimination, program)
plan, explain     the result, in words
conversion, execute, fuse       a rank's part of the planned graph, with its collectives overlapped
"""

from torch.distributed.tensor import Partial, Replicate, Shard

from ascend_parallel.sharding.advice import Advice, advise
from ascend_parallel.sharding.annotate import annotated, read_strategies, shard
from ascend_parallel.sharding.execute import ShardedModule, parallelize
from ascend_parallel.sharding.graph import Graph
from ascend_parallel.sharding.layers import ShardingStage1, shard_layer, shard_optimizer
from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.plan import ShardingPlan
from ascend_parallel.sharding.propagate import MemoryLimitError, propagate
from ascend_parallel.sharding.reshard import dtensor_from_fn, reshard, shard_tensor, unshard
from ascend_parallel.sharding.rules import register_rule
from ascend_parallel.sharding.strategies import OperatorStrategy, StrategyError
from ascend_parallel.sharding.trace import TraceError, trace

__all__ = [
    "Advice",
    "Graph",
    "MemoryLimitError",
    "OperatorStrategy",
    "Partial",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "ShardedModule",
    "ShardingPlan",
    "ShardingStage1",
    "StrategyError",
    "TraceError",
    "advise",
    "annotated",
    "dtensor_from_fn",
    "parallelize",
    "propagate",
    "read_strategies",
    "register_rule",
    "reshard",
    "shard",
    "shard_layer",
    "shard_optimizer",
    "shard_tensor",
    "trace",
    "unshard",
]
