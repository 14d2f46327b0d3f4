"""The diffs of a page of documentation, applied one after another.

A block ```diff changes the file that its first line names (``+++ train.py``); its hunks are parted by ``@@``. A block
```diff aside changes it for that one step only.
"""

import re
from dataclasses import dataclass

BLOCK = re.compile(r"^```(sh|diff|diff aside)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RANKS = re.compile(r"--nproc-per-node (\d+)")


@dataclass
class Step:
    """The files after a diff, and on how many ranks the page runs them next."""

    files: dict[str, str]
    aside: bool
    ranks: int | None = None


def steps(text, files):
    """Return the steps of a page that starts from `files`."""
    found = []
    for kind, block in BLOCK.findall(text):
        if kind == "sh":
            for ranks in RANKS.findall(block):
                found[-1].ranks = int(ranks)
            continue
        changed = applied(files, block)
        found.append(Step(changed, kind.endswith("aside")))
        files = files if found[-1].aside else changed
    return found


def applied(files, block):
    """Return the files after a diff."""
    head, *lines = block.splitlines()
    name = head.removeprefix("+++ ")
    text = files.get(name, "")
    for hunk in "\n".join(lines).split("\n@@\n"):
        marked = [line or " " for line in hunk.splitlines()]
        assert all(line[0] in " +-" for line in marked), hunk
        old, new = ("".join(f"{line[1:]}\n" for line in marked if line[0] in kept) for kept in (" -", " +"))
        assert not text or text.count(old) == 1, f"{name} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new) if text else new
    return {**files, name: text}


def printed(text):
    """Return the lines of each block that shows what a program prints."""
    blocks = re.split(r"^```(.*)$", text, flags=re.MULTILINE)  # text, opening, block, closing, text, ...
    return [block.strip().splitlines() for kind, block in zip(blocks[1::4], blocks[2::4], strict=True) if not kind]
