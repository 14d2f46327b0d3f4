"""A second communicator of a group: its sums do not stand in the line of the group's, and have the group's limit."""

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from ascend_parallel.ops import CollectiveError
from ascend_parallel.ops.operators import start_matmul_all_reduce
from ascend_parallel.ops.pending import roll_call
from ascend_parallel.process_groups.backend import GLOO, ROWS
from ascend_parallel.process_groups.second_communicator import all_reduce_beside
from ascend_parallel.settings import Settings


@on_ranks(2)
def test_a_sum_beside_passes_those_that_a_group_has_started(group):
    """Rank 1 starts the group's sums once the other one is there: in the group's line it would not come."""
    large, small = [torch.full((4,), float(index)) for index in range(6)], torch.full((3,), 1.0 + group.rank())
    works = []
    for rank in (0, 1):
        if group.rank() == rank:
            works = [dist.all_reduce(x, group=group, async_op=True) for x in large]
        if rank == 0:
            all_reduce_beside(small, group).wait()
    for work in works:
        work.wait()
    assert torch.equal(small, torch.full((3,), 3.0))
    assert [float(x[0]) for x in large] == [2.0 * index for index in range(6)]


@on_ranks(3)
def test_groups_have_their_own(group):
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([1, 2])]
    for pair in pairs:
        x = torch.ones(2)
        if group.rank() in dist.get_process_group_ranks(pair):
            all_reduce_beside(x, pair).wait()
            assert x.tolist() == [2.0, 2.0]


@on_ranks(2)
def test_where_none_is_cheap_the_sum_is_one_of_the_groups(group):
    with mock.patch.dict(ROWS, {("gloo", "cpu"): replace(GLOO, second=None)}):
        x = torch.ones(2)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as own:
            all_reduce_beside(x, group).wait()
    assert own.call_count == 1
    assert x.tolist() == [2.0, 2.0]


@on_ranks(2)
def test_a_rank_that_does_not_come_is_waited_for_within_the_groups_limit(group):
    other = dist.new_group(timeout=timedelta(seconds=1))
    if group.rank() == 0:
        x, w, settings = torch.ones(64, 64), torch.ones(64, 8), Settings(num_chunks=4, region=True)
        with pytest.raises(CollectiveError, match=r"matmul_all_reduce, collective 1 of 1, .*all its ranks are alive"):
            start_matmul_all_reduce(x, w, other, settings, narrow_beside=True).wait()
    else:
        roll_call(other)  # a sign of life
