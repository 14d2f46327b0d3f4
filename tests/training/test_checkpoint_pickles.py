"""The pickle inside a checkpoint runs no code, whichever function reads it."""

import json
import os
import pickle

import pytest
import torch
from checkpoints import model_tensors, tensor_shards
from marks import promise
from torch.distributed.checkpoint.planner import WriteItemType
from typer.testing import CliRunner

from ascend_parallel.cli.app import app
from ascend_parallel.training.checkpoint import (
    CheckpointError,
    CheckpointReader,
    load,
    save,
    whole_state,
)
from ascend_parallel.training.checkpoint import folder as folders
from ascend_parallel.training.checkpoint.dcp_files import unpickle
from ascend_parallel.training.checkpoint.megatron import load_megatron, megatron_state

ONE = "one process"


class PickledCall:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


def signed(checkpoint):
    """Update the manifest of a checkpoint of ours for its changed metadata."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    content.pop("digest")
    content["files"][".metadata"] = list(folders.checksum(checkpoint / ".metadata"))
    path.write_text(json.dumps({**content, "digest": folders.digest_of(content)}))


@pytest.fixture
def poisoned(tmp_path):
    """Checkpoints, ours and Megatron-core's, whose metadata creates a file when unpickled; and this file."""
    mark = tmp_path / "mark"
    found = []
    for name in ("ours", "megatron"):
        path = save(tmp_path / name, step=1, model=tensor_shards(model_tensors(), ONE, 0)).path
        metadata = pickle.loads((path / ".metadata").read_bytes())
        metadata.planner_data = PickledCall(os.system, f"touch {mark}")
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        found.append(path)
    signed(found[0])
    (found[1] / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return *found, mark


@promise("checkpoint-no-code")
def test_no_way_of_reading_a_checkpoint_runs_what_its_metadata_names(poisoned, tmp_path):
    ours, megatron, mark = poisoned
    model = tensor_shards(model_tensors(), ONE, 0)
    for read in (
        lambda: load(ours, model=model),
        lambda: whole_state(ours),
        lambda: CheckpointReader.open(ours).values,
        lambda: load_megatron(megatron, model),
        lambda: megatron_state(megatron),
    ):
        with pytest.raises(CheckpointError, match=r"\.metadata is .*names (posix|os)\.system, which no metadata needs"):
            read()
    for path in ours, megatron:
        for to in ("dcp", "torch", "safetensors"):
            done = CliRunner().invoke(app, ["checkpoint", "convert", str(path), str(tmp_path / "out"), "--to", to])
            assert (done.exit_code, "system" in done.output) == (2, True)
        done = CliRunner().invoke(app, ["checkpoint", "diff", str(path), str(path)])
        assert (done.exit_code, "system" in done.output) == (2, True)
    assert CliRunner().invoke(app, ["checkpoint", "show", str(ours)]).exit_code == 2
    assert not mark.exists()
    pickle.loads((ours / ".metadata").read_bytes())
    assert mark.exists()  # the attack works


def test_all_ranks_are_told_by_a_rank_that_meets_such_a_pickle(ranks, poisoned):
    content = ranks(2).run(load_poisoned, poisoned[0])
    assert content[0] == content[1]
    assert "system" in content[0]
    assert not poisoned[2].exists()


def load_poisoned(group, path):
    with pytest.raises(CheckpointError) as error:
        load(path, model=tensor_shards(model_tensors(), ONE, 0))
    return str(error.value)


@pytest.mark.parametrize(
    "call",
    [
        PickledCall(eval, "1"),
        PickledCall(getattr, "x", "upper"),
        PickledCall(torch.load, "x"),
        PickledCall(torch.serialization.load, "x"),
        PickledCall(torch.hub.load, "x"),
        PickledCall(os.path.join, "x"),
        PickledCall(open, "written", "w"),
        PickledCall(__import__, "os"),
    ],
)
def test_calls_of_many_kinds_are_refused(call):
    with pytest.raises(pickle.UnpicklingError, match="which no metadata needs; it is not loaded"):
        unpickle(pickle.dumps(call))


def test_dotted_names_do_not_reach_through_what_is_allowed():
    # protocol 4 names an attribute of an attribute: torch.Size.__class__ and others.
    for name in ("Size.__class__", "Size.__new__", "float32.__reduce__"):
        raw = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(pickle.UnpicklingError, match="which no metadata needs"):
            unpickle(raw)


def test_members_of_enumerations_as_python_3_11_2_pickles_them():
    assert unpickle(pickle.dumps(PickledCall(getattr, WriteItemType, "TENSOR"))) is WriteItemType.TENSOR
    for owner, name in ((WriteItemType, "__init__"), (WriteItemType, "mro"), (torch.Size, "numel")):
        with pytest.raises(pickle.UnpicklingError, match=r"names an attribute '.*' of .*, which no metadata needs"):
            unpickle(pickle.dumps(PickledCall(getattr, owner, name)))
