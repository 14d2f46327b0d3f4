"""Options removed by bounds: never one of a best solution; scans are solved, and proven, where tables are too wide."""

import itertools

import numpy as np
import pytest
import torch
from small_models import Mamba, Rwkv

from ascend_parallel.sharding.mesh import ProcessMesh
from ascend_parallel.sharding.planner import pruning
from ascend_parallel.sharding.planner.elimination import AssignmentProblem, TooWideError, solve
from ascend_parallel.sharding.planner.integer_program import optimum
from ascend_parallel.sharding.planner.propagate import propagate
from ascend_parallel.sharding.planner.pruning import _Messages, pruned, solved_by_pruning
from ascend_parallel.sharding.planner.search import Search
from ascend_parallel.sharding.redistribute.costs import MeshCosts
from ascend_parallel.sharding.tracing.trace import trace


def random_problem(seed, most=7):
    """Return choices with costs between most pairs of them; every second problem has many equal costs."""
    drawn, problem = np.random.default_rng(seed), AssignmentProblem()
    sizes = [int(drawn.integers(1, 6)) for _ in range(drawn.integers(2, most))]

    def costs(*shape):
        return drawn.integers(0, 6, shape).astype(float) if seed % 2 else drawn.random(shape)

    for place, size in enumerate(sizes):
        problem.add(f"c{place}", costs(size))
    for first, second in itertools.permutations(range(len(sizes)), 2):
        if drawn.random() < 0.4:
            problem.add_pair(f"c{first}", f"c{second}", costs(sizes[first], sizes[second]))
    return problem


def least_with(problem, name, option):
    """Return the least cost of all solutions with this option."""
    ranges = [[option] if each == name else range(size) for each, size in problem.sizes.items()]
    return min(problem.cost(dict(zip(problem.sizes, chosen, strict=True))) for chosen in itertools.product(*ranges))


@pytest.mark.parametrize("seed", range(40))
def test_bounds_only_grow_and_are_below_what_they_bound(seed):
    problem = random_problem(seed, most=6)
    best, messages, bound = problem.cost(solve(problem)), _Messages(problem), -np.inf
    for round_ in range(6):
        messages.forward()
        for name, excess in messages.excess().items():
            for option, more in enumerate(excess):
                assert not round_ or bound + more <= least_with(problem, name, option) + 1e-9, (name, option)
        after = messages.backward()
        assert bound - 1e-9 <= after <= best + 1e-9
        bound = after


@pytest.mark.parametrize("seed", range(60))
def test_the_best_solution_is_found(seed):
    problem = random_problem(seed)
    found = solved_by_pruning(problem)
    assert found.cost == pytest.approx(problem.cost(found.chosen))
    assert found.cost == found.bound == pytest.approx(problem.cost(solve(problem)))


def test_infinite_costs_are_avoided():
    problem = AssignmentProblem()
    for name in "abc":
        problem.add(name, np.array([0.0, 1.0, np.inf]))
    forbidden = np.array([[np.inf, 0.0, 0.0], [0.0, np.inf, 0.0], [0.0, 0.0, 0.0]])
    for pair in ("ab", "bc", "ca"):
        problem.add_pair(*pair, forbidden)
    problem.own["c"] = np.array([0.0, 1.0, 5.0])
    found = pruned(problem)
    assert np.isfinite(problem.cost(found.chosen))
    assert problem.cost(found.chosen) == pytest.approx(problem.cost(solve(problem))) == 6.0


def scan(model, steps):
    with torch.device("meta"):
        return trace(model(), (torch.zeros(8, steps, 512),))


MESH = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])


@pytest.mark.slow
@pytest.mark.parametrize("model", [Rwkv, Mamba])
def test_a_scan_costs_what_the_integer_program_finds(model):
    search = Search(scan(model, 2), MESH, {}, "time", "910b", MeshCosts.of(MESH))
    problem = search.problem()
    best, found = optimum(problem), solved_by_pruning(problem)
    assert found.cost == found.bound == pytest.approx(best.cost, rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [Rwkv, Mamba])
def test_a_scan_of_many_steps_is_proven_without_the_integer_program(monkeypatch, model):
    def refused(problem, nodes=None):
        raise AssertionError("the integer program was asked")

    monkeypatch.setattr(pruning, "optimum", refused)
    plan = propagate(scan(model, 24), MESH, objective="time")
    assert plan.bound is None
    problem = Search(plan.graph, MESH, {}, "time", "910b", MeshCosts.of(MESH)).problem()
    with pytest.raises(TooWideError):
        solve(problem)


def test_what_pruning_leaves_open_goes_to_the_integer_program(monkeypatch):
    """Three choices of which no two should be equal, with two options each: the bound of messages stays at 0."""
    problem = AssignmentProblem()
    for name in "abc":
        problem.add(name, np.zeros(2))
    for pair in ("ab", "bc", "ca"):
        problem.add_pair(*pair, np.eye(2))
    found = solved_by_pruning(problem)
    assert found.cost == found.bound == 1.0  # what remains is small, and is eliminated
    monkeypatch.setattr(pruning, "SMALL", 0)
    monkeypatch.setattr(pruning, "ATTEMPT", 0)
    half = pruned(problem)
    assert (half.bound, half.cost) == (pytest.approx(0.0), 3.0)  # the first option of each
    found = solved_by_pruning(problem)
    assert found.cost == 1.0
    assert found.bound == pytest.approx(1.0)


def near_ties(choices=12, options=20):
    """Return choices that are all connected with each other, at costs that differ in the third digit."""
    drawn, problem = np.random.default_rng(0), AssignmentProblem()
    for place in range(choices):
        problem.add(f"c{place}", 1 + drawn.random(options) / 1e3)
    for first, second in itertools.combinations(problem.sizes, 2):
        problem.add_pair(first, second, 1 + drawn.random((options, options)) / 1e3)
    return problem


def planned_near_ties(group):
    found = solved_by_pruning(near_ties())
    return found.chosen, found.cost, found.bound


@pytest.mark.timeout(45)  # a limit of a minute, as there was, is a failure
def test_a_limit_of_work_ends_the_search_with_the_same_plan_on_every_process(ranks):
    (chosen, cost, bound), other = ranks(2).run(planned_near_ties)
    assert (chosen, cost, bound) == other
    problem = near_ties()
    assert problem.cost(chosen) == pytest.approx(cost)
    assert 0.99 * cost < bound < cost * (1 - 1e-9)


def test_a_plan_that_the_limit_left_unproven_is_said_with_its_gap(monkeypatch, caplog):
    for name, limit in (("ROUNDS", 1), ("EVERY", 1), ("SMALL", 0), ("ATTEMPT", 0), ("MOST_LEFT", 0)):
        monkeypatch.setattr(pruning, name, limit)
    plan = propagate(scan(Mamba, 2), MESH, objective="time")
    assert plan.bound is not None and 0 < plan.bound < plan.cost
    assert f"no plan takes less than {1e3 * plan.bound:.4g} ms" in caplog.text
    assert set(plan.inputs) == set(plan.graph.nodes)
