"""A model once more, around the same parameters."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def twin(model: nn.Module) -> nn.Module:
    """A copy of the modules around the model's very ``Parameter`` objects and persistent buffers.

    Gradients of the twin's passes are gradients of the model's parameters, and changes in place are seen by both. Other buffers
    and attributes are the twin's own, so its modules can be given another ``forward`` and the model stays as it is.
    """
    persistent = set(model.state_dict(keep_vars=True))
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    shared |= {id(buffer): buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent}
    return copy.deepcopy(model, shared)
