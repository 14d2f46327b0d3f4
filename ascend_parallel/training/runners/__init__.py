"""How a rank runs forward and backward of a batch, by what the strategy makes of the model.

runner   what a training step needs of each
graph    its part of the graph, micro-batch by micro-batch
staged   its stages of a pipeline
eager    the model's own Python, by the plan
written  a model with collectives of its own
"""
