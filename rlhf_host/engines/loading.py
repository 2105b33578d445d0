"""Loading of new weights into an engine: code that runs beside the weights is named by import path and gets a loader."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.errors import RunError, near_matches
from rlhf_host.protocols import Buckets
from rlhf_host.spans import span


def call_by_path(path: str, first: Any, arguments: Mapping[str, Any]) -> Any:
    """Calls ``package.module:function`` with ``first`` and ``arguments``, in the current process."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    with span(f"call {path}"):
        return function(first, **arguments)


def copy_weights(model: nn.Module, buckets: Iterable[list[tuple[str, Tensor]]]) -> None:
    """Overwrites every parameter and persistent buffer of ``model`` in place, by name, cast to its own dtype.

    Raises:
        RunError: the model does not have a name, or a shape does not fit; weights are missing (a head that is not tied needs
            its own); or different weights were sent to names that are tied here.
    """
    own = dict(model.state_dict(keep_vars=True))
    written: dict[int, str] = {}
    with torch.no_grad():
        for bucket in buckets:
            for name, tensor in bucket:
                target = own.get(name)
                if target is None:
                    raise RunError(f"there is no weight {name!r} here{near_matches(name, own, 1)} (see --sync.rename)")
                if target.shape != tensor.shape:
                    raise RunError(
                        f"the weight {name} is {list(target.shape)} here and {list(tensor.shape)} where it came from"
                    )
                tied = written.setdefault(target.data_ptr(), name) if target.numel() else name
                if tied == name:
                    target.copy_(tensor)
                elif not torch.equal(target, tensor.to(target.device, target.dtype)):
                    raise RunError(f"{tied} and {name} are tied here, but came with different weights")
    missing = [name for name, target in own.items() if target.numel() and target.data_ptr() not in written]
    if missing:
        raise RunError(f"no weights came for {missing[0]} (and {len(missing) - 1} more)")


def weight_types(weights: Iterable[tuple[str, Tensor]]) -> tuple[str, tuple[str, ...]] | None:
    """Returns the floating-point type of most weights, and the names of those of other types (``WeightTypes.weight_types``)."""
    types = {name: tensor.dtype for name, tensor in weights if tensor.is_floating_point()}
    if not types:
        return None
    (usual, _), *_ = Counter(types.values()).most_common(1)
    return str(usual).removeprefix("torch."), tuple(name for name, dtype in types.items() if dtype != usual)


class ModuleLoader:
    """Loader of an engine that generates with a module in this process; ``replace`` implements its ``load``."""

    def __init__(self, engine: str, model: nn.Module, replace: Callable[[Buckets, int], None]):
        self.engine, self.rank, self.size = engine, 0, 1
        self.device = next(model.parameters()).device
        self.load = replace
        self.state: dict[str, Any] = {}
        self._model = model

    @property
    def weight_types(self) -> tuple[str, tuple[str, ...]] | None:
        return weight_types(self._model.state_dict().items())
