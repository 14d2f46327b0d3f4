"""Megatron-core's real layers for tests: built alike, run unpatched and patched, compared bit for bit."""

import torch
import torch.distributed as dist
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel

import ascend_parallel


class Layers:
    """One world of model-parallel groups, in which layers run unpatched and patched."""

    def __init__(self, tp, settings=None, **config):
        self._shims = megatron_on_cpu()
        self._shims.__enter__()
        start_model_parallel(tp)
        self.config, self.settings = config, settings or {"num_chunks": 4}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        ascend_parallel.configure(num_chunks=1)
        end_model_parallel()
        self._shims.__exit__(None, None, None)

    def make(self, kind, sizes=(96, 96), seed=0, config=(), **arguments):
        """Build ColumnParallelLinear or RowParallelLinear with reproducible weights and bias."""
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import layers

        defaults = {"sequence_parallel": False, "use_cpu_initialization": True, "params_dtype": torch.float32}
        model_config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(), **{**defaults, **self.config, **dict(config)}
        )
        torch.manual_seed(seed)
        if kind == "RowParallelLinear":
            arguments = {"bias": True, "input_is_parallel": True, "skip_bias_add": False, **arguments}
        layer = getattr(layers, kind)(*sizes, config=model_config, init_method=torch.nn.init.normal_, **arguments)
        if layer.bias is not None:
            # Row biases are the same on every rank, column biases this rank's own.
            torch.manual_seed(seed + (dist.get_rank() + 1 if kind == "ColumnParallelLinear" else 0))
            torch.nn.init.normal_(layer.bias)
        return layer

    def compare(self, kind, shape, *, settings=None, forward=None, sizes=(64, 96), **arguments):
        """Run forward and backward unpatched, then patched; return what differs, and how the patched run went."""
        runs, counts = [], {}
        for overlapped in (False, True):
            ascend_parallel.configure(**({**self.settings, **(settings or {})} if overlapped else {"num_chunks": 1}))
            ascend_parallel.ops.COUNTS.clear()
            layer = self.make(kind, sizes, **arguments)
            torch.manual_seed(100 + (dist.get_rank() if self._rows_differ(kind, arguments) else 0))
            x = torch.randn(shape).requires_grad_()
            y, bias = (forward or type(layer).__call__)(layer, x)
            torch.manual_seed(
                200 + (dist.get_rank() if kind == "ColumnParallelLinear" or self.sequence(arguments) else 0)
            )
            (y * torch.randn(y.shape)).sum().backward()
            grads = {name: p.grad for name, p in layer.named_parameters()}
            runs.append({"y": y, "returned bias": bias, "input gradient": x.grad, **grads})
            counts = ascend_parallel.ops.COUNTS.as_dict()
        return [name for name in runs[0] if not same(runs[0][name], runs[1][name])], counts

    def sequence(self, arguments):
        return {**self.config, **dict(arguments.get("config", ()))}.get("sequence_parallel", False)

    def _rows_differ(self, kind, arguments):
        return self.sequence(arguments) or (kind == "RowParallelLinear" and arguments.get("input_is_parallel", True))


def same(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)
