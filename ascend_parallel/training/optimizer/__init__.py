"""Optimizer parallel (ZeRO): each rank updates its share of the parameters.

factory             rebuild an ordinary torch optimizer over a rank's share of its parameters
targets             the parameters to update, and this rank's shard of each
partition           which rank updates what: slices of each parameter, or whole parameters
shares              the partition of all targets; reduce gradients and gather updates between replicas
buckets             tensors sent together
reduce_scatter      gradients reduce-scattered while backward runs
norm                the norm of all gradients of the job
scaling             the loss scale for fp16
state               the state as tensor shards, for any layout
memory              bytes per rank, by formula
checks              checks of the arguments
zero3               ZeRO stage 3 as a change of a plan: parameters held in slices
parallel_optimizer  the optimizer
"""

from ascend_parallel.training.optimizer.factory import OptimizerFactory, optimizer_factory
from ascend_parallel.training.optimizer.memory import OptimizerMemory, predicted_memory
from ascend_parallel.training.optimizer.parallel_optimizer import ParallelOptimizer
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.targets import Target, data_parallel_targets, module_targets
from ascend_parallel.training.optimizer.zero3 import sharded_parameters

__all__ = [
    "LossScale",
    "OptimizerFactory",
    "OptimizerMemory",
    "ParallelOptimizer",
    "Target",
    "data_parallel_targets",
    "module_targets",
    "optimizer_factory",
    "predicted_memory",
    "sharded_parameters",
]
