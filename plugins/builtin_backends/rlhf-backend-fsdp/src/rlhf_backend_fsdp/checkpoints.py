"""Optimizer state in PyTorch's distributed checkpoints (DCP): written from copies, read as data only, for any number of ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlhf_backend_fsdp.splitting import Spread
from rlhf_host import RunError, UserError
from rlhf_host.protocols import Writer

SHAPE = "fsdp.json"
STATE = "state"
FORMER: dict[str, Any] = {"optimizer": "AdamW"}
"""Properties of checkpoints that do not name them."""
OTHER = "take another checkpoint of the run, or start a new run"


def host_copy(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, of this process's piece where the tensor is split."""
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    mesh = tensor.device_mesh
    if mesh.device_type != "cpu":
        mesh = DeviceMesh("cpu", mesh.mesh, _init_backend=False, _rank=dist.get_rank())
    return Spread(mesh, tensor.placements, tensor.shape).around(tensor.to_local().to("cpu", copy=True))


def writer(directory: Path, state: dict[str, Tensor], shape: Mapping[str, Any], group: Any) -> Writer:
    """Returns a function that writes copies. It is collective in ``group``, on any thread."""

    def write() -> None:
        try:
            dcp.save(state, storage_writer=DataWriter(directory / STATE), process_group=group)
        except CheckpointException as error:  # of any rank; it is no Exception
            raise RunError(f"{directory} cannot be written: {_in_one_line(error)}") from error
        if dist.get_rank(group) == 0:
            (directory / SHAPE).write_text(json.dumps(shape), "utf-8")

    return write


def load(directory: Path, state: dict[str, Tensor], shape: Mapping[str, Any], group: Any) -> int:
    """Reads a checkpoint into ``state``. Collective. Returns its number of updates.

    Args:
        shape: properties that must be those of the run that wrote it.

    Raises:
        UserError: another backend, other properties or another model wrote it, or it cannot be read as data.
    """
    updates = check_shape(directory, shape)
    reader = DataReader(directory / STATE)
    if different := reader.shapes().items() ^ {(name, tuple(tensor.shape)) for name, tensor in state.items()}:
        raise UserError(f"{directory} is of another model: its {min(different)[0]} is not that of this run; {OTHER}")
    try:
        dcp.load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # of any rank: a damaged file can raise anything
        raise UserError(f"{directory} cannot be read: {_in_one_line(error)}; {OTHER}") from error
    return updates


def check_shape(directory: Path, shape: Mapping[str, Any]) -> int:
    """Returns the updates of a checkpoint. Raises ``UserError`` as ``load`` does, of all but its tensors."""
    try:
        saved = FORMER | json.loads((directory / SHAPE).read_text("utf-8"))
        updates = int(saved["updates"])
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} was not written by the fsdp backend: resume with the backend it was started with"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{directory / SHAPE} is damaged: {OTHER}") from error
    for name, value in shape.items():
        if saved.get(name) != value:
            raise UserError(
                f"{directory} was written with {name} {saved.get(name)}, this run has {value}: resume with the same"
            )
    return updates


def names(directory: Path) -> set[str]:
    """Returns the names of all tensors. Raises ``UserError`` as ``load`` does."""
    return set(DataReader(directory / STATE).shapes())


class DataWriter(dcp.FileSystemWriter):
    """Writes no paths of this machine."""

    def storage_meta(self) -> None:
        return None


class DataReader(dcp.FileSystemReader):
    """Reads tensors alone. DCP's own reader lets the description of a checkpoint run code."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor. Raises ``UserError`` if there is anything else."""
        described = self.read_metadata().state_dict_metadata
        return {name: tuple(each.size) for name, each in described.items() if isinstance(each, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with path.open("rb") as file:
                described = _Data(file).load()
            tensors = all(isinstance(each, TensorStorageMetadata) for each in described.state_dict_metadata.values())
        except pickle.UnpicklingError as error:
            raise _more_than_data(path) from error
        except Exception as error:  # a damaged file can raise anything
            raise UserError(f"{path} is missing or damaged: {OTHER}") from error
        if not tensors:
            raise _more_than_data(path)
        described.storage_meta = StorageMeta(load_id=self.load_id)
        return described  # type: ignore[no-any-return]


class _Data(pickle.Unpickler):
    """Knows the classes of descriptions, and no others."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "float32", "bfloat16", "float16", "float64", "int64"),
    "torch.serialization": ("_get_layout",),
}
KNOWN = {(module, name) for module, names in _CLASSES.items() for name in names}


def _in_one_line(error: CheckpointException) -> str:
    """Returns what went wrong on the first rank where something did."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}"


def _more_than_data(path: Path) -> UserError:
    return UserError(
        f"{path} holds more than tensors, so reading it could run code, which is refused: it was not written by a run; {OTHER}"
    )
