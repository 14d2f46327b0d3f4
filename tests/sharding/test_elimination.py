"""The exact solver against every combination, and against the integer program."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_parallel.sharding.planner.elimination import AssignmentProblem, TooWideError, solve
from ascend_parallel.sharding.planner.integer_program import optimum

COSTS = st.floats(0, 10, allow_nan=False).map(lambda cost: round(cost, 3))


@st.composite
def problems(draw, choices=6, options=3):
    problem, rng = AssignmentProblem(), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = [f"n{index}" for index in range(draw(st.integers(1, choices)))]
    for name in names:
        problem.add(name, rng.integers(0, 50, draw(st.integers(1, options))).astype(float))
    for first, second in draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=12)):
        shape = problem.sizes[first], problem.sizes[second]
        problem.add_pair(first, second, rng.integers(0, 50, shape).astype(float))
    return problem


def least(problem):
    names = list(problem.sizes)
    choices = product(*(range(problem.sizes[name]) for name in names))
    return min(problem.cost(dict(zip(names, chosen, strict=True))) for chosen in choices)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_elimination_finds_what_trying_everything_finds(problem):
    assert problem.cost(solve(problem)) == pytest.approx(least(problem))


@settings(max_examples=40, deadline=None)
@given(problems(choices=12, options=5))
def test_elimination_and_the_integer_program_agree(problem):
    solution = optimum(problem)
    assert solution.bound == pytest.approx(solution.cost)
    assert problem.cost(solve(problem)) == pytest.approx(solution.cost)


def test_an_infinite_cost_is_avoided():
    problem = AssignmentProblem()
    problem.add("a", np.array([0.0, 1.0]))
    problem.add("b", np.array([0.0, 1.0]))
    problem.add_pair("a", "b", np.array([[np.inf, np.inf], [np.inf, 0.0]]))
    assert solve(problem) == {"a": 1, "b": 1}


def test_tables_that_would_not_fit_are_not_made():
    problem = AssignmentProblem()
    for index in range(8):
        problem.add(f"n{index}", np.zeros(10))
    for first in range(8):
        for second in range(first):
            problem.add_pair(f"n{first}", f"n{second}", np.zeros((10, 10)))
    with pytest.raises(TooWideError, match="others make a table"):
        solve(problem, most_numbers=10_000, most_sums=100_000)


@pytest.mark.slow
def test_a_long_chain_takes_as_many_tables_as_choices():
    """Growth has to be linear in the layers: a chain of 20,000 choices, whose answer is known."""
    problem, count = AssignmentProblem(), 20_000
    for index in range(count):
        problem.add(f"n{index}", np.array([0.0, 1.0]))
    for index in range(count - 1):
        problem.add_pair(f"n{index}", f"n{index + 1}", np.array([[1.5, 0.0], [0.0, 1.5]]))
    chosen = solve(problem)
    assert problem.cost(chosen) == count // 2
