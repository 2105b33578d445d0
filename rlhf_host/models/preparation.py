"""Changes that a role's settings make to its model: which weights are trained, adapters, recomputed layers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models import adapter_dropout, adapter_files, adapters
from rlhf_host.models.heads import blocks_of
from rlhf_host.models.locations import ModelLocation
from rlhf_host.plugins.discovery import unchosen


def refuse_settings(role: RoleConfig, source: ModelLocation, *, trainable: bool) -> None:
    """Raises ``UserError`` for settings that no model in this place can have."""
    if role.quantize and source.gguf:
        raise UserError(f"the weights of GGUF files are quantized in their own way: leave quantize out for {role.model!r}")
    if trainable and not role.adapts and role.dtype not in ("auto", "float32"):
        raise UserError(
            f"dtype {role.dtype} for the trainable model {role.model!r}: trainable weights are kept in float32, because 16 bits"
            " swallow small updates; leave dtype at auto and set train.autocast to bfloat16"
        )


def no_head(role: RoleConfig) -> UserError:
    return UserError(
        f"the model {role.model!r} has no scalar head, and a frozen role cannot learn one: give a reward or value model"
    )


def wide_head(role: RoleConfig, count: int) -> UserError:
    return UserError(
        f"the model {role.model!r} has a head with {count} outputs, and a scalar head has one: give a model with num_labels 1,"
        " or the language model"
    )


def prepare(
    model: PreTrainedModel,
    role: RoleConfig,
    source: ModelLocation,
    device: torch.device,
    *,
    trainable: bool,
    probe: bool = False,
) -> PreTrainedModel:
    """Applies the role's settings to the model and moves it to the device, in place, except what is on ``meta``.

    Args:
        probe: the model has some of the role's layers. It gets an adapter of other values, where it has layers for it, and all
            its other weights are trained, if any.

    Raises:
        UserError: settings that this model cannot have, or an adapter that does not fit it.
    """
    adapts = trainable and role.adapts
    if trainable and role.attn_implementation == "flex_attention" and device.type == "cpu":
        raise UserError("attn_implementation flex_attention has no backward pass on CPUs: choose sdpa, or train on a GPU")
    remove_dropout(model)
    if role.gradient_checkpointing and trainable:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"{type(model).__name__} does not support gradient checkpointing: set gradient_checkpointing to false"
            )
        # The older name is transformers' before 5.24.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
        if (count := role.gradient_checkpointing) is not True:
            layers = [layer for layer in blocks_of(model).values() if isinstance(layer, GradientCheckpointingLayer)]
            if not layers or (isinstance(count, int) and count > len(layers) and not probe):
                name = f"gradient_checkpointing {count}: {type(model).__name__}"
                raise UserError(f"{name} has {len(layers)} layers that can be recomputed one by one; true recomputes all")
            if count == "auto" and not any(unchosen("memory_plan")):
                raise UserError("gradient_checkpointing auto: no package that plans memory is installed: set true")
            if isinstance(count, int):
                recompute(model, count)
    model.requires_grad_(trainable and not adapts)
    if trainable and not probe and (role.freeze or role.train_only):
        freeze(model, role.freeze, role.train_only)
    placed = _on(device, model.eval())
    if role.adapter is not None:
        (adapter_files.attach_like if probe else adapter_files.load_adapter)(placed, role.adapter)
        if not trainable and device.type != "meta":
            adapters.fold(placed)
    elif adapts:
        with contextlib.suppress(UserError) if probe else contextlib.nullcontext():  # targets may be in other layers
            adapters.attach(placed, role.lora, source.name, None if source.local else role.revision)
    if adapts and role.lora.dropout:
        adapter_dropout.add(placed, role.lora.dropout)
    if trainable:
        _align(placed)
    return _on(device, placed)


def recompute(model: nn.Module, count: int) -> None:
    """Lets the first ``count`` layers of a decoder compute again in the backward pass, and with any of them all blocks outside
    of it, such as those of a tower for pictures. The model has ``gradient_checkpointing_enable`` behind it.
    """
    others = set(list(blocks_of(model).values())[count:])
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = count > 0 and layer not in others


def _on(device: torch.device, model: PreTrainedModel) -> PreTrainedModel:
    if all(weight.device.type != "meta" for weight in model.parameters()):
        moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        return moved
    moved = model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return moved


def remove_dropout(model: torch.nn.Module) -> None:
    """Sets every dropout probability to 0, because with dropout two passes give different π. The config keeps its own values
    for saving.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)


def _align(model: PreTrainedModel) -> None:
    """Moves weights that lie at odd addresses. Kernels round differently by alignment, and files, so checkpoints too, differ in
    it.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def freeze(model: nn.Module, frozen: Sequence[str], only: Sequence[str]) -> None:
    """Freezes weights. A pattern (``fnmatch``) must match whole names; a tied weight has several names.

    Args:
        frozen: weights that are not trained.
        only: weights that are trained; default: all others.

    Raises:
        UserError: a pattern matches no weight, or nothing is left to train.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    every = [name for own in names.values() for name in own]
    for setting, patterns in (("freeze", frozen), ("train_only", only)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in every):
                near = near_matches(pattern, every) or f"; a name is, for example, {every[0]}"
                raise UserError(f"{setting}: no weight of {type(model).__name__} is called {pattern!r}{near}")
    for weight, own in names.items():
        wanted = not only or _matches(own, only)
        weight.requires_grad_(wanted and not _matches(own, frozen))
    if not any(weight.requires_grad for weight in names):
        raise UserError("freeze and train_only leave no weight to train")


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
