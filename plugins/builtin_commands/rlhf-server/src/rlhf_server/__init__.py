"""Servers: a small one with routes, limits and errors as JSON; on it an OpenAI-compatible server over the conversation trees of
episodes, which agents use in training, and a reward server.

The names here are for packages that serve something of their own. Importing this loads no aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_server.commands.address import HOST as HOST
    from rlhf_server.commands.address import address_of as address_of
    from rlhf_server.commands.model_command import MODEL as MODEL
    from rlhf_server.commands.model_command import SECTIONS as SECTIONS
    from rlhf_server.commands.model_command import model_command as model_command
    from rlhf_server.errors import ApiError as ApiError
    from rlhf_server.http import HttpServer as HttpServer
    from rlhf_server.http import Route as Route
    from rlhf_server.http import check_key as check_key

__getattr__, __dir__, __all__ = lazily(__name__)
