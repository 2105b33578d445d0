"""X-ray of a batch: what each installed algorithm would do with the same saved answers.

``rlhf_host.xray`` is ``xray`` of this package. Importing this loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_xray.functions import xray
    from rlhf_xray.measures import Algorithm, XRay

_HOME = {"Algorithm": "measures", "XRay": "measures", "xray": "functions"}
"""Name → its module in this package, imported when the name is first asked for."""

__all__ = ["Algorithm", "XRay", "xray"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
