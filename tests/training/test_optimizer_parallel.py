"""ParallelOptimizer: updates partitioned among ranks, against the unpartitioned optimizer in one process."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import OPTIMIZERS, WAYS, Odd, groups, made, pair, seeds
from pool import on_ranks
from torch import nn
from torch.optim import lr_scheduler

from ascend_parallel.training.optimizer import ParallelOptimizer, data_parallel_targets, optimizer_factory


def compare(group, zero_stage, partition_by, unreduced, name, dtype=torch.float64, bucket_bytes=200, steps=3):
    """Train beside the unpartitioned optimizer on the same gradients: parameters must be bitwise equal."""
    options = {"zero_stage": zero_stage, "partition_by": partition_by, "bucket_bytes": bucket_bytes}
    whole, optimizer, mine, parallel = pair(name, dtype, unreduced=unreduced, **options)
    for step in range(steps):
        ranks = range(group.size())
        for rank in ranks:
            whole(seeds(step, rank), step % 2).backward()
        for rank in [group.rank()] if unreduced else ranks:
            mine(seeds(step, rank), step % 2).backward()
        if zero_stage == 2:
            assert all(param.grad is None for param in mine.parameters()) or group.size() == 1
        optimizer.step()
        parallel.step()
        for (key, truth), param in zip(whole.named_parameters(), mine.parameters(), strict=True):
            assert torch.equal(truth, param), (
                f"{name} {zero_stage} {partition_by} {unreduced}: {key} differs in step {step}"
            )
            if zero_stage < 2 and truth.grad is not None:
                assert torch.equal(truth.grad, param.grad), f"gradient of {key}"
        optimizer.zero_grad()
        parallel.zero_grad()


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 3, 4])
@on_ranks()
def test_zero_stages_and_partitions(group):
    for zero_stage, partition_by in WAYS:
        for unreduced in (True, False) if zero_stage < 2 else (True,):
            compare(group, zero_stage, partition_by, unreduced, "AdamW")
            compare(group, zero_stage, partition_by, unreduced, "AdamW", torch.float32, 25 << 20)


@pytest.mark.slow
@on_ranks(3)
def test_elementwise_optimizers(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in OPTIMIZERS:
            compare(group, 1, "slices", False, name, torch.float32)
            compare(group, 2, "slices", True, name)


@on_ranks(3)
def test_gradients_accumulate(group):
    """Gradients of several backwards, also under no_sync, add up; dropped gradients leave no trace."""
    for zero_stage, partition_by in WAYS:
        options = {"zero_stage": zero_stage, "partition_by": partition_by, "bucket_bytes": 150}
        whole, optimizer, mine, parallel = pair("AdamW", unreduced=True, **options)
        for step in range(3):
            mine(9).backward()
            parallel.zero_grad()
            with parallel.no_sync():
                mine(seeds(step, group.rank())).backward()
            if zero_stage == 2:
                assert mine.bias.grad is not None
            for micro in (10, 20):
                mine(seeds(step + micro, group.rank()), True).backward()
            for micro in (0, 10, 20):
                for rank in range(group.size()):
                    whole(seeds(step + micro, rank), micro > 0).backward()
            with parallel.no_sync():
                mine(seeds(step + 30, group.rank())).backward()
            for rank in range(group.size()):
                whole(seeds(step + 30, rank)).backward()
            optimizer.step()
            parallel.step()
            optimizer.zero_grad()
            parallel.zero_grad()
        torch.testing.assert_close(mine.state_dict(), whole.state_dict(), rtol=0, atol=0)


@on_ranks(3)
def test_parameters_that_some_ranks_do_not_reach(group):
    """Only some ranks reach a parameter; a parameter that no rank reaches is not even decayed."""
    for zero_stage, partition_by in WAYS:
        options = {"zero_stage": zero_stage, "partition_by": partition_by, "bucket_bytes": 150}
        whole, optimizer, mine, parallel = pair("AdamW", unreduced=True, **options)
        mine(1, group.rank() == 1).backward()
        for rank in range(group.size()):
            whole(1, rank == 1).backward()
        optimizer.step()
        parallel.step()
        torch.testing.assert_close(mine.state_dict(), whole.state_dict(), rtol=0, atol=0)
        assert torch.equal(mine.unused, torch.ones(3, dtype=torch.float64))
        assert not torch.equal(mine.sometimes, torch.ones(5, dtype=torch.float64))


@on_ranks(2)
def test_backward_that_fails_and_gradients_left_from_the_last_step(group):
    """A backward that fails in the middle, and a gradient that would be summed twice."""
    mine, whole = Odd(), Odd()
    parallel = made(mine, OPTIMIZERS["AdamW"], zero_stage=2, unreduced=True, bucket_bytes=150)

    def fail(gradient):
        raise RuntimeError("in the middle")

    handle = mine.row.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        mine(1).backward()
    handle.remove()
    parallel.zero_grad()
    optimizer = OPTIMIZERS["AdamW"](groups(whole))
    mine(seeds(1, group.rank())).backward()
    for rank in range(group.size()):
        whole(seeds(1, rank)).backward()
    parallel.step()
    optimizer.step()
    torch.testing.assert_close(mine.state_dict(), whole.state_dict(), rtol=0, atol=0)
    mine = Odd()
    parallel = made(mine, OPTIMIZERS["AdamW"], unreduced=True)
    mine(1).backward()
    parallel.step()
    mine(1).backward()
    with pytest.raises(RuntimeError, match=r"would be summed twice: call zero_grad\(\)"):
        parallel.step()
    mine.zero_grad()
    mine(1).backward()
    parallel.step()


@on_ranks(2)
def test_schedulers_closures_and_parameters_written_from_outside(group):
    """Learning rate schedulers, a closure, and writing to parameters from outside."""
    for scheduler in (
        partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5),
    ):
        whole, optimizer, mine, parallel = pair("AdamW", unreduced=True)
        rates = [scheduler(optimizer), scheduler(parallel)]
        for step in range(4):
            for rank in range(group.size()):
                whole(seeds(step, rank)).backward()

            def closure(step=step, mine=mine):
                loss = mine(seeds(step, group.rank()))
                loss.backward()
                return loss

            optimizer.step()
            assert parallel.step(closure) is not None
            for part in (optimizer, parallel, *rates):
                part.step() if part in rates else part.zero_grad()
            assert rates[0].get_last_lr() == rates[1].get_last_lr()
            if step == 1:
                for model in (whole, mine):
                    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
            if step == 2:
                for model in (whole, mine):
                    model.late.data = model.late.data * 2
        torch.testing.assert_close(mine.state_dict(), whole.state_dict(), rtol=0, atol=0)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        shapes = [(6, 4), (3, 5), (5, 5), (2, 8)]
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes)

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return sum((param * torch.randint(-4, 5, param.shape, generator=generator)).sum() for param in self.all)


@on_ranks(2)
def test_optimizers_of_whole_matrices(group):
    """Optimizers that look at whole matrices, with whole parameters as shares."""
    for kind in (partial(torch.optim.Muon, lr=0.01), partial(torch.optim.Adafactor, lr=0.01)):
        for zero_stage, partition_by in ((0, "slices"), (1, "parameters"), (2, "parameters")):
            whole, mine = Matrices(), Matrices()
            optimizer = kind(whole.parameters())
            its = optimizer_factory(kind(mine.parameters()), mine)
            parallel = ParallelOptimizer(
                data_parallel_targets(mine), its, zero_stage=zero_stage, partition_by=partition_by, unreduced=True
            )
            for step in range(3):
                mine(seeds(step, group.rank())).backward()
                for rank in range(group.size()):
                    whole(seeds(step, rank)).backward()
                optimizer.step()
                parallel.step()
                optimizer.zero_grad()
                parallel.zero_grad()
            torch.testing.assert_close(mine.state_dict(), whole.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match='Adafactor looks at whole parameters: give partition_by="parameters"'):
        ParallelOptimizer(data_parallel_targets(mine), its)


def alone(queue):
    whole, optimizer, model, parallel = pair("AdamW", max_norm=1.0, unreduced=True, zero_stage=2)
    for module in (model, whole):
        module(1).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.step()
    parallel.step()
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-12, atol=1e-12)
    assert parallel.norm == pytest.approx(norm.item(), rel=1e-12)


def test_in_one_process_without_groups():
    assert not dist.is_initialized()
    alone(None)
