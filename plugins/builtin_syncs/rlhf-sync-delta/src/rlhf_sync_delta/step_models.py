"""Models of a run's kept steps, written as directories: the entry point of ``rlhf.step_models``."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.runs import RunDirectory
from rlhf_host.settings import plain, read_yaml
from rlhf_sync_delta import FOLDER
from rlhf_sync_delta.files import rebuild, steps_of
from rlhf_sync_delta.states import State

_UNTIL = re.compile(r"\.until-step-(\d+)$")
"""End of the names of settings that were in force up to a step."""
WEIGHTS = (".safetensors", ".safetensors.index.json")


class KeptSteps:
    """``rlhf_host.protocols.StepModels`` of the steps that the weight sync has kept."""

    def steps(self, run: Path) -> list[int]:
        folders = _folders(run)
        kept = {folder: steps_of(folder) for folder in dict.fromkeys(folder for _, folder in folders) if folder is not None}
        return [step for folder, steps in kept.items() for step in steps if _folder(folders, step) == folder]

    def write(self, run: Path, step: int, directory: Path) -> None:
        folder = _folder(_folders(run), step)
        if folder is None:
            raise UserError(f"{run} has not kept step {step}")
        _write(run, rebuild(folder, step), directory)


KEPT = KeptSteps()


def _folders(run: Path) -> list[tuple[float, Path | None]]:
    """Returns where the run kept its steps, by the last step for which that is so: a run that is resumed may have another sync, or
    directory, from then on. None: it kept none.
    """
    before = [(int(match[1]), path) for path in run.glob("config.yaml.until-step-*") if (match := _UNTIL.search(path.name))]
    found: list[tuple[float, Path | None]] = []
    for last, path in [*sorted(before), (math.inf, run / "config.yaml")]:
        found.append((last, _folder_of(run, plain(read_yaml(path))) if path.is_file() else run / FOLDER))
    return found


def _folder_of(run: Path, settings: Any) -> Path | None:
    sync = settings.get("sync") if isinstance(settings, dict) else None
    if not isinstance(sync, dict) or str(sync.get("name")).rpartition(":")[2] != "delta":
        return None
    directory = sync.get("directory")
    return Path(directory).expanduser() if directory else run / FOLDER


def _folder(folders: Sequence[tuple[float, Path | None]], step: int) -> Path | None:
    """Returns where a step is. A run that is resumed after it with this sync begins by writing it, too."""
    at, after = (next(folder for last, folder in folders if last >= place) for place in (step, step + 1))
    return at or after


def _write(run: Path, state: State, directory: Path) -> None:
    """Writes the weights as the run writes its own models: beside the configuration and the tokenizer of one of them, or of the
    model that it began with, and with all that this one carries.
    """
    from rlhf_host.models import load_model, load_tokenizer, quiet_transformers, save_model, save_tokenizer
    from rlhf_host.settings import RoleConfig

    begun = RoleConfig(**RunDirectory(run).settings["roles"]["actor"])
    own = next((model for model in _models(run) if (model / "config.json").is_file()), None)
    changes = {"adapter": None, "quantize": None, "device": "cpu"} | ({} if own is None else {"model": str(own)})
    model = load_model(begun.model_copy(update=changes))
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    # Weights that are equal share their memory here, and are no tied ones.
    weights = {name: tensor.clone() for name, tensor in state.tensors.items() if name not in tied}
    save_model(model, directory, weights)
    if own is None:
        with quiet_transformers():
            save_tokenizer(load_tokenizer(begun), directory)
    else:
        for path in own.iterdir():
            if path.is_file() and not path.name.endswith(WEIGHTS):
                shutil.copyfile(path, directory / path.name)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values() if tensor.is_floating_point()}
    for key in ("dtype", "torch_dtype"):
        if key in config and len(types) == 1:  # as the weights are here, which the run may train in another type
            config[key] = next(iter(types))
    (directory / "config.json").write_text(json.dumps(config, indent=2), "utf-8")


def _models(run: Path) -> Iterator[Path]:
    yield run / "model"
    yield from (path / "model" for _, path in reversed(RunDirectory(run).checkpoints))
