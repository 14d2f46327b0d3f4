"""Arguments that ParallelOptimizer refuses, and the messages."""

import pytest
import torch
from optimizer_cases import Odd
from pool import on_ranks
from torch import nn

from ascend_parallel.process_groups.consistency import DisagreementError
from ascend_parallel.sharding.tensor_shard import TensorShard
from ascend_parallel.training.optimizer import (
    LossScale,
    OptimizerFactory,
    OwnedParameter,
    ParallelOptimizer,
    data_parallel_targets,
    optimizer_factory,
)


class Kept(torch.optim.SGD):
    """Keeps a setting outside its parameter groups."""

    def __init__(self, params, lr=0.1, factor=1.0):
        super().__init__(params, lr)
        self.factor = factor


def test_recipes_that_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS cannot be partitioned: it looks at all parameters at once"):
        optimizer_factory(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(ValueError, match="Kept is not known: give optimizer_factory"):
        optimizer_factory(Kept(model.parameters()), model)
    with pytest.raises(ValueError, match=r"Kept rebuilt has factor=1.0 and not 2.0"):
        optimizer_factory(Kept(model.parameters(), factor=2.0), model, elementwise=True)
    assert optimizer_factory(Kept(model.parameters()), model, elementwise=True).states() == 0
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"group 0 of the optimizer has a \[2, 2\] that is not of the model"):
        optimizer_factory(optimizer, nn.Linear(2, 2))
    assert isinstance(optimizer_factory(optimizer, model), OptimizerFactory)
    assert optimizer_factory(optimizer, model).states() == 2
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps: give a new optimizer"):
        optimizer_factory(optimizer, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4: give 0, 1, 2, 3"),
        ({"partition_by": "rows"}, "partition_by='rows': give slices or parameters"),
        ({"zero_stage": 3, "partition_by": "parameters"}, "which cuts parameters"),
        ({"max_norm": 0.0}, "max_norm=0.0: give a number above 0"),
        ({"master_dtype": torch.int64}, "master_dtype=torch.int64"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
    ],
)
def test_options_that_are_refused(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        ParallelOptimizer(
            data_parallel_targets(model), optimizer_factory(torch.optim.Adam(model.parameters()), model), **options
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale=0.0"),
        ({"growth": 0.5}, "growth"),
        ({"backoff": 1.0}, "backoff"),
        ({"interval": 0}, "inter"),
    ],
)
def test_loss_scales_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossScale(**options)


@on_ranks(2)
def test_what_is_refused(group):
    model = Odd()
    its, targets = optimizer_factory(torch.optim.Adam(model.parameters()), model), data_parallel_targets(model)
    with pytest.raises(ValueError, match="zero_stage=2 sums gradients itself: give unreduced=True"):
        ParallelOptimizer(targets, its, zero_stage=2)
    with pytest.raises(ValueError, match="bias stands twice among the targets"):
        ParallelOptimizer([targets[0], *targets], its)
    with pytest.raises(ValueError, match="other is in no group of the optimizer"):
        ParallelOptimizer([OwnedParameter("other", model.bias, TensorShard(model.bias, (7,), (0,)))], its)
    with pytest.raises(ValueError, match="copies=1 on groups of 2 replicas"):
        ParallelOptimizer([OwnedParameter("bias", model.bias, TensorShard(model.bias, (7,), (0,)), group)], its)
    whole = TensorShard(model.bias, (7,), (0,))
    wrong, expected = (
        (targets, "rank 1: other") if group.rank() == 0 else ([OwnedParameter("other", model.bias, whole)], "^other")
    )
    with pytest.raises(ValueError, match=expected):  # on both ranks; neither waits
        ParallelOptimizer(wrong, its)
    with pytest.raises(
        DisagreementError, match=r"ranks make different optimizers: options is .*zero_stage=1.*on rank 0"
    ):
        ParallelOptimizer(targets, its, zero_stage=group.rank() + 1, unreduced=True)
    with pytest.raises(DisagreementError, match="targets is"):
        ParallelOptimizer(targets[group.rank() :], its)
    parallel = ParallelOptimizer(targets, its)
    with pytest.raises(ValueError, match="takes no more parameters"):
        parallel.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
