"""torch's async tensor-parallel operators (its library symm_mem) on CPUs and NPUs.

`framework_patch` is what COC_FRAMEWORKS names. `kernels` runs torch's two operators by this package's;
`registration` registers them and takes them back; `inductor` lets torch.compile's micro-pipeline pass use them.
docs/symm_mem.md.
"""
