"""Starts of the vLLM engine: what it refuses, with a directory's weights, experts, several devices, a whole run."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import write_tiny_model

from rlhf_host.distributed.vllm.arguments import versions_by_token
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Sampling

from .rig import Rig, make_engine, mismatch, prompts_of, write_model

pytest.importorskip("vllm")

SMALL = 300 * 2 * 2 * 2 * 32 * 4
"""Bytes of a cache for 300 tokens: layers, keys and values, heads, width of a head, bytes of a number."""


def test_what_it_cannot_serve_it_refuses_at_once(tiny_model):
    with pytest.raises(ValueError, match=r"extra\.dtype: the engine sets this itself"):
        make_engine(tiny_model, extra={"dtype": "half"})
    with pytest.raises(UserError, match=r"cannot serve .*nonsense"):
        make_engine(tiny_model, extra={"nonsense": 1})
    with pytest.raises(UserError, match=r"cannot serve .*max_model_len"):
        make_engine(tiny_model, max_model_len=4096)
    with pytest.raises(UserError, match=r"cannot serve .*: attention heads of size 8, on CPUs it has only 32,"):
        make_engine(tiny_model)
    with pytest.raises(ValueError, match="several devices need multiprocess"):
        make_engine(tiny_model, tensor_parallel_size=2, multiprocess=False)
    with pytest.raises(UserError, match="pipeline_parallel_size above 1 needs GPUs"):
        make_engine(tiny_model, pipeline_parallel_size=2)


def test_starting_leaves_the_process_as_it_was(tmp_path):
    directory = write_model(tmp_path / "model", tied=False)
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    before = torch.set_num_threads, sys.excepthook
    engine = make_engine(directory, version=0)
    try:
        assert (torch.rand(1).item(), random.random()) == expected
        assert (torch.set_num_threads, sys.excepthook) == before
    finally:
        asyncio.run(engine.close())


@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM needs AVX-512 for such a cache on CPUs")
def test_with_a_cache_of_fewer_bits_its_log_probabilities_are_not_said_to_be_exact(tmp_path):
    directory = write_model(tmp_path / "model", tied=False)
    engine = make_engine(directory, version=0, extra={"kv_cache_dtype": "fp8"})
    try:
        assert not engine.exact
    finally:
        asyncio.run(engine.close())


def test_with_a_version_it_serves_the_directorys_weights_in_the_memory_it_is_given(tmp_path):
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", tied=True)
    rig = Rig(make_engine(directory, version=3, kv_cache_bytes=SMALL), AutoModelForCausalLM.from_pretrained(directory))
    try:
        assert rig.engine.context_length == 256, "nine blocks of 32, one of which vLLM keeps for itself"
        made = rig.sample(prompts_of(3, 200), Sampling(100))
        assert [len(one.token_ids) for one in made] == [56, 56, 56]
        (made,) = rig.sample([[3, 4]], Sampling(8))
        assert made.versions == [3] * 8
        assert mismatch(rig.model, [[3, 4]], [made]) <= 1e-4
    finally:
        asyncio.run(rig.engine.close())


@pytest.mark.parametrize("multiprocess", [False, True])
def test_it_measures_how_full_its_cache_was_and_what_lost_its_place(tmp_path, multiprocess):
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", tied=True)
    engine = make_engine(directory, version=0, kv_cache_bytes=SMALL, multiprocess=multiprocess)
    rig = Rig(engine, AutoModelForCausalLM.from_pretrained(directory))

    def measured():
        return {metric.name: metric.values for metric in asyncio.run(engine.metrics())}

    async def with_a_sync():
        begun = engine.sampled
        job = asyncio.create_task(engine.generate([3], Sampling(250), (8,)))
        while engine.sampled == begun:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(rig.sync, 1)
        return (await job).versions

    try:
        assert measured() == {"kv_use": 0.0, "preemptions": 0}
        rig.sample([[3, 4]], Sampling(8))
        assert measured() == {"kv_use": 1 / 8, "preemptions": 0}
        rig.sample(prompts_of(1, 200), Sampling(100))
        assert measured() == {"kv_use": 1.0, "preemptions": 0}
        assert measured() == {"kv_use": 0.0, "preemptions": 0}
        rig.sample(prompts_of(4, 60), Sampling(100))  # two blocks each at first, five at last
        crowded = measured()
        assert crowded["kv_use"] == 1.0
        assert crowded["preemptions"] > 0
        if versions_by_token():
            assert set(asyncio.run(with_a_sync())) == {0, 1}
            assert measured()["preemptions"] == 0, "what a sync has computed again did not lack room"
    finally:
        asyncio.run(engine.close())


def test_experts_arrive_whole(tmp_path):
    """vLLM packs experts for CPUs only at the first load, and then reads unpacked ones as packed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tiny = write_tiny_model(tmp_path / "model", hidden=128)
    config = Qwen3MoeConfig(
        **{**json.loads((tiny / "config.json").read_text()), "model_type": "qwen3_moe", "eos_token_id": None},
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tiny)
    rig = Rig(make_engine(tiny, version=0), model)
    prompts = prompts_of(4, 40)
    try:
        assert mismatch(model, prompts, rig.sample(prompts, Sampling(8))) <= 1e-4, "from the directory"
        for version in (1, 2):
            rig.train(version)
            rig.sync(version)
            assert mismatch(model, prompts, rig.sample(prompts, Sampling(8))) <= 1e-4
    finally:
        asyncio.run(rig.engine.close())


def test_an_engine_on_two_devices_receives_in_both_of_its_workers(tmp_path):
    """In a namespace in which ``/dev/shm`` has less room than the only bucket needs, where the system allows that."""
    command = [sys.executable, "-m", "tests.distributed.vllm.apart", str(tmp_path), "1024", "256"]
    small = subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0
    if small:
        mount = 'mount -t tmpfs -o size=4g tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command, "64"]
    else:
        command.append("0")
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not small or found["room"] <= 64 << 20 < found["bytes"]
    assert [one[:2] for one in found["connected"]] == [[0, 2], [1, 2]]
    assert len({one[2] for one in found["connected"]}) == 2, "processes"
    assert all(one[3:] == [["weight_sync"], ["float32", []]] for one in found["connected"])
    assert all(gap <= 1e-4 for gap in found["mismatch"].values())
    assert found["versions"] == [1] * 8
    assert found["under_way"] == [200] * versions_by_token(), "a request goes on under new weights"
    message, version = found["refused"]
    assert "no weights came for lm_head.weight" in message
    assert version == -1
    assert not small or found["left"] == []


def test_the_local_runtime_trains_with_it(rlhf, small_run, prompts, tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden=128)
    run = tmp_path / "run"
    place = list(small_run).index("--actor.model") + 1
    flags = [*small_run[:place], model, *small_run[place + 1 :], "--train.steps", "3", "--run-dir", run]
    rlhf.run(*flags, "--engine", "vllm")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/max"] <= 1e-4 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    for row in rows:
        assert 0 < row["engine/kv_use"] < 1
        assert row["engine/preemptions"] == 0
        syncs = 2 if row["step"] == 1 else 1  # the first weights came before it
        assert row["sync/gb"] * 1e9 == pytest.approx(syncs * weights, rel=0.05)
        assert row["sync/gb_per_s"] > 0
    rlhf.run("eval", "--checkpoint", run, "--eval.data", prompts, "--eval.n", "2")
