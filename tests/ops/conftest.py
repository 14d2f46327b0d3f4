from pathlib import Path

import npu_wheel
import pytest
from launch import launch


@pytest.fixture(scope="session")
def with_torch_npu(tmp_path_factory):
    """Return ``run(function)``, which runs a function of a test file on 2 ranks with the real torch_npu."""
    try:
        environ = npu_wheel.environment(tmp_path_factory.mktemp("stubs"))
    except npu_wheel.Missing as reason:
        pytest.skip(str(reason))

    def run(function):
        file = Path(function.__code__.co_filename).stem
        code = f"import npu_wheel, {file} as tests; npu_wheel.on_a_rank(tests.{function.__name__})"
        for rank, finished in enumerate(launch(code, [environ] * 2, fresh=True)):
            assert finished.returncode == 0, f"rank {rank}:\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
            assert "every check was made" in finished.stdout

    return run
