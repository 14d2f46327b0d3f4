"""Runners of forward and backward of a batch, chosen by the strategy.

runner        the base class that a training step uses
graph_runner  the rank's part of the traced graph, micro-batch by micro-batch, or its stages of a pipeline
eager_runner  the model's own Python, by the plan or with its own collectives
"""
