"""A model without weights, made from its configuration alone: shows what settings mean for it before anything is loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError, first_line
from rlhf_host.models import adapter_files
from rlhf_host.models.carried import names_in
from rlhf_host.models.dtypes import weight_dtypes
from rlhf_host.models.loading import configuration, files_of, new_model, quiet_transformers, require_scalar_head, rounded_base
from rlhf_host.models.locations import ModelLocation, find_model, with_base
from rlhf_host.models.preparation import no_head, prepare, refuse_settings, wide_head
from rlhf_host.models.quantized import refuse_kind

log = logging.getLogger(__name__)

META = torch.device("meta")
NARROWEST = 0.5
"""Bytes of a weight in 4 bits, without the constants of its block."""


def meta_model(role: RoleConfig, *, head: Literal["lm", "scalar"], trainable: bool, weights: bool = True) -> Any:
    """Returns the result of ``load_model`` on torch's meta device; None: it cannot be made that way, and nothing is known.

    Args:
        weights: False: a directory with a ``config.json`` alone is enough.

    Raises:
        UserError: everything that ``load_model`` would refuse, as far as configuration files and the headers of weights tell.
    """
    role = with_base(role)
    source = find_model(role.model, weights=weights)
    refuse_settings(role, source, trainable=trainable)
    try:
        with quiet_transformers():
            model = _empty(source, role, head, trainable)
            if head == "scalar":
                require_scalar_head(model)
                _refuse_head(source, role, trainable)
            if role.quantize:
                for name, module in model.named_modules():
                    if isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings():
                        refuse_kind(model, name, type(module))
            with META if role.adapter is None else contextlib.nullcontext():  # new adapters have no first values either
                return prepare(model, role, source, META, trainable=trainable)
    except UserError:
        raise
    except Exception as error:  # some models compute while they are made, which needs weights
        log.info("%s cannot be made without weights: %s", role.model, first_line(error))
        return None


def _empty(source: ModelLocation, role: RoleConfig, head: str, trainable: bool) -> Any:
    config = configuration(source, role, head)
    dtype = torch.float32 if source.gguf else weight_dtypes(role, trainable, config.dtype, rounded_base(role))[1]
    with META:
        try:
            return new_model(source, role, head, config, dtype)
        except (ImportError, ValueError) as error:  # such as kernels for attention that are not there
            raise UserError(f"cannot load the model {role.model!r}: {first_line(error)}") from error


def _refuse_head(source: ModelLocation, role: RoleConfig, trainable: bool) -> None:
    """Raises ``UserError`` for a scalar head of another size, or a missing one that is not trained. Only files that are at hand
    are read.
    """
    if not source.local or source.gguf or (role.adapter is not None and adapter_files.is_scalar(role.adapter)):
        return
    files = names_in(files_of(source, role)).items()
    counts = [file.get_slice(name).get_shape()[0] for name, file in files if f".{name}".endswith(".score.weight")]
    if not counts and not trainable:
        raise no_head(role)
    if counts and counts[0] != 1:
        raise wide_head(role, counts[0])


def weights_of(role: RoleConfig, model: Any) -> Iterator[tuple[Any, float]]:
    """Yields each weight of an outline, and the bytes of each of its numbers on the role's device."""
    narrow = set()
    if role.quantize:
        head = model.get_output_embeddings()
        linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head}
        narrow = {weight for weight in linear if not weight.requires_grad}
    for weight in {*model.parameters(), *model.buffers()}:
        yield weight, NARROWEST if weight in narrow else weight.element_size()
