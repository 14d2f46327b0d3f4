"""``ascend-parallel report``: what this machine measures, as two files without names of hosts, users or paths."""

NAMES = ("versions", "links", "operators", "bench", "step")  # of the sections, in their order
