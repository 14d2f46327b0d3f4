"""The C++ extension is loaded for the torch that it was compiled against, and for no other."""

import pytest
import torch

from ascend_parallel import ops
from ascend_parallel.ops import shm_extension


@pytest.mark.skipif(isinstance(shm_extension.extension(), str), reason="the C++ extension is not built")
def test_an_extension_of_another_torch_is_not_loaded_and_both_versions_are_said(monkeypatch):
    built = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    reason = shm_extension.extension()
    assert reason.startswith("the C++ extension was compiled against torch ")
    assert built in reason
    assert "and this is 2.99.1+cpu" in reason
    assert "--no-build-isolation" in reason


def test_an_extension_that_is_missing_or_broken_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    monkeypatch.setattr(shm_extension, "__file__", str(tmp_path / "shm_extension.py"))
    monkeypatch.setattr(ops, "__path__", [str(tmp_path)])
    assert shm_extension.extension().startswith("the C++ extension is not built: ")
    (tmp_path / "_shm_torch_2_99.so").write_text("no library")
    reason = shm_extension.extension()
    assert reason.startswith("the C++ extension cannot be loaded: ")
    assert "_shm_torch_2_99.so" in reason
