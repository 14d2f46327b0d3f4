"""Pipeline parallelism: a plan split into stages, each on its own mesh, run by torch's schedules.

stage_assignment   the stage of each operator
split_plan         splits the plan of the whole model into a plan for each stage
schedule           the order in which ranks run micro-batches
timing             when each action of a schedule runs, for given times of the stages
picture            a simulated schedule as text and as a picture; a step's measured times
groups             meshes and process groups; parameters that several stages read
stage              a batch's parts, and a rank's part of a stage, run by torch.distributed.pipelining
cross_mesh         a stage that exchanges blocks with stages on meshes of other shapes
cross_mesh_sums    sums of gradients that such meshes share
pipeline           the pipeline
"""
