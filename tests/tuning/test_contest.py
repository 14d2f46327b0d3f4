"""What wins: the one rule for chunks of a pass, groups of parts, regions and the steps of a server."""

import pytest
from marks import promise

from ascend_parallel.tuning.measured.contest import Contest, fastest, may_lose, slowest

LUCK = [0.8, 0.8, 1.05, 0.8, 1.05, 0.8, 1.05]


@promise("auto-no-loss")
@pytest.mark.parametrize(
    ("ours", "won"),
    [
        ([0.5, 0.5, 0.5], True),
        ([0.99, 0.99, 0.99], False),  # 2 % or less is noise
        ([1.5, 0.5, 1.5], False),
        ([0.9, 1.2, 0.9], True),  # one round may be lost
        ([0.5, 0.5, 1.1, 0.5, 1.1], False),  # two may not, though the median wins
        (LUCK, False),
        ([0.5, 0.5, 0.5, 5.0], True),
        ([1.0] * 4, False),
    ],
)
def test_overlap_has_to_win_in_all_rounds_but_one(ours, won):
    assert Contest([1.0] * len(ours), ours).won is won


def test_of_more_rounds_a_winner_may_lose_so_many_that_luck_wins_once_in_16_times():
    assert {rounds: may_lose(rounds) for rounds in (3, 7, 14, 21)} == {3: 1, 7: 1, 14: 3, 21: 6}
    for rounds in range(7, 12):
        tosses = [bin(tossed).count("1") for tossed in range(2**rounds)]
        assert sum(lost <= may_lose(rounds) for lost in tosses) <= len(tosses) / 16
        assert sum(lost <= may_lose(rounds) + 1 for lost in tosses) > len(tosses) / 16


def test_rounds_are_compared_in_pairs():
    """A slow phase of the machine hits both ways of a round: neither's own median tells."""
    standing = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert Contest(standing, [0.95 * seconds for seconds in standing]).gain == pytest.approx(0.05)
    assert Contest(standing, [0.95 * seconds for seconds in standing]).won


@pytest.mark.parametrize(
    ("ours", "is_clear"),
    [([0.9, 0.95, 0.9], True), ([1.0, 1.2, 1.1], True), ([0.9, 0.97, 0.9], False), ([0.9, 1.1, 0.9], False)],
)
def test_further_rounds_follow_unless_the_first_are_clear(ours, is_clear):
    assert Contest([1.0] * 3, ours).is_clear is is_clear


def test_ranks_whose_clocks_differ_decide_alike():
    """A round takes as long as on its slowest rank; all have the same figures, so all decide the same."""
    quick, slow = [0.1, 0.1, 0.1], [0.9, 1.2, 0.9]
    assert slowest([quick, slow]) == slowest([slow, quick]) == slow
    assert slowest([[1.0, 5.0], [3.0, 2.0]]) == [3.0, 5.0]


def test_the_fastest_has_the_least_median():
    assert fastest({"a": [1, 9, 1], "b": [0.5, 2, 2], "c": [1, 1, 1]}, ["a", "b", "c"]) == "a"
