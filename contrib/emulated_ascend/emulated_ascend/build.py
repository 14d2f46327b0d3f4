"""Compiles the emulated libraries for the installed wheel, once, into the user's cache."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .wheel import Unusable, Wheel

SOURCES = Path(__file__).parent / "csrc"
# The names under which the wheel looks for CANN; one library has everything.
LIBRARIES = (
    "libhccl", "libopapi", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel", "libatb", "libhcomm",
)  # fmt: skip
COMMON = """
.type emulated_entry,@function
emulated_entry:
 lea 8(%rsp),%r10
 push %rbp
 mov %rsp,%rbp
 sub $112,%rsp
 and $-16,%rsp
 movq %rdi,0(%rsp)
 movq %rsi,8(%rsp)
 movq %rdx,16(%rsp)
 movq %rcx,24(%rsp)
 movq %r8,32(%rsp)
 movq %r9,40(%rsp)
 movsd %xmm0,48(%rsp)
 movsd %xmm1,56(%rsp)
 movsd %xmm2,64(%rsp)
 movsd %xmm3,72(%rsp)
 movsd %xmm4,80(%rsp)
 movsd %xmm5,88(%rsp)
 movsd %xmm6,96(%rsp)
 movsd %xmm7,104(%rsp)
 mov %eax,%edi
 mov %rsp,%rsi
 lea 48(%rsp),%rdx
 mov %r10,%rcx
 call emulated_prepare@PLT
 leave
 ret
.section .note.GNU-stack,"",@progbits
"""


def built() -> Path:
    """Return the folder of the libraries for this wheel; compile them if these sources were not compiled for it yet."""
    if platform.machine() != "x86_64":
        raise Unusable(f"emulated_ascend reads calls as x86-64 passes them; this machine is {platform.machine()}")
    wheel = Wheel()
    digest = hashlib.sha256(wheel.version.encode())
    for source in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emulated_ascend"
    folder = cache / f"{wheel.version}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        compile_into(fresh, wheel)
        if not folder.exists():  # another process may have been faster
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def compile_into(folder: Path, wheel: Wheel) -> None:
    """Compile every source, and the entry points that are generated for this wheel, to one library with all names."""
    operators = wheel.operators()
    (folder / "names.h").write_text(
        "static const char* const NAMES[] = {" + ", ".join(f'"{name}"' for name in operators) + "};\n"
    )
    (folder / "entries.S").write_text(
        ".text\n" + "".join(entry(number, name) for number, name in enumerate(operators)) + COMMON
    )
    written = "\n".join(source.read_text() for source in SOURCES.glob("*.cpp"))
    missing = [name for name in wheel.undefined() if not re.search(rf"\b{name}\(|\bDONE\({name}\)", written)]
    (folder / "missing.c").write_text(
        "#include <stdio.h>\n"
        + "\n".join(
            f'int {name}(void) {{ fprintf(stderr, "[emulated ascend] {name} is not emulated\\n"); return 507899; }}'
            for name in missing
        )
    )
    includes = [f"-I{path}" for path in (folder, SOURCES, *wheel.headers)]
    sources = [*sorted(SOURCES.glob("*.cpp")), folder / "entries.S", folder / "missing.c"]
    objects = []
    for source in sources:
        made = folder / f"{source.stem}.o"
        language = ["-std=c++17"] if source.suffix == ".cpp" else []
        run("g++" if language else "gcc", *language, "-O1", "-fPIC", "-w", *includes, "-c", source, "-o", made)
        objects.append(made)
    library = folder / "libascendcl.so"
    run("g++", "-shared", "-o", library, "-Wl,-soname,libascendcl.so", *objects, "-lpthread", "-lrt", "-ldl")
    empty = folder / "empty.c"
    empty.write_text("\n")
    for name in LIBRARIES:
        run(
            "gcc", "-shared", empty, "-o", folder / f"{name}.so", f"-Wl,-soname,{name}.so", "-Wl,--no-as-needed",
            f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN",
        )  # fmt: skip
    for left in (*objects, empty):
        left.unlink()


def entry(number: int, name: str) -> str:
    """Write the two functions of an operator: the first decodes the call, the second queues it."""
    sized = f"{name}GetWorkspaceSize"
    return (
        f".globl {sized}\n.type {sized},@function\n{sized}:\n mov ${number},%eax\n jmp emulated_entry\n"
        f".globl {name}\n.type {name},@function\n{name}:\n jmp emulated_execute@PLT\n"
    )


def run(*words: object) -> None:
    """Run a compiler; its last line is the error."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        text = (done.stderr.strip() or "no message").splitlines()
        raise Unusable(f"{words[0]} failed: {next((line for line in text if 'error' in line), text[-1])}")
