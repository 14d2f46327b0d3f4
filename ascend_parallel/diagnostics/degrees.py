"""``ascend-parallel verify --degrees``: run a script at several tensor-parallel degrees, and compare every bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascend_parallel.ops.blocks import BLOCKS
from ascend_parallel.tuning.launch.process_tree import process_tree
from ascend_parallel.tuning.launch.signals import signals_as_exceptions

PATIENCE = 10.0  # seconds that a run has to end after SIGTERM


class DegreesError(ValueError):
    """The degrees, or what a run of the script has left, cannot be compared; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that a layer computed: the digest of each block, or of the whole, from all ranks."""

    layer: str
    name: str
    digests: Mapping[str, str]


def degrees_of(text: str) -> tuple[int, ...]:
    """Return the degrees of a text such as "1,2,4"; raises `DegreesError`."""
    words = text.split(",")
    degrees = tuple(int(word) for word in words if re.fullmatch(r"\s*[0-9]+\s*", word))
    if len(degrees) < 2 or len(degrees) != len(words) or any(not each or BLOCKS % each for each in degrees):
        raise DegreesError(f"--degrees {text!r}: give two or more of 1, 2, 4 and {BLOCKS}, such as 1,2,4")
    return degrees


def compare_degrees(degrees: Sequence[int], script: Sequence[str]) -> tuple[bool, str]:
    """Run ``script`` with as many processes as each of `degrees`; return whether all bits are equal, and why, in words.

    Raises `DegreesError` if a run fails, or no layer ran.
    """
    with signals_as_exceptions(), tempfile.TemporaryDirectory(prefix="ascend_parallel-degrees-") as folder:
        found = []
        for degree in degrees:
            place = Path(folder) / str(degree)
            _run(degree, script, place)
            found.append(read(place, degree))
    return difference(degrees, found)


def _run(degree: int, script: Sequence[str], folder: Path) -> None:
    """Run the script in `degree` processes of one thread each."""
    values = {"COC_DETERMINISTIC": "tp", "OMP_NUM_THREADS": "1", **os.environ, "COC_DIGESTS": str(folder)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(degree)]
    command = [*launcher, "-m", "ascend_parallel", "run", *script]
    with process_tree(command, patience=PATIENCE, folder=folder.parent, env=values) as process:
        code = process.wait()
    if code:
        raise DegreesError(f"{script[0]} ended with {code} at degree {degree}")


def read(folder: Path, degree: int) -> list[Tensor]:
    """Return the tensors of a run in order; raises `DegreesError` if ranks differ or none wrote any."""
    ranks = []
    for rank in range(degree):
        path = folder / f"rank{rank}.jsonl"
        if not path.is_file():
            raise DegreesError(f"rank {rank} of {degree} ran no layer of this package: is the script tensor-parallel?")
        ranks.append([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    if len({len(lines) for lines in ranks}) > 1:
        raise DegreesError(f"at degree {degree} ranks computed {', '.join(str(len(each)) for each in ranks)} tensors")
    found = []
    for lines in zip(*ranks, strict=True):
        first = lines[0]
        digests: dict[str, str] = {}
        for rank, line in enumerate(lines):
            for block, value in line["digests"].items():
                if digests.setdefault(block, value) != value or line["tensor"] != first["tensor"]:
                    raise DegreesError(
                        f"at degree {degree} rank {rank} has another {first['tensor']} of {first['layer']}"
                    )
        found.append(Tensor(first["layer"], first["tensor"], digests))
    return found


def difference(degrees: Sequence[int], found: Sequence[Sequence[Tensor]]) -> tuple[bool, str]:
    """Tell whether all degrees computed the same tensors, and the common digest or the first difference in words."""
    first = found[0]
    for degree, tensors in zip(degrees[1:], found[1:], strict=True):
        for index, (one, other) in enumerate(zip(first, tensors, strict=False)):
            if one != other:
                return False, _words(index, one, other, degrees[0], degree)
        if len(tensors) != len(first):
            return False, f"degree {degrees[0]} computed {len(first)} tensors, degree {degree} {len(tensors)}"
    whole = hashlib.sha1(json.dumps([dict(each.digests) for each in first]).encode(), usedforsecurity=False)
    names = ", ".join(map(str, degrees))
    return True, f"degrees {names}: all {len(first)} tensors have the same bits, digest {whole.hexdigest()[:16]}"


def _words(index: int, one: Tensor, other: Tensor, first: int, degree: int) -> str:
    if (one.layer, one.name) != (other.layer, other.name):
        return (
            f"tensor {index + 1} is the {one.name} of {one.layer} at degree {first}, and the {other.name} of "
            f"{other.layer} at degree {degree}"
        )
    blocks = [block for block in one.digests if one.digests[block] != other.digests.get(block)]
    where = "" if len(blocks) == len(one.digests) else f" block {', '.join(blocks)} of {len(one.digests)},"
    return (
        f"tensor {index + 1}, the {one.name} of {one.layer},{where} differs first: {one.digests[blocks[0]]} at degree "
        f"{first}, {other.digests.get(blocks[0], 'nothing')} at degree {degree}"
    )
