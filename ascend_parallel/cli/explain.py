"""``ascend-parallel explain``: which kernel runs a layer, in how many chunks, and why no other does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_parallel.cli.options import (
    DTYPES,
    MOST_RANKS,
    TP,
    BatchOption,
    LayerOption,
    ModelOption,
    ParallelOption,
    SequenceOption,
    ShapeOption,
    dtype_of,
)
from ascend_parallel.cli.output import console, errors, refuse_unread
from ascend_parallel.devices import DEVICES
from ascend_parallel.tuning.cost_model.tables import PlanningError, lookup
from ascend_parallel_autoload.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    from ascend_parallel.ops.registry import Explanation
    from ascend_parallel.settings import Settings
    from ascend_parallel.tuning.cost_model.models import ModelLinear

DIRECTIONS = ("forward", "backward")
MODULES = {framework.name: f"{framework.package}." for framework in FRAMEWORKS if not framework.opt_in}


def explain(
    ctx: typer.Context,
    model: ModelOption = None,
    shape: ShapeOption = None,
    layer: LayerOption = "both",
    tp: Annotated[int, typer.Option(min=2, max=MOST_RANKS, help="Tensor-parallel ranks.")] = TP,
    seq: SequenceOption = None,
    micro_batch: BatchOption = 1,
    sequence_parallel: ParallelOption = True,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; default: float32 on a CPU, else bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help=", ".join(DEVICES))] = "npu",
    chip: Annotated[str, typer.Option(help="Name of the NPU, such as Ascend910B1, for its fused operators.")] = "",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,HEADS,KEYS,WIDTH",
            help="Explain attention of a sequence that the ranks share instead, with its output projection.",
        ),
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help=f"Say too whether its layers are replaced: {', '.join(MODULES)}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say for a model's layers or a shape which kernel runs, in how many chunks, and why no other kernel does.

    The settings are the environment's. Runs nothing. ascend_parallel.explain does the same in Python.

    Examples:

      COC_PARALLEL_NUM=4 ascend-parallel explain --model llama2-7b --tp 8

      USE_COC_FUSED_KERNEL=1 ascend-parallel explain --shape 4096,1376,4096 --layer row --chip Ascend910B1

      COC_PARALLEL_NUM=4 ascend-parallel explain --shape 2048,1024,1024 --tp 2 --device cpu --framework megatron

      USE_COC_FUSED_KERNEL=1 ascend-parallel explain --context 32768,32,8,128 --tp 8 --chip Ascend910_9391
    """
    from ascend_parallel.cli.bench_request import linears_of
    from ascend_parallel.settings import current_settings

    with errors("explain"):
        place = lookup("--device", device, {name: name for name in DEVICES})
        if context is not None:
            if model is not None or shape:
                raise PlanningError("give one of --model, --shape and --context")
            refuse_unread(ctx, "--context")
            _explain_attention(context, dtype or DEVICES[place].dtype, tp, place, chip, as_json)
            return
        prefix = None if framework is None else lookup("--framework", framework, MODULES)
        _, linears = linears_of(
            model,
            shape,
            layer,
            seq,
            micro_batch=micro_batch,
            tp=tp,
            sequence_parallel=sequence_parallel,
            dtype=dtype_of(dtype or DEVICES[place].dtype),
            device=place,
        )
        refuse_unread(ctx, "--shape" if shape else "--model")
        settings = current_settings()
        found = [passed for linear in linears for passed in _passes(linear, chip, settings)]
        state = None if prefix is None else _state(str(framework).lower(), prefix)
    if as_json:
        passes = [_plain(linear, direction, reasons) for linear, direction, reasons in found]
        typer.echo(json.dumps({"settings": settings.as_dict(), "framework": state, "passes": passes}, indent=2))
        return
    _show(state, found)


def _explain_attention(text: str, dtype: str, ranks: int, device: str, chip: str, as_json: bool) -> None:
    """Explain the exchange around attention, and the two matmuls that a fused operator may run with it."""
    from ascend_parallel.overlap.choices import explain as explain_call
    from ascend_parallel.settings import current_settings
    from ascend_parallel.tuning.bench.attention import AttentionCase

    dtype_of(dtype)
    case, settings = AttentionCase.parse(text, dtype, ranks), current_settings()
    reasons = explain_call(case.exchange(ranks, device, chip), settings)
    if as_json:
        passes = [_of_call("attention", case.chosen_exchange(ranks), "forward and backward", reasons)]
        typer.echo(json.dumps({"settings": settings.as_dict(), "framework": None, "passes": passes}, indent=2))
        return
    console(highlight=False).print(f"attention, forward and backward: {reasons}", markup=False, soft_wrap=True)


def _show(state: dict[str, Any] | None, found: list[tuple[ModelLinear, str, Explanation]]) -> None:
    out = console(highlight=False)
    if state is not None:
        out.print(f"{state['name']}: {state['state']}", markup=False, soft_wrap=True)
        for patch in state["patches"]:
            done = "replaced" if patch["replaced"] else "untouched"
            out.print(f"  {done}  {patch['target']}: {patch['reason']}", markup=False, soft_wrap=True)
    for linear, direction, reasons in found:
        out.print(f"{linear.name} ({linear.shape.kind}), {direction}: {reasons}", markup=False, soft_wrap=True)


def _passes(linear: ModelLinear, chip: str, settings: Settings) -> list[tuple[ModelLinear, str, Explanation]]:
    """Return the explanation of each direction of a layer that has a collective."""
    from ascend_parallel.overlap.choices import explain as explain_call
    from ascend_parallel.overlap.known import known_in_call, known_of

    found = []
    for direction in DIRECTIONS:
        matmul = linear.matmul(direction)
        if matmul is not None:
            asked = replace(
                matmul,
                soc=chip,
                shm=_shared_memory(),
                deterministic=settings.deterministic,
                comm_mode=settings.comm_mode,
                fused_ranks=settings.fused_ranks,
            )
            known = known_in_call(settings, known_of(settings), linear.shape, direction)
            found.append((linear, direction, explain_call(asked, settings, known)))
    return found


def _shared_memory() -> str | None:
    """Return why ranks of this machine cannot share memory, or None."""
    from ascend_parallel.patch_control import CONTROL

    state = CONTROL.status().kernels["shm"]
    return None if state == "available" else state


def _state(name: str, prefix: str) -> dict[str, Any]:
    """Tell whether a framework's layers are replaced on this machine, with the methods and their reasons."""
    from ascend_parallel.patch_control import CONTROL

    misfits = CONTROL.try_apply() if CONTROL.status().settings.enabled else {}
    status = CONTROL.status()
    patches = [
        {"target": patch.target, "replaced": patch.applied, "reason": patch.reason}
        for patch in status.patches
        if patch.target.startswith(prefix)
    ]
    state = status.frameworks.get(name, "") or "its layers are untouched: overlap is off"
    return {"name": name, "state": "; ".join([state, *misfits.values()]) if not patches else state, "patches": patches}


def _plain(linear: ModelLinear, direction: str, reasons: Explanation) -> dict[str, Any]:
    return _of_call(linear.name, linear.shape.kind, direction, reasons)


def _of_call(layer: str, kind: str, direction: str, reasons: Explanation) -> dict[str, Any]:
    """Return what explains a pass, in plain values."""
    decision = reasons.decision
    return {
        "layer": layer,
        "kind": kind,
        "direction": direction,
        "problem": decision.call.in_words,
        "operator": decision.call.operator,
        "kernel": decision.kernel,
        "chunks": len(decision.sizes),
        "sizes": list(decision.sizes),
        "reason": decision.reason,
        "codes": list(decision.codes),
        "unmet": decision.unmet,
        "kernels": reasons.kernels,
        "beside": [
            {
                "operator": choice.matmul.operator,
                "shape": list(choice.matmul.shape),
                "kernel": choice.kernel,
                "code": choice.code,
                "fused": choice.fused,
                "why": choice.why,
            }
            for choice in reasons.beside
        ],
    }
