"""Overlapped replacements of the forwards of Megatron-core's parallel linear layers, experts and shared attention.

framework_patch  these and all other patches of Megatron-core, applied together
layers     the two replacements, and which calls they cover
uncovered  layers and calls that run the original
experts    the replacement of MoELayer.forward, whose all-to-alls run under groups of experts
context    core attentions whose ranks share a sequence
output_projection  the row layer behind a core attention, multiplied under its exchange
embedding  the sum over ranks behind VocabParallelEmbedding, whose rows come under the first layer in regions
check, original  checks inside a run, beside Megatron-core's own code
every_degree  how weights are packed, and other sums and masks, with COC_DETERMINISTIC=tp
wgrad      Megatron's weight gradient accumulation
conflicts  features that exclude overlap, and replaced functions of Megatron
built_classes  other classes that a program builds in place of Megatron's
"""

from __future__ import annotations

import importlib

from ascend_parallel.patches.base import Patch, PatchSet, RepeatedFunction, version_tuple
from ascend_parallel.patches.megatron.conflicts import FUNCTIONALS
from ascend_parallel.patches.megatron.layers import Megatron, make_column_forward, make_row_forward
from ascend_parallel.settings import Settings
from ascend_parallel_autoload.frameworks import MEGATRON

LAYERS = MEGATRON.module
VERSIONS = ">=0.10,<0.20"
NEWEST = "0.19.2"

# Parameters of the functions that compute a layer's matmul and collectives, of all supported versions.
FUNCTION_PARAMETERS = frozenset(
    (
        "input",
        "weight",
        "bias",
        "gradient_accumulation_fusion",
        "allreduce_dgrad",
        "sequence_parallel",
        "grad_output_buffer",
        "wgrad_deferral_limit",
        "async_grad_allreduce",
        "tp_group",
        "gtp_remat_size",
    )
)


def installed_version() -> str:
    """Return the version of the megatron-core that is imported."""
    # megatron.core.__version__ is not set yet while megatron.core is being imported.
    info = importlib.import_module("megatron.core.package_info")
    return str(info.__version__)


def installed(settings: Settings) -> Megatron:
    """Return the imported Megatron-core, whose layers are to run with `settings`."""
    return Megatron(importlib.import_module(LAYERS), version_tuple(installed_version()), settings)


def patch_set(megatron: Megatron) -> PatchSet:
    """Return the patches that overlap Megatron-core's layers."""
    return PatchSet(
        "megatron-core",
        VERSIONS,
        [
            Patch(
                target=f"{LAYERS}.ColumnParallelLinear.forward",
                replacement=lambda original: make_column_forward(original, megatron),
                parameters=("self", "input_", "weight", "runtime_gather_output"),
                reason="gathers under the matmul, reduces the input gradient under the backward's matmuls",
            ),
            Patch(
                target=f"{LAYERS}.RowParallelLinear.forward",
                replacement=lambda original: make_row_forward(original, megatron),
                parameters=("self", "input_"),
                reason="reduces or scatters under the matmul, gathers the gradient under the backward's matmul",
            ),
        ],
        newest=NEWEST,
        repeated=[RepeatedFunction(module=LAYERS, name=name, parameters=FUNCTION_PARAMETERS) for name in FUNCTIONALS],
    )
