"""torch's async tensor-parallel operators (its library symm_mem) on CPUs and NPUs.

`kernels` runs torch's two operators by this package's; `registration` registers them and takes them back;
`inductor` lets torch.compile's micro-pipeline pass use them. docs/symm_mem.md.
"""

from ascend_parallel.patches.symm_mem.registration import register, unregister

__all__ = ["register", "unregister"]
