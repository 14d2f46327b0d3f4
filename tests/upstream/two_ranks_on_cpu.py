"""A pytest plugin for Megatron's unit tests: 2 CPU ranks for 8 GPUs, local layers for Transformer Engine's.

The tensor-parallel size is 2 wherever the test's pipeline has one stage. At size 1, which most tests of layers and
models ask for, no layer communicates.
"""

import contextlib
import sys
import types
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from megatron_cpu import megatron_on_cpu

# The conftest would download data, which these tests do not read. It is imported before `pytest_configure`.
DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
sys.modules[DOWNLOADS] = types.ModuleType(DOWNLOADS)
sys.modules[DOWNLOADS].download_and_extract_asset = lambda **_: None


def pytest_configure(config):
    import megatron.core.utils
    from megatron.core.models.gpt import gpt_layer_specs

    def local_layer(num_experts=None, moe_grouped_gemm=False, qk_layernorm=False, multi_latent_attention=False, **_):
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts, moe_grouped_gemm, qk_layernorm, multi_latent_attention
        )

    init = dist.init_process_group
    stack = contextlib.ExitStack()
    stack.enter_context(megatron_on_cpu(schedules=True))
    for owner, name, value in (
        # Without Transformer Engine its version is None, which a fixture of every test compares with a number.
        (megatron.core.utils, "get_te_version", lambda: Version("0")),
        (gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", local_layer),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 2),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.nn.Module, "cuda", lambda module, *_: module),
        (dist, "init_process_group", lambda backend=None, **kwargs: init("gloo", **kwargs)),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    config.add_cleanup(stack.close)


def pytest_collection_modifyitems(items):
    from tests.unit_tests.test_utilities import Utils

    initialize = Utils.initialize_model_parallel

    def at_two(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, *args, **sizes):
        size = 2 if pipeline_model_parallel_size == 1 else tensor_model_parallel_size
        return initialize(size, pipeline_model_parallel_size, *args, **sizes)

    Utils.initialize_model_parallel = staticmethod(at_two)
