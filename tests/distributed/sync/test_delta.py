"""The sync ``delta`` with vLLM, which packs weights, and with engines on Ray: every sync is compared with the trainer."""

from __future__ import annotations

import json
import tempfile

import pytest
import torch
from rlhf_authoring import write_tiny_model
from rlhf_sync_delta.files import rebuild, steps_of
from safetensors.torch import load_file

ON_RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")


@pytest.fixture
def short():
    """A directory with a name that leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as made:
        yield made


@pytest.mark.parametrize("place", ["vllm", "ray"])
@pytest.mark.timeout(600)
def test_engines_have_the_trainers_weights_after_every_sync(rlhf, small_run, tiny_model, tmp_path, short, place):
    run, model = tmp_path / "run", write_tiny_model(tmp_path / "wide", hidden=128)  # vLLM has no narrower heads
    if place == "vllm":
        pytest.importorskip("vllm")
        where = ("--engine", "vllm")
    else:
        pytest.importorskip("ray")
        where = (*ON_RAY, "--ray.temp-dir", short, "--placement", "rollout=1")
    sync = ("--sync", "delta", "--sync.verify", "on", "--eval.at-start", "false")
    flags = [model if flag == tiny_model else flag for flag in small_run]
    rlhf.run(*flags, "--train.steps", "3", "--run-dir", run, *sync, *where)
    assert steps_of(run / "deltas") == [0, 1, 2, 3]
    built, own = rebuild(run / "deltas", 3).tensors, load_file(run / "model/model.safetensors")
    kept = {tensor.dtype for tensor in built.values()}
    assert all(torch.equal(own[name].to(built[name].dtype), built[name]) for name in own)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    size = (run / "deltas/step-000003.delta").stat().st_size / 1e9
    assert rows[-1]["sync/gb"] == pytest.approx(size)
    assert len(kept) == 1
