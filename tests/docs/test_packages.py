"""The source distribution and the wheel: what is in them, and what they are once installed."""

import json
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import call, environment

ROOT = Path(__file__).parents[2]
OURS = ("editable", "ascend_parallel")
# What only a checkout needs: git's own, and links for in-tree tools to folders that are there under their real names.
OF_A_CHECKOUT = {".gitignore", "ascend_parallel/ops", "ascend_parallel/patches"}


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def succeed(python, *arguments, **options):
    ended = call(python, *arguments, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tracked files, so that building leaves nothing in the tree that is tested."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def torchless(tmp_path_factory):
    """The Python of an environment in which packages can be built, and torch is not to be seen."""
    return environment(tmp_path_factory.mktemp("torchless") / "venv", without=["torch", "functorch", *OURS])


@pytest.fixture(scope="module")
def sdist(checkout, torchless, tmp_path_factory):
    """The source distribution, built without torch."""
    folder = tmp_path_factory.mktemp("sdist")
    succeed(torchless, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, checkout)
    (made,) = folder.iterdir()
    return made


def test_the_source_distribution_has_all_that_is_tracked(sdist):
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    assert tracked() - OF_A_CHECKOUT <= files
    made = {name for name in files - tracked() if not name.startswith("ascend_parallel.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_a_wheel_built_without_torch_runs_and_says_what_it_lacks(sdist, torchless, tmp_path):
    pip = ("-m", "pip", "--disable-pip-version-check")
    succeed(torchless, *pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ascend_parallel", "ascend_parallel_autoload.py"}
    assert not [name for name in names if name.endswith((".cpp", ".h", ".so"))]
    for name in (
        "ops/shm.py",
        "patches/base.py",
        "diagnostics/timeline/report.html.jinja",
        "sharding/visualize/page.html.jinja",
        "training/pipeline/picture.svg.jinja",
        "tuning/cost_model/data/models.toml",
        "tuning/cost_model/data/hardware/ascend-910b1.toml",
    ):
        assert f"ascend_parallel/{name}" in names
    python = environment(tmp_path / "venv", without=OURS)
    succeed(python, *pip, "install", "--no-deps", "--no-index", wheel)
    ours = ("-m", "ascend_parallel", "doctor", "--json")
    report = json.loads(succeed(python, *ours, COC_PARALLEL_NUM="4", cwd=tmp_path))
    (found,) = [one for one in report["findings"] if (one["section"], one["name"]) == ("kernels", "shm")]
    assert "the C++ extension is not built" in found["found"]
    assert "pip install --no-build-isolation" in found["advice"]


@pytest.mark.packages
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_with_torch_in_sight_has_the_kernel(kind, sdist, checkout, tmp_path):
    """As the quick start has it; the wheel is of the checkout, and the sdist was built without torch."""
    python = environment(tmp_path / "venv", without=OURS)
    source = sdist
    if kind == "wheel":
        succeed(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, checkout, timeout=600)
        (source,) = tmp_path.glob("*.whl")
    options = ("--no-build-isolation", "--no-deps", "--no-index")
    succeed(python, "-m", "pip", "--disable-pip-version-check", "install", *options, source, timeout=600)
    command = tmp_path / "venv" / "bin" / "ascend-parallel"
    ended = subprocess.run([command, "status"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    asked = ("doctor", "--json", "--group", "2")
    report = json.loads(succeed(python, "-m", "ascend_parallel", *asked, COC_PARALLEL_NUM="4", cwd=tmp_path))
    assert report["healthy"]
    tried = {one["name"]: one["found"] for one in report["findings"] if one["section"] == "tried on 2 processes"}
    assert tried["shm"] == "right"
