"""A Llama of transformers' tensor parallelism, with change.diff applied: plain, and with a backend of linear layers."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from patched_copy import patched

from ascend_parallel.overlap.linear import column_linear, row_linear
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.launch.ranks import call_on_ranks

HERE = Path(__file__).parent
NAME = "transformers.distributed.tensor_parallel"


def rank(group, file, path):
    """Return the calls of the backend by style, and the largest difference of a loss or gradient."""
    import transformers.distributed
    from hugging_face import step

    spec = importlib.util.spec_from_file_location(NAME, file)
    changed = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    transformers.distributed.tensor_parallel = changed
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=group.size(), tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config)
    plain, calls = step(model), {"ColwiseParallel": 0, "RowwiseParallel": 0, "others": 0}

    def backend(style, module, args, kwargs, mesh):
        name = type(style).__name__
        if name == "RowwiseParallel":
            run = row_linear
        elif name == "ColwiseParallel" and style.output_layouts.is_shard():
            run = column_linear
        else:
            calls["others"] += 1
            return NotImplemented
        calls[name] += 1
        return run(args[0], module.weight.to_local(), group=mesh.get_group(), settings=Settings(num_chunks=4))

    changed.TensorParallelLayer.linear_backend = staticmethod(backend)
    overlapped = step(model)
    assert plain.keys() == overlapped.keys()
    return calls, max(float((plain[name] - overlapped[name]).abs().max()) for name in plain)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_backend_runs_the_linear_layers(tmp_path, monkeypatch):
    import transformers
    from hugging_face import write

    if transformers.__version__ != "5.23.0":
        pytest.skip("the change is against transformers 5.23.0")
    installed = Path(transformers.__file__).parent / "distributed" / "tensor_parallel.py"
    file = patched(HERE / "change.diff", installed, tmp_path / "checkout")
    support = HERE.parents[1] / "tests" / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(support), os.environ.get("PYTHONPATH", "")]))
    path = write(tmp_path, "Llama")
    calls, difference = call_on_ranks("test_linear_backend:rank", 2, limit=120, file=str(file), path=path)
    # Two blocks: q, k, v, gate and up are column layers, o and down row layers. The head gathers, and is left alone.
    assert (calls["ColwiseParallel"], calls["RowwiseParallel"]) == (10, 4) and calls["others"]
    assert difference < 1e-5
