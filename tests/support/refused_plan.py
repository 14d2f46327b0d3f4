"""A plan that one rank refuses, because it has another number of threads than the others."""

import contextlib

import torch

from ascend_parallel.tuning.measured.chunk_plan import Plan, this_machine

REFUSED = "refused: the plan was measured elsewhere: threads is"


@contextlib.contextmanager
def refused_plan(refuses):
    """Yield a plan of this machine for two ranks, which this rank `refuses` inside this context, or takes."""
    threads = torch.get_num_threads()
    plan = Plan(this_machine(2, torch.device("cpu"), "gloo"))
    torch.set_num_threads(threads + refuses)
    try:
        yield plan
    finally:
        torch.set_num_threads(threads)
