"""Time Megatron-core's parallel linear layers: plain, with the CoC of the real MindSpeed, and with this package.

    MINDSPEED=<checkout> python benchmarks/beside_mindspeed.py --link 1gbit      about eight minutes

MINDSPEED names a checkout of MindSpeed with ``mindspeed/core/tensor_parallel/coc_feature`` (26.1.0_core_r0.12.1). Its
four autograd functions run as they are, on gloo and the CPU: what they ask of torch_npu is the present device, and what
they ask of Megatron's training arguments is whether gradients accumulate in a kernel (no). Weights and shapes are those
of megatron-core's own layers, fp32, 2 ranks, forward and backward; the results of every variant are compared with
plain's first. "auto" is COC_PARALLEL_NUM=auto after its search.

The tables have medians, and the ratio plain / variant, paired by round, with a bootstrap interval: of the clock, and of
a processor with gloo's threads, on the rank that takes most.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import in_turn, milliseconds, on_ranks, options_of, ratio, run, table
from megatron_cpu import end_model_parallel, megatron_on_cpu, start_model_parallel

import ascend_parallel

RANKS, PLAIN, MINDSPEED = 2, "plain", "MindSpeed"
LAYERS = ("row", "column")
MODES = {"all-reduce": False, "sequence parallel": True}
FUNCTIONS = "mindspeed.core.tensor_parallel.coc_feature"
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}
TOLERANCE = 1e-5  # of the largest value: fp32 sums of 2048 numbers in another order


def main() -> None:
    """Read the command line, measure, print."""
    parser = options_of(__doc__, rounds=15)
    parser.add_argument(
        "--shape", type=_shape, default="2048,2048,2048", metavar="M,K,N", help="global; default: all 2048"
    )
    parser.add_argument(
        "--chunks", type=int, choices=(2, 4, 8), default=8, help="of MindSpeed and of this package; default: 8"
    )
    options = vars(parser.parse_args())
    checkout = Path(os.environ.get("MINDSPEED", ""))
    if not (checkout / FUNCTIONS.replace(".", "/")).is_dir():
        raise ValueError(
            f"MINDSPEED={os.environ.get('MINDSPEED', '')}: not a checkout with {FUNCTIONS.replace('.', '/')}"
        )
    options["checkout"] = str(checkout.resolve())
    found = on_ranks("beside_mindspeed:rank", RANKS, link=options.pop("link"), limit=1800, options=options)
    for clock in CLOCKS:
        rows = [
            [layer, mode, name, milliseconds(times[name], 0), *ratio(times[PLAIN], times[name])]
            for layer, mode, measured, times in found
            if measured == clock
            for name in times
        ]
        print(f"\n{clock}\n\n{table(['layer', 'mode', 'variant', 'ms', 'plain / variant', '95 %'], rows)}")


def rank(group: dist.ProcessGroup, options: dict[str, Any]) -> list[tuple[str, str, str, dict[str, list[float]]]]:
    """Return layers, modes and clocks with the seconds of each variant."""
    found = []
    with megatron_on_cpu():
        start_model_parallel(RANKS)
        functions = mindspeed_functions(options["checkout"], options["chunks"])
        for mode, sequence_parallel in MODES.items():
            for layer in LAYERS:
                runs = _runs(layer, sequence_parallel, functions[mode, layer], options)
                for clock, read in CLOCKS.items():
                    found.append((layer, mode, clock, in_turn(runs, options["rounds"], clock=read)))
                runs[PLAIN]()  # restores the plain method
        end_model_parallel()
    return found


def mindspeed_functions(checkout: str, chunks: int) -> dict[tuple[str, str], Any]:
    """Import MindSpeed's CoC functions, set to `chunks`; return ``apply(x, weight, bias)`` by mode and layer."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    sys.path.insert(0, checkout)
    vars(torch)["npu"] = types.SimpleNamespace(current_device=torch.cuda.current_device)
    training = types.ModuleType("megatron.training")
    vars(training)["get_args"] = lambda: argparse.Namespace(gradient_accumulation_fusion=False)
    kernels = types.ModuleType("mindspeed.ops.npu_matmul_add")
    vars(kernels).update(npu_matmul_add_fp32=None, npu_matmul_add_fp16=None)
    sys.modules |= {"torch_npu": types.ModuleType("torch_npu"), training.__name__: training, kernels.__name__: kernels}
    config = importlib.import_module(f"{FUNCTIONS}.min_comm_cfg").min_comm_config
    config.register_tp_get_functions(
        parallel_state.get_tensor_model_parallel_group,
        parallel_state.get_tensor_model_parallel_world_size,
        parallel_state.get_tensor_model_parallel_rank,
        mappings.gather_from_tensor_model_parallel_region,
    )
    config.register_mappings(
        mappings._reduce, mappings._reduce_scatter_along_first_dim, mappings._gather_along_first_dim
    )
    config.register_coc_get_param(-1, chunks, False)
    own = importlib.import_module(f"{FUNCTIONS}.user_config").get_value_from_cfg
    config.register_matmul_soc_friendly_setting(own("matmul_soc_friendly"), own("k_min"), own("k_max"))
    config.register_all_gather_recomputation_switch(own("recompute_all_gather"))
    config.register_column_backward_coc_switch(own("enable_coc_in_column_backward"))
    reduces = importlib.import_module(f"{FUNCTIONS}.coc_parallel_linears_all_reduce")
    scatters = importlib.import_module(f"{FUNCTIONS}.coc_parallel_linears_sequence_parallel")
    return {
        ("all-reduce", "row"): reduces.COCRowAllReduceFunction.apply,
        ("all-reduce", "column"): reduces.COCColumnAllReduceFunction.apply,
        ("sequence parallel", "row"): scatters.COCRowSeqParallelFunction.apply,
        ("sequence parallel", "column"): scatters.COCColumnSeqParallelFunction.apply,
    }


def _runs(kind: str, sequence_parallel: bool, theirs: Any, options: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return what runs forward and backward of a layer by variant, after all results were compared with plain's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    rows, k, n = options["shape"]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=k,
        num_attention_heads=8,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    own: dict[str, Any] = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False}
    owner = ColumnParallelLinear if kind == "column" else RowParallelLinear
    more = {"gather_output": False} if kind == "column" else {"input_is_parallel": True, "skip_bias_add": True}
    layer: torch.nn.Module = owner(k, n, **own, **more)
    layer.weight.main_grad = None  # MindSpeed carries this attribute along
    share = rows // RANKS if sequence_parallel else rows
    if kind == "column":
        x, dy = _drawn(share, k, alike=not sequence_parallel), _drawn(rows, n // RANKS, alike=False)
    else:
        x, dy = _drawn(rows, k // RANKS, alike=False), _drawn(share, n, alike=not sequence_parallel)
    x.requires_grad_()

    def step(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x.grad = layer.weight.grad = None
        y = forward()
        y.backward(dy)
        return y.detach(), x.grad, layer.weight.grad  # type: ignore[return-value]

    def by_megatron(method: Callable[..., Any]) -> torch.Tensor:
        owner.forward = method
        y: torch.Tensor = layer(x)[0]
        return y

    def by_mindspeed() -> torch.Tensor:
        config = importlib.import_module(f"{FUNCTIONS}.min_comm_cfg").min_comm_config
        config.register_sequence_parallel_switch(sequence_parallel)
        y: torch.Tensor = theirs(x, layer.weight, None)
        return y

    ascend_parallel.configure(num_chunks=1)
    methods = {PLAIN: owner.forward}
    for name, settings in ((str(options["chunks"]), {"num_chunks": options["chunks"]}), ("auto", {"auto": True})):
        ascend_parallel.configure(**settings)
        methods[name] = owner.forward
        ascend_parallel.configure(num_chunks=1)
    forwards = {name: partial(by_megatron, method) for name, method in methods.items()} | {MINDSPEED: by_mindspeed}
    runs = {name: partial(step, forward) for name, forward in forwards.items()}
    plain = runs[PLAIN]()
    for name, run_variant in runs.items():
        for got, wanted in zip(run_variant(), plain, strict=True):
            if (got - wanted).abs().max() > TOLERANCE * wanted.abs().max():
                raise ValueError(f"{kind}, sequence_parallel={sequence_parallel}: {name} differs from plain")
    return runs


def _drawn(rows: int, width: int, *, alike: bool) -> torch.Tensor:
    """Draw numbers that are alike on all ranks, or other ones on each."""
    generator = torch.Generator().manual_seed(0 if alike else 1 + dist.get_rank())
    return torch.randn(rows, 1, width, generator=generator)


def _shape(text: str) -> tuple[int, ...]:
    rows, k, n = (int(size) for size in text.split(","))
    if rows % (8 * RANKS) or k % RANKS or n % RANKS:
        raise argparse.ArgumentTypeError(f"{text}: M is divisible by {8 * RANKS}, K and N by {RANKS}")
    return rows, k, n


if __name__ == "__main__":
    run(main)
