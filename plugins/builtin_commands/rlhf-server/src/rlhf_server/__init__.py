"""Servers: a small one with routes, limits and errors as JSON; on it an OpenAI-compatible server over the conversation trees of
episodes, which agents use in training, and a reward server.

The names here are for packages that serve something of their own. Importing this loads no aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_server.errors import ApiError as ApiError
    from rlhf_server.http import HttpServer as HttpServer
    from rlhf_server.http import Route as Route

__getattr__, __dir__, __all__ = lazily(__name__)
