"""The choice of groups of experts from measured rounds, on a clock that the test moves."""

import pytest
import torch
from marks import promise

from ascend_parallel.ops.call import Exchange
from ascend_parallel.tuning.measured import part_groups

EXCHANGE = Exchange("expert_exchange", 4, None, 64, torch.float32, "cpu", 2)
WIN, LUCK = [0.8] * 7, [0.8, 0.8, 1.05, 0.8, 1.05, 0.8, 1.05]
CASES = {  # the times of 7 rounds, in turn 1; how the experts are grouped
    "two groups win": ({2: WIN, 4: [0.9] * 7}, (2, 2)),
    "four groups win": ({2: [0.95] * 7, 4: WIN}, (1, 1, 1, 1)),
    "no round gains": ({2: [1.1] * 7, 4: [1.2] * 7}, (4,)),
    "a lucky median": ({2: LUCK, 4: [1.2] * 7}, (4,)),
}


class Clock:
    """Time that passes only inside of runs."""

    def __init__(self):
        self.now = 0.0

    def seconds_of(self, call, device):
        before = self.now
        call()
        return self.now - before

    def taking(self, seconds):
        """Return a run that takes the seconds in turn, with a slow one before the first three and before the rest."""
        left = iter([5.0, *seconds[:3], 5.0, *seconds[3:]])

        def run():
            self.now += next(left)

        return run


def chosen(group, rounds, slow_rank):
    """Return the entry's sizes and its time in turn; on the other rank groups are quick."""
    clock, before = Clock(), part_groups.seconds_of
    own = group.rank() == slow_rank
    runs = {
        (4 // count,) * count: clock.taking([spent if own else 0.1 for spent in of_count])
        for count, of_count in rounds.items()
    }
    part_groups.seconds_of = clock.seconds_of
    try:
        entry = part_groups.fastest_groups(EXCHANGE, group, runs, clock.taking([1.0] * 7), torch.device("cpu"))
    finally:
        part_groups.seconds_of = before
    return entry.sizes, entry.serial, entry.operator


@promise("auto-experts")
@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_groups_have_to_win_round_by_round_on_the_slowest_rank(ranks, case, slow_rank):
    rounds, expected = CASES[case]
    for sizes, serial, operator in ranks(2).run(chosen, rounds, slow_rank):
        assert (sizes, operator) == (expected, "expert_exchange")
        assert serial == pytest.approx(1.0)
