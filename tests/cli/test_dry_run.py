"""``--dry-run`` refuses what the run would refuse later, as far as settings, options and models' configurations say."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from rlhf_authoring.models import write_tiny_model

from rlhf_host.config.run_dir import locked
from rlhf_host.models import available_memory

deepspeed, vllm, peft = (
    pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")
    for library in ("deepspeed", "vllm", "peft")
)


@pytest.fixture
def dry(rlhf_here, tiny_model, prompts, tmp_path, monkeypatch):
    """The exit code and the last line of a dry run; nothing may be written."""
    monkeypatch.chdir(tmp_path)

    def run(*flags, model=tiny_model, algo="rloo", reward=("--reward", "vowels"), data=prompts):
        before = set(tmp_path.iterdir())
        flags = ["--algo", algo, *reward, "--actor.model", model, "--data", data, *flags]
        done = rlhf_here("train", "--run-dir", tmp_path / "run", *flags, "--dry-run")
        assert set(tmp_path.iterdir()) == before
        assert "Traceback" not in done.output
        return done

    return run


def refusal(done) -> str:
    assert done.exit_code == 2, done.output
    return done.stderr.partition("Error: ")[2].strip()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--actor.freeze", "*"], "freeze and train_only leave no weight to train"),
        (["--actor.train-only", "*lm_hed*"], "train_only: no weight of LlamaForCausalLM is called '*lm_hed*'"),
        (
            ["--actor.router-aux-loss-coef", "0.01"],
            "router_aux_loss_coef is 0.01, and LlamaForCausalLM has no auxiliary loss of its routers: set it to 0",
        ),
        (["--actor.dtype", "bfloat16"], "dtype bfloat16 for the trainable model"),
        (["--actor.attn-implementation", "flash_attention_2"], "cannot load the model"),
        (["--rollout.tool-format", "no"], "rollout.tool_format 'no' is not one of auto, none, "),
        (["--data.template-kwargs", "thinking"], "data.template_kwargs 'thinking': write KEY=VALUE"),
        (["--overlong-penalty.buffer", "999"], "extension:overlong_penalty (rlhf-plugin-dapo "),
        (["--actor.device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        pytest.param(
            ["--actor.lora.rank", "4", "--actor.lora.targets", "q_prj"],
            "lora.targets: LlamaForCausalLM has no linear map 'q_prj'; did you mean 'q_proj'",
            marks=peft,
        ),
        pytest.param(
            ["--actor.lora.rank", "4", "--actor.lora.targets", "lm_head"], "lora.targets: lm_head is the head", marks=peft
        ),
        pytest.param(
            ["--backend", "deepspeed", "--actor.quantize", "4bit", "--actor.lora.rank", "4"],
            "backend deepspeed cannot train over weights in 4 bits: choose --backend torch, or leave quantize out",
            marks=[deepspeed, peft],
        ),
        pytest.param(
            ["--backend", "deepspeed", "--backend.precision", "fp16", "--actor.device", "cpu"],
            "precision fp16 needs a GPU: use bf16 or fp32",
            marks=deepspeed,
        ),
        pytest.param(
            [
                "--backend",
                "deepspeed",
                "--engine",
                "vllm",
                "--backend.zero-stage",
                "3",
                "--backend.zero-hpz-partition-size",
                "2",
            ],
            "zero_hpz_partition_size 2 does not divide the 1 ranks",
            marks=deepspeed,
        ),
        pytest.param(
            ["--backend", "deepspeed", "--backend.autotp-size", "2", "--engine", "vllm"],
            "backend deepspeed splits a model over 2 processes, and runtime local has one",
            marks=[deepspeed, vllm],
        ),
        pytest.param(
            ["--engine", "vllm", "--engine.tensor-parallel-size", "2", "--engine.multiprocess", "false"],
            "--engine: several devices need multiprocess: true",
            marks=vllm,
        ),
        pytest.param(
            ["--engine", "vllm", "--engine.extra", '{"dtype": "float32"}'],
            "--engine: extra.dtype: the engine sets this itself, from its own options",
            marks=vllm,
        ),
        pytest.param(
            ["--engine", "vllm", "--engine.extra", '{"data_parallel_size": 2}'],
            "--engine: extra.data_parallel_size: engines side by side are this (--placement rollout=N), so leave it out",
            marks=vllm,
        ),
        pytest.param(
            ["--engine", "vllm", "--engine.extra", '{"enable_chunked_prefill": true}'],
            "engine vllm: extra.enable_chunked_prefill: on CPUs the engine sets this itself, so leave it out",
            marks=vllm,
        ),
        pytest.param(
            ["--engine", "vllm", "--sync.adapter", "adapter"],
            "sync.adapter is adapter, and the actor trains none: give --actor.lora.rank, or leave it out",
            marks=vllm,
        ),
    ],
)
def test_what_settings_and_a_models_configuration_say_is_refused(dry, flags, line):
    assert refusal(dry(*flags)).startswith(line)


def test_the_run_itself_refuses_them_before_anything_is_loaded_or_written(rlhf_here, tiny_model, prompts, tmp_path):
    flags = ["--algo", "rloo", "--reward", "vowels", "--actor.model", tiny_model, "--data", prompts, "--actor.freeze", "*"]
    done = rlhf_here("train", *flags, "--run-dir", tmp_path / "run")
    assert refusal(done).endswith("freeze and train_only leave no weight to train")
    assert "Loading actor" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_sound_run_says_what_it_needs(dry):
    done = dry("--kl.coef", "0.1")
    assert done.exit_code == 0, done.output
    assert (
        "memory: 0.0 GB at least (actor: 0.00·10⁹ numbers, 0.0 GB, and 0.0 GB of gradients and optimizer; reference: "
        in done.stdout
    )


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def huge(tiny_model, tmp_path):
    """A model of 16·10¹² weights as far as its configuration says."""
    directory = shutil.copytree(tiny_model, tmp_path / "huge")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9, "hidden_size": 8192}))
    return directory


def test_weights_that_cannot_fit_are_refused_with_numbers(dry, huge):
    line = refusal(dry(model=huge))
    assert line.startswith("the models do not fit: on ")
    # 10⁹ rows of 8192 numbers twice (embedding and head), 4 bytes each, and 12 of their gradients and moments
    assert "they need 262144.1 GB at least (actor: 16384.00·10⁹ numbers, 65536.0 GB, and 196608.1 GB of gradients" in line
    assert "train an adapter (--actor.lora.rank 16) and keep frozen weights in fewer bits" in line
    assert line.endswith(", or choose a smaller model or another place")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_where_the_place_is_not_known_nothing_is_guessed(dry, huge):
    done = dry("--runtime", "ray", model=huge)
    assert done.exit_code == 0, done.output
    assert "the memory of the places that the roles get is unknown, so this is not checked" in done.stdout
    assert "runtime ray: not checked: whether the cluster has these devices" in done.stdout


def test_the_memory_of_this_machine_is_that_of_its_container_and_swap(monkeypatch):
    monkeypatch.setattr(available_memory, "machine_memory", lambda: {"MemTotal": 8, "SwapTotal": 2})
    monkeypatch.setattr(available_memory, "container_memory", lambda: None)
    cpu = torch.device("cpu")
    assert available_memory.available_memory(cpu) == 10
    monkeypatch.setattr(available_memory, "container_memory", lambda: 5)
    assert available_memory.available_memory(cpu) == 7
    monkeypatch.setattr(available_memory, "machine_memory", dict)
    assert available_memory.available_memory(cpu) is None
    assert available_memory.available_memory(torch.device("meta")) is None


# --- rows that stay together -----------------------------------------------------------------------


def long_model(tmp_path):
    return write_tiny_model(tmp_path / "long", positions=64_000)


def test_pairs_of_answers_longer_than_a_micro_batch_are_refused(dry, tmp_path):
    model, pairs = long_model(tmp_path), {"algo": "online_dpo"}
    line = refusal(dry("--rollout.max-new-tokens", "9000", model=model, **pairs))
    assert line.startswith("two rows that must stay together may cost 18,000 tokens (answers of 9,000, and a prompt), and")
    assert "train.max_tokens_per_microbatch is 16,384" in line
    more = ("--rollout.max-new-tokens", "9000", "--train.max-tokens-per-microbatch", "19000")
    assert dry(*more, model=model, **pairs).exit_code == 0
    assert dry("--rollout.max-new-tokens", "8000", model=model, **pairs).exit_code == 0
    assert dry("--rollout.max-new-tokens", "9000", model=model).exit_code == 0, "rows of groups may be split"


def test_prompts_count_too(dry, tmp_path):
    """Here is a prompt of 12 tokens: 2 · (12 + 40 - 1)."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "abcdefghijkl", "label": "1"}) + "\n")
    flags = ("--rollout.max-new-tokens", "40", "--train.max-tokens-per-microbatch")
    data = tmp_path / "one.jsonl"
    assert "may cost 102 tokens" in refusal(dry(*flags, "101", algo="online_dpo", data=data))
    assert dry(*flags, "102", algo="online_dpo", data=data).exit_code == 0


def test_agents_of_several_turns_are_bounded_by_the_longest_row(dry, tmp_path):
    model, flags = long_model(tmp_path), ["--agent", "multi_turn", "--rollout.max-new-tokens", "64"]
    done = dry(*flags, model=model, algo="online_dpo")
    assert done.exit_code == 0, done.output
    assert "two rows that must stay together may cost 127,9" in done.stdout
    line = refusal(dry(*flags, "--rollout.max-tokens", "10000", model=model, algo="online_dpo"))
    assert line.endswith("or a smaller --rollout.max-tokens")


def test_pairs_of_a_data_set_are_looked_at(dry, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b" * 30, "rejected": "c" * 20}) + "\n")
    line = refusal(dry("--train.max-tokens-per-microbatch", "40", algo="dpo", reward=(), data=file))
    assert "pair 1 (a prompt of 1 tokens" in line
    assert "must stay together: set --train.max-tokens-per-microbatch" in line


# --- other models, tasks, plugins -------------------------------------------------------------------


def test_a_frozen_scalar_role_has_a_head_of_one_output(dry, tiny_model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    judge = ("--reward", "reward_model")
    line = refusal(dry("--reward-model.model", tiny_model, reward=judge))
    assert line.endswith("has no scalar head, and a frozen role cannot learn one: give a reward or value model")
    classes = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    shutil.copytree(tiny_model, tmp_path / "classes")
    classes.save_pretrained(tmp_path / "classes")
    line = refusal(dry("--reward-model.model", tmp_path / "classes", reward=judge))
    assert "has a head with 3 outputs, and a scalar head has one" in line


def test_what_a_reward_says_of_tokenizers_is_said_before(dry, tiny_model):
    line = refusal(
        dry("--reward-model.model", tiny_model, "--reward.reward_model.template", "chat", reward=("--reward", "reward_model"))
    )
    assert line.endswith("template is chat, but the reward model's tokenizer has no chat template: set template to text")


def test_an_agent_that_a_row_asks_for_is_there(dry, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "label": "b", "who": "planer"}) + "\n")
    line = refusal(dry("--data.agent-key", "who", data=file))
    assert line == "rows, row 1 asks for the agent 'planer'; the run has single_turn"


# --- resuming ---------------------------------------------------------------------------------------


def test_a_resumed_run_is_looked_at_too(rlhf_here, small_run, tmp_path):
    run_dir = tmp_path / "run"
    assert rlhf_here(*small_run, "--train.steps", "1", "--run-dir", run_dir).exit_code == 0
    resume = ("train", "--resume", run_dir, "--dry-run")
    assert refusal(rlhf_here(*resume)) == f"{run_dir} is finished at step 1; raise --train.steps to continue"
    done = rlhf_here(*resume, "--train.steps", "2")
    assert done.exit_code == 0, done.output
    assert f"{run_dir}/checkpoints/step-000001: the run would go on after step 1" in done.stdout
    with locked(run_dir):
        assert "is in use by another process" in refusal(rlhf_here(*resume, "--train.steps", "2"))
    checkpoint = run_dir / "checkpoints/step-000001/state.json"
    checkpoint.write_text(checkpoint.read_text() + " ")
    assert "step-000001 is damaged: state.json" in refusal(rlhf_here(*resume, "--train.steps", "2"))


@deepspeed
def test_a_run_is_resumed_with_the_backend_that_wrote_its_optimizers(rlhf_here, small_run, tmp_path):
    run_dir = tmp_path / "run"
    assert rlhf_here(*small_run, "--train.steps", "1", "--run-dir", run_dir).exit_code == 0
    before = (run_dir / "config.yaml").read_text()
    resume = ("train", "--resume", run_dir, "--train.steps", "2", "--backend", "deepspeed", "--force")
    line = f"{run_dir}/checkpoints/step-000001 was written by the backend torch, and deepspeed cannot read it: "
    for more in ((), ("--dry-run",)):
        assert refusal(rlhf_here(*resume, *more)) == line + "resume with --backend torch"
    assert (run_dir / "config.yaml").read_text() == before


def test_a_run_is_resumed_with_the_roles_it_trains(rlhf_here, small_run, tmp_path):
    run_dir = tmp_path / "run"
    assert rlhf_here(*small_run, "--train.steps", "1", "--run-dir", run_dir).exit_code == 0
    line = refusal(rlhf_here("train", "--resume", run_dir, "--train.steps", "2", "--algo", "ppo", "--force", "--dry-run"))
    assert line == "the checkpoint trains actor, this run actor, critic: resume with the algorithm it was started with"
