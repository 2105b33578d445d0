"""Runs that come back by themselves. ``rlhf train --max-restarts`` and ``rlhf_host.supervised`` use ``supervised`` of this package.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_supervisor.supervisor import supervised as supervised

__getattr__, __dir__, __all__ = lazily(__name__)
