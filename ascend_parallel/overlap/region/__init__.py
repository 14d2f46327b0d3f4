"""Regions: a collective's rows are waited for chunk by chunk, where the next layers need them.

Between two attention cores every operator works row by row: proj, all-reduce, bias, add, norm, fc1, activation, fc2,
all-reduce. A region cuts all of them at the same rows. A chunk's collective then runs under any other chunk's work.

rows      the primitive: rows of a tensor that are filled in order, on demand
cuts      the chunks of a region, which keep the bits of all its matmuls
exchange  the collectives, with and without sequence parallelism
tail      bias, add and norm after a row-parallel layer
mlp       fc1, activation and fc2
column    a column-parallel layer that pulls its input
"""
