"""Servers: a small one with routes, limits and errors as JSON; on it an OpenAI-compatible server over the conversation trees of
episodes, which agents use in training, and a reward server.

The names here are for packages that serve something of their own. Importing this loads no aiohttp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_server.errors import ApiError
    from rlhf_server.http import HttpServer, Route

_HOME = {
    "ApiError": "errors",
    "HttpServer": "http",
    "Route": "http",
}
"""Name → its module in this package, imported when the name is first asked for."""

__all__ = [
    "ApiError",
    "HttpServer",
    "Route",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
