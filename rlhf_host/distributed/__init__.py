"""Runs in several processes: Ray, DeepSpeed, vLLM, and the weight syncs between processes.

Nothing outside this folder imports it: entry points name the plugins, which are in ``plugin.py`` of each folder. The names here are
for packages with a weight sync, and for those with an engine that keeps weights of its own. They are provisional. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.distributed.sync.buckets import Wire, note_sent
    from rlhf_host.distributed.sync.remote import TRAINER, RemoteSync, ask, wire_types
    from rlhf_host.distributed.vllm.startup import ends_of
    from rlhf_host.distributed.vllm.weights import check_complete, parameter_names

_HOME = {
    "TRAINER": "sync.remote",
    "RemoteSync": "sync.remote",
    "Wire": "sync.buckets",
    "ask": "sync.remote",
    "check_complete": "vllm.weights",
    "ends_of": "vllm.startup",
    "note_sent": "sync.buckets",
    "parameter_names": "vllm.weights",
    "wire_types": "sync.remote",
}
"""Name → its module in this folder, imported when the name is first asked for."""

__all__ = [
    "TRAINER",
    "RemoteSync",
    "Wire",
    "ask",
    "check_complete",
    "ends_of",
    "note_sent",
    "parameter_names",
    "wire_types",
]

__getattr__, __dir__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
