"""Which arguments op-plugin passes to each aclnn function, by its version: argument_lists.tsv, as data.

tools/argument_lists.py writes the file from op-plugin's sources. A kernel of which the installed wheel passes another
list is not run: its call is an error with both lists.
"""

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_suffix(".tsv")
# The versions of op-plugin whose functions a torch_npu's libraries name: it was built between them.
OP_PLUGIN = {"2.13.0": ("26.1.0", "master")}
# What torch_npu calls by itself, or op-plugin in a state that no branch has.
OWN = {
    "InplaceCeil": ("t", "self"),
    "InplaceCopy": ("tt", "self,src"),
    "NonzeroV2": ("tr", "self,out"),
    "TopkV2": ("tiibbitt", "?,k,dim,largest,?,?,values,indices"),
}
# Letters that a call passes alike: none is a null pointer, a bool is an integer.
ALIKE = {"o": "t", "r": "t", "z": "s", "b": "i"}
ARRAYS = "IEBLStp"


class ArgumentList(NamedTuple):
    """The letters of a function's arguments (csrc/aclnn.cpp), and their names in op-plugin; ? is not known."""

    letters: str
    names: str

    def takes(self, signature: str) -> bool:
        """Tell whether a kernel of this signature can read the arguments."""
        return len(signature) == len(self.letters) and all(map(alike, signature, self.letters))

    def __str__(self) -> str:
        """Return the arguments with their letters."""
        return ", ".join(map(" ".join, zip(self.letters, self.names.split(","), strict=True)))


def alike(ours: str, theirs: str) -> bool:
    """Tell whether an argument that a kernel reads as `ours` can be passed as `theirs`."""
    if theirs == "?":
        return True
    if "p" in (ours, theirs):
        return ours in ARRAYS + "oz" and theirs in ARRAYS + "oz"
    return ALIKE.get(ours, ours) == ALIKE.get(theirs, theirs)


def argument_lists(op_plugin: tuple[str, ...]) -> dict[str, list[ArgumentList]]:
    """Return the lists of versions of op-plugin, by the functions' names without aclnn."""
    found = {name: [ArgumentList(*own)] for name, own in OWN.items()}
    for row in FILE.read_text().splitlines():
        name, letters, names, versions = row.split("\t")
        if not set(op_plugin).isdisjoint(versions.split(" ")):
            found.setdefault(name, []).append(ArgumentList(letters, names))
    return found


def disagreement(name: str, signature: str, version: str) -> str | None:
    """Return why the kernel of a function cannot take the calls of a version of torch_npu; None: it can."""
    lists = lists_of(version).get(name)
    if lists is None:
        return f"its list of arguments is not known for torch_npu {version}"
    if any(each.takes(signature) for each in lists):
        return None
    return f"its kernel takes {signature}, torch_npu {version} passes {' or '.join(map(str, lists))}"


def lists_of(version: str) -> dict[str, list[ArgumentList]]:
    """Return what a version of torch_npu passes, by the functions' names without aclnn."""
    if version not in _LISTS:
        _LISTS[version] = argument_lists(OP_PLUGIN[version])
    return _LISTS[version]


_LISTS: dict[str, dict[str, list[ArgumentList]]] = {}
