"""A base with weights that no class has a place for, on its whole way: each is accounted for in all that is written."""

from __future__ import annotations

import asyncio

import pytest

from rlhf_host.config.schema import RoleConfig
from rlhf_host.models.carried import carried_by
from rlhf_host.models.loading import load_model
from rlhf_host.records.episodes import Sampling
from tests.carriers import account, weights_in, write_glm
from tests.distributed.vllm.rig import Rig, make_engine, mismatch, prompts_of


@pytest.mark.timeout(600)
def test_every_weight_of_the_base_is_accounted_for_on_its_whole_way(rlhf, small_run, tiny_model, tmp_path, capsys):
    pytest.importorskip("peft")
    pytest.importorskip("vllm")
    base, run, lora = write_glm(tmp_path / "glm"), tmp_path / "run", tmp_path / "lora"
    carried = set(carried_by(load_model(RoleConfig(model=str(base)))))
    flags = [base if flag == tiny_model else flag for flag in small_run]
    kept = ("--checkpoint.every", "1", "--checkpoint.keep", "0", "--sync", "delta")
    rlhf.run(*flags, "--train.steps", "2", "--run-dir", run, *kept, "--engine", "vllm", "--sync.verify", "on")
    rlhf.run("train", "--resume", run, "--train.steps", "3")
    rlhf.run("export", run, "--output", tmp_path / "export")
    rlhf.run("export", run, "--dtype", "bfloat16", "--output", tmp_path / "half")
    for step in (1, 3):
        (run / f"checkpoints/step-{step:06d}").rename(tmp_path / f"step-{step}")
    rlhf.run("export", f"{run}@1", "--output", tmp_path / "delta")
    rlhf.run(*flags, "--train.steps", "1", "--run-dir", lora, "--actor.lora.rank", "4")
    rlhf.run("merge-lora", lora, "--output", tmp_path / "merged")
    written = {
        "checkpoint": tmp_path / "step-1/model",
        "resumed": tmp_path / "step-3/model",
        **{name: tmp_path / name for name in ("export", "half", "delta", "merged")},
        "final": run / "model",
    }
    whole = dict.fromkeys(weights_in(base), "the model's") | dict.fromkeys(carried, "carried")
    for name, directory in written.items():
        found = account(base, directory, carried)
        counts = {kind: list(found.values()).count(kind) for kind in sorted({*found.values()})}
        with capsys.disabled():
            print(f"\n{name:<12}{counts}", end="")
        assert found == whole, name
    assert len(carried) == len(whole) - 35
    engine = make_engine(tmp_path / "export", version=0)
    try:
        model = load_model(RoleConfig(model=str(tmp_path / "export"), dtype="float32"))
        prompts = prompts_of(3, 6)
        assert mismatch(model, prompts, Rig(engine, model).sample(prompts, Sampling(max_new_tokens=8))) < 1e-4
    finally:
        asyncio.run(engine.close())
