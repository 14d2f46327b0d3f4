"""Training strategies around a sharded model: data, pipeline, recompute, optimizer parallel, checkpoints.

pieces           a rank's part of a tensor, as a box in the whole one: what checkpoints are made of
"""
