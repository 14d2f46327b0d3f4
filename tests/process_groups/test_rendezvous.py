"""What ranks say to each other in the store of their group: who is missing, who decides, what is left behind."""

import time

import pytest
import torch.distributed as dist
from pool import on_ranks
from torch.distributed import distributed_c10d as c10d

from ascend_parallel.diagnostics.timeline.align import compare
from ascend_parallel.ops import shm
from ascend_parallel.ops.pending import roll_call
from ascend_parallel.process_groups.consistency import DisagreementError, announce_failure, store_all_gather
from ascend_parallel.process_groups.rendezvous import Rendezvous

TALKS = {
    "all-gather": lambda group: store_all_gather(group, "here", {"rank": group.rank()}, DisagreementError),
    "roll call": roll_call,
    "clocks": compare,
    "shared memory": lambda group: (shm._SHARED.pop(group, None), shm.reach(group)),
}


def keys(group):
    """Return the number of keys in the store, once no rank writes."""
    dist.barrier(group)
    number = c10d._get_process_group_store(group).num_keys()
    dist.barrier(group)
    return number


@pytest.mark.parametrize("talk", TALKS)
@on_ranks(3)
def test_what_was_said_is_deleted_when_ranks_meet_again(group, talk):
    for _ in range(2):
        TALKS[talk](group)
    twice = keys(group)
    for _ in range(5):
        TALKS[talk](group)
    assert keys(group) == twice


@on_ranks(2)
def test_who_looks_at_the_latest_leaves_nothing_behind(group):
    before = keys(group)
    assert Rendezvous(group, "never met", latest=True).said("name", [0, 1]) == {}
    assert keys(group) == before


@on_ranks(3)
def test_missing_ranks_are_returned_and_ranks_of_another_topic_are_never_met(group):
    if group.rank() == 1:
        Rendezvous(group, "another topic").publish("name", "other")
    else:
        here = Rendezvous(group, "a topic")
        here.publish("name", f"of {group.rank()}")
        assert here.absent("name", 0.2) == [1]
        assert here.said("name", here.ranks) == {0: "of 0", 2: "of 2"}
    dist.barrier(group)
    late = Rendezvous(group, "a topic", latest=group.rank() != 1)  # the first of rank 1 is the first of the others
    late.publish("name", f"of {group.rank()}")
    assert late.absent("name", 20) == []
    assert late.texts("name") == {rank: f"of {rank}" for rank in range(3)}
    outcome = late.decide(f"of {group.rank()}")
    assert late.decided
    late.publish("outcome", outcome)
    assert late.absent("outcome", 20) == []
    assert len(set(late.texts("outcome").values())) == 1


@pytest.mark.parametrize("failing", [(2,), (0,), (0, 1)])
@on_ranks(3)
def test_ranks_are_told_of_a_failure_at_once_also_if_they_come_late_and_meet_again(group, failing):
    """A rank that comes after the others have raised would wait for the group's time limit."""
    me, begin = group.rank(), time.monotonic()
    time.sleep(1.5 * (me == 1))
    if me in failing:
        announce_failure(group, f"rank {me} has failed", DisagreementError, topic="work")
    else:
        with pytest.raises(DisagreementError, match=f"rank {failing[0]} has failed"):
            store_all_gather(group, "here", {}, DisagreementError, topic="work")
    assert time.monotonic() - begin < 8
    again = store_all_gather(group, "here", {"rank": me}, DisagreementError, topic="work")
    assert again == {rank: {"rank": rank} for rank in range(3)}
