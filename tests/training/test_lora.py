"""Runs that train LoRA adapters: the reference is the base in the same memory, checkpoints hold the adapter alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import write_tiny_model
from safetensors.torch import load_file, save_file

pytest.importorskip("peft")

LORA = ("--actor.lora.rank", "4", "--actor.lr", "1e-2", "--kernels", "none")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(3, 8) for b in range(2, 6)]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def online(tiny_model, prompts):
    return [
        *("train", "--algo", "rloo", "--reward", "vowels", "--kl.coef", "0.05", "--data", prompts),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "4", "--train.steps", "4"),
    ]


def curve(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    return [{key: value for key, value in row.items() if not key.startswith(machine)} for row in rows]


def ok(result):
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_samples_trains_and_writes_its_adapter(rlhf_here, online, tiny_model, tmp_path):
    ok(
        rlhf_here(
            *online,
            *LORA,
            "--actor.model",
            tiny_model,
            "--run-dir",
            tmp_path / "run",
            "--checkpoint.every",
            "2",
            "--checkpoint.keep",
            "2",
        )
    )
    rows = curve(tmp_path / "run")
    assert len(rows) == 4
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert rows[0]["kl"] == 0.0  # the same module without its adapter, which is 0 at first
    assert rows[-1]["kl"] > 1e-4
    assert min(row["grad_norm"] for row in rows) > 0
    for model in (tmp_path / "run/model", tmp_path / "run/checkpoints/step-000002/model"):
        names = {path.name for path in model.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
        assert not names & {"config.json", "model.safetensors"}
    settings = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model)
    # Optimizer state of what is trained alone.
    saved = torch.load(tmp_path / "run/checkpoints/step-000004/optimizers/actor/optimizer.pt", weights_only=True)
    adapter = load_file(tmp_path / "run/model/adapter_model.safetensors")
    moments = sum(state["exp_avg"].numel() for state in saved["optimizer"]["state"].values())
    assert moments == sum(tensor.numel() for tensor in adapter.values())


def test_dpo_with_the_base_as_reference_is_dpo_with_a_copy_of_it(rlhf_here, pairs, tiny_model, tmp_path):
    common = ["train", "--algo", "dpo", *LORA, "--actor.model", tiny_model, "--data", pairs, "--train.batch-size", "10"]
    common += ["--data.epochs", "5"]
    ok(rlhf_here(*common, "--run-dir", tmp_path / "view"))
    ok(rlhf_here(*common, "--reference.device", "cpu", "--actor.device", "auto", "--run-dir", tmp_path / "copy"))
    rows = curve(tmp_path / "view")
    assert rows == curve(tmp_path / "copy")
    assert rows[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert rows[-1]["loss"] < 0.68


def test_which_roles_are_views(tiny_model):
    from rlhf_host.config.schema import LoraOptions, RoleConfig
    from rlhf_host.records.needs import RoleNeed
    from rlhf_host.runtimes.building import role_views

    actor, reference = RoleNeed("actor", trainable=True, source=None), RoleNeed("reference")
    base = RoleConfig(model=str(tiny_model))
    trains = base.model_copy(update={"lora": LoraOptions(rank=4)})
    assert role_views([(actor, base), (reference, base)]) == {}
    assert role_views([(actor, trains), (reference, base)])["reference"].start is None
    for change in ({"dtype": "bfloat16"}, {"model": "other"}, {"device": "cuda:1"}):
        assert role_views([(actor, trains), (reference, base.model_copy(update=change))]) == {}
    assert role_views([(actor, trains), (RoleNeed("reference", head="scalar"), base)]) == {}
    assert role_views([(reference, base)]) == {}  # apart from the actor: its own copy


def test_a_resumed_run_is_the_run_that_was_never_stopped(rlhf, online, tiny_model, tmp_path):
    flags = [*online, *LORA, "--actor.model", tiny_model, "--checkpoint.every", "2", "--checkpoint.keep", "0"]
    rlhf.run(*flags, "--run-dir", tmp_path / "whole")
    rlhf.run(*flags, "--train.steps", "2", "--run-dir", tmp_path / "cut")
    rlhf.run("train", "--resume", tmp_path / "cut", "--train.steps", "4")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    first, second = (load_file(tmp_path / run / "model/adapter_model.safetensors") for run in ("whole", "cut"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_resume_on_another_base_is_refused(rlhf_here, online, tiny_model, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    flags = [*online, *LORA, "--actor.model", base, "--train.steps", "1", "--run-dir", tmp_path / "run"]
    ok(rlhf_here(*flags))
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    result = rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "2")
    assert result.exit_code == 2
    assert "was trained on other weights than those of" in result.output
    for change in (["--actor.lora.rank", "8"], ["--actor.adapter", tmp_path / "run/model"]):
        result = rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "2", *change)
        assert result.exit_code == 2
        assert "start a new run, or add --force" in result.output


def test_a_run_that_begins_with_an_adapter_keeps_a_copy_of_it_as_its_reference(rlhf_here, online, tiny_model, tmp_path):
    ok(rlhf_here(*online, *LORA, "--actor.model", tiny_model, "--run-dir", tmp_path / "first"))
    start = tmp_path / "first/model"
    more = [*online, "--actor.lr", "1e-2", "--kernels", "none", "--checkpoint.every", "2", "--checkpoint.keep", "0"]
    ok(rlhf_here(*more, "--actor.model", tiny_model, "--actor.adapter", start, "--run-dir", tmp_path / "second"))
    ok(rlhf_here(*more, "--actor.model", start, "--run-dir", tmp_path / "third"))
    rows = curve(tmp_path / "second")
    assert rows == curve(tmp_path / "third")
    assert rows[0]["kl"] == 0.0
    assert rows[-1]["kl"] > 1e-5
    # The same with the merged model as the base and as the reference, but for rounding.
    ok(rlhf_here("merge-lora", tmp_path / "first", "--output", tmp_path / "merged"))
    ok(rlhf_here(*more, "--reference.model", tmp_path / "merged", "--actor.model", start, "--run-dir", tmp_path / "apart"))
    for here, there in zip(rows, curve(tmp_path / "apart"), strict=True):
        assert here["kl"] == pytest.approx(there["kl"], abs=1e-5)
    # A resume finds the same reference again, not the checkpoint's adapter.
    ok(rlhf_here(*more, "--actor.model", start, "--train.steps", "2", "--run-dir", tmp_path / "cut"))
    ok(rlhf_here("train", "--resume", tmp_path / "cut", "--train.steps", "4"))
    assert curve(tmp_path / "cut") == rows


def test_the_learning_rate_of_adapters_is_ten_times_the_usual_one(rlhf_here, online, tiny_model, tmp_path):
    lora = ["--actor.lora-rank", "4", "--train.steps", "1", "--checkpoint.final", "false"]
    ok(rlhf_here(*online, "--actor.model", tiny_model, *lora, "--run-dir", tmp_path / "lora"))
    ok(rlhf_here(*online, "--actor.model", tiny_model, *lora[2:], "--run-dir", tmp_path / "whole"))
    rates = [curve(tmp_path / run)[0]["lr"] for run in ("lora", "whole")]
    assert rates[0] == pytest.approx(10 * rates[1])


@pytest.mark.parametrize("algo", ["sft", "rm", "kto"])
def test_algorithms_on_a_data_set_train_adapters(algo, rlhf_here, pairs, tiny_model, tmp_path):
    data = pairs
    if algo == "sft":
        data = tmp_path / "answers.jsonl"
        rows = [json.loads(line) for line in pairs.read_text().splitlines()]
        data.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n" for row in rows))
    flags = ["train", "--algo", algo, *LORA, "--actor.model", tiny_model, "--data", data, "--eval.data", data]
    ok(rlhf_here(*flags, "--train.batch-size", "5", "--data.epochs", "3", "--run-dir", tmp_path / "run"))
    rows = curve(tmp_path / "run")
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    names = set(load_file(tmp_path / "run/model/adapter_model.safetensors"))
    assert ("base_model.model.score.weight" in names) == (algo == "rm")


def test_a_critic_and_an_actor_each_train_an_adapter(rlhf_here, tiny_model, prompts, tmp_path):
    flags = ["train", "--algo", "ppo", "--reward", "vowels", "--data", prompts, "--rollout.n", "2", "--train.batch-size", "4"]
    lora = [*LORA, "--critic.lora.rank", "2", "--train.steps", "2", "--rollout.max-new-tokens", "8"]
    ok(rlhf_here(*flags, *lora, "--actor.model", tiny_model, "--run-dir", tmp_path / "run"))
    critic = tmp_path / "run/checkpoints/step-000002/roles/critic"
    assert json.loads((critic / "adapter_config.json").read_text())["r"] == 2
    assert "base_model.model.score.weight" in load_file(critic / "adapter_model.safetensors")
    ok(rlhf_here("train", "--resume", tmp_path / "run", "--train.steps", "3"))


RAY = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200", "--train.threads", "1")


@pytest.mark.timeout(900)
def test_on_ray_engines_get_merged_weights_and_the_reference_is_with_the_actor(rlhf, online, tiny_model, tmp_path):
    pytest.importorskip("ray")
    flags = [*online, *LORA, "--actor.model", tiny_model, "--sync.verify", "on", "--train.steps", "3"]
    rlhf.run(*flags, "--run-dir", tmp_path / "local")
    place = ("--placement", "actor+reference=2", "--placement", "rollout=1")
    rlhf.run(*flags, *RAY, *place, "--run-dir", tmp_path / "ray")
    local, ray = curve(tmp_path / "local"), curve(tmp_path / "ray")
    assert max(row["mismatch/max"] for row in ray) < 1e-4
    assert ray[0]["kl"] == 0.0
    assert len(local) == len(ray) == 3
    for here, there in zip(local, ray, strict=True):
        for name in ("reward/mean", "grad_norm", "kl", "version"):
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name
    first, second = (load_file(tmp_path / run / "model/adapter_model.safetensors") for run in ("local", "ray"))
    assert all(torch.allclose(tensor, second[name], atol=1e-3) for name, tensor in first.items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sync", "sent", "more"),
    [("ipc", "merged", ["--actor.quantize", "4bit"]), ("ipc", "adapter", []), ("checkpoint", "adapter", [])],
)
def test_vllm_samples_what_is_trained(sync, sent, more, rlhf, tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    if more:
        pytest.importorskip("bitsandbytes")
    model = write_tiny_model(tmp_path / "model", hidden=128)  # vLLM has no attention kernel for narrower heads on CPUs
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "label": "7"}) + "\n" for a in range(8) for b in range(8)))
    flags = [
        "train",
        "--algo",
        "rloo",
        "--reward",
        "vowels",
        "--data",
        data,
        "--rollout.n",
        "4",
        "--rollout.max-new-tokens",
        "8",
    ]
    flags += ["--train.batch-size", "8", "--train.steps", "3", *LORA, "--actor.model", model, "--engine", "vllm"]
    flags += ["--sync", sync, "--sync.verify", "on", "--sync.adapter", sent, *more]
    flags += ["--sync.directory", tmp_path / "weights"] if sync == "checkpoint" else []
    rlhf.run(*flags, *RAY, "--run-dir", tmp_path / "run")
    rows = curve(tmp_path / "run")
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert min(row["grad_norm"] for row in rows) > 0
    assert rows[-1]["version"] == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_saves_and_sends_adapters_as_one_process_does(stage, rlhf, online, tiny_model, tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("deepspeed")
    flags = [*online, *LORA, "--actor.model", tiny_model, "--train.steps", "3", "--actor.adam-eps", "1e-4"]
    rlhf.run(*flags, "--run-dir", tmp_path / "local")
    zero = ("--backend", "deepspeed", "--backend.zero-stage", str(stage), "--sync.verify", "on", "--checkpoint.every", "2")
    place = ("--placement", "actor+reference=2", "--placement", "rollout=1")
    rlhf.run(*flags, *RAY, *zero, *place, "--run-dir", tmp_path / "zero")
    local, ranks = curve(tmp_path / "local"), curve(tmp_path / "zero")
    assert max(row["mismatch/max"] for row in ranks) < 1e-4
    for here, there in zip(local, ranks, strict=True):
        for name in ("reward/mean", "grad_norm", "kl"):
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name
    first, second = (load_file(tmp_path / run / "model/adapter_model.safetensors") for run in ("local", "zero"))
    assert first.keys() == second.keys()
    assert all(torch.allclose(tensor, second[name], atol=1e-4) for name, tensor in first.items())
    rlhf.run("train", "--resume", tmp_path / "zero", "--train.steps", "4")
    assert curve(tmp_path / "zero")[-1]["mismatch/max"] < 1e-4
