"""The mechanics of patches, on a test class and on the real Megatron-core."""

import ast
import functools
import importlib
import json
import os
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launch import forked_python
from marks import promise

import ascend_parallel
from ascend_parallel import SettingsError
from ascend_parallel.patches.base import Patch, PatchError, PatchSet, in_range


@pytest.fixture
def module():
    """A framework with one class, importable during a test."""
    framework = types.ModuleType("framework_of_this_test")
    exec("class Layer:\n    def forward(self, x):\n        return x\n    value = 3", framework.__dict__)
    sys.modules[framework.__name__] = framework
    yield framework
    del sys.modules[framework.__name__]


def patch(**changes):
    values = {
        "target": "framework_of_this_test.Layer.forward",
        "replacement": lambda original: lambda self, x: original(self, x) + 1,
        "parameters": ("self", "x"),
        "reason": "adds one",
    }
    return Patch(**{**values, **changes})


def patch_set(*patches):
    return PatchSet("framework", ">=0.10,<0.17", patches or (patch(),), newest="0.16.1")


def test_a_patch_gives_way_to_the_package_that_it_names_and_to_no_other(module):
    exec("class Other:\n    def run(self, x):\n        return x", module.__dict__)
    patches = patch_set(patch(gives_way_to="mindspeed"), patch(target="framework_of_this_test.Other.run"))
    patches.apply("0.16.1")
    mine = module.Layer.forward
    for written in ("monitor", "mindspeed.core.adaptor"):
        around = types.FunctionType((lambda self, x: x).__code__, {"__name__": written})
        module.Layer.forward = theirs = functools.wraps(mine)(around)  # copies the name of the wrapped one's module
        assert patches.status()[0].reason == f"replaced in turn by {written}"
        if written == "monitor":
            with pytest.raises(PatchError, match="of monitor was put on top"):
                patches.revert()
    for _ in range(2):
        patches.revert()
        assert (module.Layer.forward, module.Other().run(1)) == (theirs, 1)
        patches.apply("0.16.1")
        patches.apply("0.16.1")
        assert (module.Layer.forward, module.Other().run(1)) == (theirs, 2)
        assert [each.reason for each in patches.status()] == ["left to mindspeed.core.adaptor", "adds one"]


def test_apply_is_idempotent_and_revert_restores_the_very_object(module):
    original = module.Layer.__dict__["forward"]
    alias = module.Layer
    patches = patch_set()
    assert patches.status()[0].reason == "not applied"
    for _ in range(2):
        patches.apply("0.16.1")
        assert alias().forward(1) == 2
    assert patches.status()[0].applied
    patches.revert()
    patches.revert()
    assert module.Layer.__dict__["forward"] is original
    patches.apply("0.16.1")
    assert alias().forward(1) == 2


def test_a_patch_in_front_of_an_inherited_method_is_added_and_removed(module):
    exec("class Base:\n    def run(self, x):\n        return x", module.__dict__)
    exec("class Other(Base):\n    pass\nclass Derived(Other):\n    pass", module.__dict__)
    module.Base.make = classmethod(lambda cls, x: (cls, x))
    make = patch(
        target="framework_of_this_test.Other.make",
        inherited=True,
        replacement=lambda original: lambda cls, x: (*original(cls, x), "ours"),
    )
    patches = patch_set(patch(target="framework_of_this_test.Other.run", inherited=True), make)
    patches.apply("0.16.1")
    assert module.Base().run(1) == 1
    assert module.Derived().run(1) == 2
    assert module.Derived.make(1) == (module.Derived, 1, "ours")
    module.Base.run = lambda self, x: 10 * x  # the inherited method is looked up at every call
    assert module.Other().run(1) == 11
    assert all(status.applied for status in patches.status())
    patches.revert()
    assert "run" not in vars(module.Other)
    assert module.Other.make(1) == (module.Other, 1)
    module.Other.run = lambda self, x: x
    with pytest.raises(PatchError, match="expected that the class inherits the method"):
        patches.apply("0.16.1")


def test_a_patch_in_front_of_a_method_that_an_object_finds_elsewhere(module):
    exec("class Worker:\n    def load(self, x):\n        return 10 * x", module.__dict__)
    exec("class Wrapper:\n    def __getattr__(self, name):\n        return getattr(Worker(), name)", module.__dict__)
    patches = patch_set(patch(target="framework_of_this_test.Wrapper.load", inherited=True))
    patches.apply("0.16.1")
    assert module.Wrapper().load(1) == 11 and patches.status()[0].applied
    patches.revert()
    assert module.Wrapper().load(1) == 10 and "load" not in vars(module.Wrapper)
    with pytest.raises(PatchError, match=r"Worker.missing: expected that the class inherits the method, found none"):
        patch_set(patch(target="framework_of_this_test.Worker.missing", inherited=True)).apply("0.16.1")


def test_revert_refuses_when_somebody_patched_on_top(module):
    patches = patch_set()
    patches.apply("0.16.1")
    ours = module.Layer.forward
    module.Layer.forward = lambda self, x: ours(self, x) * 10
    with pytest.raises(PatchError, match=r"cannot be reverted.*put on top"):
        patches.revert()
    assert not patches.status()[0].applied
    assert "replaced in turn" in patches.status()[0].reason
    assert module.Layer().forward(1) == 20
    module.Layer.forward = ours
    patches.revert()


def test_all_targets_are_checked_before_the_first_is_touched(module):
    original = module.Layer.__dict__["forward"]
    with pytest.raises(PatchError, match="expected a method of this class, found 3"):
        patch_set(patch(), patch(target="framework_of_this_test.Layer.value")).apply("0.16.1")
    assert module.Layer.__dict__["forward"] is original


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": ("self", "x", "y")}, "expected the parameters self, x, y, found self, x"),
        ({"target": "framework_of_this_test.Missing.forward"}, "expected a class, found None"),
        ({"target": "framework_of_this_test.Layer.missing"}, "expected a method of this class, found None"),
        ({"target": "no_such_module.Layer.forward"}, "no_such_module cannot be imported"),
    ],
)
def test_what_does_not_fit_is_refused(module, changes, message):
    with pytest.raises(PatchError, match=message):
        patch_set(patch(**changes)).apply("0.16.1")


def test_somebody_elses_replacement_is_refused(module):
    def foreign(self, x):
        return x

    for replacement in (foreign, functools.wraps(module.Layer.forward)(foreign)):  # wraps copies the names
        module.Layer.forward = replacement
        with pytest.raises(
            PatchError, match=r"expected the original, found a replacement from .*test_patches.*MindSpeed"
        ):
            patch_set().apply("0.16.1")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.9.0", False), ("0.10.0", True), ("0.12.0rc1", True), ("0.16.1", True), ("0.17.0", False), ("1.0", False)],
)
def test_versions(module, version, fits):
    assert in_range(version, ">=0.10,<0.17") is fits
    if not fits:
        with pytest.raises(
            PatchError, match=f"framework: expected a version >=0.10,<0.17, found {version};"
        ) as refused:
            patch_set().apply(version)
        for advice in (
            f"framework: expected a version >=0.10,<0.17, found {version}; the newest tested version is 0.16.1",
            "pip install 'framework>=0.10,<0.17'",
            "unset COC_PARALLEL_NUM and USE_COC_FUSED_KERNEL",
            "report the version in an issue of ascend_parallel",
        ):
            assert advice in str(refused.value)


def python(code, program=sys.executable, **environ):
    """Run code in a fresh interpreter; of this package's variables only `environ` are set."""
    kept = {name: value for name, value in os.environ.items() if "COC" not in name}
    return subprocess.run([program, "-c", code], env={**kept, **environ}, capture_output=True, text=True, timeout=120)


def forked(code, **environ):
    """Run code where torch is imported, which has called the entry point."""
    return python(code, forked_python(), **environ)


def output(code, run=python, **environ):
    done = run(code, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def outputs(code, *environs):
    """Return the output of one fresh interpreter for each environment, all run at the same time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda environ: output(code, **environ), environs))


FORWARD = (
    "from megatron.core.tensor_parallel.layers import ColumnParallelLinear as C; print(C.forward.__code__.co_filename)"
)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["import ascend_parallel, megatron.core", "import megatron.core, ascend_parallel"])
def test_either_order_of_imports(order):
    patched = output(f"{order}; {FORWARD}", forked, COC_PARALLEL_NUM="4", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert patched.replace("\\", "/").endswith("patches/compiled.py")


@pytest.fixture(scope="module")
def plain():
    return output(FORWARD, forked)


@promise("off-untouched")
@pytest.mark.slow
@pytest.mark.parametrize("environ", [{}, {"COC_PARALLEL_NUM": "1", "USE_COC_FUSED_KERNEL": "0"}, {"COC_MODE": "0"}])
def test_off_means_untouched(plain, environ):
    assert plain.endswith("tensor_parallel/layers.py")
    assert output(f"import ascend_parallel; {FORWARD}", forked, **environ) == plain


# What a fresh interpreter has after each of three imports.
IMPORTS = f"""
import json, sys, torch
found = {{"torch": [name for name in sys.modules if name.split(".")[0] in ("ascend_parallel", "wrapt")]}}
import megatron.core
found["core"] = sorted(name for name in sys.modules if name.startswith("megatron"))
{FORWARD.replace("print(", "found['forward'] = (")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imports():
    """What is imported without a variable, and with one."""
    return [json.loads(text) for text in outputs(IMPORTS, {}, {"COC_PARALLEL_NUM": "4"})]


def test_exporting_the_variable_is_enough(imports):
    assert [found["forward"].endswith("patches/compiled.py") for found in imports] == [False, True]


@pytest.mark.slow
def test_another_variable_is_enough_too_but_not_if_torch_calls_no_entry_points():
    off = {"COC_PARALLEL_NUM": "4", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    files = outputs(FORWARD, {"USE_COC_FUSED_KERNEL": "1"}, off)
    assert [file.endswith("patches/compiled.py") for file in files] == [True, False]


@pytest.mark.slow
def test_an_import_reads_the_variables_at_once_unless_the_program_is_our_own_command(tmp_path):
    """The command reads them when it runs something; a program that only looks like the command is a program."""
    script = tmp_path / "train.py"
    script.write_text(
        "from ascend_parallel import *\n"
        "import ascend_parallel.settings, megatron.core.tensor_parallel.layers as layers\n"
        "print(ascend_parallel.settings.current_settings().num_chunks, status().settings.num_chunks,\n"
        "      layers.ColumnParallelLinear.forward.__code__.co_filename, column_linear.__name__)\n"
    )
    environ = {**os.environ, "COC_PARALLEL_NUM": "3", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    def run(*words):
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=120, check=True)

    program = run(forked_python(), str(script), "-m", "ascend_parallel").stdout
    assert program.startswith("3 3 ") and "patches/compiled.py column_linear" in program
    assert run(forked_python(), "-m", "ascend_parallel", "run", str(script)).stdout == program
    assert run(str(Path(sys.executable).with_name("ascend-parallel")), "run", str(script)).stdout == program


def test_the_public_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(ascend_parallel.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and "TYPE_CHECKING" in ast.unparse(node.test)
        and "not" not in ast.unparse(node.test)
    )
    seen = {(name.name, node.module) for node in block.body for name in node.names}
    for name, home in seen:
        found = importlib.import_module(home)
        assert getattr(ascend_parallel, name) is (
            importlib.import_module(f"{home}.{name}") if found is ascend_parallel else getattr(found, name)
        )
    assert sorted({*(name for name, _ in seen), "__version__"}) == ascend_parallel.__all__
    with pytest.raises(AttributeError, match="has no attribute 'confgure'"):
        ascend_parallel.confgure  # noqa: B018


def test_autoload_imports_nothing_while_the_variables_are_unset(imports):
    unset, loaded = (found["torch"] for found in imports)
    assert unset == []
    assert "wrapt" in loaded
    assert "ascend_parallel" not in loaded


def test_an_import_of_the_package_leaves_torchs_compiler_out():
    """It takes seconds, and brings torch's styles, which would count as a framework in use."""
    code = "import ascend_parallel, sys; ascend_parallel.status(); print('torch._dynamo' in sys.modules)"
    assert output(code, COC_PARALLEL_NUM="4") == "False"


def test_the_hook_imports_no_module_of_megatron(imports):
    """A script may call ``jit.disable_jit_fuser()`` before it imports what would be compiled."""
    plain, hooked = (found["core"] for found in imports)
    assert hooked == plain


@pytest.mark.parametrize(
    "value", ["four", pytest.param("", marks=pytest.mark.stress), pytest.param("1e9", marks=pytest.mark.stress)]
)
def test_autoload_never_breaks_torch_and_a_bad_value_is_raised_with_megatron(value):
    failed = python("import torch; print('fine'); import megatron.core", COC_PARALLEL_NUM=value)
    assert failed.stdout == "fine\n"
    assert failed.returncode != 0
    assert f"SettingsError: COC_PARALLEL_NUM='{value}' is not allowed" in failed.stderr


@pytest.mark.slow
def test_an_error_that_was_swallowed_is_raised_at_every_import():
    code = """
import sys
for module in ("megatron.core", "megatron.core", "megatron.core.tensor_parallel.layers"):
    try:
        __import__(module)
    except ValueError as error:
        print(error)
"""
    assert output(code, COC_PARALLEL_NUM="four").count("COC_PARALLEL_NUM='four' is not allowed") == 3


def test_autoload_survives_a_broken_environment():
    broken = "import sys; sys.modules['wrapt'] = None\nimport torch\nprint('fine')"
    done = python(broken, COC_PARALLEL_NUM="4")
    assert (done.returncode, done.stdout.strip()) == (0, "fine")
    assert "overlap cannot be switched on" in done.stderr


@pytest.mark.slow
def test_a_misspelt_variable_is_warned_of_without_any_import_of_ours():
    done = python("import megatron.core", USE_COC_FUSED_KERNE="1")
    assert done.returncode == 0
    assert "USE_COC_FUSED_KERNE, which nothing reads; did you mean USE_COC_FUSED_KERNEL" in done.stderr


@promise("off-untouched")
@pytest.mark.slow
def test_apply_revert_apply_on_megatron():
    code = """
import ascend_parallel as ap
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as C, RowParallelLinear as R
originals = C.forward, R.forward
ap.configure(num_chunks=4); ap.apply(); ap.apply()
assert C.forward is not originals[0] and C.forward.__wrapped__ is originals[0]
assert [p.applied for p in ap.status().patches if "ParallelLinear.forward" in p.target] == [True, True], ap.status()
ap.revert(); ap.revert()
assert (C.forward, R.forward) == originals
ap.apply()
assert C.forward is not originals[0]
ap.configure(num_chunks=1)
assert (C.forward, R.forward) == originals
print(ap.status().state)
"""
    assert output(code, forked) == "off: every framework's layers are untouched"


@pytest.mark.slow
def test_apply_imports_megatron_and_patches_once():
    code = """
import ascend_parallel as ap
ap.apply()
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as C
print(ap.status().state, hasattr(C.forward.__wrapped__, "__wrapped__"))
"""
    patched = output(code, forked, COC_PARALLEL_NUM="4", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert patched.startswith("2 of 2 methods of megatron-core")
    assert patched.endswith("replaced False")


def test_apply_while_off_is_refused():
    off = "COC_PARALLEL_NUM=1, USE_COC_FUSED_KERNEL=0 and COC_MODE=-1 switch overlap off"
    with pytest.raises(SettingsError, match=f"nothing to apply: {off}"):
        ascend_parallel.apply()


@pytest.mark.slow
def test_without_megatron():
    hide = "import sys; sys.modules['megatron'] = None\n"
    assert "waiting for the import of megatron-core, which is not installed" in output(
        hide + "import ascend_parallel as ap; print(ap.status().state)", COC_PARALLEL_NUM="4"
    )
    failed = python(hide + "import ascend_parallel as ap; ap.apply()", COC_PARALLEL_NUM="4")
    assert "megatron-core, which is not installed" in failed.stderr
    assert "the variables have nothing to overlap" in failed.stderr
    failed = python(hide + "import ascend_parallel as ap; ap.apply()", COC_PARALLEL_NUM="4", COC_FRAMEWORKS="megatron")
    assert "PatchError: megatron-core: found none installed" in failed.stderr


@pytest.mark.slow
def test_a_variable_changed_after_import_is_told_and_changes_nothing():
    code = """
import os, ascend_parallel as ap
import megatron.core
os.environ["COC_PARALLEL_NUM"] = "8"
print(ap.status().settings.num_chunks, ap.status().notes[0])
"""
    told = output(code, forked, COC_PARALLEL_NUM="4")
    assert told.startswith("4 COC_PARALLEL_NUM was 4 when it was read and is 8 now")


@pytest.mark.slow
def test_a_run_that_overlapped_nothing_says_so():
    done = forked("import megatron.core", COC_PARALLEL_NUM="4", RANK="0")
    assert "overlap was on, but 0 linear layers ran with it: no layer of " in done.stderr
    assert "no layer of megatron-core with a tensor-parallel group" in done.stderr
    on_top = "from megatron.core.tensor_parallel.layers import RowParallelLinear as R\nR.forward = lambda self, x: x"
    done = forked(on_top, COC_PARALLEL_NUM="4", RANK="0")
    assert "RowParallelLinear.forward was replaced in turn by __main__" in done.stderr


@pytest.mark.stress
def test_a_run_that_overlapped_nothing_says_so_where_it_helps():
    assert "linear layers" not in python("import megatron.core; 1 / 0", COC_PARALLEL_NUM="4", RANK="0").stderr
    assert "linear layers" not in python("import megatron.core", COC_PARALLEL_NUM="4").stderr
    te = "import sys, types; sys.modules['transformer_engine'] = te = types.ModuleType('transformer_engine')\n"
    for file, blamed in (("types.__file__", True), ("'a.dummy.module.py'", False)):
        code = f"import megatron.core\n{te}te.__file__ = {file}"
        done = python(code, COC_PARALLEL_NUM="4", RANK="0")
        assert ("TransformerEngine's layers are not covered" in done.stderr) == blamed
    assert "linear layers" not in python("import megatron.core", COC_PARALLEL_NUM="4", RANK="1").stderr


@pytest.mark.slow
def test_run_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, helper; print(sys.argv[1:], __name__, helper.x)\n" + FORWARD)
    (tmp_path / "helper.py").write_text("x = 5")
    for call in (["run", str(script), "--layers", "2"], ["run", "-m", "train", "--layers", "2"]):
        code = (
            f"import sys; sys.argv = ['ascend_parallel', *{call!r}]; from ascend_parallel.__main__ import main; main()"
        )
        lines = output(
            code, forked, COC_PARALLEL_NUM="4", TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=str(tmp_path)
        ).splitlines()
        assert lines[0] == "['--layers', '2'] __main__ 5"
        assert lines[1].endswith("patches/compiled.py")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "code"), [(["run"], 2), (["run", "nowhere.py"], 2), (["run", "--help"], 0)])
def test_run_without_a_script(call, code):
    done = subprocess.run([forked_python(), "-m", "ascend_parallel", *call], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert "Usage" in done.stdout or "no such file: 'nowhere.py'" in done.stderr


@pytest.mark.slow
def test_run_does_not_import_the_command_line(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import sys; print([m for m in ('typer', 'rich') if m in sys.modules])")
    done = subprocess.run(
        [sys.executable, "-m", "ascend_parallel", "run", str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_status_command():
    environ = {**os.environ, "COC_PARALLEL_NUM": "4"}
    call = [forked_python(), "-m", "ascend_parallel", "status"]
    done = subprocess.run([*call, "--json"], capture_output=True, text=True, env=environ, timeout=60)
    found = json.loads(done.stdout)
    assert found["settings"]["num_chunks"] == 4
    assert [patch["applied"] for patch in found["patches"] if "ParallelLinear.forward" in patch["target"]] == [
        True,
        True,
    ]
    shown = subprocess.run(call, capture_output=True, text=True, env=environ, timeout=60).stdout
    assert "RowParallelLinear.forward" in shown
