"""Location of a model: a directory, a hub name, a GGUF file, a step of a run, the base of an adapter, or the built-in
``quickstart``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from rlhf_host.config.load import QUICKSTART
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models import adapter_files
from rlhf_host.once import once
from rlhf_host.runs.models import step_model

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Location of a model: ``path`` is a directory or a hub name, ``gguf`` a file in that directory."""

    path: str
    local: bool
    gguf: str | None = None

    @property
    def name(self) -> str:
        """Name that others may use for it, wherever they run."""
        return str(Path(self.path, self.gguf or "").absolute()) if self.local else self.path


@once
def find_model(name: str | None, *, weights: bool = True) -> ModelLocation:
    """Finds out whether it is a directory, a GGUF file, ``RUN@STEP`` or a hub name; refuses anything else before loading."""
    if not name:
        raise UserError("no model is set: give a model directory, a hub name, a GGUF file, or 'quickstart' (--actor.model)")
    if name == QUICKSTART:
        return ModelLocation(str(Path(__file__).with_name(QUICKSTART)), local=True)  # of scripts/quickstart_model.py
    name = step_model(name) or name
    path = Path(name).expanduser()
    if adapter_files.is_adapter(path):
        base = adapter_files.base_of(path)[0]
        try:
            return find_model(base, weights=weights)
        except UserError as error:
            raise UserError(
                f"{error} ({name} is an adapter for it: give both, with --actor.model and --actor.adapter)"
            ) from error
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{name} is a file, but not a GGUF file: give the model's directory")
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"{name} needs the package gguf: pip install 'rlhf-host[gguf]'")
        return ModelLocation(str(path.parent), local=True, gguf=path.name)
    if path.is_dir():
        _check_directory(path, weights)
        return ModelLocation(str(path), local=True)
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    match = near_matches(path.name, sorted(each.name for each in beside if each.is_dir() or each.suffix == ".gguf"))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise UserError(f"no model at {name}{match or ': no such file or directory'}")
    if not _cached(name) and (match or not hub_answers()):
        hub = "" if match else f"; as a hub name it is not in the local cache, and {_unreached()}"
        raise UserError(f"no model {name!r}: no such directory{match}{hub}")
    return ModelLocation(name, local=False)


def with_base(role: RoleConfig) -> RoleConfig:
    """Returns the role with the base as its model, if its model is the directory of an adapter; quantized as the adapter needs
    it. The model of ``RUN@STEP`` becomes a directory.

    Raises:
        UserError: the role has another adapter too, or the base is missing.
    """
    if (model := step_model(role.model)) != role.model:
        role = role.model_copy(update={"model": model, "revision": None})
    if adapter_files.is_adapter(role.model):
        if role.adapter is not None:
            raise UserError(
                f"the model {role.model} is an adapter itself, so --actor.adapter {role.adapter} cannot be used with it"
            )
        find_model(role.model)
        base, revision = adapter_files.base_of(str(role.model))
        role = role.model_copy(update={"model": base, "revision": revision, "adapter": role.model})
    if role.adapter is not None and role.quantize is None:
        role = role.model_copy(update={"quantize": adapter_files.quantized_base(role.adapter)})
    return role


def _check_directory(path: Path, weights: bool) -> None:
    files = {entry.name for entry in path.iterdir()}
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if "config.json" not in files:
        hint = f"give the GGUF file itself: {path / gguf[0]}" if gguf else "a model directory is what save_pretrained writes"
        if any((path / "model" / name).is_file() for name in ("config.json", adapter_files.CONFIG)):
            hint = f"the model of this run is {path / 'model'}"
        raise UserError(f"{path} has no config.json: {hint}")
    if weights and not any(name.endswith(".safetensors") for name in files):
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
        problem = "only pickled weights, which can run code when loaded: convert them to" if pickled else "no weights: it needs"
        raise UserError(f"{path} has {problem} .safetensors files")
    if weights and INDEX in files:
        _check_index(path / INDEX)


def _check_index(path: Path) -> None:
    """Raises ``UserError`` for an index that does not say in which file each weight is."""
    try:
        index = json.loads(path.read_text("utf-8"))
        whole = isinstance(index["metadata"], dict) and {*map(type, index["weight_map"].values())} == {str}
    except (ValueError, LookupError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is damaged: it needs 'metadata', and a 'weight_map' from weights to files; fetch it again")


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"no model {name!r}: no such directory, and not a hub name") from error


def _unreached() -> str:
    from huggingface_hub import constants

    if not constants.is_offline_mode():
        return "the hub cannot be reached from here"
    return f"{'HF_HUB_OFFLINE' if 'HF_HUB_OFFLINE' in os.environ else 'TRANSFORMERS_OFFLINE'} is set, so the hub is not asked"


def hub_answers() -> bool:
    """Returns True if the hub's name resolves. Without this check, transformers retries for most of a minute before it gives
    up.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if "https" in urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
