"""How many chunks: a cost model, measurements on real ranks, and what both choose."""
