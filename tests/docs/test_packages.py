"""The source distribution and the wheel: what is in them, and what they are once installed."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from environments import call, environment
from marks import promise

from ascend_parallel import __version__

# Building takes long; `make test-rest` runs these, and `make packages` those that build the extension too.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TORCH = ".".join(torch.__version__.split(".")[:2])
PIP = ("-m", "pip", "--disable-pip-version-check")
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
def archives(checkout, torchless, tmp_path_factory):
    """The source distribution, and the wheel built of it, as ``python -m build`` makes them, without torch."""
    folder = tmp_path_factory.mktemp("archives")
    succeed(torchless, "-m", "build", "--no-isolation", "--outdir", folder, checkout)
    (made,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return made, wheel


@pytest.fixture(scope="module")
def sdist(archives):
    return archives[0]


@pytest.fixture(scope="module")
def wheel(archives):
    return archives[1]


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@promise("sdist-files")
def test_the_source_distribution_has_all_that_is_tracked(sdist):
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    assert tracked() - OF_A_CHECKOUT <= files
    made = {name for name in files - tracked() if not name.startswith("ascend_parallel.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_a_wheel_built_without_torch_has_the_package_alone_and_says_that_it_is_pure_python(wheel):
    assert wheel.name == f"ascend_parallel-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ascend_parallel", "ascend_parallel_autoload"}
    assert not [name for name in names if name.endswith((".cpp", ".h", ".so"))]
    for name in (
        "py.typed",
        "ops/shm.py",
        "patches/base.py",
        "diagnostics/timeline/report.html.jinja",
        "sharding/visualize/page.html.jinja",
        "training/pipeline/picture.svg.jinja",
        "tuning/cost_model/data/models.toml",
        "tuning/cost_model/data/hardware/ascend-910b1.toml",
    ):
        assert f"ascend_parallel/{name}" in names


def test_an_index_would_take_both_archives(archives):
    pytest.importorskip("twine", reason="twine is not installed")
    command = [sys.executable, "-m", "twine", "check", "--strict", *archives]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED") == 2


def test_what_an_index_shows_of_the_package(metadata):
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"]
    classifiers = metadata.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} | {"Typing :: Typed"} <= {
        *classifiers
    }
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Homepage", "Repository", "Documentation", "Changelog", "Issues"} == set(urls)


def test_the_readme_that_an_index_shows_has_no_relative_link_and_its_own_words(metadata):
    shown, written = metadata.get_payload(decode=True).decode(), (ROOT / "README.md").read_text()
    home = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", shown)
    assert len(links) == len(re.findall(r"\]\(", written)) > 30
    assert [target for _, target in links if not target.startswith(("https://", "#"))] == []
    for image, target in links:
        kind = f"{home}/{'raw' if image else 'blob'}/v{__version__}/"
        if target.startswith(kind):
            assert (ROOT / target.removeprefix(kind).partition("#")[0]).exists(), target
    assert (
        f"![An MLP on a link of 1 Gbit/s, serial above and overlapped below]({home}/raw/v{__version__}/docs/" in shown
    )
    assert re.sub(rf"{home}/(raw|blob)/v{re.escape(__version__)}/", "", shown).strip() == written.strip()


@pytest.fixture
def installed(wheel, tmp_path):
    """The Python of an environment that has the wheel without the extension."""
    python = environment(tmp_path / "venv", without=OURS)
    succeed(python, *PIP, "install", "--no-deps", "--no-index", wheel)
    return python


def test_a_wheel_built_without_torch_runs_and_says_what_it_lacks(installed, tmp_path):
    ours = ("-m", "ascend_parallel", "doctor", "--json")
    report = json.loads(succeed(installed, *ours, COC_PARALLEL_NUM="4", cwd=tmp_path))
    (found,) = [one for one in report["findings"] if (one["section"], one["name"]) == ("kernels", "shm")]
    assert "the C++ extension is not built" in found["found"]
    assert "pip install --no-build-isolation" in found["advice"]


def test_users_type_checkers_see_the_types(installed, tmp_path):
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    (tmp_path / "user.py").write_text(
        "import ascend_parallel\n\nreveal_type(ascend_parallel.configure(num_chunks=4))\nascend_parallel.coverage()\n"
    )
    ended = call(installed, "-m", "mypy", "--cache-dir", tmp_path / "cache", "user.py", cwd=tmp_path, timeout=240)
    assert 'Revealed type is "ascend_parallel.settings.Settings"' in ended.stdout, ended.stdout + ended.stderr
    assert re.search(r"user\.py:4: error: Missing positional argument", ended.stdout), ended.stdout
    assert ended.stdout.strip().endswith("Found 1 error in 1 file (checked 1 source file)")


@pytest.mark.packages
@pytest.mark.timeout(900)
def test_without_a_compiler_the_wheel_is_one_of_pure_python_by_its_name(checkout, tmp_path):
    python = environment(tmp_path / "venv", without=OURS)
    succeed(
        python, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, checkout, CXX="no-c++", CC="no-cc"
    )
    (made,) = tmp_path.glob("*.whl")
    assert made.name == f"ascend_parallel-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(made) as archive:
        (tags,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL"))
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    assert "Root-Is-Purelib: true" in tags


@promise("packages-extension")
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
        assert source.name.startswith(f"ascend_parallel-{__version__}-1torch{TORCH}-cp")
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
    (built,) = (tmp_path / "venv").glob("lib/*/site-packages/ascend_parallel/ops/_shm_torch_*.so")
    built.rename(built.with_name(built.name.replace(TORCH.replace(".", "_"), "2_6")))
    report = json.loads(succeed(python, "-m", "ascend_parallel", *asked, USE_COC_FUSED_KERNEL="1", cwd=tmp_path))
    (found,) = [one["found"] for one in report["findings"] if (one["section"], one["name"]) == ("kernels", "shm")]
    assert f"was compiled against torch 2.6, and this is {torch.__version__}" in found
