"""Write emulated_ascend/argument_lists.tsv: which arguments op-plugin passes to each aclnn function, by its version.

    python argument_lists.py CHECKOUT 7.2.0 7.3.0 26.0.0 26.1.0 master

CHECKOUT is a clone of op-plugin, the versions are its branches. Read are the calls in its C++ (EXEC_NPU_CMD and its
like) and the functions that its table generates (gen_opapi in op_plugin_functions.yaml); neither runs. A line has a
function's name without aclnn, the letters of its arguments (emulated_ascend/csrc/aclnn.cpp), their names in the source,
and the versions that pass them so. A letter is ? where the type of a C++ expression is not found out.
"""

import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "emulated_ascend" / "argument_lists.tsv"
CALL = re.compile(
    r"\bEXEC_(?:GET_MAX_WORKSPACE|UPDATE|NPU|NO_FORMAT_CHECK|_)+_CMD(?:_SYNC|_EXT)?\s*\(\s*(aclnn\w+)\s*,"
)
FUNCTIONS = "op_plugin/config/op_plugin_functions.yaml"
LETTERS = {
    "Tensor": "t", "TensorWrapper": "t", "TensorWrapper*": "t", "optional<Tensor>": "o", "Scalar": "s",
    "optional<Scalar>": "z", "IntArrayRef": "I", "SymIntArrayRef": "I", "ArrayRef<SymInt>": "I",
    "ArrayRef<int64_t>": "I", "vector<int64_t>": "I", "OptionalIntArrayRef": "p", "optional<IntArrayRef>": "p",
    "OptionalArrayRef<SymInt>": "p", "OptionalSymIntArrayRef": "p", "TensorList": "L", "ITensorListRef": "L",
    "TensorListWrapper": "L", "vector<Tensor>": "L", "ArrayRef<Tensor>": "L", "optional<TensorList>": "p",
    "ArrayRef<Scalar>": "S", "vector<Scalar>": "S", "ArrayRef<bool>": "B", "bool": "b", "double": "d", "float": "f",
    "char*": "c", "string": "c", "string_view": "c", "char": "i", "ScalarType": "i", "ArrayRef<double>": "E",
    "ArrayRef<float>": "E", "vector<double>": "E", "vector<float>": "E",
}  # fmt: skip
INTEGERS = re.compile(
    r"(u?int\d*_t|int|long|unsigned( int)?|size_t|aclDataType|SymInt|ScalarType|MemoryFormat|\w+(Type|Mode|Enum))$"
)
SCHEMA = {
    "Tensor": "t", "Tensor?": "o", "Scalar": "s", "Scalar?": "z", "SymInt[]": "I", "int[]": "I", "SymInt[]?": "p",
    "int[]?": "p", "Tensor[]": "L", "Scalar[]": "S", "int": "i", "SymInt": "i", "bool": "b", "float": "d", "str": "c",
    "str?": "c", "ScalarType": "i", "ScalarType?": "i", "bool[]": "B", "float[]": "E", "float[]?": "p", "int?": "i",
    "bool?": "b",
}  # fmt: skip


# Expressions that tell their type; the first that matches counts.
EXPRESSIONS = (
    (r"-?\d+(LL?|U)?", "i"),
    (r"-?\d*\.\d*(e-?\d+)?f", "f"),
    (r"-?\d*\.\d*(e-?\d+)?", "d"),
    (r'".*"', "c"),
    (r".*\.(scalar_type|dtype)\(\)", "i"),
    (r".*\.item\(\)", "s"),
    (r".*\.(sizes|sym_sizes)\(\)", "I"),
    (r"(const_cast<char ?\*>|.*\.c_str\(\)).*", "c"),
    (r".*convert_to_acl_data_type\(.*", "i"),
    (r".*GetAclDataType\(.*", "i"),
    (r"(at::|c10::)?(IntArrayRef|SmallVector<.*>|ArrayRef<int64_t>)[({].*", "I"),
    (r"(at::|c10::)?Scalar\(.*", "s"),
    (r"(at::)?TensorList\(.*", "L"),
    (r"(at::)?Tensor\(.*", "t"),
    (r"c10::optional<at::Tensor>\(.*", "o"),
    (
        r"(npu_preparation|OpPreparation)::(apply_tensor|copy_\w*to_device|copy_scalar|copy_tensor|CastBackToOri)\w*\(.*",
        "t",
    ),
    (r"at::(empty|zeros|ones|full|cat|zeros_like|empty_like)\b.*", "t"),
    (r"op_infer::\w+\(.*|array_to_small_vector\(.*", "I"),
    (
        r".*\.(contiguous|to|transpose|clone|view|reshape|detach|(un)?squeeze|expand|mT|t|slice|select|narrow)\([^)]*\)",
        "t",
    ),
    (r".*(==|!=|&&|\|\||<=|>=).*(?<!\?).*", "b"),
)
CONDITION = re.compile(r"[^?]*(==|!=|&&|\|\||<=|>=)[^?]*")


def closing(text: str, begin: int) -> int:
    """Return the index behind the bracket that closes the one before `begin`."""
    depth = 1
    for index in range(begin, len(text)):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if not depth:
            return index + 1
    return len(text)


def split(text: str) -> list[str]:
    """Split at commas that no bracket holds."""
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [part.strip() for part in (*parts, current) if part.strip()]


def letter_of_type(text: str) -> str:
    """Return the letter of a C++ type."""
    text = re.sub(r"\b(const|static|constexpr|at|c10|std|torch|inline)\b(::)?|&|\s(?!int)", "", text).strip()
    text = re.sub(r"^SmallVector<(int64_t|SymInt),.*>$", "IntArrayRef", text)
    text = re.sub(r"^array<bool,.*>$", "ArrayRef<bool>", text)
    text = re.sub(r"^array<int64_t,.*>$", "IntArrayRef", text)
    if text in LETTERS:
        return LETTERS[text]
    return "i" if INTEGERS.match(text) else "?"


def declared(name: str, before: str) -> str:
    """Return the letter of a variable by its last declaration before a call."""
    pattern = (
        r"(?:^|[(,;{}]|\n)\s*((?:static\s+|constexpr\s+|const\s+)*[A-Za-z_][\w:]*(?:<[^;{}()=]*?>)?"
        r"(?:\s+const)?\s*[&*]?\s*(?:const\s+)?)"
        rf"(?<=[\s&*>]){re.escape(name)}\s*([,)=;({{\[])"
    )
    found = max(re.finditer(pattern, before), key=re.Match.start, default=None)
    if found is None or found[1].strip() in ("return", "else"):
        several = re.findall(
            rf"\n\s*(?:const )?([\w:]+(?:<[^;=()]*?>)?) \w+(?:, \w+)*, {re.escape(name)}\s*[,;]", before
        )
        return letter_of_type(several[-1]) if several else "?"
    kind = found[1].strip()
    if "auto" not in kind:
        return "c" if found[2] == "[" and kind == "char" else letter_of_type(kind)
    if found[2] != "=":
        return "?"
    end = before.find(";", found.end())
    return letter_of(before[found.end() : end].strip(), before[: found.start()])


def letter_of(expression: str, before: str, depth: int = 0) -> str:
    """Return the letter of an expression; `before` is the source above it."""
    text = " ".join(expression.split())
    if depth > 5:
        return "?"
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        return {"true": "b", "false": "b", "nullptr": "p"}.get(text) or declared(text, before)
    for pattern, letter in EXPRESSIONS:
        if re.fullmatch(pattern, text):
            return letter
    if CONDITION.fullmatch(text):
        return "b"
    if element := re.fullmatch(r"(\w+)\[\w+\]", text):
        return {"L": "t", "S": "s"}.get(declared(element[1], before), "?")
    if cast := re.match(r"(?:static|const|reinterpret)_cast<([^>]*)>", text):
        return letter_of_type(cast[1])
    if choice := re.match(r"[^?]*\?(.*?)(?<!:):(?!:)(.*)$", text):
        letters = {letter_of(part.strip(), before, depth + 1) for part in choice.groups()} - {"?"}
        return min(letters, default="?")
    if value := re.fullmatch(r"(.*?)\.(?:value_or|value)\((.*)\)", text):
        letter = letter_of(value[2], before, depth + 1) if value[2] else "?"
        own = letter_of(value[1], before, depth + 1)
        return {"o": "t", "z": "s", "p": "I"}.get(own, letter)
    return "?"


def calls(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, letters and arguments of each call in a C++ file."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.S)
    for call in CALL.finditer(source):
        if source[source.rfind("\n", 0, call.start()) + 1 :].lstrip().startswith("#define"):
            continue
        arguments = split(source[call.end() : closing(source, call.end()) - 1])
        letters = "".join(letter_of(argument, source[: call.start()]) for argument in arguments)
        yield call[1], letters, ",".join(re.sub(r"\s+", "", argument) for argument in arguments)


def generated(table: str) -> Iterator[tuple[str, str, str]]:
    """Yield the same of each function that op-plugin generates from its table."""
    for block in re.split(r"\n  - func: ", table)[1:]:
        run = re.search(r"\n {6}exec: '?([^\n']*)", block)
        if run is None:
            continue
        schema = block[: block.index("\n")].strip().strip("'\"")
        head, _, back = schema.partition(") -> ")
        types = {}
        for argument in split(head[head.index("(") + 1 :]):
            if argument == "*":
                continue
            kind, _, name = argument.partition("=")[0].strip().rpartition(" ")
            kind = re.sub(r"\([a-z]!?( -> [^)]*)?\)", "", kind)
            types[name] = SCHEMA.get(re.sub(r"\[\d+\]", "[]", kind), "?")
        for name, value in re.findall(
            r"\n {8}(\w+): '?(.*?)'?(?=\n)", (re.search(r"new_params:((\n {8}.*)+)", block) or ["", ""])[1]
        ):
            types[name] = letter_of(value, "") if not re.fullmatch(r"\w+", value) else types.get(value, "?")
        outs = re.findall(r"\n {6}(out\d?|\w*result\w*): *(?=\n|$)", block)
        types |= dict.fromkeys(outs, "t")
        name, *arguments = split(run[1])
        if not arguments:
            out = len(re.findall("Tensor", back)) if "!" not in schema else 0
            arguments = [*(name for name in types if name not in outs), *(outs or ["out"] * out)]
            types.setdefault("out", "t")
        yield name, "".join(types.get(argument, "?") for argument in arguments), ",".join(arguments)
        for number, other in re.findall(r"\n +- param: (\w+)\n +exec: (aclnn\w+)", block):
            scalar = types | {number: "s"}
            yield other, "".join(scalar.get(argument, "?") for argument in arguments), ",".join(arguments)


def lists(checkout: str, version: str) -> set[tuple[str, str, str]]:
    """Return all lists of a version."""
    packed = subprocess.run(["git", "-C", checkout, "archive", version, "op_plugin"], check=True, capture_output=True)
    found = set()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        for member in files:
            if member.name == FUNCTIONS:
                found |= set(generated(files.extractfile(member).read().decode()))
            elif member.name.endswith((".cpp", ".h")) and "utils/op_api_common" not in member.name:
                found |= set(calls(files.extractfile(member).read().decode()))
    return {(name.removeprefix("aclnn"), letters, words) for name, letters, words in found}


def main() -> None:
    """Write the table."""
    checkout, *versions = sys.argv[1:]
    of_list: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for version in versions:
        for name, letters, words in sorted(lists(checkout, version)):
            _, known = of_list.setdefault((name, letters), (words, []))
            if version not in known:
                known.append(version)
    rows = [
        "\t".join((name, letters, words, " ".join(known)))
        for (name, letters), (words, known) in sorted(of_list.items())
    ]
    TABLE.write_text("\n".join(rows) + "\n")
    print(f"{len({name for name, _ in of_list})} functions, {len(of_list)} lists of arguments")


if __name__ == "__main__":
    main()
