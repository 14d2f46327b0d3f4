"""The three operators as settings decide them: what a layer does, in one call."""

from ascend_parallel.ops import operators
from ascend_parallel.ops.call import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ascend_parallel.ops.probing import ANY


def start_matmul_all_reduce(x, w, group, settings, *, layout=ANY, comm_scales=None, parts=(), **options):
    asked = {"layout": layout, "comm_scales": comm_scales, "parts": parts}
    decision = operators.decided(ALL_REDUCE, x, w, group, settings, **asked)
    return operators.start_matmul_all_reduce(x, w, group, decision, comm_scales=comm_scales, **options)


def start_matmul_reduce_scatter(x, w, group, settings, *after, layout=ANY, parts=(), **options):
    decision = operators.decided(REDUCE_SCATTER, x, w, group, settings, layout=layout, parts=parts)
    return operators.start_matmul_reduce_scatter(x, w, group, decision, *after, **options)


def run_all_gather_matmul(x, w, group, settings, *keep, layout=ANY, parts=(), **options):
    decision = operators.decided(ALL_GATHER, x, w, group, settings, layout=layout, parts=parts)
    return operators.run_all_gather_matmul(x, w, group, decision, *keep, **options)
