"""ascend-parallel bench --framework vllm: vLLM's own row layer on two ranks, as it is and in chunks of tokens."""

import json
import os
from pathlib import Path

import pytest
from ranks import environment
from typer.testing import CliRunner

from ascend_parallel.cli import bench_request
from ascend_parallel.cli.app import app

TOKENS, K, N = 600, 64, 96


def counted(group, **asked):
    """Return what the ranks measure; rank 0 writes the chunks that each count ran in, by what was counted."""
    from ascend_parallel.ops.counts import COUNTS
    from ascend_parallel.patches.vllm import bench

    found = {}

    class Counted(bench.TimedRowLayer):
        def _timed(self, operator, variant):
            COUNTS.clear()
            seconds = super()._timed(operator, variant)
            counts = COUNTS.as_dict()
            found.setdefault(variant.known.number, []).append(counts.get("matmul_all_reduce", {}).get("chunks", 0))
            assert "region" not in counts  # rows are finished at the layer's end
            return seconds

    measured = bench.measure(group, timed=Counted, **asked)
    if group.rank() == 0:
        Path(os.environ["COUNTED"]).write_text(json.dumps(found))
    return measured


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "counted.json"
    own = bench_request.TIMED_FRAMEWORKS["vllm"]
    words = ("--framework", "vllm", "--shape", f"{TOKENS},{K},{N}", "--chunks", "2,4", "--rounds", "3", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bench_request.TIMED_FRAMEWORKS, "vllm", own._replace(target="test_bench:counted"))
        ended = CliRunner().invoke(app, ["bench", *words], env=environment(COUNTED=file))
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout), json.loads(file.read_text())


def test_the_command_times_the_forward_of_vllms_row_layer(results):
    (row,), (times,) = results[0]["passes"], results[0]["times"]
    assert [row[name] for name in ("layer", "run", "operator", "m", "k", "n")] == [
        *("row", "forward", "matmul_all_reduce"),
        *(TOKENS, K, N),
    ]
    assert results[0]["framework"].startswith("vllm 0.") and results[0]["ranks"] == 2
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in times.values())
    assert row["serial"] == sorted(times["serial"])[1] and row["bound"] == max(row["matmul"], row["comm"])
    assert [entry["sizes"] for entry in results[0]["plan"]["entries"]] == [row["kept"]]


def test_chunks_have_the_sizes_of_a_step_and_the_serial_path_is_vllms_own(results):
    from ascend_parallel.devices import CPU

    sizes = {variant["name"]: variant["sizes"] for variant in results[0]["passes"][0]["variants"]}
    assert {"2 chunks", "4 chunks"} <= set(sizes)
    assert all(sum(rows) == TOKENS and rows[0] in CPU.chunk_rows for rows in sizes.values())
    ran = {int(count): set(chunks) for count, chunks in results[1].items()}
    assert ran.pop(1) == {0}
    assert ran == {len(rows): {len(rows)} for rows in sizes.values()}
