"""A rank's part of a planned model: what it runs is decided and compiled once, then run in every step.

rank_plan              the decisions: kernels (of fused matmuls), gradient_plan (buckets), checkpointed_blocks, prefetch
compiler               the decisions as a list of `instructions` and `compute_instructions`; `segments` of torch.compile
sharded_module         holds the rank's slices and runs the list
parallelize            the model's own Python drives the same compiled operators: eager_state, eager_forward
async_redistribute     starts redistributions early; their gradients are in redistribute/edges
overlapped_linear      matmuls with their collective; gradient_reduction sums parameter gradients in buckets
recompute_autograd     runs a part a second time in backward; regather gathers parameters a second time
activation_memory      the bytes that backward needs, estimated from the plan
"""
