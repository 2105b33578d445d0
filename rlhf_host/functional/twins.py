"""A second version of a model with the same parameters."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def twin(model: nn.Module) -> nn.Module:
    """Returns a copy of the modules that shares the model's ``Parameter`` objects and persistent buffers.

    The twin's backward passes compute gradients of the model's parameters, and both see changes in place. Other buffers and
    attributes belong to the twin. So its modules can get another ``forward`` without a change to the model.
    """
    persistent = set(model.state_dict(keep_vars=True))
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    shared |= {id(buffer): buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent}
    return copy.deepcopy(model, shared)
