"""``ascend-parallel report``: what this machine measures, as two files without names of hosts, users or paths."""
