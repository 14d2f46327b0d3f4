"""`ascend-parallel report`: what it measures, what a failure leaves, and that its files name nobody."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import rank_sections
from launch import forked_python
from marks import promise
from rank_sections import FAILING, fails, hangs

from ascend_parallel.cli.report.command import NAME, _run
from ascend_parallel.cli.report.page import markdown
from ascend_parallel.cli.report.redaction import Redaction
from ascend_parallel.cli.report.sections import SECTIONS, Request, Section
from ascend_parallel.ops.problem import OPERATORS
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
    command = ["torchrun", "--nproc-per-node", str(ranks), "-m", "ascend_parallel", "report", "--quick"]
    environment = {**os.environ, **PLANTED, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_python(), "-m", "torch.distributed.run", *command[1:], "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page, values = ((tmp_path / f"{NAME}.{suffix}").read_text() for suffix in ("md", "json"))
    assert names_nobody(page) and names_nobody(values)
    return json.loads(values), page, done.stderr


@promise("report-names")
@pytest.mark.slow
def test_every_section_under_torchrun_and_no_name_in_the_files(tmp_path):
    """On 3 ranks, which share neither the rows of the layers nor the heads of the model as these are."""
    report, page, progress = launched(tmp_path, ranks=3)
    assert (report["ranks"], report["device"], report["quick"]) == (3, "cpu", True)
    assert set(report["sections"]) == set(SECTIONS) and "failed" not in page
    versions, links, operators, bench, step = report["sections"].values()
    assert versions["versions"]["CANN"] == "of unknown version at <path>"
    assert "not installed" not in versions["versions"]["torch"]
    assert {row["collective"] for row in links["collectives"]} == {"all-reduce", "reduce-scatter", "all-gather"}
    assert all(row["seconds"] > 0 for row in links["collectives"])
    rows = operators["kernels"]
    assert {(row["operator"], row["kernel"]) for row in rows} == {(op, name) for op in OPERATORS for name in KERNELS}
    assert all(row["error"] < 1e-5 and row["again"] for row in rows if "refused" not in row)
    assert all(row["bits"] for row in rows if row["kernel"] == "reference")
    assert operators["experts"] == "right"
    assert "## Links" in page and "## Operators" in page
    assert "3/5 operators: done" in progress
    assert set(step["losses"]) == set(step["times"]) == {"plain", "2 chunks"}
    assert step["losses"]["2 chunks"] == pytest.approx(step["losses"]["plain"], rel=1e-5)
    assert step["counts"]["matmul_all_reduce"]["chunks"] > step["counts"]["matmul_all_reduce"]["calls"]
    for row in bench["passes"]:
        assert set(row["predicted"]) >= {"serial"} and row["predicted_parts"] is None
        assert all(seconds > 0 for seconds in row["predicted"].values())


@promise("report-names")
@pytest.mark.sample("hangs-6-not done within 6 s")
@pytest.mark.parametrize(
    ("measure", "limit", "said"), [(fails, 120, "rank 1 ended with status 1"), (hangs, 6, "not done within 6 s")]
)
def test_a_section_that_fails_or_hangs_says_so_and_the_report_goes_on(measure, limit, said, monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(Path(rank_sections.__file__).parent))
    monkeypatch.setitem(SECTIONS, "links", Section("links", limit, measure))
    monkeypatch.setitem(SECTIONS, "step", Section("step", 1, lambda request, limit: {"skipped": "nothing is here"}))
    request = Request(ranks=2, device="cpu", quick=True)
    report = _run(request, ["links", "step"], redaction(), quiet=True)
    report = {"date": "", "version": "", **report}
    page = markdown(report)
    assert said in report["sections"]["links"]["error"] and "**This section failed**" in page
    assert names_nobody(page) and names_nobody(json.dumps(report))
    assert "Not measured: nothing is here." in page
    if measure is fails:
        assert "RuntimeError: " in report["sections"]["links"]["error"]


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
