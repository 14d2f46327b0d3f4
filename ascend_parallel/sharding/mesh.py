"""ProcessMesh: ranks in an array with named dimensions. Plans need no process; groups are made on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ascend_parallel.process_groups import time_limit
from ascend_parallel.process_groups.consistency import confirm_same

# Public since torch 2.14, where the older name warns.
_set_timeout: Callable[..., None] = getattr(dist, "set_timeout", c10d._set_pg_timeout)

Ranks = npt.NDArray[np.int64]
Key = tuple[object, ...]

# By default group: the DeviceMesh of each ProcessMesh, so that equal meshes share their groups, and the reverse.
_DEVICE_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[Key, DeviceMesh]] = WeakKeyDictionary()
_PROCESS_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, ProcessMesh]] = WeakKeyDictionary()


class ProcessMesh:
    """Global ranks in an array, such as ``ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])``."""

    def __init__(self, mesh: Any, dim_names: Sequence[str] | None = None) -> None:
        """Take nested lists, an array or a tensor of distinct ranks, and a name for each dimension (else d0, d1, ...).

        Raises `ValueError` for negative or repeated ranks, and for names that do not match the dimensions.
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
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: ProcessMesh | DeviceMesh) -> ProcessMesh:
        """Return `mesh`, or the equal `ProcessMesh` of a torch DeviceMesh, which then uses the DeviceMesh's groups."""
        if isinstance(mesh, ProcessMesh):
            return mesh
        known = _PROCESS_MESHES.setdefault(default_group(), {})
        if mesh not in known:
            known[mesh] = cls(mesh.mesh, mesh.mesh_dim_names)
            known[mesh]._device_mesh = mesh
        return known[mesh]

    @property
    def array(self) -> Ranks:
        """The ranks as a read-only array."""
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

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension by name."""
        return dict(zip(self._names, self.shape, strict=True))

    def size(self, name: str) -> int:
        """Return the size of a dimension by name."""
        return self.shape[self.dim(name)]

    def dim(self, name: str) -> int:
        """Return the index of a dimension by name."""
        if name not in self._names:
            raise ValueError(f"{name!r} is no dimension of this mesh; there are {', '.join(self._names)}")
        return self._names.index(name)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return a global rank's index on each mesh dimension, or None if the rank is not in the mesh."""
        return self._places.get(rank)

    def own_coordinate(self) -> tuple[int, ...]:
        """Return this process's index on each mesh dimension; raises `ValueError` on a rank that is not in the mesh."""
        rank = dist.get_rank()
        if rank not in self._places:
            raise ValueError(f"rank {rank} is not in {self}, so it has no part of the model")
        return self._places[rank]

    def ascends(self, dim: int) -> bool:
        """Tell whether the ranks ascend along a dimension, as the ranks of a process group do."""
        return bool((np.diff(self._array, axis=dim) > 0).all())

    def get_mesh_with_dim(self, name: str, index: int | None = None) -> ProcessMesh:
        """Return the mesh with dimension `name` first, or the submesh at `index` along `name`, without `name`."""
        dim = self.dim(name)
        rest = [dim_name for dim_name in self._names if dim_name != name]
        if index is None:
            return ProcessMesh(np.moveaxis(self._array, dim, 0), [name, *rest])
        if not 0 <= index < self.shape[dim]:
            raise ValueError(f"index={index}: {name} has the size {self.shape[dim]}")
        part = self._array.take(index, axis=dim)
        return ProcessMesh(part, rest) if rest else ProcessMesh([int(part)])

    def __getitem__(self, key: str | tuple[str, ...] | int) -> ProcessMesh:
        """Return a submesh.

        By names: the submesh of these dimensions that contains this process (torch.distributed has to be
        initialised). By number: the submesh at that index of the first dimension.
        """
        if isinstance(key, int):
            return self.get_mesh_with_dim(self._names[0], key)
        names = (key,) if isinstance(key, str) else key
        dims = [self.dim(name) for name in names]
        rank = dist.get_rank()
        place = self.coordinate(rank)
        if place is None:
            raise ValueError(f"rank {rank} is not in {self}, so it has no {', '.join(names)} of its own")
        taken = tuple(slice(None) if dim in dims else place[dim] for dim in range(self.ndim))
        kept = sorted(dims)
        return ProcessMesh(self._array[taken].transpose([kept.index(dim) for dim in dims]), names)

    def device_mesh(self) -> DeviceMesh:
        """Return the torch DeviceMesh of the same ranks, on the accelerator if the default group has one.

        A mesh of another device type is made by `ProcessMesh.of`. Equal meshes share one DeviceMesh. Its first call
        makes process groups: every rank of the default group has to call it at the same place, also ranks outside the
        mesh.
        """
        if self._device_mesh is not None:
            return self._device_mesh
        known = _DEVICE_MESHES.setdefault(default_group(), {})
        if self._key not in known:
            self._confirm_all_come()
            array = torch.tensor(self._array)
            mesh = known[self._key] = DeviceMesh(default_device(), array, mesh_dim_names=self._names)
            if mesh.get_coordinate() is not None:
                for group in mesh.get_all_groups():  # torch would let them wait for half an hour
                    _set_timeout(time_limit(group), group)
        self._device_mesh = known[self._key]
        return self._device_mesh

    def _confirm_all_come(self) -> None:
        """Raise if a rank does not come, or comes with another mesh: torch would wait half an hour for its groups."""
        if self.ndim == 1 and len(self._places) == dist.get_world_size():
            return  # the default group is its group
        place = f"the groups of {self}"
        confirm_same(
            default_group(),
            place,
            {"mesh": str(self)},
            f"ranks came to {place} with other meshes",
            "Make the same meshes in the same order on every rank",
            topic="meshes",
            hint="it has stopped, or does not make this mesh (every rank makes every mesh, also one that it is not in)",
        )

    @property
    def has_groups(self) -> bool:
        """Tell whether `device_mesh` was called for this mesh or an equal mesh."""
        return self._device_mesh is not None or self._key in _DEVICE_MESHES.get(default_group(), {})

    def group(self, dim: int | str) -> dist.ProcessGroup:
        """Return this rank's process group along a dimension; see `device_mesh` for the ranks that have to call it."""
        index = self.dim(dim) if isinstance(dim, str) else dim
        return self.device_mesh().get_group(index)

    def places_in_group(self, dim: int, place: Sequence[int]) -> list[int]:
        """Return, for each rank of the group along `dim` through `place`, its index along `dim`, in group order.

        torch orders a group by global rank, whatever the order in the mesh.
        """
        line = self._array[tuple(slice(None) if axis == dim else index for axis, index in enumerate(place))]
        return [int(index) for index in np.argsort(line)]

    def has_ranks_of(self, other: ProcessMesh) -> bool:
        """Tell whether the other mesh has the same ranks at the same indices; dimension names may differ."""
        return self._key[:2] == other._key[:2]

    def __eq__(self, other: object) -> bool:
        """Compare ranks and names."""
        return isinstance(other, ProcessMesh) and self._key == other._key

    def __hash__(self) -> int:
        """Hash ranks and names."""
        return hash(self._key)

    def __repr__(self) -> str:
        """Return the constructor call of an equal mesh."""
        return f"ProcessMesh({self._array.tolist()}, dim_names={list(self._names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle ranks and names; groups belong to a process."""
        return ProcessMesh, (self._array.tolist(), list(self._names))


def forget_groups() -> None:
    """Make meshes create their groups again, after the process groups were destroyed on all ranks."""
    _DEVICE_MESHES.clear()
    _PROCESS_MESHES.clear()


def default_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device type of a group's collectives (None: of the default group's): the accelerator's, or "cpu"."""
    types = [device.type for device in (group or default_group())._device_types]
    # A torch that was built for an accelerator names it also on a machine without one, as gloo's groups do.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None and accelerator.type in types else "cpu"


def default_group() -> dist.ProcessGroup:
    """Return the default group; raise `RuntimeError` if torch.distributed is not initialised."""
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
        raise ValueError(f"mesh={array.tolist()}: give ranks of 0 or more, each once")
    return array.astype(np.int64)
