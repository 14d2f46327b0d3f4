"""A plugin of vLLM for tests: ranks on one machine sum over gloo, as those of two machines do, not in shared memory."""


def register():
    import torch
    from vllm.distributed.device_communicators import cpu_communicator

    kind = cpu_communicator.CpuCommunicator
    if hasattr(kind, "_all_group_ranks_share_shm_group_name"):
        kind._all_group_ranks_share_shm_group_name = lambda self: False
    else:  # vLLM 0.14 and before ask nobody
        cpu_communicator._CPUSHMDistributed = lambda communicator: torch.distributed
