"""Optimizer parallel (ZeRO): each rank updates its share of the parameters.

factory             rebuild an ordinary torch optimizer over a rank's share of its parameters
targets             the parameters to update, and this rank's shard of each
partition           which rank updates or holds what: slices or whole parameters; bytes per rank, by formula
shares              the partition of all targets; reduce gradients, take their norm, gather updates between replicas
buckets             tensors sent together
reduce_scatter      gradients reduce-scattered while backward runs
scaling             the loss scale for fp16
state               the state as tensor shards, for any layout
checks              checks of the arguments
parallel_optimizer  the optimizer
"""

from ascend_parallel.training.optimizer.factory import OptimizerFactory, optimizer_factory
from ascend_parallel.training.optimizer.parallel_optimizer import ParallelOptimizer
from ascend_parallel.training.optimizer.partition import predicted_memory, sharded_parameters
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.targets import OwnedParameter, data_parallel_targets, module_targets

__all__ = [
    "LossScale",
    "OptimizerFactory",
    "OwnedParameter",
    "ParallelOptimizer",
    "data_parallel_targets",
    "module_targets",
    "optimizer_factory",
    "predicted_memory",
    "sharded_parameters",
]
