"""Without scipy, of the extra `[sharding]`: Megatron-core overlaps, and other commands say what to install."""

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules['scipy'] = None; "
RUN = "from ascend_parallel.__main__ import main; sys.argv[0] = 'ascend-parallel'; main()"


def python(code, *words):
    command = [sys.executable, "-c", WITHOUT + code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_patches_of_megatron_need_no_scipy():
    ended = python("import ascend_parallel.patches.megatron.framework_patch")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("strategy", "llama2-7b", "--config", "x.toml"),
        ("propagate", "x.py:y", "--mesh", "dp=2"),
        ("plan-training", "--model", "llama2-7b", "--ranks", "8", "--memory", "9GB"),
        ("checkpoint", "show", "x"),
    ],
)
def test_a_command_that_needs_it_says_so_in_a_line(words):
    ended = python(RUN, *words)
    assert ended.returncode == 2, ended.stderr
    message = "ascend_parallel.sharding needs scipy, of its extra [sharding]: pip install scipy"
    assert ended.stderr.splitlines() == [f"{words[0]}: {message}"]
