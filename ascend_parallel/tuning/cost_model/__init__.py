"""What a chunk count costs: hardware and models as data, a cost model, its simulation, and the search for chunk sizes.

Nothing is imported here: training processes use parts of this package, and pay for those alone.

    from ascend_parallel.tuning.cost_model.cost import CostModel
    from ascend_parallel.tuning.cost_model.hardware import find_hardware
    from ascend_parallel.tuning.cost_model.chunk_pipeline import makespan
    from ascend_parallel.tuning.cost_model.chunk_search import best_sizes

    costs = CostModel(find_hardware("910b"))
    best = best_sizes(problem.rows, lambda sizes: makespan(costs.call(problem, sizes)))

docs/predict.md has the formulas, sources and limits.
"""
