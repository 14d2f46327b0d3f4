"""The messages of the package's source: every text that can be raised or logged, "…" for what is filled in."""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ascend_parallel.ops.decision import SENTENCES

ROOT = Path(__file__).parents[2]
SOURCES = ("ascend_parallel", "ops", "patches", "ascend_parallel_autoload")
LOGGING = {"warning", "info", "error", "warn", "say_once", "log_uncovered", "_warn_once"}
FILLED = "…"
EVERY_DEGREE = "COC_DETERMINISTIC=tp: "  # what a DegreeError, which an arithmetic raises, begins with
CAUGHT = {"CannotExpandError", "_NotByRowsError"}  # by the package itself, always: no user sees them


@dataclass(frozen=True)
class Message:
    """A text of the source: its file and line, what raises or logs it, and its words."""

    place: str
    by: str
    text: str


def files():
    links = {ROOT / "ascend_parallel" / "ops", ROOT / "ascend_parallel" / "patches"}
    for name in SOURCES:
        path = ROOT / name
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        yield from (one for one in found if not links & set(one.parents))


def texts(node):
    """The texts that an expression can be: both of a choice, the sum of a sum; none if it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.sub(r"%[sdg]", FILLED, node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else FILLED for part in node.values)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.Lambda):
        return texts(node.body)
    if isinstance(node, ast.Call) and node.args and _refuses_degree(node):
        return [EVERY_DEGREE + text for text in texts(node.args[0])]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = texts(node.left) or [FILLED], texts(node.right) or [FILLED]
        return [one + other for one in left for other in right]
    return []


@functools.cache
def literals():
    """Every text of the source, docstrings too: what a page quotes has to be in one of them."""
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found += texts(node) if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp, ast.Call)) else []
    # Reasons, which follow one another.
    found += [f"{FILLED}; {re.sub('{[^}]*}', FILLED, sentence)}" for sentence in SENTENCES.values()]
    sources = (ROOT / "ops" / "csrc").glob("*.cpp")
    return found + [one for path in sources for one in re.findall(r'"([^"\n]*)"', path.read_text())]


def messages():
    """What is raised or logged with a text that the call itself has; not what the command line's own parser refuses."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node if _logs(node) else None
            if not isinstance(call, ast.Call) or not call.args:
                continue
            by = _name(call)
            if by in ("BadParameter", "AssertionError", "Exit", "SystemExit", *CAUGHT):
                continue
            for text in texts(call if _refuses_degree(call) else call.args[0]):
                yield Message(f"{path.relative_to(ROOT)}:{node.lineno}", by, text)


def _name(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _logs(node):
    return isinstance(node, ast.Call) and (_name(node) in LOGGING or _refuses_degree(node))


def _refuses_degree(call):
    """Whether a call makes a DegreeError: the class, or ``settings.arithmetic.refuse``."""
    asked = _name(call) == "refuse" and getattr(call.func, "value", None)
    return _name(call) == "DegreeError" or (bool(asked) and getattr(asked, "attr", "") == "arithmetic")


@functools.cache
def raised():
    """The names of the package's own classes of errors."""
    found = set()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and re.search(r"(Error|Exception)$", node.name):
                found.add(node.name)
    return found - CAUGHT


def stands_for(quoted, text):
    """Whether a text has the parts of a quoted message, one after another."""
    position = 0
    for part in quoted.split(FILLED):
        found = text.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True
