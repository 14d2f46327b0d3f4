"""Randomly damaged files of every format: reading gives an error of the package that names the file, or a result.

Two kinds of damage: of bytes (as a disk or a copy does it), and of the values that a text holds (as an editor does it).
The draws are seeded, so that a failure comes again.
"""

import contextlib
import copy
import json
import pickle
import random
import struct

import pytest
import torch
from checkpoints import are_as_in, model_tensors, tensor_shards
from marks import promise
from test_chunk_plan import PLAN
from timelines import made

from ascend_parallel import SettingsError
from ascend_parallel.diagnostics.timeline import files as timeline_files
from ascend_parallel.diagnostics.timeline.files import TimelineError
from ascend_parallel.diagnostics.timeline.merge import merge
from ascend_parallel.environment import read_settings
from ascend_parallel.training.checkpoint import (
    CheckpointError,
    CheckpointReader,
    load,
    read_safetensors,
    save,
    write_safetensors,
)
from ascend_parallel.training.checkpoint import folder as folders
from ascend_parallel.training.checkpoint.megatron import megatron_state
from ascend_parallel.tuning.measured.chunk_plan import load_plan

VALUES = [
    None,
    True,
    [],
    {},
    [[]],
    "",
    "x",
    "\ud800",
    -1,
    0,
    0.5,
    float("inf"),
    float("nan"),
    10**20,
    10**400,
    "9" * 40,
]
FEW, MANY = 60, 3000


def bytes_damaged(raw, draw):
    """Return bytes with 1 to 3 places changed, removed, doubled or inserted."""
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(raw) + 1), draw.choice([1, 1, 1, 2, 8, 64, 1000])
        shard = raw[at : at + length]
        new = draw.choice([b"", shard * 2, bytes(b ^ (1 << draw.randrange(8)) for b in shard), draw.randbytes(length)])
        raw = draw.choice([raw[:at] + new + raw[at + length :], raw[:at] + new + raw[at:], raw[:at]])
        raw = raw or b"\n"
    return raw


def places(value, path=()):
    """Return the path of every value inside lists and dicts."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in inner for deeper in places(child, (*path, key)))]


def values_damaged(value, draw):
    """Return a JSON value with 1 to 3 of its values replaced, removed, doubled or used as a key."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        paths = [path for path in places(value) if path]
        if not paths:
            return draw.choice(VALUES)
        *path, key = draw.choice(paths)
        holder = value
        for step in path:
            holder = holder[step]
        change = draw.randrange(4)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[draw.choice(["", "x", "../x", "\u0664"])] = holder.pop(key)
        elif change == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = draw.choice(VALUES)
    return value


def damaged_texts(value, draw):
    """Return JSON damaged in its values, or in its bytes."""
    if draw.random() < 0.3:
        return bytes_damaged(json.dumps(value).encode(), draw)
    return json.dumps(values_damaged(value, draw)).encode()


def damaged_timeline(folder, draw):
    """Damage a line of the file of a rank; return its reader and the file."""
    header, passes = made(1, steps=2, clocks=[{"to": 0, "offset": 3, "error": 5}])
    path = timeline_files.write(folder, header, passes)
    timeline_files.write(folder, *made(0, steps=2))
    lines = path.read_bytes().splitlines(keepends=True)
    number = draw.randrange(len(lines))
    lines[number] = damaged_texts(json.loads(lines[number]), draw) + b"\n"
    path.write_bytes(b"".join(lines))
    return lambda: merge(folder).write(folder, False), path, TimelineError


def damaged_plan(folder, draw):
    path = folder / "plan.json"
    path.write_bytes(damaged_texts(PLAN.as_dict(), draw))
    return lambda: (load_plan(str(path)), hash(read_settings({"COC_PLAN": str(path)}))), path, SettingsError


CONFIG = {"num_chunks": 4, "k_min": 512, "order": "auto", "fused": True, "customized_coc": {"[64, 32, 16]": [16, 48]}}
TOML = b'num_chunks = 4\nk_min = 512\norder = "auto"\n[customized_coc]\n"[64, 32, 16]" = [16, 48]\n'


def damaged_config(folder, draw):
    path = folder / draw.choice(["coc.json", "coc.toml"])
    path.write_bytes(damaged_texts(CONFIG, draw) if path.suffix == ".json" else bytes_damaged(TOML, draw))
    return lambda: hash(read_settings({"COC_CONFIG": str(path)})), "", SettingsError  # or the key of a value


def checkpoint_of(folder):
    return save(folder / "c", step=3, model=tensor_shards(model_tensors(), "one process", 0), values={"at": 7}).path


def load_and_compare(checkpoint):
    model = tensor_shards(model_tensors(), "one process", 0, blank=True)
    before = tensor_shards(model_tensors(), "one process", 0, blank=True)
    try:
        loaded = load(checkpoint, model=model)
    except CheckpointError:
        assert are_as_in(model, before)  # nothing was filled
        raise
    assert are_as_in(model, tensor_shards(model_tensors(), "one process", 0))
    assert isinstance(loaded.step, int)
    assert CheckpointReader.open(checkpoint).values.keys() == {"at"}


def damaged_manifest(folder, draw):
    """A manifest whose values changed, mostly with the digest that belongs to them."""
    path = checkpoint_of(folder) / "manifest.json"
    told = json.loads(path.read_text())
    told.pop("digest")
    changed = values_damaged(told, draw)
    if isinstance(changed, dict) and draw.random() < 0.8:
        with contextlib.suppress(ValueError):  # a number of more digits than Python writes
            changed["digest"] = folders.digest_of(changed)
    path.write_text(json.dumps(changed))
    return lambda: load_and_compare(path.parent), path.parent, CheckpointError


def damaged_checkpoint(folder, draw):
    path = draw.choice(sorted(checkpoint_of(folder).iterdir()))
    path.write_bytes(bytes_damaged(path.read_bytes(), draw))
    return lambda: load_and_compare(path.parent), path.parent, CheckpointError


def damaged_metadata(folder, draw):
    """A directory of Megatron-core's kind, which has no checksums."""
    checkpoint = checkpoint_of(folder)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    path = checkpoint / draw.choice([".metadata", ".metadata", "metadata.json"])
    raw = path.read_bytes()
    if path.name == ".metadata" and draw.random() < 0.5:
        found = pickle.loads(raw)
        name = draw.choice(sorted(found.state_dict_metadata))
        entry, place = found.state_dict_metadata[name], draw.choice(list(found.storage_data.values()))
        draw.choice(
            [
                lambda: setattr(place, "offset", draw.choice([-1, 10**9, 3])),
                lambda: setattr(place, "length", draw.choice([-1, 10**9, 0])),
                lambda: setattr(place, "relative_path", draw.choice(["../x", "", 3, "/etc/passwd"])),
                lambda: setattr(entry, "size", draw.choice([torch.Size([10**15]), (), None])),
                lambda: setattr(entry, "chunks", draw.choice([[], None, [3]])),
                lambda: found.state_dict_metadata.pop(name),
                lambda: setattr(found, "storage_data", None),
                lambda: setattr(found, "state_dict_metadata", [name]),
            ]
        )()
        path.write_bytes(pickle.dumps(found))
    else:
        path.write_bytes(bytes_damaged(raw, draw))
    return lambda: megatron_state(checkpoint), checkpoint, CheckpointError


def damaged_safetensors(folder, draw):
    path = folder / "model.safetensors"
    tensors = model_tensors()
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(path, kinds, tensors.__getitem__, {"format": "pt"})
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    if draw.random() < 0.7:
        text = damaged_texts(json.loads(raw[8 : 8 + length]), draw)
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    else:
        path.write_bytes(bytes_damaged(raw, draw))
    return lambda: read_safetensors(path), path, CheckpointError


FORMATS = {
    "timeline": damaged_timeline,
    "plan": damaged_plan,
    "config": damaged_config,
    "manifest": damaged_manifest,
    "checkpoint": damaged_checkpoint,
    "metadata": damaged_metadata,
    "safetensors": damaged_safetensors,
}


def try_many(folder, name, rounds, seed):
    """Damage a file `rounds` times; return how often it was refused."""
    refused = 0
    for number in range(rounds):
        own = folder / str(number)
        own.mkdir()
        read, place, error = FORMATS[name](own, random.Random(f"{name} {seed} {number}"))
        try:
            read()
        except error as found:
            refused += 1
            assert str(place) in str(found), (number, found)
            assert len(str(found)) < 20_000
        except BaseException as found:
            raise AssertionError(f"{name}, seed {seed}, round {number}: {type(found).__name__}: {found}") from found
    return refused


@promise("damaged-files")
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_refused_by_name_or_read(tmp_path, name):
    rounds = FEW // 3 if name in ("manifest", "checkpoint", "metadata") else FEW
    assert try_many(tmp_path, name, rounds, 1) > rounds // 4


@pytest.mark.stress
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files_are_refused_by_name_or_read(tmp_path, name):
    try_many(tmp_path, name, MANY // 10 if name in ("manifest", "checkpoint", "metadata") else MANY, 2)
