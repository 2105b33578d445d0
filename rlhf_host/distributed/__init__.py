"""Runs in several processes: Ray, DeepSpeed, vLLM, and the weight syncs between processes.

Nothing outside this folder imports it: entry points name the plugins, which are in ``plugin.py`` of each folder. The names here are
for packages with a weight sync, and for those with an engine that keeps weights of its own. They are provisional. Importing this
loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.distributed.sync.buckets import Wire as Wire
    from rlhf_host.distributed.sync.buckets import note_sent as note_sent
    from rlhf_host.distributed.sync.remote import TRAINER as TRAINER
    from rlhf_host.distributed.sync.remote import RemoteSync as RemoteSync
    from rlhf_host.distributed.sync.remote import ask as ask
    from rlhf_host.distributed.sync.remote import wire_types as wire_types
    from rlhf_host.distributed.vllm.startup import ends_of as ends_of
    from rlhf_host.distributed.vllm.weights import check_complete as check_complete
    from rlhf_host.distributed.vllm.weights import parameter_names as parameter_names

__getattr__, __dir__, __all__ = lazily(__name__)
