"""What later versions of Megatron-core added: refused, left to the original, or computed alike."""

import contextlib
import re
import types
from pathlib import Path

import pytest
import torch
from layers import Layers
from pool import on_ranks

import ascend_parallel
from ascend_parallel.patches.base import PatchError, in_range, version_tuple
from ascend_parallel.patches.megatron import LAYERS, NEWEST, VERSIONS, installed_version, patch_set
from ascend_parallel.patches.megatron.uncovered import TE_EXTENSION, uncovered_column, uncovered_layer
from ascend_parallel.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_versions_of_make_compat_and_of_the_package_are_those_of_the_patches():
    tried = re.search(r"^MEGATRON_VERSIONS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert all(in_range(version, VERSIONS) for version in tried)
    assert tried[-1] == NEWEST
    minors = {version_tuple(version)[:2] for version in tried}
    assert minors == {(0, minor) for minor in range(10, version_tuple(NEWEST)[1] + 1)}
    assert f'"megatron-core{VERSIONS}"' in (ROOT / "pyproject.toml").read_text()
    assert not in_range(f"0.{version_tuple(NEWEST)[1] + 1}", VERSIONS)


@pytest.mark.parametrize("name", ["linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"])
def test_an_unknown_parameter_below_forward_is_refused(monkeypatch, name):
    """A version that passes something new to its own function must not be trained without it."""
    from megatron.core.tensor_parallel import layers

    patches = patch_set(Settings(num_chunks=4))
    patches.check(installed_version())
    exec(f"def {name}(input, weight, bias, bias_scale=1.0): pass", vars(layers), made := {})
    monkeypatch.setattr(layers, name, made[name])
    with pytest.raises(PatchError, match=rf"{LAYERS}\.{name}: unknown parameters bias_scale.*known: .*gtp_remat_size"):
        patches.check(installed_version())


def later_features(group):
    """Call layers that have an attribute of a later Megatron-core; return the reasons and what ran overlapped."""
    found = {}
    with Layers(group.size()) as layers:
        ascend_parallel.configure(num_chunks=4)
        for name, value, kind, training in (
            ("gtp_remat_size", 2, "ColumnParallelLinear", True),
            ("gtp_remat_size", 2, "RowParallelLinear", True),
            ("gtp_remat_size", 1, "RowParallelLinear", True),
            ("output_dtype", torch.float64, "ColumnParallelLinear", True),
            ("use_inference_optimized_all_gather", True, "ColumnParallelLinear", False),
            ("use_inference_optimized_all_gather", True, "ColumnParallelLinear", True),
        ):
            ascend_parallel.ops.COUNTS.clear()
            gathers = {"gather_output": True} if kind == "ColumnParallelLinear" else {}
            layer = layers.make(kind, (64, 96), **gathers).train(training)
            setattr(layer, name, value)
            columns = 64 if kind == "ColumnParallelLinear" else 64 // group.size()
            # The original of a version that knows the feature may need what this test does not set up.
            with contextlib.suppress(AttributeError, ImportError, TypeError, AssertionError):
                layer(torch.randn(64, 2, columns, requires_grad=True))[0].sum().backward()
            found[name, value, kind, training] = bool(ascend_parallel.ops.COUNTS.as_dict())
            if name == "gtp_remat_size":
                found[name, value, kind] = str(ascend_parallel.coverage(layer))
    return found


def test_features_of_later_versions_go_to_the_original(ranks):
    column, row = "ColumnParallelLinear", "RowParallelLinear"
    sharded = "its weight is sharded again by weight rematerialisation (gtp_remat_size 2)"
    for found in ranks(2).run(later_features):
        assert found == {
            ("gtp_remat_size", 2, column, True): False,
            ("gtp_remat_size", 2, column): f"0 of 1 linear layers covered (1 {column}: {sharded})",
            ("gtp_remat_size", 2, row, True): False,
            ("gtp_remat_size", 2, row): f"0 of 1 linear layers covered (1 {row}: {sharded})",
            ("gtp_remat_size", 1, row, True): True,
            ("gtp_remat_size", 1, row): "1 of 1 linear layers covered",
            ("output_dtype", torch.float64, column, True): False,
            ("use_inference_optimized_all_gather", True, column, False): False,
            ("use_inference_optimized_all_gather", True, column, True): True,
        }


class FsdpParameter(torch.nn.Parameter):
    """A weight whose gradient Megatron-FSDP asks for in a buffer that it allocates in backward."""

    __fsdp_param__ = True

    def get_main_grad(self):
        self.buffers = [*getattr(self, "buffers", ()), torch.full_like(self, 7.0)]  # the gradient replaces it
        return self.buffers[-1]


@pytest.mark.skipif(
    not in_range(installed_version(), ">=0.14,<1"), reason="Megatron-FSDP is known to layers since 0.14"
)
@on_ranks(2)
def test_gradients_of_megatron_fsdp(group):
    runs, counts = [], {}
    with Layers(group.size()) as layers:
        for chunks in (1, 4):
            ascend_parallel.configure(num_chunks=chunks)
            ascend_parallel.ops.COUNTS.clear()
            buffers = []
            for kind, columns in (("ColumnParallelLinear", 64), ("RowParallelLinear", 64 // group.size())):
                layer = layers.make(kind, (64, 96))
                layer.weight = FsdpParameter(layer.weight.data)
                layer.weight.grad_added_to_main_grad = False
                layer.gradient_accumulation_fusion = True
                torch.manual_seed(5)
                layer(torch.randn(128, 2, columns, requires_grad=True))[0].square().sum().backward()
                buffers += layer.weight.buffers
            runs.append(buffers)
            counts = ascend_parallel.ops.COUNTS.as_dict()
    same, overlapped = [torch.equal(a, b) for a, b in zip(*runs, strict=True)], bool(counts)
    assert same == [True, True]
    assert overlapped


def test_fsdp_gradients_that_transformer_engine_computes_are_left_to_it(monkeypatch):
    weight = FsdpParameter(torch.zeros(4, 4))
    config = types.SimpleNamespace(_cpu_offloading_context=None)
    layer = types.SimpleNamespace(
        _parameters={"weight": weight},
        weight=None,
        output_size_per_partition=4,
        input_size=4,
        gradient_accumulation_fusion=True,
        config=config,
    )
    extension = pytest.importorskip(TE_EXTENSION)
    for gemm, version, reason in (
        (None, (0, 18, 2), None),
        (print, (0, 17, 1), None),
        (print, (0, 18, 2), "TransformerEngine writes its weight gradient into Megatron-FSDP's buffer"),
    ):
        monkeypatch.setattr(extension, "te_general_gemm", gemm, raising=False)
        assert uncovered_layer(layer, version) == reason
        assert uncovered_column(layer, weight, given=True, gathers_output=False, version=version) == reason
    layer.gradient_accumulation_fusion = False
    assert uncovered_layer(layer, (0, 18, 2)) is None
