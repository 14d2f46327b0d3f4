"""Cost model of chunked calls: hardware and models as data, costs, and the search for chunk sizes.

This file imports nothing, so that a training process loads only the parts that it uses.

    from ascend_parallel.tuning.cost_model.cost import CostModel
    from ascend_parallel.tuning.cost_model.hardware import find_hardware
    from ascend_parallel.tuning.cost_model.chunk_pipeline import makespan
    from ascend_parallel.tuning.cost_model.chunk_search import best_sizes

    costs = CostModel(find_hardware("910b"))
    best = best_sizes(problem.rows, lambda sizes: makespan(costs.call(problem, sizes)))

docs/predict.md has the formulas, sources and limits.
"""
