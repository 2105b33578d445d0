"""Weights that servers get: each version complete, in memory or as a model directory with the model's other files."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_host import RunError, Scratch, UserError
from rlhf_host.distributed import as_in_files, check_complete, outline_of, parameter_names
from rlhf_host.protocols import Bucket, Buckets

KEPT = 2
"""Number of versions that stay as directories: a server may still read the last but one."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


class Stored:
    """The weights of one version. Used from several threads.

    Args:
        directory: where they are.
        tensors: or the weights themselves, on the CPU,
        write: and what writes them into a directory, where a server reads no other way.
    """

    def __init__(
        self,
        directory: Path | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        write: Callable[[Mapping[str, Tensor]], Path] | None = None,
    ):
        self._directory, self._tensors, self._write = directory, tensors, write
        self._lock = threading.Lock()
        self.readers = 0
        """Number of servers that read the directory, which therefore stays."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    def directory(self) -> Path:
        """Returns a model directory with them; the first call may write it."""
        with self._lock:
            if self._directory is None:
                assert self._write is not None
                assert self._tensors is not None
                self._directory = self._write(self._tensors)
            return self._directory

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and weights, on the CPU and contiguous, in the same order every time.

        Raises:
            UserError: the directory has weights in another form than safetensors.
        """
        if self._tensors is not None:
            yield from self._tensors.items()
            return
        files = sorted(self.directory().glob("*.safetensors"))
        if not files:
            raise UserError(f"engine http: the model in {self.directory()} has no safetensors to send")
        for file in files:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - it is no mapping
                    yield name, weights.get_tensor(name).contiguous()


class WeightFiles:
    """Directories ``version-N`` in a new directory of this engine, which is removed with it.

    Args:
        root: where that directory is made; None: among the system's temporary ones.
        model: directory of the run's model.
        config: its configuration.

    Raises:
        UserError: nothing can be written there.
    """

    def __init__(self, root: Path | None, model: Path, config: Any):
        try:
            if root is not None:
                root = root.expanduser().absolute()
                root.mkdir(parents=True, exist_ok=True)
            self._scratch = Scratch("rlhf-http-", root or tempfile.gettempdir())
            self._scratch.path.chmod(0o755)  # servers may be another user's
            self._others = self._scratch.path / "model"
            shutil.copytree(model, self._others, ignore=shutil.ignore_patterns(*WEIGHTS))
        except OSError as error:
            raise UserError(f"engine http cannot write weights in {root or tempfile.gettempdir()}: {error.strerror}") from error
        self._expected, self._outline = parameter_names(config), outline_of(config)
        self._versions: list[tuple[Path, Stored]] = []

    def copy(self, model: Path, version: int) -> Stored:
        """Copies the model directory, which need not stay, as ``version``."""
        path = self._fill(version, lambda directory: shutil.copytree(model, directory))
        return self._list(path, Stored(path))

    def write(self, buckets: Buckets, version: int) -> Stored:
        """Writes all weights, one file per bucket, as ``version``.

        Raises:
            RunError: a weight of the model is missing.
        """
        path = self._write(self._parts(buckets), version)
        return self._list(path, Stored(path))

    def hold(self, buckets: Buckets, version: int) -> Stored:
        """Copies all weights into memory, as ``version``; a directory is written when one is asked for.

        Raises:
            RunError: a weight of the model is missing.
        """
        tensors = {name: tensor.clone() for part in self._parts(buckets) for name, tensor in part.items()}

        def write(held: Mapping[str, Tensor]) -> Path:
            path = self._write([held], version)
            self._list(path, stored)
            return path

        stored = Stored(tensors=tensors, write=write)
        return stored

    def _parts(self, buckets: Buckets) -> Iterator[dict[str, Tensor]]:
        """Yields the weights as the model's files have them. Raises ``RunError`` at the end if one is missing."""
        came = set[str]()
        for bucket in buckets:
            came.update(name for name, _ in bucket)
            yield _apart(as_in_files(self._outline, bucket))
        check_complete(self._expected, came)

    def _write(self, parts: Iterable[Mapping[str, Tensor]], version: int) -> Path:
        def fill(directory: Path) -> None:
            shutil.copytree(self._others, directory)
            names: dict[str, str] = {}
            size = 0
            for number, whole in enumerate(parts):
                file = f"model-{number + 1:05d}.safetensors"
                save_file(dict(whole), directory / file, metadata={"format": "pt"})
                names.update(dict.fromkeys(whole, file))
                size += sum(tensor.nbytes for tensor in whole.values())
            index = {"metadata": {"total_size": size}, "weight_map": names}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

        return self._fill(version, fill)

    def _fill(self, version: int, fill: Callable[[Path], Any]) -> Path:
        path = self._scratch.path / f"version-{version:06d}"
        aside = path.with_name(f".{path.name}.partial")
        for left in (aside, path):
            shutil.rmtree(left, ignore_errors=True)
        try:
            fill(aside)
            aside.rename(path)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):  # safetensors has an error of its own for a full disk
                raise RunError(f"engine http cannot write version {version} in {self._scratch.path}: {error}") from error
            raise
        return path

    def _list(self, path: Path, stored: Stored) -> Stored:
        """Notes a new directory, and removes old ones that no server reads."""
        self._versions = [*(one for one in self._versions if one[0] != path), (path, stored)]
        for old, owner in self._versions[:-KEPT]:
            if not owner.readers:
                shutil.rmtree(old, ignore_errors=True)
                self._versions.remove((old, owner))
        return stored

    def close(self) -> None:
        self._scratch.close()


def _apart(bucket: Bucket) -> dict[str, Tensor]:
    """Returns the tensors on the CPU. Those that share memory, as tied ones do, are copied: safetensors takes none."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for name, tensor in bucket:
            tensor = tensor.detach().cpu()
            place = tensor.untyped_storage().data_ptr()
            yield name, tensor.clone() if place in seen else tensor.contiguous()
            seen.add(place)

    return dict(tensors())
