"""`ascend-parallel report`: what it measures, what a failure leaves, and that its files name nobody."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rank_sections
from launch import forked_python
from marks import promise
from rank_sections import FAILING, fails, hangs
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.cli.report.command import NAME, _run, complete, write
from ascend_parallel.cli.report.page import markdown
from ascend_parallel.cli.report.redaction import Redaction
from ascend_parallel.cli.report.sections import SECTIONS, Request, Section
from ascend_parallel.ops.call import OPERATORS
from ascend_parallel.ops.registry import KERNELS

# What stands in the environment, and must stand in no file.
PLANTED = {
    "USER": "hildegard",
    "LOGNAME": "hildegard-k",
    "HOSTNAME": "npu-node17.lab.example.org",
    "HOME": "/home/bartholomew",
    "SLURMD_NODENAME": "rack4-blade2",
    "ASCEND_HOME_PATH": "/opt/secretcustomer/ascend-toolkit",
    "CXX": "/opt/secretcustomer/bin/g++-that-is-not-there",
    "HTTPS_PROXY": "http://proxyuser:hunter22@10.20.30.40:3128",
    "API_TOKEN": "tok_9f8e7d6c5b4a",
}
SECRETS = ["hildegard", "npu-node17", "example.org", "bartholomew", "rack4", "secretcustomer", "proxyuser", "hunter22"]
SECRETS += ["10.20.30.40", "tok_9f8e", "/home", "/tmp", "/opt", "/usr"]


def redaction():
    return Redaction.of(PLANTED)


def names_nobody(text):
    return [secret for secret in SECRETS if secret in text] == []


def launched(tmp_path, ranks):
    """Run the command under torchrun with the planted environment; return the report and the page."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    words = ["-m", "ascend_parallel", "report", "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, **PLANTED, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_python(), *launcher, *words], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return *read(tmp_path), done.stderr


def read(folder):
    """Return the values and the page of the report in a folder, which name nobody."""
    page, values = ((folder / f"{NAME}.{suffix}").read_text() for suffix in ("md", "json"))
    assert names_nobody(page) and names_nobody(values)
    return json.loads(values), page


@promise("report-names")
@pytest.mark.slow
def test_every_section_under_torchrun_and_no_name_in_the_files(tmp_path):
    """On 3 ranks, which do not share the rows of the layers as these are."""
    report, page, progress = launched(tmp_path, ranks=3)
    assert (report["ranks"], report["device"], report["accelerators"], report["quick"]) == (3, "cpu", 0, True)
    assert list(report["sections"]) == list(SECTIONS) and "failed" not in page
    assert "3/3 try: no launch was given behind --" in progress and "Not measured: no launch was given" in page
    doctor, bench, _ = report["sections"].values()
    found = {each["name"]: each["found"] for each in doctor["findings"]}
    assert found["CANN"] == "of unknown version at <path>" and "not installed" not in found["torch"]
    assert "/dev/shm" not in found and "variables" not in found
    assert found["reference"] == found["expert_exchange"] == "right"
    rows = doctor["tried"]["calls"]
    assert {(row["operator"], row["kernel"]) for row in rows} == {(op, name) for op in OPERATORS for name in KERNELS}
    assert all(row["error"] < 1e-5 for row in rows if "refused" not in row and row["dtype"] == "float32")
    assert all(row["bits"] for row in rows if row["kernel"] == "reference")
    assert "| matmul_all_reduce | bfloat16 | chunked | 8 |" in page
    assert list(bench["modes"]) == ["all-reduce", "sequence parallel"]
    alone = [row for mode in bench["modes"].values() for row in mode["collectives"]]
    assert {row["collective"] for row in alone} == {"all-reduce", "reduce-scatter", "all-gather"}
    assert "| all-reduce | 16.4 KB |" in page and "| all-reduce | 262 KB |" in page  # 16 rows, and 256, of 256 columns
    passes = [row for mode in bench["modes"].values() for row in mode["passes"]]
    assert {row["m"] for row in passes} == {256, 513}  # 512 rows, rounded up
    for row in passes:
        assert set(row["predicted"]) >= {"serial"} and row["predicted_parts"] is None
        assert all(seconds > 0 for seconds in row["predicted"].values())


@pytest.mark.parametrize("hardware", [None, "ascend910b3"])
def test_the_page_of_bench_has_measured_and_predicted_times(hardware):
    parts = {"matmul": 0.003, "collective": 0.002}
    row = {"layer": "row", "run": "forward", "m": 512, "k": 256, "n": 128, "matmul": 0.004, "comm": 0.001}
    row |= {"serial": 0.005, "best": "2 chunks", "predicted": {"serial": 0.006, "2 chunks": 0.003}}
    row["variants"] = [{"name": name, "seconds": 0.004, "speedup": 1.25} for name in ("2 chunks", "shm")]
    alone = {"collective": "all-reduce", "bytes": 262144, "seconds": 0.001, "bus": 2.6e8}
    mode = {"conditions": "shapes; ms", "hardware": hardware, "passes": [row], "collectives": [alone]}
    mode["passes"][0]["predicted_parts"] = parts if hardware else None
    page = markdown(made({"bench": {"modes": {"all-reduce": mode}, "seconds": 1.0}}))
    own = " 3.00 | 2.00 |" if hardware else ""
    times = "4.00 | 1.00 | 5.00 (1.20) | 4.00 (1.25; 0.75) | 4.00 (1.25)"
    assert f"| row | forward | 512,256,128 | {times} | 2 chunks |{own}\n" in page
    assert "| all-reduce | 262 KB | 1.000 | 0.260 |" in page
    assert (f"of the data of `{hardware}`" in page) == (hardware is not None)


def made(sections):
    facts = {"ranks": 2, "device": "cpu", "accelerators": 0, "quick": True}
    return complete(facts, sections, redaction())


@promise("report-names")
@pytest.mark.sample("hangs-3-not done within 3 s")
@pytest.mark.parametrize(
    ("measure", "limit", "said"), [(fails, 120, "rank 1 ended with status 1"), (hangs, 3, "not done within 3 s")]
)
def test_a_section_that_fails_or_hangs_says_so_and_the_report_goes_on(measure, limit, said, monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(rank_sections.__file__).parent))
    monkeypatch.setitem(SECTIONS, "doctor", Section("doctor", limit, measure))
    request = Request(ranks=2, device="cpu", quick=True)
    report = _run(request, ["doctor", "try"], redaction(), quiet=True)
    page = markdown(report)
    assert said in report["sections"]["doctor"]["error"] and "**This section failed**" in page
    assert names_nobody(page) and names_nobody(json.dumps(report))
    assert "Not measured: no launch was given behind --." in page
    if measure is fails:
        assert "RuntimeError: " in report["sections"]["doctor"]["error"]


@promise("report-names")
def test_what_is_wrong_and_what_a_log_says_lose_the_values_of_all_variables():
    """The values of variables are in no pattern of names: only a text that may quote them loses them."""
    said = f"overlap is on (COC_PLAN=plans/{PLANTED['API_TOKEN']}.json)"
    wrong = {"name": "shm", "verdict": "bad", "found": f"wrong: rank 1 has {PLANTED['API_TOKEN']}"}
    right = {"name": "torch", "verdict": "good", "found": "2.13.0+cpu"}
    found = made({"doctor": {"findings": [wrong, right], "seconds": 1.0}, "try": {"said": [said], "lines": [said]}})
    assert names_nobody(json.dumps(found))
    assert [each["found"] for each in found["sections"]["doctor"]["findings"]] == [
        "wrong: rank 1 has <value>",
        "2.13.0+cpu",
    ]
    assert found["sections"]["try"]["lines"] == ["overlap is on (COC_PLAN=plans/<value>.json)"]


PRINTS = "print('the weights of customer 7'); raise SystemExit(3)"
STEPS = """
import torch
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(100):
    weight.grad = torch.ones(3)
    optimizer.step()
    print(f"loss: {float(weight.sum()):.3f}")
"""


@promise("report-names")
@pytest.mark.sample("fails")
@pytest.mark.parametrize(
    ("code", "said"),
    [(PRINTS, "the plain run ended with 3"), (STEPS, "no layer was overlapped")],
    ids=["fails", "runs"],
)
def test_a_launch_of_the_users_is_tried_and_neither_its_words_nor_its_output_are_in_the_report(code, said):
    request = Request(ranks=2, device="cpu", quick=True, launch=(sys.executable, "-c", code, "--customer-7"))
    report = _run(request, ["try"], redaction(), quiet=True)
    text = markdown(report) + json.dumps(report)
    assert said in text and "customer" not in text
    if code is STEPS:
        assert "parameters have equal bits on every rank" in markdown(report)
        assert report["sections"]["try"]["steps"] == 12


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"at {PLANTED['HOME']}/x.py", "at <path>"),
        ("on npu-node17.lab.example.org:29500", "on <host>:29500"),
        ("NPU-NODE17 of Hildegard", "<host> of <user>"),
        (f"proxy {PLANTED['HTTPS_PROXY']}", "proxy <url>"),
        ("mail hildegard@lab.example.org", "mail <address>"),
        ("[::1]:80, fe80:0:0:1:2:3:4:5 and 192.168.0.7", "[<address>]:80, <address> and <address>"),
        ("[256, 64] x [64, 32], T_matmul / T_comm", "[256, 64] x [64, 32], T_matmul / T_comm"),
        ("torch 2.13.0+cpu, all-reduce/s", "torch 2.13.0+cpu, all-reduce/s"),
    ],
)
def test_names_are_removed_and_figures_stay(text, redacted):
    assert redaction().text(text) == redacted


def test_what_ranks_print_is_part_of_an_error():
    assert all(value in FAILING for value in PLANTED)


@pytest.mark.slow
def test_several_machines_are_refused(monkeypatch, tmp_path):
    environment = {**os.environ, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "8"}
    command = [forked_python(), "-m", "ascend_parallel", "report", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and "16 ranks, and 8 here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_launch_is_not_tried_by_every_rank_of_torchrun(monkeypatch, tmp_path):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    ended = CliRunner().invoke(app, ["report", "--out", str(tmp_path), "--", "torchrun", "train.py"])
    assert ended.exit_code == 2 and "run report without torchrun, with --ranks" in ended.stderr


def test_a_trial_of_kernels_that_failed_is_said_once():
    found = {"findings": [{"name": "torch", "found": "2.13"}], "tried": {"error": "rank 1: no\ndevice"}, "seconds": 1.0}
    page = markdown(made({"doctor": found}))
    assert "No kernel was tried" in page and page.count("rank 1: no\ndevice") == 1


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_run_of_two_halves_is_reported_on_cpus(tmp_path):
    """The program of the card, on gloo: its report names nobody, and no reader takes it for GPUs."""
    words = [str(BENCHMARKS / "gpu.py"), "--halves", "--device", "cpu", "--parts", "layers,symm", "--rounds", "1"]
    words += ["--repeats", "1", "--rows", "64", "--hidden", "32", "--nccl", "/opt/secretcustomer/libnccl.so.2"]
    done = subprocess.run(
        [forked_python(), *words, "--report", str(tmp_path)],
        capture_output=True, text=True, timeout=240, env={**os.environ, **PLANTED},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report, page = read(tmp_path)
    assert (report["ranks"], report["accelerators"]) == (2, 0)
    assert page.startswith(
        f"# Report of {report['date']}, 2 ranks on CPUs, in place of two halves of a card: no figure"
    )
    layers, symm = report["sections"].values()
    assert list(report["sections"]) == ["layers, gloo, on CPUs", "symm, gloo, on CPUs"]
    assert layers["machine"]["backend"] == "gloo" and set(layers["figures"]["row"]["plain"]) >= {"device_ms", "bits"}
    assert "| row | by hand, chunks 4 |" in page and "torch's async operators have no CPU" in symm["texts"]
    assert report["options"]["nccl"] == "<path>" and report["options"]["rows"] == 64


def test_no_reader_takes_two_halves_for_two_gpus(tmp_path, monkeypatch):
    """As a card's ranks return it: the title, each section and the values say that there is one."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    halves = importlib.import_module("halves")
    machine = {"card": "NVIDIA H100 80GB HBM3", "halves": "two of one card (MPS: 45 %)", "driver": "580.159.04"}
    machine |= {"CTAs": "4", "backend": "NCCL 2.30.7"}
    texts = [", ".join(f"{name} {value}" for name, value in machine.items()), "| layer | ms |"]
    failed = {"error": f"rank 1 ended with status 1\n---- rank 1 printed:\n{PLANTED['API_TOKEN']}", "seconds": 30.5}
    parts = {
        "layers, 4 CTAs": {"machine": machine, "texts": texts, "figures": {}, "seconds": 9.5},
        "steps, CTAs as NCCL chooses": failed,
    }
    found = {"options": {"device": "cuda", "nccl": "/opt/secretcustomer/libnccl.so.2"}, "parts": parts}
    write(complete(*halves.report_of(found), redaction()), tmp_path)
    report, page = read(tmp_path)
    assert (report["ranks"], report["accelerators"]) == (2, 1)
    title, *lines = page.splitlines()
    assert title.endswith("2 ranks on two halves of one NVIDIA H100 80GB HBM3: one GPU, not two")
    heads = [line for line in lines if line.startswith("## ")]
    assert len(heads) == 2 and all(line.endswith(", two halves of one card") for line in heads)
    for words in ("NCCL 2.30.7", "CTAs 4", "driver 580.159.04", "two of one card", "rank 1 ended with status 1"):
        assert words in page
    assert report["sections"]["layers, 4 CTAs, two halves of one card"]["machine"] == machine
