"""python -m emulated_ascend, as a user types it."""

import os
import subprocess
import sys
import time

import pytest
from emulated_ascend.__main__ import main
from emulated_ascend.launch import launch

TRAIN = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.full((3,), float(rank + 1), device="npu")
dist.all_reduce(x)
os.write(1, f"sum {x.tolist()} {torch.npu.get_device_name(0)} {torch.npu.mem_get_info()[1] >> 20}\\n".encode())
dist.all_reduce(x)
torch.npu.synchronize()
dist.destroy_process_group()
"""


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "emulated_ascend", *words], capture_output=True, text=True, timeout=200
    )


def test_run_starts_ranks_of_an_unmodified_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run("run", "--ranks", "2", "--memory-mb", "4096", "--soc", "Ascend910B3", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("sum [3.0, 3.0, 3.0] Ascend910B3 4096") == 2, done.stdout


def test_a_rank_that_fails_ends_the_command_and_the_other_ranks(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, time\nos._exit(7) if os.environ['RANK'] == '1' else time.sleep(500)")
    assert launch([str(script)], 3, dict(os.environ), patience=0.1) == 7


def test_ranks_end_with_the_command_that_is_ended(tmp_path):
    script, started = tmp_path / "train.py", tmp_path / "started"
    script.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(500)")
    code = f"import os; from emulated_ascend.launch import launch; launch([{str(script)!r}], 1, dict(os.environ))"
    command = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    limit = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < limit:
        time.sleep(0.05)
    command.terminate()
    assert command.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_operators_are_listed_outside_the_emulations_environment():
    outside = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    words = [sys.executable, "-m", "emulated_ascend", "operators"]
    done = subprocess.run(words, env=outside, capture_output=True, text=True, timeout=100)
    assert "+ Add" in done.stdout.splitlines() and "- LinalgQr" in done.stdout.splitlines(), done.stderr
    assert done.stderr.splitlines()[-1].endswith("have a kernel")


def test_bad_words_are_a_sentence(capsys, monkeypatch):
    for words, said in {
        ("run",): "run needs a script, or -- and a command",
        ("run", "--ranks", "0", "x.py"): "--ranks is 0; it has to be 1 or more",
        ("run", "--", "/no/such/command"): "/no/such/command cannot be started: No such file or directory",
        ("run", "--clock", "--races", "x.py"): "--clock and --races exclude each other",
        ("run", "--clock", "--device", "H100", "x.py"): "--device is H100; allowed are 910B1, ",
    }.items():
        monkeypatch.setattr(sys, "argv", ["emulated_ascend", *words])
        assert main() == 2
        assert said in capsys.readouterr().err
