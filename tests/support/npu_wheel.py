"""The real torch_npu wheel on a machine without NPU and CANN: installed aside, linked to stubs, run on CPU kernels.

`environment(folder)` gives the variables under which ``import torch`` brings torch_npu along (torch loads it
through its entry point, as it does for users). What the wheel needs of CANN are six shared libraries. Which
functions of them it needs is read from its own ELF files: the names that are undefined there and defined
neither there nor in anything this process, with torch, has loaded. Stubs with those names are compiled.

The stubs stay beside the emulated CANN (tests/ascend), which needs an environment of its own: here other versions of
the wheel are tried (TORCH_NPU), meta kernels are compared, and one rank's missing part is planted.

`CpuKernels` then registers CPU kernels over gloo under the wheel's own ``npu::`` schemas, which go on refusing
arguments that they do not know.
"""

import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

VERSION = os.environ.get("TORCH_NPU", "2.13.0")
OPENED = "libopapi.so"  # plain 2.7.1 opens it as it is imported
INSTALL_LIMIT = 300  # seconds; the wheel has 44 MB

# What a stub returns: ACL_ERROR_INTERNAL_ERROR, or, where the caller reads what it points to, no address.
ERROR_CODE = 500000
RETURN_ADDRESS = {"aclGetRecentErrMsg", "aclrtGetSocName"}


class Missing(Exception):
    """Why the wheel cannot be had here."""


def environment(folder):
    """Variables of a process that is to have torch_npu; stubs go to `folder`. Raises `Missing` with the reason."""
    if sys.platform != "linux":
        raise Missing(f"torch_npu is built for Linux only, this is {sys.platform}")
    if torch.__version__.split(".")[:2] != VERSION.split(".")[:2]:
        raise Missing(f"torch_npu {VERSION} needs a torch of that version, this is {torch.__version__}")
    for tool in ("cc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise Missing(f"no {tool} on the path to make stub libraries with")
    site = installed()
    make_stubs(site / "torch_npu", folder)
    tests = Path(__file__).parents[1]
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, (site, tests / "support", tests / "ops", tests / "overlap"))),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }


def installed():
    """Return the folder of the installed wheel in the user's cache, after installing it there if need be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascend_parallel"
    site = cache / f"torch_npu-{VERSION}-{sys.implementation.cache_tag}-{platform.machine()}"
    if site.exists():
        return site
    fresh = site.with_name(f"{site.name}.{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [*pip, "--target", str(fresh), f"torch_npu=={VERSION}"],
            check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT,
        )  # fmt: skip
        if not site.exists():  # another session may have been faster
            fresh.rename(site)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or "no message").splitlines()[-1]
        raise Missing(f"pip could not install torch_npu=={VERSION}: {last}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"torch_npu=={VERSION} could not be installed in {cache}: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return site


def make_stubs(package, folder):
    """Compile one library that defines what the wheel lacks, under each name that the wheel looks for."""
    elves = [*package.glob("_C*.so"), *(path for path in package.glob("lib/*.so") if "atb" not in path.name)]
    loaded = loaded_objects()
    wanted = names("--undefined-only", elves) - names("--defined-only", [*elves, *loaded])
    if not wanted:
        raise Missing("the wheel lacks no function: nm told nothing")
    source = folder / "stubs.c"
    lines = (
        f"long {name}(void) {{ return {0 if name in RETURN_ADDRESS else ERROR_CODE}; }}" for name in sorted(wanted)
    )
    source.write_text("\n".join(lines) + "\n")
    library = folder / "libstubs.so"
    compiled = subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], capture_output=True, text=True)
    if compiled.returncode:
        raise Missing(f"cc could not compile the stubs: {compiled.stderr.strip().splitlines()[-1]}")
    present = {path.name for path in (*elves, *loaded)}
    for name in needed(elves) - present | {OPENED}:
        if name.endswith(".so"):  # CANN's names carry no version, the system's do
            (folder / name).symlink_to(library)


def loaded_objects():
    """Every file whose code this process has mapped: torch, Python, the C and C++ libraries."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({Path(line[5]) for line in lines if len(line) == 6 and "x" in line[1] and line[5].startswith("/")})


def names(which, elves):
    """Dynamic symbols of ELF files, as nm selects them; weak ones that nobody defines are none."""
    listed = subprocess.run(["nm", "-D", which, *map(str, elves)], capture_output=True, text=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return {row[-1].partition("@")[0] for row in rows if len(row) >= 2 and row[-2] not in "wv"}


def needed(elves):
    """Shared libraries that ELF files ask for."""
    listed = subprocess.run(["readelf", "-d", *map(str, elves)], capture_output=True, text=True).stdout
    return {line.partition("[")[2].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line}


# Arguments that may be given by name.
ANTIQUANT = {"antiquant_scale", "antiquant_offset", "antiquant_group_size"}
INT8 = {"x1_scale", "x2_scale", "output_dtype"}
DEQUANT = {"dequant_scale", "pertoken_scale"}
COMM_QUANT = {"comm_quant_scale_1", "comm_quant_scale_2"}
ALLOWED = {
    "npu_mm_all_reduce_base": {"reduce_op", "comm_turn", "comm_mode", *ANTIQUANT, *DEQUANT, *COMM_QUANT},
    "npu_mm_reduce_scatter_base": {"reduce_op", "comm_turn", "comm_mode", *INT8},
    "npu_all_gather_base_mm": {"gather_index", "gather_output", "comm_turn", "comm_mode", *INT8},
}
# Beside an all-to-all, with what they take behind `world_size`, in order; torch_npu 2.7 has none of them.
EXCHANGED = {
    "npu_all_to_all_matmul": ("bias", "all2all_axes", "all2all_out_flag", "comm_mode"),
    "npu_matmul_all_to_all": ("bias", "all2all_axes", "comm_mode"),
}


class CpuKernels:
    """CPU kernels over gloo for the fused operators, each of which checks that it is called as documented.

    groups  the group of each HCCL name
    calls   (operator, keyword arguments that differ from the schema's defaults) of each call so far
    wrong   if true, the last rank's part is left out of every sum, so that a test can prove it would notice
    """

    def __init__(self):
        assert importlib.metadata.version("torch_npu") == VERSION
        self.groups, self.calls, self.wrong = {}, [], False
        self._library = torch.library.Library("npu", "IMPL")
        for operator in (*ALLOWED, *(name for name in EXCHANGED if hasattr(torch.ops.npu, name))):
            self._library.impl(operator, getattr(self, operator), "CPU")

    def npu_mm_all_reduce_base(self, x1, x2, hcom, **options):
        if x1.dtype == torch.int8:
            return self._int8_all_reduce(x1, x2, hcom, options)
        assert not (DEQUANT | COMM_QUANT) & set(options), f"{set(options)} for an input of {x1.dtype}"
        if x2.dtype == torch.int8:
            x2 = dequantised(x1, x2, options)
        else:
            assert not ANTIQUANT & set(options), f"{set(options)} for a weight of {x2.dtype}"
        self._check("npu_mm_all_reduce_base", x1, x2, self.groups[hcom].size(), hcom, options)
        return self._sum(x1, x2, hcom).to(x1.dtype)

    def _int8_all_reduce(self, x1, x2, hcom, options):
        """What aclnnQuantMatmulAllReduceV2 and V3 compute, after the checks that their pages name."""
        self._check("npu_mm_all_reduce_base", x1, x2, self.groups[hcom].size(), hcom, options)
        token, column = options["pertoken_scale"], options["dequant_scale"]
        y = scaled_product(x1, x2, token[:, None], column.float())
        dtype, group = torch.bfloat16 if column.dtype == torch.bfloat16 else torch.float16, self.groups[hcom]
        if self.wrong and group.rank() == group.size() - 1:
            y.zero_()
        if not COMM_QUANT & set(options):
            dist.all_reduce(y, group=group)
            return y.to(dtype)
        first, second = (options[name].float() for name in sorted(COMM_QUANT))
        q = (y / first).round().clamp(-128, 127)  # every rank sums all rows, to which the page's two steps come
        dist.all_reduce(q, group=group)
        return ((q * (first / second)).round().clamp(-128, 127) * second).to(dtype)

    def npu_mm_reduce_scatter_base(self, x1, x2, hcom, world_size, **options):
        self._check("npu_mm_reduce_scatter_base", x1, x2, world_size, hcom, options)
        assert x1.shape[0] % world_size == 0, "M not divisible by the ranks"
        total = self._sum(x1, x2, hcom, *scales(options))
        return total.chunk(world_size)[self.groups[hcom].rank()].to(result_dtype(x1, options))

    def npu_all_gather_base_mm(self, x1, x2, hcom, world_size, **options):
        self._check("npu_all_gather_base_mm", x1, x2, world_size, hcom, options)
        parts = [torch.empty_like(x1) for _ in range(world_size)]
        dist.all_gather(parts, x1, group=self.groups[hcom])
        gathered = torch.cat(parts)
        x1_scale, x2_scale = scales(options)
        if x2_scale is not None:  # the operator gathers the scales of every rank's rows
            parts = [torch.empty_like(x1_scale) for _ in range(world_size)]
            dist.all_gather(parts, x1_scale, group=self.groups[hcom])
            x1_scale = torch.cat(parts)
        y = scaled_product(gathered, x2, x1_scale, x2_scale).to(result_dtype(x1, options))
        return y, gathered if options.get("gather_output", True) else x1.new_empty(0)

    def npu_all_to_all_matmul(self, x1, x2, hcom, world_size, *given):
        options = named("npu_all_to_all_matmul", given)
        self._check_exchanged("npu_all_to_all_matmul", x1, x2, world_size, hcom, options)
        assert x1.shape[0] % world_size == 0 and x2.shape[0] == x1.shape[1] * world_size, (x1.shape, x2.shape)
        came = torch.empty_like(x1)
        dist.all_to_all_single(came, x1, group=self.groups[hcom])
        if self.wrong:
            came.view(world_size, -1)[-1].zero_()
        whole = came.view(world_size, -1, x1.shape[1]).transpose(0, 1).flatten(1)
        y = self._added(whole.float() @ x2.float(), options)
        return y.to(x1.dtype), whole if options.get("all2all_out_flag", True) else x1.new_empty(0)

    def npu_matmul_all_to_all(self, x1, x2, hcom, world_size, *given):
        options = named("npu_matmul_all_to_all", given)
        self._check_exchanged("npu_matmul_all_to_all", x1, x2, world_size, hcom, options)
        assert x2.shape[1] % world_size == 0 and x1.shape[1] == x2.shape[0], (x1.shape, x2.shape)
        y = self._added(x1.float() @ x2.float(), options).to(x1.dtype)
        sent = y.view(len(y), world_size, -1).transpose(0, 1).contiguous()
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.groups[hcom])
        if self.wrong:
            came[-1].zero_()
        return came.flatten(0, 1)

    def _added(self, y, options):
        return y if options.get("bias") is None else y + options["bias"].float()

    def _check_exchanged(self, operator, x1, x2, world_size, hcom, options):
        self.calls.append((operator, options))
        assert world_size == self.groups[hcom].size() and world_size in (2, 4, 8, 16), f"world_size {world_size}"
        assert x1.dtype == x2.dtype and x1.dtype in (torch.float16, torch.bfloat16), (x1.dtype, x2.dtype)
        assert x1.dim() == x2.dim() == 2 and x1.is_contiguous() and x2.is_contiguous(), (x1.stride(), x2.stride())
        bias, axes = options.get("bias"), [-2, -1] if operator == "npu_all_to_all_matmul" else [-1, -2]
        assert options.get("all2all_axes") in (None, axes), options
        wide = torch.float32 if x1.dtype == torch.bfloat16 else torch.float16
        assert bias is None or (bias.dtype == wide and bias.shape == (x2.shape[1],)), (bias.dtype, bias.shape)

    def _check(self, operator, x1, x2, world_size, hcom, options):
        self.calls.append((operator, options))
        assert world_size == self.groups[hcom].size(), f"world_size {world_size}"
        assert set(options) <= ALLOWED[operator], f"unexpected {set(options) - ALLOWED[operator]}"
        assert options.get("reduce_op", "sum") == "sum"
        assert not options.get("comm_turn") and not options.get("gather_index")
        if x1.dtype == torch.int8 and operator == "npu_mm_all_reduce_base":
            check_dequant(x2, options, x1.shape[0])
        elif x1.dtype == torch.int8:
            check_int8(x1, x2, options)
        else:
            assert x1.dtype in (torch.float16, torch.bfloat16) and not INT8 & set(options), (x1.dtype, set(options))
        assert x1.dtype == x2.dtype, (x1.dtype, x2.dtype)
        assert x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], (x1.shape, x2.shape)
        assert x1.is_contiguous(), f"x1 with strides {x1.stride()}"
        assert x2.is_contiguous() or x2.t().is_contiguous(), f"x2 with strides {x2.stride()}"
        assert operator == "npu_mm_all_reduce_base" or 256 <= x1.shape[1] < 65535, f"K is {x1.shape[1]}"

    def _sum(self, x1, x2, hcom, x1_scale=None, x2_scale=None):
        group = self.groups[hcom]
        product = scaled_product(x1, x2, x1_scale, x2_scale)
        if self.wrong and group.rank() == group.size() - 1:
            product.zero_()
        dist.all_reduce(product, group=group)
        return product


def named(operator, given):
    return dict(zip(EXCHANGED[operator], given, strict=False))


def scales(options):
    return options.get("x1_scale"), options.get("x2_scale")


def result_dtype(x1, options):
    return options.get("output_dtype", torch.bfloat16) if x1.dtype == torch.int8 else x1.dtype


def scaled_product(x1, x2, x1_scale, x2_scale):
    """What the pages of the reduce-scatter and the all-gather compute: int8 is multiplied exactly, then scaled."""
    if x2_scale is None:
        return x1.float() @ x2.float()
    return (x1.int() @ x2.int()).float() * x1_scale * x2_scale


def check_int8(x1, x2, options):
    """Check a product of int8 by int8 as the pages of the reduce-scatter and the all-gather ask for it."""
    assert options.get("comm_mode") == "aiv", options.get("comm_mode")
    assert options.get("output_dtype", torch.bfloat16) in (torch.float16, torch.bfloat16)
    for given, shape in zip(scales(options), [(x1.shape[0], 1), (1, x2.shape[1])], strict=True):
        assert given.dtype == torch.float32 and tuple(given.shape) == shape, (given.dtype, given.shape, shape)
        assert given.is_contiguous(), f"strides {given.stride()}"


def check_dequant(x2, options, m):
    """Check a product of int8 by int8 as the pages of aclnnQuantMatmulAllReduceV2 and V3 ask for it."""
    (k, n), comm = x2.shape, COMM_QUANT & set(options)
    assert 1 <= k <= 65535 and 1 <= n <= 65535, (k, n)
    assert not (ANTIQUANT | {"comm_mode"}) & set(options), set(options)
    token, column = options["pertoken_scale"], options["dequant_scale"]
    assert (token.dtype, token.shape) == (torch.float32, (m,)), (token.dtype, token.shape)
    assert column.dtype in (torch.bfloat16, torch.float32), column.dtype
    assert tuple(column.shape) in [(1,), (n,), (1, n)] and column.is_contiguous(), column.shape
    assert comm in (set(), COMM_QUANT), f"{comm} without the other"
    for given in (options[name] for name in comm):
        assert given.dtype == (torch.bfloat16 if column.dtype == torch.bfloat16 else torch.float16), given.dtype
        assert tuple(given.shape) == (n,) and given.is_contiguous(), given.shape


def dequantised(x1, x2, options):
    """What the page of npu_mm_all_reduce_base says an int8 weight [k, n] stands for, after the checks it names."""
    (k, n), scale, size = x2.shape, options["antiquant_scale"], options.get("antiquant_group_size", 0)
    assert 1 <= k <= 65535 and 1 <= n <= 65535, (k, n)
    assert size == 0 or (32 <= size <= k - 1 and size % 32 == 0), f"antiquant_group_size {size}, k {k}"
    shapes = [(-(-k // size), n)] if size else [(1,), (n,), (1, n)]
    offset = options.get("antiquant_offset", torch.zeros_like(scale))
    for given in (scale, offset):
        assert given.dtype == x1.dtype and tuple(given.shape) in shapes, (given.dtype, given.shape, shapes)
        assert given.is_contiguous(), f"strides {given.stride()}"
    if size:
        scale, offset = (given.repeat_interleave(size, 0)[:k] for given in (scale, offset))
    w = ((x2.float() + offset.float()) * scale.float()).to(x1.dtype)
    assert x2.is_contiguous() or x2.t().is_contiguous(), f"x2 with strides {x2.stride()}"
    return w if x2.is_contiguous() else w.t().contiguous().t()


def on_a_rank(function):
    """Run ``function(kernels, group)`` of a test on this rank, with CPU kernels for the default group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kernels = CpuKernels()
    kernels.groups["tensor parallel"] = dist.group.WORLD
    from ascend_parallel.ops import npu  # not above: test_mindspeed.py imports this package late

    npu._HCCL_NAMES[dist.group.WORLD] = "tensor parallel"
    function(kernels, dist.group.WORLD)
    print("every check was made")
    # A gloo group that lives on to the interpreter's end may abort the process, with torch_npu and without.
    kernels.groups.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
