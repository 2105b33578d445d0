"""A program: vLLM on two devices gets weights in both of its workers. Prints a line of JSON.

With the room in ``/dev/shm`` limited to ``room_mb`` (0: as it is), it shows that buckets do not pass through it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path


def process(loader):
    """Runs in a worker."""
    return [loader.rank, loader.size, os.getpid(), list(loader.state), loader.weight_types]


async def scenario(rig, bucket_mb):
    from rlhf_host.distributed.sync.plugin import IPC, Broadcast
    from rlhf_host.distributed.vllm.arguments import versions_by_token
    from rlhf_host.errors import RunError
    from rlhf_host.protocols import SyncTarget
    from rlhf_host.records.episodes import Sampling
    from rlhf_host.weight_sync.local_source import LocalSource
    from tests.distributed.vllm.rig import mismatch, prompts_of

    prompts, found, version = prompts_of(3, 40), {"mismatch": {}}, 0
    for way in (IPC, Broadcast):
        plugin = way(way.Options(bucket_mb=bucket_mb, timeout_s=120))
        await plugin.connect([SyncTarget("e0", rig.engine)])
        rig.train(version)
        takes = version and versions_by_token()
        unfinished = [asyncio.create_task(rig.engine.generate(prompts[0], Sampling(200), (3, version)))] if takes else []
        await plugin.send(LocalSource(rig.model), version)
        found["connected"] = await rig.engine.run(f"{__spec__.name}:process")
        keys = [(7, version, i) for i in range(3)]
        made = await asyncio.gather(*(rig.engine.generate(p, Sampling(8), key) for p, key in zip(prompts, keys, strict=True)))
        found["mismatch"][way.name] = mismatch(rig.model, prompts, made)
        found["versions"] = list(made[0].versions)
        found["under_way"] = [len((await one).versions) for one in unfinished]
        await plugin.close()
        version += 1
    try:
        missing = [(name, weight) for name, weight in rig.model.named_parameters()]
        plugin = IPC(IPC.Options(bucket_mb=bucket_mb, timeout_s=120))
        await plugin.connect([SyncTarget("e0", rig.engine)])
        await plugin.send(LocalSource(rig.model, lambda size: iter([missing])), version)
    except RunError as error:
        found["refused"] = [str(error), rig.engine.version]
    return found


def main(directory, hidden, bucket_mb, room_mb):
    from rlhf_authoring.models import write_tiny_model
    from transformers import AutoModelForCausalLM

    from tests.distributed.vllm.rig import Rig, make_engine

    path = write_tiny_model(Path(directory) / "model", hidden=hidden, tied=True)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    rig = Rig(make_engine(path, tensor_parallel_size=2, kv_cache_bytes=1 << 25), model)
    # Only now: vLLM's own start wants hundreds of megabytes there.
    held = os.statvfs("/dev/shm")
    used = held.f_frsize * (held.f_blocks - held.f_bfree)
    if room_mb:
        subprocess.run(["mount", "-o", f"remount,size={used + (room_mb << 20)}", "/dev/shm"], check=True)
    shm = os.statvfs("/dev/shm")
    try:
        found = asyncio.run(scenario(rig, bucket_mb))
    finally:
        asyncio.run(rig.engine.close())
    largest = sum(weight.nbytes for weight in model.parameters())
    print(json.dumps({**found, "room": shm.f_frsize * shm.f_bfree, "bytes": largest, "left": os.listdir("/dev/shm")}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
