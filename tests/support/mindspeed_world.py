"""The real MindSpeed on the real Megatron-LM, without NPU and CANN: processes that import both, and run their layers.

MINDSPEED and MEGATRON name checkouts; neither can be had from pip (``make compat-mindspeed``). torch_npu is the real
wheel over stub libraries (npu_wheel.py); tests/ascend/test_mindspeed.py has emulated NPUs and HCCL instead. What stands
for something else here: the modules in `ABSENT`, the device "cpu" where MindSpeed asks for the present device, and gloo
for HCCL.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from unittest import mock

import npu_wheel
import torch
from launch import launch
from torch.overrides import TorchFunctionMode

# Modules that need CANN: torchair and acl come with it, auto_settings profiles a device as it is imported.
ABSENT = ("torchair", "acl", "mindspeed.auto_settings")
# What a launch script says of its model and run.
MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm --lr 0.1 --train-iters 1
    --tokenizer-type NullTokenizer --vocab-size 255
"""
SUPPORT = Path(__file__).parent


def environment(folder):
    """Variables of a process that is to have MindSpeed, Megatron-LM and torch_npu; raises `npu_wheel.Missing`."""
    checkouts = []
    for name, file in (("MINDSPEED", "mindspeed/megatron_adaptor.py"), ("MEGATRON", "megatron/training/__init__.py")):
        checkout = Path(os.environ.get(name, ""))
        if name not in os.environ:
            raise npu_wheel.Missing(f"{name} names no checkout: make compat-mindspeed MINDSPEED=... MEGATRON=...")
        if not (checkout / file).is_file():
            raise npu_wheel.Missing(f"{name}={checkout} has no {file}")
        checkouts.append(str(checkout.resolve()))
    environ = npu_wheel.environment(folder)
    here = [str(SUPPORT), str(SUPPORT.parent / "patches"), str(SUPPORT.parents[1])]
    site = environ["PYTHONPATH"].split(os.pathsep)[0]
    path = [site, *checkouts, *here, os.environ.get("PYTHONPATH", "")]
    # Megatron wants the first, so that a collective starts before the matmul that is launched after it.
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    return environ | more | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(environ, function, flags="", ranks=2, late=False, **variables):
    """Run `function` of test_mindspeed.py on `ranks` with MindSpeed's `flags`; return the finished processes.

    With `late`, ascend_parallel is imported after MindSpeed has put its replacements in, not by ``import torch``.
    """
    code = f"import mindspeed_world; mindspeed_world.on_a_rank({function.__name__!r}, {flags.split()!r}, {late})"
    backend = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if late else {}
    return launch(code, [environ | backend | variables] * ranks, timeout=300, fresh=True)


def on_a_rank(name, flags, late):
    sys.argv = ["pretrain_gpt.py", "--tensor-model-parallel-size", os.environ["WORLD_SIZE"], *MODEL.split(), *flags]
    sys.meta_path.insert(0, _Absent())
    if late:
        import torch_npu  # noqa: F401
    for absent in [name for name in sys.modules if name.split(".")[0] == "torchair"]:
        del sys.modules[absent]  # torch_npu's own, which fails at its first use
    import mindspeed.megatron_adaptor  # noqa: F401

    if late:
        import ascend_parallel  # noqa: F401
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.npu.current_device = lambda: torch.device("cpu")
    torch.npu.is_bf16_supported = lambda: True  # Megatron-core's own backward asks, and no device can answer
    import test_mindspeed
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import arguments, global_vars

    # The name of MindSpeed's feature, which it looks up in the words of the command, is no argument of its parser.
    sys.argv = [word for word in sys.argv if word != "--qat-quant-engine"]
    global_vars.set_args(arguments.validate_args(arguments.parse_args()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    args = global_vars.get_args()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    getattr(test_mindspeed, name)(dist.group.WORLD)
    print("every check was made")
    parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


class NpuMeansCpu(TorchFunctionMode):
    """Creates on the CPU what is asked for on the device "npu", for constructors that name the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("npu"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mock for every module of `ABSENT`, and for the modules inside it."""

    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = mock.MagicMock(name=spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass
