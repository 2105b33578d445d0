"""Adapters on disk, in peft's format: ``adapter_config.json`` names the base, ``adapter_model.safetensors`` has the base's
hash.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlhf_host.directories import content_hash
from rlhf_host.errors import UserError
from rlhf_host.models.adapters import (
    BASE,
    PREFIX,
    TRAINED,
    adapted_name,
    adapter_layers,
    adapter_weights,
    expert_tensors,
    inject,
    kinds,
    peft_library,
)
from rlhf_host.models.dtypes import DTYPES, NARROW, written_type
from rlhf_host.models.heads import scalar_head
from rlhf_host.models.quantized import is_quantized
from rlhf_host.once import once

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
HASH = "base_sha256"
"""Key in the metadata of ``WEIGHTS``: the content hash of the base's weights."""
QUANTIZED = "base_quantized"
"""Key there: how the base was quantized, if it was."""
ROUNDED = "base_dtype"
"""Key there: the 16-bit type that the base's weights were rounded to, if they were."""

FREE = {
    *("r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "task_type", "inference_mode", "auto_mapping", "revision"),
    *("peft_version", "base_model_name_or_path", "lora_dropout", "init_lora_weights", "runtime_config", "megatron_core"),
    "target_parameters",
}
"""Settings of an adapter that may have any value; all others must be peft's defaults."""


TYPES: dict[str, tuple[Any, str]] = {
    "r": (int, "a rank of 1 or more"),
    "lora_alpha": ((int, float), "a number other than 0"),
    "rank_pattern": ((dict, NoneType), "an object"),
    "alpha_pattern": ((dict, NoneType), "an object"),
    "modules_to_save": ((list, NoneType), "a list"),
}
"""Types of the settings that are read."""


def is_adapter(path: str | Path | None) -> bool:
    """Returns True if this is the directory of an adapter, and not of a whole model."""
    if not path or not (directory := Path(path).expanduser()).is_dir():
        return False
    return (directory / CONFIG).is_file() and not any(directory.glob("model*.safetensors"))


def base_of(directory: str | Path) -> tuple[str, str | None]:
    """Returns the model that an adapter was trained on: a path or hub name, and its revision.

    Raises:
        UserError: the directory has no such file, or the file does not name the model.
    """
    settings = _read(directory)
    if not isinstance(name := settings.get("base_model_name_or_path"), str) or not name:
        raise UserError(f"{Path(directory) / CONFIG} does not name its base model: give it with --actor.model")
    return name, settings.get("revision")


def is_scalar(directory: str | Path) -> bool:
    """Returns True if the adapter has a scalar head."""
    return "score" in (_read(directory).get("modules_to_save") or ())


def save_adapter(
    model: Any, directory: str | Path, base_files: Sequence[Path], trained: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes the trained weights.

    Args:
        base_files: weight files of the base, for its hash.
        trained: an earlier result of ``adapter_weights``; default: the current weights.
    """
    config = copy.deepcopy(model.peft_config[TRAINED])
    config.inference_mode, config.target_modules = True, sorted(config.target_modules)
    config.modules_to_save = ["score"] if scalar_head(model) is not None else None
    trained = adapter_weights(model) if trained is None else trained
    weights = {name: tensor.contiguous().cpu() for name, tensor in trained.items()}
    Path(directory).mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", HASH: content_hash(base_files), **_rounding(model)}
    save_file(weights, Path(directory) / WEIGHTS, metadata=metadata)
    config.save_pretrained(str(directory))


def rank_of(directory: str | Path) -> int:
    """Returns the largest rank in an adapter."""
    settings = _read(directory)
    return max([int(settings.get("r") or 8), *(settings.get("rank_pattern") or {}).values()])


def load_adapter(model: Any, directory: str | Path, name: str = TRAINED) -> None:
    """Loads an adapter from a directory into the model. The dropout in its file is not used.

    Args:
        name: its name inside the model; ``TRAINED`` is trained, any other is a frozen copy.

    Raises:
        UserError: peft is missing, the adapter is of a kind that cannot be used here, or it does not fit the model.
    """
    config, saved = _settings(model, directory), _weights(directory)
    modules, tensors = _modules(saved), expert_tensors(model, config.target_parameters or ())
    modules = _without_experts(modules, tensors)
    if missing := sorted(set(modules) - {own for own, _ in model.named_modules()}):
        raise UserError(f"the adapter {directory} does not fit {type(model).__name__}, which has no {missing[0]}")
    inject(model, config, name, modules, tensors)
    own = _parameters(model, name, with_head=is_scalar(directory))
    if different := sorted(key for key in own.keys() ^ saved.keys() if key in own or not key.startswith("score.")):
        where = f"{WEIGHTS} lacks it" if different[0] in own else "it has no place here"
        raise UserError(f"the adapter {directory} does not fit {type(model).__name__}: {different[0]}: {where}")
    with torch.no_grad():
        for key, weight in own.items():
            if weight.shape != saved[key].shape:
                shapes = f"{list(saved[key].shape)} in the adapter and {list(weight.shape)} here"
                raise UserError(f"the adapter {directory} is for another model: {key} is {shapes}")
            weight.copy_(saved[key])


def attach_like(model: Any, directory: str | Path) -> None:
    """Adds an adapter with the settings of one in a directory, and new values, to those of its linear maps that the model has.

    Raises:
        UserError: peft is missing, or the adapter is of a kind that cannot be used here.
    """
    own, config = {name for name, _ in model.named_modules()}, _settings(model, directory)
    tensors = expert_tensors(model, config.target_parameters or ())
    modules = [module for module in _without_experts(_modules(_weights(directory)), tensors) if module in own]
    if modules or tensors:
        inject(model, config, TRAINED, modules, tensors)


def _settings(model: Any, directory: str | Path) -> Any:
    """Returns peft's configuration of an adapter, as it is used here."""
    _refuse_other_kinds(_read(directory), directory, kinds(name for name, _ in model.named_modules()))
    config = peft_library().LoraConfig.from_pretrained(str(directory))
    config.modules_to_save, config.lora_dropout, config.init_lora_weights, config.inference_mode = None, 0.0, True, False
    return config


def _modules(weights: Collection[str]) -> list[str]:
    """Returns the linear maps that an adapter's weights belong to."""
    return sorted({key.rpartition(".lora_")[0] for key in weights if ".lora_" in key})


def _without_experts(modules: Collection[str], tensors: Collection[str]) -> list[str]:
    layers = {tensor.rpartition(".")[0] for tensor in tensors}
    return [module for module in modules if module.replace(BASE, "") not in layers]


def _weights(directory: str | Path) -> dict[str, torch.Tensor]:
    _metadata(directory)  # raises where the file is missing or damaged
    return {key.removeprefix(PREFIX): tensor for key, tensor in load_file(Path(directory) / WEIGHTS).items()}


def _parameters(model: Any, name: str, with_head: bool) -> dict[str, torch.Tensor]:
    """Returns the adapter's parameters in the model, by their names in the file."""
    own: dict[str, torch.Tensor] = {}
    for prefix, layer in adapter_layers(model):
        if name in layer.lora_A:
            own |= {f"{prefix}.lora_{part}.weight": getattr(layer, f"lora_{part}")[name].weight for part in "AB"}
    if with_head and (head := scalar_head(model)) is not None:
        own |= {f"score.{key}": weight for key, weight in head.named_parameters()}
    return own


def _refuse_other_kinds(settings: dict[str, Any], directory: str | Path, own: Collection[str]) -> None:
    usual = peft_library().LoraConfig().to_dict()
    kind = settings.get("peft_type")
    other = [key for key, value in settings.items() if key in usual and key not in {*FREE, "peft_type"} and value != usual[key]]
    other = [key for key in other if settings[key] or usual[key]]  # versions of peft write null, false or {} for the same
    if kind != "LORA":
        raise UserError(
            f"{directory} is an adapter of the kind {kind}, and only LORA can be used here: merge it with peft first"
        )
    # Of reward models, peft names modules of several families.
    modules = [module for module in settings.get("modules_to_save") or () if module != "score" and module in own]
    init = settings.get("init_lora_weights", True)
    if init not in (True, False, "gaussian", "orthogonal", "eva"):
        other.append(f"init_lora_weights {init}, which changes the base")
    other += [f"modules_to_save {module}" for module in modules]
    patterns = [key for key in ("rank_pattern", "alpha_pattern") if settings.get(key) and settings.get("target_parameters")]
    other += [f"{key} beside target_parameters" for key in patterns]
    if other:
        raise UserError(
            f"the adapter {directory} uses {', '.join(other)}, which is not supported here: merge it with peft first"
        )


def refuse_other_base(directory: str | Path, base: str, files: Sequence[Path]) -> None:
    """Raises ``UserError`` if an adapter was trained on other weights than those in ``files``. Adapters of other programs do
    not record their base, so they pass.
    """
    then, recorded = _read(directory).get("base_model_name_or_path"), _metadata(directory).get(HASH)
    if recorded is not None and recorded != content_hash(files):
        raise UserError(
            f"the adapter {directory} was trained on other weights than those of {base}: give the model it was trained on"
            f" (then at {then})"
        )


def quantized_base(directory: str | Path) -> str | None:
    """Returns how the base was quantized when the adapter was trained; None: not at all, or the adapter does not tell."""
    _read(directory)
    return _metadata(directory).get(QUANTIZED)


def rounded_base(directory: str | Path) -> torch.dtype | None:
    """Returns the 16-bit type of the base when the adapter was trained; None: 32 bits, or the adapter does not tell.

    Raises:
        UserError: the type is unknown.
    """
    recorded = _metadata(directory).get(ROUNDED)
    if recorded is not None and recorded not in DTYPES:
        path = Path(directory) / WEIGHTS
        raise UserError(f"{path}: {ROUNDED} in its metadata is {recorded!r}, and must be one of {', '.join(DTYPES)}")
    return None if recorded is None else DTYPES[recorded]


def _rounding(model: Any) -> dict[str, str]:
    """Returns metadata about how the base's weights differ from those in its files."""
    layer, in_4_bits = adapter_layers(model)[0][1], is_quantized(model)
    base = layer.get_base_layer()
    weight = getattr(base, adapted_name(layer))
    dtype = written_type(weight, getattr(base, "compute_dtype", None) if in_4_bits else None)
    rounded = {ROUNDED: str(dtype).removeprefix("torch.")} if dtype in NARROW else {}
    return rounded | ({QUANTIZED: "4bit"} if in_4_bits else {})


def _metadata(directory: str | Path) -> dict[str, str]:
    path = Path(directory).expanduser() / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except FileNotFoundError as error:
        raise UserError(f"{directory} has no {WEIGHTS}: it needs the adapter's weights as safetensors") from error
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path} cannot be read: {error}") from error


@once
def _read(directory: str | Path) -> dict[str, Any]:
    path = Path(directory).expanduser() / CONFIG
    try:
        settings = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"no adapter at {directory}: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} is no adapter's configuration")
    for key, (types, needed) in TYPES.items():
        value = settings.get(key)
        wrong = not isinstance(value, types) or isinstance(value, bool) or value == 0 or (key == "r" and value < 1)
        if key in settings and wrong:
            raise UserError(f"{path}: {key} must be {needed}, not {json.dumps(value)}")
    return settings
