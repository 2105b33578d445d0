"""Weights as directories that servers load: each version complete, with the model's other files beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rlhf_host import Scratch, UserError
from rlhf_host.distributed import check_complete, parameter_names
from rlhf_host.protocols import Bucket, Buckets

KEPT = 2
"""Number of versions that stay: a server may still read the last but one."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


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
        self._expected = parameter_names(config)
        self._versions: list[Path] = []

    def copy(self, model: Path, version: int) -> Path:
        """Copies the model directory, which need not stay, as ``version``. Returns the directory."""
        return self._add(version, lambda directory: shutil.copytree(model, directory))

    def write(self, buckets: Buckets, version: int) -> Path:
        """Writes all weights, one file per bucket, as ``version``. Returns the directory.

        Raises:
            RunError: a weight of the model is missing.
        """

        def fill(directory: Path) -> None:
            shutil.copytree(self._others, directory)
            names: dict[str, str] = {}
            size = 0
            for number, bucket in enumerate(buckets):
                file = f"model-{number + 1:05d}.safetensors"
                whole = _apart(bucket)
                save_file(whole, directory / file, metadata={"format": "pt"})
                names.update(dict.fromkeys(whole, file))
                size += sum(tensor.nbytes for tensor in whole.values())
            check_complete(self._expected, set(names))
            index = {"metadata": {"total_size": size}, "weight_map": names}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

        return self._add(version, fill)

    def _add(self, version: int, fill: Any) -> Path:
        path = self._scratch.path / f"version-{version:06d}"
        aside = path.with_name(f".{path.name}.partial")
        for left in (aside, path):
            shutil.rmtree(left, ignore_errors=True)
        try:
            fill(aside)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        aside.rename(path)
        self._versions = [*(one for one in self._versions if one != path), path]
        while len(self._versions) > KEPT:
            shutil.rmtree(self._versions.pop(0), ignore_errors=True)
        return path

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
