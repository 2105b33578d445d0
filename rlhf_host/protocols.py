"""Engines, backends, runtimes and weight sync as the host sees them. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class SyncTarget:
    """One engine as ``sync_connect`` sees it."""

    name: str
    engine: Any
