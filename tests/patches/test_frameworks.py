"""COC_FRAMEWORKS: which frameworks are patched, and which are left as they are."""

import json
import os
import re
import subprocess
import sys

import pytest
from launch import forked_python, launch

from ascend_parallel import SettingsError, patch_control
from ascend_parallel.environment import read_settings
from ascend_parallel.patch_control import PatchControl
from ascend_parallel.patches.base import PatchSet
from ascend_parallel.patches.framework_patch import AppliedPatches, FrameworkPatch

INFO = "'megatron.core.package_info'"
OTHER_VERSION = (
    f"import wrapt; wrapt.register_post_import_hook(lambda info: setattr(info, '__version__', '0.20.0'), {INFO})\n"
)
IMPORT = "from megatron.core.tensor_parallel.layers import RowParallelLinear as R\n"
SHOW = "import ascend_parallel as ap; print(hasattr(R.forward, '__wrapped__'), ap.status().frameworks)"


def python(code, program=sys.executable, **environ):
    """Run code in a fresh interpreter; of this package's variables only `environ` are set."""
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    words = [program, "-c", code]
    return subprocess.run(words, env={**kept, **environ}, capture_output=True, text=True, timeout=120)


def with_torch(code, **environ):
    """Run code where torch is imported already, and no framework."""
    return python(code, forked_python(), **environ)


def forked(code, **environ):
    """Run code where torch and megatron-core are imported already."""
    (done,) = launch(code, [environ])
    return done


@pytest.mark.slow
def test_a_framework_of_another_version_is_left_as_it_is_and_said_once():
    done = with_torch(OTHER_VERSION + IMPORT + SHOW + "; ap.configure(num_chunks=8)", COC_PARALLEL_NUM="4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False {'megatron': \"left as it is: megatron-core: expected a version")
    assert done.stderr.count("left as it is: megatron-core: expected a version") == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("asked", [{"COC_STRICT": "1"}, {"COC_FRAMEWORKS": "megatron"}])
def test_it_is_an_error_if_asked_for_at_every_import(asked):
    again = OTHER_VERSION + "try:\n    " + IMPORT + "except RuntimeError as error:\n    print(error)\n" + IMPORT
    done = with_torch(again, COC_PARALLEL_NUM="4", **asked)
    assert "found 0.20.0" in done.stdout
    assert "PatchError: megatron-core: expected a version" in done.stderr


@pytest.mark.slow
def test_only_named_frameworks_are_patched():
    done = forked(IMPORT + SHOW, COC_PARALLEL_NUM="4", COC_FRAMEWORKS="transformers")
    assert done.stdout.startswith("False {'transformers': "), done.stderr


def test_names_are_read_from_the_variable_the_file_and_configure(tmp_path):
    assert read_settings({"COC_FRAMEWORKS": " Torch,megatron, torch"}).frameworks == ("torch", "megatron")
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"frameworks": ["deepspeed"]}))
    settings = read_settings({"COC_CONFIG": str(file)})
    assert settings.frameworks == ("deepspeed",)
    assert settings.as_dict()["frameworks"] == ["deepspeed"]
    assert read_settings({}, frameworks=["megatron"]).frameworks == ("megatron",)


@pytest.mark.parametrize("value", ["", "sglang", "megatron,", "megatron torch"])
def test_unknown_names_are_refused(value):
    with pytest.raises(
        SettingsError, match=r"frameworks=.* is not allowed: give one or more of megatron, transformers"
    ):
        read_settings({"COC_FRAMEWORKS": value})


@pytest.mark.slow
def test_symm_mem_is_registered_only_if_it_is_named():
    show = "import torch.distributed.tensor.parallel, ascend_parallel as ap; print(ap.status().frameworks)"
    named = forked(show, COC_PARALLEL_NUM="4", COC_FRAMEWORKS="symm_mem")
    assert "4 kernels of torch's symm_mem registered" in named.stdout, named.stderr
    assert "symm_mem" not in forked(show, COC_PARALLEL_NUM="4").stdout


@pytest.mark.slow
def test_what_is_not_installed_is_an_error_only_if_it_is_named():
    hidden = "import sys; sys.modules['deepspeed'] = None\nimport ascend_parallel as ap; ap.configure(); ap.apply()"
    named = forked(hidden, COC_PARALLEL_NUM="4", COC_FRAMEWORKS="deepspeed")
    assert "PatchError: deepspeed: found none installed" in named.stderr
    assert forked(hidden, COC_PARALLEL_NUM="4").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "from torch.distributed.fsdp import fully_shard",
        pytest.param("from torch.distributed.pipelining import pipeline", marks=pytest.mark.slow),
        pytest.param("import torch.distributed.checkpoint", marks=pytest.mark.slow),
        pytest.param("import megatron.core, torch.distributed.fsdp", marks=pytest.mark.slow),
        pytest.param("import transformers.modeling_utils", marks=pytest.mark.slow),
    ],
)
def test_programs_that_import_torchs_styles_on_the_way(imports):
    """The package is imported in the middle of torch's own imports."""
    if "transformers" in imports:
        pytest.importorskip("transformers", reason="transformers is not installed")
    show = "import sys; print(sys.modules['ascend_parallel'].status().state)"
    done = python(f"import torch; {imports}; {show}", COC_PARALLEL_NUM="4")
    assert re.search(r"(\d+) of \1 methods of torch", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("failing", "raise RuntimeError('no kernel')", "which cannot be imported and patched: RuntimeError: no kernel"),
        (
            "lacking",
            "import not_there",
            "which cannot be imported and patched: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("older", None, "which has no {}"),
    ],
)
def test_a_command_tells_why_a_framework_cannot_be_imported(name, code, why, tmp_path, monkeypatch):
    """As vLLM beside a torchvision of another torch, or without one of its own requirements."""
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").touch()
    if code is not None:
        (package / "layers.py").write_text(code)
    (tmp_path / f"{name}-1.5.dist-info").mkdir()
    (tmp_path / f"{name}-1.5.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    framework = FrameworkPatch(name=name, title=name, module=f"{name}.layers", make=lambda settings: None)
    monkeypatch.setattr(patch_control, "wanted", lambda settings: [framework])
    assert PatchControl().try_apply() == {name: f"{name}: found version 1.5, {why.format(f'{name}.layers')}"}


def test_what_a_framework_prints_as_it_is_imported_is_not_in_the_output_of_a_command(tmp_path, monkeypatch, capsys):
    """As vLLM's log, which it writes to standard output."""
    (tmp_path / "talking.py").write_text("print('Automatically detected platform')")
    monkeypatch.syspath_prepend(tmp_path)
    made = AppliedPatches("talking", "1.5", PatchSet("talking", None, []))
    framework = FrameworkPatch(name="talking", title="talking", module="talking", make=lambda settings: made)
    monkeypatch.setattr(patch_control, "wanted", lambda settings: [framework])
    assert PatchControl().try_apply() == {}
    assert capsys.readouterr() == ("", "Automatically detected platform\n")
