"""ascend-parallel status and doctor beside an installed vLLM: what its user reads before a server starts."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment

COMMAND = Path(sys.executable).with_name("ascend-parallel")
NAMES = importlib.metadata.packages_distributions()["vllm"]
BUILD = "vllm" if "vllm" in NAMES else NAMES[0]
VERSION = importlib.metadata.version(BUILD)
FOUND = VERSION if BUILD == "vllm" else f"{VERSION} ({BUILD})"
REPLACED = rf"(\d+) of \1 methods of vllm {re.escape(VERSION)} replaced"
LATER = "0.34.0"  # of a vLLM that is not supported

# Words of the command, and its variables.
CASES = {
    "status": (["status"], {"COC_PARALLEL_NUM": "4"}),
    "invariant": (["status", "--json"], {"COC_PARALLEL_NUM": "4", "VLLM_BATCH_INVARIANT": "1"}),
    "invariant doctor": (["doctor", "--json"], {"COC_PARALLEL_NUM": "4", "VLLM_BATCH_INVARIANT": "1"}),
    "plugins": (["status"], {"COC_PARALLEL_NUM": "4", "VLLM_PLUGINS": "slow_link"}),
    "version": (["doctor", "--json"], {"COC_PARALLEL_NUM": "4"}),
    "off": (["doctor", "--json"], {}),
}
# An import of vLLM takes ten seconds: each case runs in a fork of a process with vLLM, and nothing of this package.
FORKING = f"""
import json, os, runpy, sys
import torch.distributed.tensor.parallel, transformers.modeling_utils, typer
import vllm.model_executor.layers.linear, vllm.model_executor.layers.layernorm, vllm.v1.worker.worker_base
assert not [name for name in sys.modules if name.startswith("ascend_parallel.")]
cases, folder, running = json.loads(sys.argv[1]), sys.argv[2], {{}}
for name, (words, variables) in cases.items():
    pid = os.fork()
    if pid == 0:
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{folder}}/{{name}}.{{end}}", os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(variables)
        if name == "version":
            sys.path.insert(0, folder)
            vllm.__version__ = "{LATER}"
        sys.argv[1:] = words
        runpy.run_module("ascend_parallel", run_name="__main__")
    running[name] = pid
for name, pid in running.items():
    _, status = os.waitpid(pid, 0)
    open(f"{{folder}}/{{name}}.code", "w").write(str(os.waitstatus_to_exitcode(status)))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return the exit code, the standard output and the errors of each command."""
    folder = tmp_path_factory.mktemp("status")
    information = folder / f"{BUILD.replace('-', '_')}-{LATER}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BUILD}\nVersion: {LATER}\n")
    forking = [sys.executable, "-c", FORKING, json.dumps(CASES), str(folder)]
    subprocess.run(forking, env=environment(COLUMNS=200), check=True, timeout=400)
    found = {}
    for name in CASES:
        code, out, err = (folder.joinpath(f"{name}.{end}").read_text() for end in ("code", "out", "err"))
        found[name] = int(code), out, err
    return found


def findings(text):
    """Return the report of doctor in JSON, and each finding by section and name."""
    report = json.loads(text)
    return report, {(one["section"], one["name"]): one for one in report["findings"]}


@pytest.mark.slow
def test_doctor_imports_and_patches_this_vllm():
    env, pipes = environment(COC_PARALLEL_NUM=4), {"capture_output": True, "text": True}
    doctor = subprocess.run([COMMAND, "doctor", "--json"], env=env, timeout=400, check=True, **pipes)
    report, found = findings(doctor.stdout)
    assert report["verdict"] == "nothing is wrong; overlap is on: 4 chunks (COC_PARALLEL_NUM=4)"
    assert found["versions", "vllm"]["found"] == FOUND and found["versions", "vllm"]["verdict"] == "good"
    assert "COC_PARALLEL_NUM=4" in found["settings", "variables"]["found"]
    assert re.search(REPLACED, found["patches", "state"]["found"])
    assert found["patches", "RowParallelLinear.forward"]["verdict"] == "good"


def test_status_tells_that_the_methods_of_this_vllm_are_replaced(ended):
    code, out, err = ended["status"]
    assert code == 0, err
    first, *lines = out.splitlines()
    assert re.search(REPLACED, first) and "but no layer" not in first
    assert lines[0] == "overlap is on: 4 chunks (COC_PARALLEL_NUM=4)"
    replaced = {line.split()[1] for line in lines if line.startswith("replaced  vllm.")}
    assert "vllm.model_executor.layers.linear.RowParallelLinear.forward:" in replaced and len(replaced) > 10
    assert not [line for line in lines if line.startswith("untouched  vllm.")]


def test_where_vllm_fixes_its_kernels_the_state_says_that_no_layer_runs_with_overlap(ended):
    code, out, err = ended["invariant"]
    assert code == 0, err
    state = json.loads(out)["frameworks"]["vllm"]
    assert re.match(REPLACED, state)
    assert state.endswith("but no layer runs with overlap: VLLM_BATCH_INVARIANT fixes kernels and the order of sums")


def test_the_verdict_says_so_too(ended):
    code, out, err = ended["invariant doctor"]
    assert code == 0, err
    on = "nothing is wrong; overlap is on: 4 chunks (COC_PARALLEL_NUM=4), but no layer runs with overlap: "
    assert json.loads(out)["verdict"] == f"{on}VLLM_BATCH_INVARIANT fixes kernels and the order of sums"


def test_plugins_that_leave_this_package_out_are_named_and_the_command_fails(ended):
    code, out, err = ended["plugins"]
    assert code == 1
    text = "vllm: VLLM_PLUGINS=slow_link does not name ascend_parallel: add it, or unset VLLM_PLUGINS"
    assert f"left as it is: {text}" in " ".join(out.split())
    assert f"vllm: {text}; do what it says, " in err
    assert "overlap is on" not in out and "Traceback" not in err


def test_a_version_that_is_not_supported_is_named_with_the_build_to_install(ended):
    code, out, err = ended["version"]
    report, found = findings(out)
    assert code == 1 and report["verdict"] == "1 thing to fix: vllm", err
    assert found["versions", "vllm"]["found"].startswith(LATER)
    bad = found["patches", "vllm"]["found"]
    assert f"expected a version >=0.11,<0.34, found {LATER}; " in bad
    assert f"pip install '{BUILD}>=0.11,<0.34'" in bad


def test_without_variables_doctor_tells_the_version_and_that_all_is_off(ended):
    code, out, err = ended["off"]
    report, found = findings(out)
    assert code == 0, err
    assert report["verdict"].startswith("nothing is wrong; overlap is off: ")
    assert found["versions", "vllm"]["found"] == FOUND
    assert found["patches", "state"]["found"] == "off: every framework's layers are untouched"
