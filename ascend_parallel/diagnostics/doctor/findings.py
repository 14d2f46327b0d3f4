"""Examine the installation and the settings; every finding has a verdict and advice."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ascend_parallel.diagnostics.doctor.trial import LIMIT, outcomes, try_kernels
from ascend_parallel.diagnostics.installed import installed_build
from ascend_parallel.ops import chunk_loop
from ascend_parallel.ops.call import HEAD_EXCHANGE, KEY_GATHER, Exchange
from ascend_parallel.ops.key_gather import GATHER, choose_exchange, cut_heads
from ascend_parallel.ops.npu import soc_name
from ascend_parallel.ops.npu_limits import fused_operators_of
from ascend_parallel.ops.registry import would_choose
from ascend_parallel.overlap.choices import NO_LAYER, overlap_in_words
from ascend_parallel.settings import Settings
from ascend_parallel.tuning.launch.devices import CPU
from ascend_parallel.tuning.launch.ranks import PACKAGE
from ascend_parallel_autoload.frameworks import FRAMEWORKS

GOOD, NOTE, BAD = "good", "note", "bad"

NO_BACKENDS = ("undefined", "fake")  # in torch's list of backends

# Package -> why this package does not overlap its layers, or conflicts with it.
OTHER_LAYERS = {
    "transformer_engine": "its layers are not overlapped: give Megatron --transformer-impl local",
    "mindspeed": "its CoC and MC2 replace the same layers: enable either MindSpeed's or this package",
}

# Packages whose layers are overlapped, beside torch's own.
PACKAGES = tuple(framework.title for framework in FRAMEWORKS if not framework.of_torch)
# The section and name of the finding on what is replaced.
STATE = "patches", "state"

# The largest ratio of the table "Host time of Megatron-core's layers" in benchmarks/README.md, which a test compares.
LOOP_COST = (
    "a pass of a layer in 4 chunks then costs the host up to 1.35 times what it costs with the loop in C++ "
    "(benchmarks/README.md, host_cost.py --loops)"
)
REBUILD = (
    "to build it: pip install --no-build-isolation --no-deps --force-reinstall -v . (in the source, with torch, "
    "setuptools, wheel and a C++ compiler installed; -v shows why a build fails)"
)


class PatchState(Protocol):
    """The part of `PatchControl` that doctor uses: the settings and patches of this process."""

    @property
    def refused(self) -> Exception | None:
        """The error of an invalid environment variable, or None."""

    def status(self) -> Any:
        """Return the current settings and patches."""

    def try_apply(self) -> dict[str, str]:
        """Apply the patches of all installed frameworks; return why they do not fit, by the framework's name."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was found, a verdict ("good", "note" or "bad"), and advice."""

    section: str
    name: str
    found: str
    verdict: str = GOOD
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, the settings in force, and each call of a trial (`try_all`), None without one."""

    findings: list[Finding]
    settings: Settings
    tried: Mapping[str, Any] | None = None

    @property
    def healthy(self) -> bool:
        """Whether no finding is bad."""
        return all(finding.verdict != BAD for finding in self.findings)

    @property
    def verdict(self) -> str:
        """A summary in one sentence."""
        bad = [finding for finding in self.findings if finding.verdict == BAD]
        if bad:
            return f"{len(bad)} thing{'s' if len(bad) > 1 else ''} to fix: {', '.join(f.name for f in bad)}"
        lacking = "" if any(map(_version, PACKAGES)) else "; variables act on torch's own layers alone"
        states = (finding.found for finding in self.findings if (finding.section, finding.name) == STATE)
        idle = "".join(f", {NO_LAYER}{state.split(NO_LAYER, 1)[1]}" for state in states if NO_LAYER in state)
        uncompiled = (finding.found for finding in self.findings if finding.advice == REBUILD)
        slower = "".join(
            f"; chunks are looped over in Python, and CPU ranks have no shared-memory kernel: {reason}"
            for reason in uncompiled
        )
        return f"nothing is wrong; overlap is {overlap_in_words(self.settings)}{idle}{lacking}{slower}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found = [asdict(finding) for finding in self.findings]
        return {"healthy": self.healthy, "verdict": self.verdict, "findings": found, "tried": self.tried}


@dataclass(frozen=True, kw_only=True)
class ContextRequest:
    """Heads of attention that ranks would share: of queries, and of keys and values."""

    queries: int
    keys: int
    ranks: int

    def findings(self, settings: Settings) -> Iterator[Finding]:
        """Yield whether the ranks can share the heads, how, and in how many groups with these settings."""
        section, name = "context parallelism", f"{self.queries} heads, {self.keys} of keys"
        if self.ranks == 1:
            yield Finding(section, name, "one rank: nothing is exchanged")
            return
        if refusal := settings.arithmetic.forbids("weight gradients are summed over the ranks that share a sequence"):
            yield Finding(section, name, f"refused: {refusal}", BAD, "COC_DETERMINISTIC=1")
            return
        try:
            way, why = choose_exchange(self.queries, self.keys, self.ranks)
        except ValueError as error:
            yield Finding(section, name, f"refused on {self.ranks} ranks: {error}", BAD, "another number of ranks")
            return
        gathers = way == GATHER
        how = "keys and values are gathered" if gathers else "heads are exchanged"
        advice = "gradients of keys and values are sums over the ranks: their bits are not those of one rank"
        yield Finding(section, name, f"{how}, because {why}", NOTE if gathers else GOOD, advice if gathers else "")
        yield self._groups(section, way, settings)

    def _groups(self, section: str, way: str, settings: Settings) -> Finding:
        """Return in how many groups of heads the exchange would run."""
        heads = cut_heads(self.queries, self.keys, self.ranks, way)
        if heads == 1:
            advice = "" if way == GATHER else "fewer ranks"
            return Finding(section, "groups", "one head of keys is one group: nothing is hidden", NOTE, advice)
        if settings.tunes or settings.plan is not None:
            how = "measured in the run" if settings.tunes else "as the plan says"
            return Finding(section, "groups", f"{how}; at most {heads}")
        operator = KEY_GATHER if way == GATHER else HEAD_EXCHANGE
        call = Exchange(operator, heads, 1, 1, torch.float32, "cpu", self.ranks)
        sizes = would_choose(call, settings).sizes
        if len(sizes) > 1:
            return Finding(section, "groups", f"{len(sizes)}, of heads {list(sizes)}")
        advice = "export COC_PARALLEL_NUM=auto, which measures and chooses, or a number of groups"
        return Finding(section, "groups", "1: nothing is hidden", NOTE, advice)


def examine(
    control: PatchState,
    ranks: int = 0,
    say: Callable[[str], None] = lambda _: None,
    device: str = CPU,
    time_limit: float = LIMIT,
    context: ContextRequest | None = None,
) -> Report:
    """Return all findings; with `ranks` of 2 or more, also try every kernel on that many local processes.

    control
        The patches of this process; applied if the settings enable them.
    say
        Called with the name of each step, for a progress line.
    device, time_limit
        The type of device on which the kernels are tried, and the seconds after which their processes are ended.
    context
        Heads that ranks would share: whether they can, and how.
    """
    findings: list[Finding] = []
    for step, check in (
        ("versions", _versions),
        ("devices", _devices),
        ("settings and patches", lambda: examine_request(control)),
        ("kernels", lambda: _kernels(control)),
        ("chunks", _loop),
    ):
        say(step)
        findings += check()
    if context is not None:
        findings += context.findings(control.status().settings)
    tried = None
    if ranks:
        say(f"every kernel on {ranks} processes")
        tried = try_kernels(ranks, device, time_limit)
        findings += _trial(f"tried on {ranks} processes" + ("" if device == CPU else f" of {device}"), tried)
    return Report(findings, control.status().settings, tried)


def examine_request(control: PatchState) -> Iterator[Finding]:
    """Yield findings on the variables and on whether they take effect in a training; `status` uses them too."""
    yield from _settings(control)
    yield from _patches(control)


def _versions() -> Iterator[Finding]:
    section = "versions"
    yield Finding(section, "python", f"{platform.python_version()} on {platform.machine()}")
    yield Finding(section, "ascend_parallel", importlib.metadata.version("ascend_parallel"))
    if (here := commit()) is not None:
        yield Finding(section, "commit", here)
    if (other := _imported_elsewhere()) != PACKAGE:
        found = f"this is {PACKAGE}, and a program in another folder imports {other or 'none'}"
        advice = "run doctor from another folder, or install what is here: pip install -e ."
        yield Finding(section, "ascend_parallel", found, BAD, advice)
    yield Finding(section, "torch", str(torch.__version__))  # with the build's device, which its metadata may lack
    advice = "needed for its patches, not for column_linear, row_linear and the operators"
    yield from (_optional(name, _version(name), advice) for name in PACKAGES)
    npu, cann = _version("torch_npu"), _cann()
    yield _optional("torch_npu", npu, "needed on NPUs")
    if npu and _release(npu) != _release(torch.__version__):
        advice = (
            f"this torch is {torch.__version__}: install torch_npu {_release(torch.__version__)}, or its post-release"
        )
        yield Finding(section, "torch_npu", npu, BAD, advice)
    if npu or cann:
        yield _optional("CANN", cann, "source set_env.sh", "not found", BAD)
        yield from _fused_operators()
    yield _optional("compiler", _compiler(), "needed to build the shared-memory kernel", "none")


def _fused_operators() -> Iterator[Finding]:
    """Yield which fused operators are documented for this machine's chip; nothing where there is none."""
    module: Any = getattr(torch, "npu", None)
    if module is None or not module.is_available():
        return
    chip = soc_name()
    found = fused_operators_of(chip)
    yield Finding("versions", "fused operators", f"{chip}: {', '.join(found) or 'none'} (USE_COC_FUSED_KERNEL=1)")


def _imported_elsewhere() -> str | None:
    """Return the folder of the package that a Python program in the root folder imports; None: it finds none."""
    code = "import importlib.util as u; found = u.find_spec('ascend_parallel'); print(found.origin if found else '')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    return str(Path(done.stdout.strip()).parent) if done.stdout.strip() else None


def commit() -> str | None:
    """Return the commit of the checkout that this package is imported from; None: no checkout, or git says nothing."""
    root = Path(PACKAGE).resolve().parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    try:
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of another user's
        return None


def _optional(
    name: str, found: str | None, advice: str, missing: str = "not installed", verdict: str = NOTE
) -> Finding:
    """Return the finding on a part; a `missing` part gets the verdict and the advice."""
    return Finding("versions", name, found) if found else Finding("versions", name, missing, verdict, advice)


def _version(package: str) -> str | None:
    """Return the version of a package, with the name of its build if that is another."""
    found = installed_build(package)
    if found is None:
        return None
    name, version = found
    return version if name == package else f"{version} ({name})"


def _release(version: str) -> str:
    """Return the three numbers that torch_npu's wheels require to equal torch's: 2.7.1 of 2.7.1.post8 and 2.7.1+cpu."""
    numbers = re.match(r"\d+(\.\d+){0,2}", version)
    return numbers.group() if numbers else version


def _cann() -> str | None:
    """Return the version of the CANN at ASCEND_HOME_PATH, which CANN's set_env.sh sets; None without it."""
    if _is_emulated():
        return "emulated by emulated_ascend: nothing runs on an NPU"
    home = os.environ.get("ASCEND_HOME_PATH")
    if home is None:
        return None
    for file in sorted(Path(home).glob("**/ascend_toolkit_install.info")):
        for line in file.read_text().splitlines():
            if line.startswith("version="):
                return line.removeprefix("version=")
    return f"of unknown version at {home}"


def _is_emulated() -> bool:
    """Tell whether emulated_ascend stands in the place of CANN (contrib/emulated_ascend)."""
    try:
        return hasattr(ctypes.CDLL("libascendcl.so"), "emulated_counts")
    except OSError:
        return False


def _compiler() -> str | None:
    name = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if name is None:
        return None
    try:
        words = [*shlex.split(name), "--version"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}, which does not run: {error}"
    return done.stdout.partition("\n")[0] or None


def _devices() -> Iterator[Finding]:
    section = "devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(section, "cpu", f"{cores} cores for this process, {torch.get_num_threads()} threads in torch")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < 256 << 20
        advice = (
            "enlarge it (docker run --shm-size=1g): the shared-memory kernel needs several times the largest result"
        )
        yield Finding(section, "/dev/shm", f"{free >> 20} MB free", NOTE if small else GOOD, advice if small else "")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator else 0
    yield Finding(section, "accelerators", f"{count} of {accelerator.type}" if accelerator else "none")
    backends = [
        name for name in dist.Backend.backend_list if name not in NO_BACKENDS and dist.is_backend_available(name)
    ]
    yield Finding(section, "backends", ", ".join(backends) or "none", GOOD if backends else BAD)


def _settings(control: PatchState) -> Iterator[Finding]:
    section = "settings"
    status = control.status()
    if control.refused is not None:
        yield Finding(section, "variables", str(control.refused), BAD, "correct or unset it")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("COC_", "USE_COC_"))}
    yield Finding(section, "variables", ", ".join(f"{k}={v}" for k, v in variables.items()) or "none set")
    for note in status.notes:
        if "not initialised" not in note:
            yield Finding(section, "variables", note, BAD, "correct or unset it")
    if variables and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        advice = "unset it, import ascend_parallel in the script, or start it with python -m ascend_parallel run"
        yield Finding(section, "TORCH_DEVICE_BACKEND_AUTOLOAD", "0: variables alone do not patch", BAD, advice)


def _patches(control: PatchState) -> Iterator[Finding]:
    section = STATE[0]
    status = control.status()
    if status.settings.enabled:
        advice = "do what it says, install a supported version, or unset the variables"
        errors = control.try_apply()
        yield from (Finding(section, title, reason, BAD, advice) for title, reason in errors.items())
        status = control.status()
    yield Finding(*STATE, status.state)
    for patch in status.patches:
        name = ".".join(patch.target.split(".")[-2:])
        yield Finding(section, name, patch.reason or "replaced", GOOD if patch.applied else BAD)
    if status.region:
        yield Finding(section, "regions", status.region)
    for package, why in OTHER_LAYERS.items():
        if importlib.util.find_spec(package):
            yield Finding(section, package, "installed", NOTE, why)


def _kernels(control: PatchState) -> Iterator[Finding]:
    for name, state in control.status().kernels.items():
        advice = REBUILD if "C++ extension" in state else ""
        yield Finding("kernels", name, state, GOOD if state == "available" else NOTE, advice)


def _loop() -> Iterator[Finding]:
    """Yield which loop runs over the chunks of a layer."""
    if isinstance(chunk_loop.LOOP, str):
        yield Finding("chunks", "loop", f"in Python: {chunk_loop.LOOP}", NOTE, f"{LOOP_COST}; {REBUILD}")
    else:
        yield Finding("chunks", "loop", "in C++")


def _trial(section: str, tried: Mapping[str, Any]) -> Iterator[Finding]:
    for name, outcome in outcomes(tried).items():
        verdict = BAD if outcome.startswith("wrong") else NOTE if outcome.startswith("not tried") else GOOD
        yield Finding(section, name, outcome, verdict)
