"""Engines, which generate tokens: the protocol, and the embedded engine on transformers.

The names here are for packages with an engine: requests and their checks, tokens that end a completion, and loading of weights.
They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.engines.loading import ModuleLoader, call_by_path, copy_weights
    from rlhf_host.engines.requests import Request, check_request, end_tokens

_HOME = {
    "ModuleLoader": "loading",
    "Request": "requests",
    "call_by_path": "loading",
    "check_request": "requests",
    "copy_weights": "loading",
    "end_tokens": "requests",
}
"""Name → its module in this package, imported when the name is first asked for."""

__all__ = [
    "ModuleLoader",
    "Request",
    "call_by_path",
    "check_request",
    "copy_weights",
    "end_tokens",
]

__getattr__, __dir__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
