"""Pipeline parallelism: a plan cut into stages, each on its own mesh, run by torch's schedules.

stages           which operator belongs to which stage
cut              one plan of the whole model becomes one per stage
schedule         in which order ranks run micro-batches, simulated
picture          a simulated schedule in text and as a picture
measured         where the time of a step went, beside what the simulation says
stage            a rank's part of a stage, as torch.distributed.pipelining runs it
run              the pipeline
"""
