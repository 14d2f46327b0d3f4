"""vLLM's prefill: row layers overlapped, and rows that stay unfinished up to the next attention.

layers     the replacements of the row layer's forward and of the all-reduce of a tensor-parallel group
row_wise   the modules of ops/row_wise.py, which run on the rows that have arrived
chunks     the chunks of a number of tokens
bits       from how many rows on the model's matmuls give a row the same bits
auto       how many chunks, from dummy steps that are timed
fused      a row layer as one operator of torch_npu, with USE_COC_FUSED_KERNEL=1
invariant  COC_DETERMINISTIC=invariant: products, norms, attention and log-softmax of a trainer
operators  a row layer as one operator of compiled graphs; steps that leave these
start      what is said, and probed, once a worker has loaded its model; vLLM's caches of compiled graphs
bench      what the ranks of `ascend-parallel bench --framework vllm` time: a row layer alone
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from ascend_parallel.diagnostics.installed import installed_build
from ascend_parallel.ops.row_wise import LATER, MODULES, RowWise
from ascend_parallel.patches.base import Patch, PatchError, PatchSet
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch, OnTop
from ascend_parallel.patches.vllm import invariant, start
from ascend_parallel.patches.vllm.layers import Vllm, all_reduce, make_row_forward
from ascend_parallel.patches.vllm.operators import LINEAR, PARALLEL_STATE
from ascend_parallel.patches.vllm.row_wise import row_wise_call
from ascend_parallel.settings import Settings
from ascend_parallel_autoload import frameworks

VERSIONS = ">=0.11,<0.34"
NEWEST = "0.32.0"
NAME = "ascend_parallel"


def patches(settings: Settings) -> AppliedPatches:
    """Return the patches of the installed vLLM; raises `PatchError` if VLLM_PLUGINS does not name this package."""
    refuse_unless_allowed(os.environ.get("VLLM_PLUGINS"))
    version, build = str(importlib.import_module("vllm").__version__), installed_build("vllm")
    package = "" if build is None else build[0]
    if settings.arithmetic.fixed_tiles:
        invariant.refuse_other_versions(version, package or "vllm")
        same = invariant.InvariantVllm(settings, version)
        of_layers = invariant.patches(same, worker())
        patch_set = PatchSet("vllm", invariant.VERSIONS, of_layers, newest=NEWEST, package=package)
        return Applied("vllm", version, patch_set, same, on_top=invariant.LATER)
    framework = Vllm(settings, version)
    found = [
        Patch(
            target=f"{LINEAR}.RowParallelLinear.forward",
            replacement=lambda original: make_row_forward(original, framework),
            parameters=("self", "input_"),
            reason="reduces under the matmul, and leaves its rows unfinished",
        ),
        Patch(
            target=f"{PARALLEL_STATE}.GroupCoordinator.all_reduce",
            replacement=lambda original: all_reduce(original, framework),
            parameters=("self", "input_"),
            reason="reduces in chunks of tokens, and leaves them unfinished: embedding, experts, adapters",
        ),
        Patch(
            target=f"{worker()}.load_model",
            replacement=lambda original: start.load_model(original, framework),
            parameters=None,
            reason="names the row layers that compiled graphs run as operators",
            inherited=True,
        ),
        Patch(
            target=f"{worker()}.initialize_from_config",
            replacement=lambda original: start.initialize_from_config(original, framework),
            parameters=("self", "kv_cache_configs"),
            reason="asks which chunks keep the bits, and says what is covered",
        ),
    ]
    modules = [_patch_of(each) for each in MODULES if each.exists()]
    patch_set = PatchSet("vllm", VERSIONS, [*found, *modules], newest=NEWEST, package=package)
    return Applied("vllm", version, patch_set, framework, on_top=ON_TOP)


def worker() -> str:
    """Return the class that wraps a worker: 0.11 still has it beside the workers of its first engine."""
    first = "vllm.worker.worker_base"
    known = importlib.util.find_spec(first.rpartition(".")[0]) is not None
    return f"{first if known else 'vllm.v1.worker.worker_base'}.WorkerWrapperBase"


def refuse_unless_allowed(plugins: str | None) -> None:
    """Raise `PatchError` if the value of VLLM_PLUGINS leaves this package out, as vLLM does with its own plugins."""
    if plugins is not None and NAME not in plugins.split(","):
        raise PatchError(f"vllm: VLLM_PLUGINS={plugins} does not name {NAME}: add it, or unset VLLM_PLUGINS")


def _patch_of(each: RowWise) -> Patch:
    return Patch(
        target=f"{each.module}.{each.owner}.{each.method}",
        replacement=lambda original: row_wise_call(original, each),
        parameters=None,
        reason="runs on the rows that have arrived",
        inherited=each.inherited(),
    )


def _on_top(each: RowWise) -> OnTop:
    """Return the patch of a class whose module has been imported, if it has a method of its own."""

    def patch_set(_: Vllm) -> PatchSet:
        own = each.exists() and not each.inherited()
        return PatchSet(each.module.partition(".")[0].replace("_", "-"), None, [_patch_of(each)] if own else [])

    return OnTop(each.module, patch_set)


ON_TOP = [_on_top(each) for each in LATER]


class Applied(AppliedPatches):
    """The patches, and an entry among vLLM's variables, which its caches of compiled graphs know."""

    def apply(self) -> None:
        """Apply the patches."""
        super().apply()
        assert isinstance(self._runs, Vllm)
        start.mark_caches(self._runs)

    def revert(self) -> None:
        """Restore the original methods."""
        super().revert()
        start.unmark_caches()


VLLM = FrameworkPatch.of(frameworks.VLLM, patches, on_top=[each.module for each in (*ON_TOP, *invariant.LATER)])
