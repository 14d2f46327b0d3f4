"""The table of what works row by row, for all frameworks: each row of the results depends on that of the inputs alone.

Where rows are still on their way (ops/unfinished.py), these run on the rows that have arrived; all else waits for all
rows. A line names

`OPERATORS`  an operator of torch's dispatcher, of torch or of a vendor, besides elementwise operators of torch;
`FUNCTIONS`  a `torch.autograd.Function`, whatever kernel it calls: the fused norms and activations of training;
`MODULES`    a module's forward without gradients, and `MATMULS` of its linear layers: those of vLLM.

A new one is a line here. Every line vouches that a call with some rows gives the results of these rows, bit for bit;
`tests/ops/test_row_wise.py` and `tests/vllm/test_row_wise.py` prove it for those that run on a CPU, and docs/regions.md
says which do not. Not here: what draws random numbers, what has a scale over all rows, and what changes its inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowWiseOperator:
    """An operator of the dispatcher, whose first argument has rows.

    name
        ``namespace::name``; all overloads but those that write to an argument.
    shape
        The place of the argument that has the shape of a row, as a shape or as a tensor, such as a norm's weight.
    dim
        The place of the argument that names the last dimension, or dimensions, of a row; -1 where it is left out.
        None for `shape` and `dim`: the operator is elementwise.
    summed
        The last results, where they are sums over all rows, such as the gradient of a norm's weight. They are computed
        once all rows are there, by the whole operator, so that their bits stay.
    masked
        Whether its last argument says which results are wanted.
    """

    name: str
    shape: int | None = None
    dim: int | None = None
    summed: tuple[int, ...] = ()
    masked: bool = False

    def trailing(self, args: Sequence[Any]) -> int | None:
        """Return the number of dimensions that a row has by `shape`; None: it is elementwise."""
        if self.shape is None:
            return None
        row = args[self.shape]
        return row.dim() if isinstance(row, torch.Tensor) else len(row)


@dataclass(frozen=True)
class RowWiseFunction:
    """A subclass of `torch.autograd.Function`, whose forward and backward work row by row.

    module, owner
        The class.
    rows
        The places of the arguments with rows, behind `ctx`; one that is None is left out.
    writes
        Whether its kernels may write to gradients or to what was saved, as kernels in place do.
    """

    module: str
    owner: str
    rows: tuple[int, ...] = (0,)
    writes: bool = False

    def kind(self) -> type | None:
        """Return the class; None: this version has none, or no such module."""
        return _class_of(self.module, self.owner)


@dataclass(frozen=True)
class RowWise:
    """A method of a module that works row by row, called without gradients.

    module, owner, method
        The class and its method.
    rows
        The places of the arguments with rows, behind `self`; one that is None is left out.
    writes
        Whether its kernels may write to these arguments.
    derived
        The full names of subclasses that work row by row too; other subclasses wait.
    schemes
        Of a linear method that leaves its arithmetic to a layer's scheme: the classes that work row by row.
    """

    module: str
    owner: str
    method: str = "forward"
    rows: tuple[int, ...] = (0,)
    writes: bool = False
    derived: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()

    def names(self, kind: type, scheme: type) -> bool:
        """Tell whether a class is this one or of `derived`, and its layer's scheme of `schemes`, if it has any."""
        named = f"{kind.__module__}.{kind.__qualname__}" in (f"{self.module}.{self.owner}", *self.derived)
        return named and (not self.schemes or scheme.__name__ in self.schemes)

    def kind(self) -> type | None:
        """Return the class; None: this version has none, or no such module."""
        return _class_of(self.module, self.owner)

    def exists(self) -> bool:
        """Tell whether this version has the class."""
        return self.kind() is not None

    def inherited(self) -> bool:
        """Tell whether the class inherits the method."""
        kind = self.kind()
        return kind is not None and self.method not in vars(kind)


def _class_of(module: str, owner: str) -> type | None:
    """Return a class of a module, which is imported; None: it cannot be found."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or the module was made by hand
        return None
    kind = getattr(importlib.import_module(module), owner, None)
    return kind if isinstance(kind, type) else None


# --- Operators of the dispatcher. Arguments of torch_npu's are those of the schemas of the torch_npu 2.13.0 wheel.
OPERATORS = (
    RowWiseOperator("aten::native_layer_norm", shape=1),
    RowWiseOperator("aten::_fused_rms_norm", shape=1),
    RowWiseOperator("aten::native_layer_norm_backward", shape=2, summed=(1, 2), masked=True),
    RowWiseOperator("aten::_fused_rms_norm_backward", shape=2, summed=(1,), masked=True),
    RowWiseOperator("aten::mean", dim=1),
    RowWiseOperator("aten::sum", dim=1),
    RowWiseOperator("npu::npu_rms_norm", shape=1),
    RowWiseOperator("npu::npu_rms_norm_backward", shape=2, summed=(1,)),
    RowWiseOperator("npu::npu_add_rms_norm", shape=2),
    RowWiseOperator("npu::npu_swiglu", dim=1),
    RowWiseOperator("npu::npu_swiglu_backward", dim=2),
    RowWiseOperator("npu::npu_gelu"),
    RowWiseOperator("npu::npu_gelu_backward"),
    RowWiseOperator("npu::npu_fast_gelu"),
    RowWiseOperator("npu::npu_fast_gelu_backward"),
    RowWiseOperator("npu::npu_silu"),
    RowWiseOperator("npu::npu_silu_backward"),
)

# --- Autograd functions.
_APEX = "apex.normalization.fused_layer_norm"
_FUSIONS = "megatron.core.fusions"
_LIGER = "liger_kernel.ops"
FUNCTIONS = (
    RowWiseFunction(f"{_FUSIONS}.fused_bias_swiglu", "SwiGLUFunction"),
    RowWiseFunction(f"{_FUSIONS}.fused_bias_swiglu", "BiasSwiGLUFunction"),
    RowWiseFunction(f"{_FUSIONS}.fused_bias_geglu", "BiasGeGLUFunction"),
    RowWiseFunction(f"{_FUSIONS}.fused_bias_gelu", "GeLUFunction"),
    RowWiseFunction(_APEX, "FusedLayerNormFunction"),
    RowWiseFunction(_APEX, "FusedLayerNormAffineFunction"),
    RowWiseFunction(_APEX, "FusedLayerNormAffineMixedDtypesFunction"),
    RowWiseFunction(_APEX, "FusedRMSNormFunction"),
    RowWiseFunction(_APEX, "FusedRMSNormAffineFunction"),
    RowWiseFunction(_APEX, "FusedRMSNormAffineMixedDtypesFunction"),
    RowWiseFunction("apex.contrib.layer_norm.layer_norm", "FastLayerNormFN"),
    RowWiseFunction(f"{_LIGER}.rms_norm", "LigerRMSNormFunction", writes=True),
    RowWiseFunction(f"{_LIGER}.layer_norm", "LigerLayerNormFunction"),
    RowWiseFunction(f"{_LIGER}.fused_add_rms_norm", "LigerFusedAddRMSNormFunction", rows=(0, 1), writes=True),
    RowWiseFunction(f"{_LIGER}.swiglu", "LigerSiLUMulFunction", rows=(0, 1), writes=True),
    RowWiseFunction(f"{_LIGER}.swiglu", "LigerFusedGateUpSiLUMulFunction", writes=True),
    RowWiseFunction(f"{_LIGER}.geglu", "LigerGELUMulFunction", rows=(0, 1), writes=True),
)

# --- Modules of vLLM. The subclasses of vllm-ascend are named for what their operators are documented to compute; none
# was run (docs/vllm.md).
_LAYERS = "vllm.model_executor.layers"
_ASCEND = "vllm_ascend.ops"
NORMS = (
    *(
        RowWise(
            f"{_LAYERS}.layernorm", owner, rows=(0, 1), writes=True, derived=(f"{_ASCEND}.layernorm.Ascend{owner}",)
        )
        for owner in ("RMSNorm", "GemmaRMSNorm")
    ),
    RowWise(f"{_LAYERS}.layernorm", "LayerNorm"),
)
ACTIVATIONS = tuple(
    RowWise(f"{_LAYERS}.activation", owner, derived=(f"{_ASCEND}.activation.Ascend{owner}",))
    for owner in (
        "SiluAndMul",
        "MulAndSilu",
        "GeluAndMul",
        "NewGELU",
        "FastGELU",
        "QuickGELU",
        "ReLUSquaredActivation",
    )
)
# The matmuls of column layers, of replicated ones, and of those with adapters. ``apply(layer, x, bias)``
MATMULS = (
    RowWise(
        f"{_LAYERS}.linear",
        "UnquantizedLinearMethod",
        "apply",
        rows=(1,),
        derived=(f"{_ASCEND}.linear.AscendUnquantizedLinearMethod",),
    ),
)
# From vllm-ascend 0.23 on the subclass has a method of its own.
ASCEND_MATMUL = RowWise(f"{_ASCEND}.linear", "AscendUnquantizedLinearMethod", "apply", rows=(1,))
# Matmuls of quantised layers: with weights alone of few bits, or with activations of a fixed scale or one per token.
# Not here: a scale over all rows; kernels that unpack the weight in each call (AWQ, the first GPTQ).
QUANTISED_MATMULS = (
    RowWise(
        f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors",
        "CompressedTensorsLinearMethod",
        "apply",
        rows=(1,),
        schemes=("CompressedTensorsW8A8Int8", "CompressedTensorsWNA16"),
    ),
    RowWise(f"{_LAYERS}.quantization.auto_gptq", "AutoGPTQLinearMethod", "apply", rows=(1,)),
    RowWise(f"{_LAYERS}.quantization.gptq_marlin", "GPTQMarlinLinearMethod", "apply", rows=(1,)),
)
MODULES = (*NORMS, *ACTIVATIONS, *MATMULS)
# In modules that are patched once the program has imported them.
LATER = (ASCEND_MATMUL, *QUANTISED_MATMULS)
