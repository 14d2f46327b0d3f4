"""Degrees of tensor parallelism: digests of bits, at each degree the same on all ranks, and refusals."""

import hashlib

import torch

import ascend_parallel


def digest(tensor):
    return hashlib.sha1(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def at_degrees(ranks, function, *args, degrees=(1, 2, 4)):
    """Return what `function(group, *args)` returns on the ranks of each degree."""
    found = []
    for degree in degrees:
        first, *others = ranks(degree).run(function, *args)
        assert all(other == first for other in others)
        found.append(first)
    return found


def refused_in_the_tree(run):
    """Return the error with which COC_DETERMINISTIC=tp refuses what `run()` does."""
    ascend_parallel.configure(deterministic="tp")
    try:
        run()
        return ""
    except ascend_parallel.DegreeError as error:
        return str(error)
    finally:
        ascend_parallel.configure(num_chunks=1)
