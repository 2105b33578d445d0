"""Runs in several processes: Ray, DeepSpeed, vLLM, the weight syncs between processes, and what splits a model.

Nothing outside this folder imports it: entry points name the plugins, which are in ``plugin.py`` of each folder. The names here are
for packages: with a runtime of several processes, a backend that splits weights, a weight sync, or an engine that keeps weights of
its own. They are provisional. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.distributed.bits import bits_of as bits_of
    from rlhf_host.distributed.bits import kept_bits as kept_bits
    from rlhf_host.distributed.bits import note_bits as note_bits
    from rlhf_host.distributed.ray.setups import EngineSetup as EngineSetup
    from rlhf_host.distributed.ray.setups import RemoteRoles as RemoteRoles
    from rlhf_host.distributed.ray.setups import plain as plain
    from rlhf_host.distributed.ray.setups import start_engine as start_engine
    from rlhf_host.distributed.split.gathered import merged_units as merged_units
    from rlhf_host.distributed.split.gathered import named_buffers as named_buffers
    from rlhf_host.distributed.split.packed import run_through as run_through
    from rlhf_host.distributed.split.parking import Parking as Parking
    from rlhf_host.distributed.split.parking import Parks as Parks
    from rlhf_host.distributed.split.parking import distinct as distinct
    from rlhf_host.distributed.split.ports import reserved as reserved
    from rlhf_host.distributed.split.ranks import Ranks as Ranks
    from rlhf_host.distributed.split.shards import deal as deal
    from rlhf_host.distributed.split.shards import saved_bytes as saved_bytes
    from rlhf_host.distributed.split.shards import share_writer as share_writer
    from rlhf_host.distributed.split.weight_reader import load_sharded as load_sharded
    from rlhf_host.distributed.sync.buckets import Wire as Wire
    from rlhf_host.distributed.sync.buckets import note_sent as note_sent
    from rlhf_host.distributed.sync.remote import TRAINER as TRAINER
    from rlhf_host.distributed.sync.remote import RemoteSync as RemoteSync
    from rlhf_host.distributed.sync.remote import ask as ask
    from rlhf_host.distributed.sync.remote import wire_types as wire_types
    from rlhf_host.distributed.vllm.startup import ends_of as ends_of
    from rlhf_host.distributed.vllm.weights import as_in_files as as_in_files
    from rlhf_host.distributed.vllm.weights import check_complete as check_complete
    from rlhf_host.distributed.vllm.weights import outline_of as outline_of
    from rlhf_host.distributed.vllm.weights import parameter_names as parameter_names

__getattr__, __dir__, __all__ = lazily(__name__)
