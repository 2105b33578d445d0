"""Weight sync: from the trainer to the engines, under a version.

The names here are for packages with a weight sync: the frame of one to engines with weights of their own, and the types of
weights on their way. They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.weight_sync.buckets import Wire, note_sent
    from rlhf_host.weight_sync.remote_sync import TRAINER, RemoteSync, ask, wire_types

_HOME = {
    "TRAINER": "remote_sync",
    "RemoteSync": "remote_sync",
    "Wire": "buckets",
    "ask": "remote_sync",
    "note_sent": "buckets",
    "wire_types": "remote_sync",
}
"""Name → its module in this folder, imported when the name is first asked for."""

__all__ = ["TRAINER", "RemoteSync", "Wire", "ask", "note_sent", "wire_types"]

__getattr__, __dir__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
