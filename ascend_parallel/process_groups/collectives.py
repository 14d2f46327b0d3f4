"""The names of collectives, in costs, plans, counts and messages. An operator of ops/call.py is a matmul with one."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ALL_TO_ALL, SEND, BROADCAST = "all_to_all", "send", "broadcast"
