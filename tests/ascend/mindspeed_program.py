"""A rank with MindSpeed on Megatron-LM on an emulated NPU, as a launch script for NPUs starts it.

python mindspeed_program.py FLAG...     MindSpeed's flags; EXPECTED: the chunks that are asked for
"""

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[1] / "support"
sys.path[:0] = [os.environ["MINDSPEED"], os.environ["MEGATRON"], str(SUPPORT), str(SUPPORT.parents[1])]


def main():
    """Compare a column and a row layer with float64, and the chunks that are asked for with those of the arguments."""
    import mindspeed_world
    import torch
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    flags = ["--tensor-model-parallel-size", os.environ["WORLD_SIZE"], *mindspeed_world.MODEL.split(), *sys.argv[1:]]
    sys.argv = ["pretrain_gpt.py", *flags]
    sys.meta_path.insert(0, mindspeed_world._Absent())  # what comes with CANN alone
    for absent in [name for name in sys.modules if name.split(".")[0] == "torchair"]:
        del sys.modules[absent]
    import mindspeed.megatron_adaptor  # noqa: F401
    from megatron.core import parallel_state
    from megatron.training import arguments, global_vars
    from mindspeed_layers import compare, pair

    import ascend_parallel

    global_vars.set_args(arguments.validate_args(arguments.parse_args()))
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model = pair().to(f"npu:{rank}")
    assert compare(model) == []
    assert str(ascend_parallel.coverage(model)) == "2 of 2 linear layers covered", ascend_parallel.coverage(model)
    state = ascend_parallel.status()
    assert state.settings.num_chunks == int(os.environ["EXPECTED"]), state.settings
    assert sum(count["calls"] for count in state.counts.values()) > 0, "so small matmuls are covered, and not cut"
    print("every check was made", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
