"""Training strategies around a sharded model: data, pipeline, recompute, optimizer parallel, checkpoints.

options, strategy    one frozen Strategy that configures the training, from Python or TOML
training_plan        the strategy applied to a model: graph, sharding plan, stages
degrees              the search for data, tensor and pipeline parallel sizes; confirm_degrees plans what it finds
explain              the effect of each option, predicted
train_step           the training step; runners/ run its forward and backward
step_arguments       checks of its arguments: alone, between ranks, and that nothing changes them later
to_static            the training step of a model marked by shard_tensor
loss, graph_passes   the model and its loss as one graph; operators of the graph that are fused
autocast             casts by operator, inserted into a plan (amp.level O1)
recompute            recompute of modules and functions
batch_checks         checks that the ranks of a replica get the same batch
masked_means         warnings about means over unequal counts
rank_watch           detection of lost ranks; heartbeats is its protocol
"""

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.degrees.search import search_degrees
from ascend_parallel.training.explain import explain
from ascend_parallel.training.loss import WeightedLoss
from ascend_parallel.training.options import (
    AmpOptions,
    CommFusion,
    GradientMerge,
    OverlapOptions,
    ShardingOptions,
    StrategyOptionError,
)
from ascend_parallel.training.pipeline.options import PipelineOptions
from ascend_parallel.training.recompute import Recompute, recompute
from ascend_parallel.training.strategy import Strategy
from ascend_parallel.training.to_static import StaticModel, StaticPredictor, to_static
from ascend_parallel.training.train_step import TrainStep, train_step
from ascend_parallel.training.training_plan import TrainingPlan, plan_training

__all__ = [
    "AmpOptions",
    "CommFusion",
    "GradientMerge",
    "OverlapOptions",
    "PipelineOptions",
    "Recompute",
    "ShardingOptions",
    "StaticModel",
    "StaticPredictor",
    "Strategy",
    "StrategyOptionError",
    "TensorShard",
    "TrainStep",
    "TrainingPlan",
    "WeightedLoss",
    "explain",
    "plan_training",
    "recompute",
    "search_degrees",
    "to_static",
    "train_step",
]
