"""ProcessMesh: ranks in an array whose dimensions have names. Plans need no process; groups are made when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Ranks = npt.NDArray[np.int64]
Key = tuple[object, ...]

# Device meshes of each default group, so that equal meshes share their groups, and back.
_DEVICE_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Key, DeviceMesh]] = WeakKeyDictionary()
_PROCESS_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, ProcessMesh]] = WeakKeyDictionary()


class ProcessMesh:
    """Global ranks in an array, such as ``ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])``."""

    def __init__(self, mesh: Any, dim_names: Sequence[str] | None = None) -> None:
        """Take nested lists, an array or a tensor of different ranks, and a name for each dimension (else d0, d1, ...).

        Raises `ValueError` for ranks that are negative or stand twice, and names that do not fit.
        """
        self._array = _ranks(mesh)
        self._array.setflags(write=False)
        names = tuple(dim_names) if dim_names is not None else tuple(f"d{dim}" for dim in range(self.ndim))
        if len(names) != self.ndim or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"dim_names={list(names)}: a mesh of shape {self.shape} needs {self.ndim} different names, such as "
                f"{[f'd{dim}' for dim in range(self.ndim)]}"
            )
        self._names = names
        self._key: Key = (self.shape, tuple(self._array.ravel().tolist()), names)
        self._places: dict[int, tuple[int, ...]] = {int(self._array[place]): place for place in np.ndindex(self.shape)}
        self._made: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: ProcessMesh | DeviceMesh) -> ProcessMesh:
        """Return `mesh`, or the same as a `ProcessMesh` if it is torch's; its groups are then used."""
        if isinstance(mesh, ProcessMesh):
            return mesh
        known = _PROCESS_MESHES.setdefault(_default_group(), {})
        if mesh not in known:
            known[mesh] = cls(mesh.mesh, mesh.mesh_dim_names)
            known[mesh]._made = mesh
        return known[mesh]

    @property
    def array(self) -> Ranks:
        """The ranks, read only."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(self._array.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._array.ndim

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Name of each dimension."""
        return self._names

    @property
    def process_ids(self) -> list[int]:
        """All ranks, row by row."""
        return list(self._places)

    def size(self, name: str) -> int:
        """Return the size of a dimension by name."""
        return self.shape[self.dim(name)]

    def dim(self, name: str) -> int:
        """Return the index of a dimension by name."""
        if name not in self._names:
            raise ValueError(f"{name!r} is no dimension of this mesh; there are {', '.join(self._names)}")
        return self._names.index(name)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return where a global rank stands, or None if it is not in the mesh."""
        return self._places.get(rank)

    def get_mesh_with_dim(self, name: str, index: int | None = None) -> ProcessMesh:
        """Return the mesh with the named dimension first, or its `index`-th part along it (without that dimension)."""
        dim = self.dim(name)
        rest = [other for other in self._names if other != name]
        if index is None:
            return ProcessMesh(np.moveaxis(self._array, dim, 0), [name, *rest])
        if not 0 <= index < self.shape[dim]:
            raise ValueError(f"index={index}: {name} has the size {self.shape[dim]}")
        part = self._array.take(index, axis=dim)
        return ProcessMesh(part, rest) if rest else ProcessMesh([int(part)])

    def __getitem__(self, which: str | tuple[str, ...] | int) -> ProcessMesh:
        """Return a part of the mesh.

        By names: the line, plane, ... of these dimensions that this process stands in (torch.distributed has to be
        initialised). By number: that part of the first dimension.
        """
        if isinstance(which, int):
            return self.get_mesh_with_dim(self._names[0], which)
        names = (which,) if isinstance(which, str) else which
        dims = [self.dim(name) for name in names]
        rank = dist.get_rank()
        place = self.coordinate(rank)
        if place is None:
            raise ValueError(f"rank {rank} is not in {self}, so it has no {', '.join(names)} of its own")
        taken = tuple(slice(None) if dim in dims else place[dim] for dim in range(self.ndim))
        kept = sorted(dims)
        return ProcessMesh(self._array[taken].transpose([kept.index(dim) for dim in dims]), names)

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return torch's mesh of the same ranks, by default of the accelerator if the default group has one.

        Made once for equal meshes. Making it makes process groups: every rank of the default group has to call it at
        the same place, also those that are not in the mesh.
        """
        device_type = device_type or (self._made.device_type if self._made is not None else default_device())
        if self._made is not None and self._made.device_type == device_type:
            return self._made
        known = _DEVICE_MESHES.setdefault(_default_group(), {})
        key = (*self._key, device_type)
        if key not in known:
            known[key] = DeviceMesh(device_type, torch.tensor(self._array), mesh_dim_names=self._names)
        self._made = known[key]
        return self._made

    @property
    def has_groups(self) -> bool:
        """Tell whether `device_mesh` was called, for this mesh or an equal one."""
        return self._made is not None or (*self._key, default_device()) in _DEVICE_MESHES.get(_default_group(), {})

    def group(self, dim: int | str) -> dist.ProcessGroup:
        """Return the process group of this rank's line along a dimension; see `device_mesh` for who has to call it."""
        index = self.dim(dim) if isinstance(dim, str) else dim
        return self.device_mesh().get_group(index)

    def places_in_group(self, dim: int, place: Sequence[int]) -> list[int]:
        """Return the places along `dim`, on the line through `place`, of the group's ranks in their order.

        torch orders a group by global rank, whatever the order in the mesh.
        """
        line = self._array[tuple(slice(None) if other == dim else index for other, index in enumerate(place))]
        return [int(index) for index in np.argsort(line)]

    def has_ranks_of(self, other: ProcessMesh) -> bool:
        """Tell whether the other mesh has the same ranks at the same places, whatever the names."""
        return self._key[:2] == other._key[:2]

    def __eq__(self, other: object) -> bool:
        """Compare ranks and names."""
        return isinstance(other, ProcessMesh) and self._key == other._key

    def __hash__(self) -> int:
        """Hash ranks and names."""
        return hash(self._key)

    def __repr__(self) -> str:
        """Return what makes the mesh."""
        return f"ProcessMesh({self._array.tolist()}, dim_names={list(self._names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle ranks and names; groups belong to a process."""
        return ProcessMesh, (self._array.tolist(), list(self._names))


def forget_groups() -> None:
    """Have meshes make their groups anew: those that were made have been destroyed, on all ranks."""
    _DEVICE_MESHES.clear()
    _PROCESS_MESHES.clear()


def default_device() -> str:
    """Return the type of the device the default group's collectives run on: an accelerator's if there is one."""
    types = [device.type for device in _default_group()._device_types]
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in types else "cpu"


def _default_group() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return dist.group.WORLD


def _ranks(mesh: Any) -> Ranks:
    if isinstance(mesh, torch.Tensor):
        mesh = mesh.cpu().numpy()
    array = np.array(mesh)
    if array.dtype.kind not in "iu" or array.ndim == 0 or array.size == 0:
        raise ValueError(f"mesh={mesh!r}: give nested lists of ranks, each list of one level as long as the others")
    ranks = array.ravel()
    if ranks.min() < 0 or len(np.unique(ranks)) != len(ranks):
        raise ValueError(f"mesh={array.tolist()}: ranks are 0 or more and stand in a mesh once")
    return array.astype(np.int64)
