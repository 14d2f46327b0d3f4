"""Optimizer parallel (ZeRO): each rank updates its share of the parameters.

recipe      from an ordinary torch optimizer to what makes it again over a rank's share
targets     what is optimized, and this rank's box of it
division    which rank updates what: slices of each parameter, or whole parameters
shares      the division of all targets, and what moves between replicas
buckets     tensors sent together
scatter     gradients summed into boxes while backward runs
norm        the gradients' norm over the job
scaling     the loss's scale for fp16
state       the state as pieces, for any layout
memory      bytes per rank, by formula
checks      what is refused
level3      parameters held in slices, as a change of a plan
parallel    the optimizer
"""

from ascend_parallel.training.optimizer.factory import Recipe, recipe
from ascend_parallel.training.optimizer.memory import OptimizerMemory, predicted_memory
from ascend_parallel.training.optimizer.parallel_optimizer import ParallelOptimizer
from ascend_parallel.training.optimizer.scaling import LossScale
from ascend_parallel.training.optimizer.targets import Target, data_parallel_targets, module_targets
from ascend_parallel.training.optimizer.zero3 import sharded_parameters

__all__ = [
    "LossScale",
    "OptimizerMemory",
    "ParallelOptimizer",
    "Recipe",
    "Target",
    "data_parallel_targets",
    "module_targets",
    "predicted_memory",
    "recipe",
    "sharded_parameters",
]
