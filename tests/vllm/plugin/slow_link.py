"""A plugin of vLLM for tests: ranks on one machine sum over gloo, as those of two machines do, not in shared memory."""


def register():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
