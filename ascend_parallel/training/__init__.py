"""Training strategies around a sharded model: data, pipeline, recompute, optimizer parallel, checkpoints.

options, strategy    what is said about a training: one frozen Strategy, from Python or TOML
loss, passes         the model and its loss as one graph; operators of it that become one
batches, masked      batches that differ on one replica; means over unequal counts
watch                which ranks are still there
"""

from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.explain import explain
from ascend_parallel.training.options import (
    AmpOptions,
    CommFusion,
    GradientMerge,
    OverlapOptions,
    PipelineOptions,
    ShardingOptions,
    StrategyOptionError,
)
from ascend_parallel.training.recompute import Recompute, recompute
from ascend_parallel.training.strategy import Strategy
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
    "Strategy",
    "StrategyOptionError",
    "TensorShard",
    "TrainStep",
    "TrainingPlan",
    "explain",
    "plan_training",
    "recompute",
    "train_step",
]
