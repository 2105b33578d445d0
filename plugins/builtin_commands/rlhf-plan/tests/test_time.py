"""The time of a run: counts against formulas, lengths, ranges, refusals, and what is said after a run. Dry steps are slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rlhf_authoring.learner import __file__ as learner
from rlhf_plan import time_plan
from rlhf_plan.answers import of_limits, of_path
from rlhf_plan.counted_passes import count
from rlhf_plan.gpu_time import GPUS, GpuTime
from rlhf_plan.items import GPU_NAMES
from rlhf_plan.prediction import Prediction, afterword, compared, keep, kept
from rlhf_plan.short_models import Layers, layers_of, write_short
from rlhf_plan.spans import Span, duration
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MixtralConfig, Qwen2Config, Qwen3MoeConfig

from rlhf_host import UserError
from rlhf_host.settings import RoleConfig, RunConfig

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
GPU = ("--time", "--gpu", "H100", "--prompt-tokens", "100", "--train.steps", "10")


@pytest.fixture
def config_at(tmp_path):
    def write(config, architecture):
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / "model")
        return RoleConfig(model=str(tmp_path / "model"))

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def host(monkeypatch):
    """The host's own seconds are known, so that no dry step is needed."""
    monkeypatch.setattr(time_plan, "_host", lambda rows: Span(0.1, 0.1, 0.1))


def refused(result) -> str:
    assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
    return result.stderr


def test_a_pass_has_the_flops_of_its_formula(config_at):
    role = config_at(Qwen2Config(**SMALL, num_hidden_layers=7), "Qwen2ForCausalLM")
    found = count(role, "lm", 2, 32, backward=True)
    weights = 7 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    attention = 7 * 2 * 2 * 2 * 64 * 32**2 / 2  # two rows, two products, causal
    forward = found.forward.total(lambda one: one.flops)
    assert forward == pytest.approx(2 * weights * 64 + attention, rel=0.02)
    assert found.backward.total(lambda one: one.flops) == pytest.approx(4 * weights * 64 + 2.5 * attention, rel=0.02)
    assert found.forward.total(lambda one: one.bytes) > 2 * weights


def test_only_active_experts_are_counted(config_at):
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    role = config_at(MixtralConfig(**SMALL, **experts, num_hidden_layers=4), "MixtralForCausalLM")
    attention = 2 * 64 * (2 * 64 * 64 + 2 * 64 * 32 + 64 * 8) + 2 * 2 * 2 * 64 * 32**2 / 2
    two = 2 * 64 * 2 * 3 * 64 * 128
    assert count(role, "lm", 2, 32, backward=False).forward.total(lambda one: one.flops) == pytest.approx(4 * (attention + two))


def test_an_operation_that_nobody_knows_is_refused(config_at, monkeypatch):
    from transformers.models.qwen2 import modeling_qwen2

    @torch.library.custom_op("of_a_test::mystery", mutates_args=())
    def mystery(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    mystery.register_fake(torch.empty_like)
    role = config_at(Qwen2Config(**SMALL, num_hidden_layers=2), "Qwen2ForCausalLM")
    inner = modeling_qwen2.Qwen2MLP.forward
    monkeypatch.setattr(modeling_qwen2.Qwen2MLP, "forward", lambda self, hidden: inner(self, mystery(hidden)))
    with pytest.raises(UserError, match="the operation of_a_test::mystery computes is not known"):
        count(role, "lm", 1, 8, backward=False)


def test_layers_of_several_kinds_stand_for_all_only_where_they_repeat(config_at):
    windows = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = Gemma3TextConfig(**SMALL, num_hidden_layers=26, layer_types=(windows * 5)[:26], head_dim=16)
    assert layers_of(config_at(gemma, "Gemma3ForCausalLM"), "lm") == Layers(26, 6)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0, 5, 6]}
    odd = config_at(Qwen3MoeConfig(**SMALL, **experts, num_hidden_layers=12), "Qwen3MoeForCausalLM")
    with pytest.raises(UserError, match="12 layers are of 2 kinds in an order that does not repeat"):
        layers_of(odd, "lm")


def test_a_short_model_is_the_first_layers_with_the_tokenizer(tmp_path):
    from rlhf_host.internals import find_model

    role = RoleConfig(model=find_model("quickstart").path)
    assert layers_of(role, "lm").depths() == [3]
    write_short(role, "lm", 2, tmp_path / "short")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "short")
    assert model.config.num_hidden_layers == 2
    assert {float(norm.weight.detach().min()) for norm in (model.model.norm, model.model.layers[1].input_layernorm)} == {1.0}
    assert (tmp_path / "short/tokenizer_config.json").exists()


def test_lengths_of_a_file_of_a_limit_and_of_nothing(tmp_path):
    assert of_limits(64).mean == Span(1, 32.5, 64)
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps({"length": length}) + "\n" for length in (10, 20, 30, 500)))
    lengths = of_path(file, 100)
    assert (lengths.mean.low, lengths.mean.middle, lengths.mean.high, lengths.longest) == (1, 100, 100, 100)
    file.write_text('{"length": 3}\nnothing\n')
    with pytest.raises(UserError, match=r"answers.jsonl:2: no trajectory with a length"):
        of_path(file, 100)


def test_seconds_are_said_in_the_unit_that_people_would_take():
    said = [duration(value) for value in (0, 0.0123, 0.5, 90, 150, 9000, 400_000)]
    assert said == ["0 s", "12 ms", "0.5 s", "90 s", "2.5 min", "2.5 h", "4.6 days"]


def test_names_of_gpus_in_the_help_are_those_with_a_data_sheet():
    assert tuple(GPUS) == GPU_NAMES


def prediction(low: float, high: float) -> Prediction:
    parts = dict.fromkeys(("sampling", "passes", "optimizer", "sync", "host"), Span(low / 5, (low + high) / 10, high / 5))
    return Prediction(parts, 100, Span(0, 0, 0), 2, "2 × H100", ["one note"], Span(1, 2, 3), Span(5, 6, 7))


def test_cost_is_that_of_all_devices():
    lines = prediction(36, 72).lines(2.0)
    assert lines[2] == "  100 steps: 60 min to 2 h; cost 4.00 to 8.00 for 2 devices at 2 per device and hour"
    assert "cost" not in "".join(prediction(36, 72).lines(None))


def test_a_prediction_is_found_by_settings_that_change_a_step(cache):
    config = RunConfig()
    keep(config, prediction(1, 2))
    later = {"name": "other", "run_dir": "x", "seed": 7}
    assert kept(RunConfig.model_validate(later | {"train": {"steps": 9}})) == prediction(1, 2)
    assert kept(RunConfig.model_validate({"train": {"batch_size": 9}})) is None


@pytest.mark.parametrize(("step", "place"), [(0.5, "below"), (1.5, "inside"), (3.0, "above")])
def test_what_a_run_took_is_said_beside_the_prediction(step, place):
    rows = [{"time/step": step, "time/rollout": step / 2, "time/train": step / 4, "length/mean": 9.0}]
    measured, predicted, lengths = compared(rows, prediction(1, 2))
    assert measured.startswith(f"Time of a step, measured: {duration(step)} (sampling ")
    assert predicted.endswith(f"measured is {place}")
    assert lengths == "  answers had 9 tokens at the mean, and were predicted to have 5 to 7"


def test_after_a_run_without_a_prediction(cache, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "time/step": 2.0, "time/train": 1.5}\n')
    measured, hint = afterword(RunConfig(run_dir=str(run)))
    assert measured == "Time of a step, measured: 2 s (passes and optimizer 1.5 s, host 0.5 s)"
    assert hint.startswith("  not predicted: rlhf plan --time")
    assert json.loads((run / "plan.json").read_text())["measured"] == {"step": 2.0, "whole": 2.0}


def test_gpus_are_computed_as_a_range(plan, config_at, cache, host):
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 1000,
    }
    role = config_at(Qwen2Config(**sizes, num_hidden_layers=40), "Qwen2ForCausalLM")
    placed = ("--runtime", "ray", "--placement", "actor+rollout=8", "--backend", "fsdp", "--engine", "vllm")
    done = plan("--actor.model", role.model, *GPU, *placed, "--price", "2.5", "--json", "--data", "arithmetic")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["devices"], found["steps"]) == (8, 10)
    assert all(span["low"] <= span["middle"] <= span["high"] for span in found["parts"].values())
    weights = 40 * (4 * 2048**2 + 3 * 2048 * 8192)
    training = 6 * weights * 256 * 101  # of the shortest answers
    products = training / (0.75 * 989e12) / 8
    assert products < found["parts"]["passes"]["low"] < 2.5 * products
    assert any("computed, not measured" in note for note in found["notes"])


def test_evaluations_are_not_hidden_behind_training(plan, cache, host, monkeypatch, tmp_path):
    seconds = {"sampling": Span(4, 8, 16), "passes": Span(4, 5, 6), "optimizer": Span(1, 1, 1), "sync": Span(0, 0, 0)}
    monkeypatch.setattr(time_plan, "computed_on_gpus", lambda *arguments: GpuTime(seconds, 1, []))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(12)))
    flags = (
        "--actor.model",
        "quickstart",
        "--data",
        rows,
        "--eval.data",
        rows,
        "--reward",
        f"{learner}:right_answer",
        "--rollout.n",
        "2",
    )
    flags += ("--time", "--gpu", "H100", "--train.steps", "10", "--eval.every", "5", "--train.batch-size", "2", "--json")
    found = json.loads(plan(*flags, "--async-depth", "1").stdout)
    assert found["parts"]["sampling"]["low"] == 0
    # three evaluations of 12 answers, where a step has 4
    assert (found["evaluations"]["low"], found["evaluations"]["high"]) == (3 * 4, 3 * 3 * 16)
    assert any("evaluations sample 36 answers" in note and "3 to 9 times" in note for note in found["notes"])


def test_an_evaluation_of_fewer_answers_than_a_step_takes_a_part_of_one():
    assert time_plan.batches_of(4, 8) == (0.5, 1.0)
    assert time_plan.batches_of(24, 8) == (1.0, 3.0)
    assert time_plan.sampled_again(Span(1, 2, 4), 1.0, 4.0) == Span(1, 4, 16)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--price", "2"], "--price goes with --time"),
        (["--time", "--price", "cheap"], "--price cheap: give what a device costs in an hour"),
        (["--time", "--gpu", "H10"], "--gpu H10: no data sheet of it is here"),
        (["--time", "--device", "cuda"], "--time --device cuda: say which GPU"),
        (["--time", "--answers", "nowhere"], "--answers nowhere: no such run or file"),
        (["--time", "--link-gbs", "9"], "--link-gbs 9: give LOW..HIGH"),
        (["--time", "--engine", "http", "--engine.urls", "http://127.0.0.1:9"], "the rate of the engine http is unknown"),
        (["--time", "--gpu", "H100", "--placement", "actor=4"], "runtime local has one process and takes no placement"),
        (["--time", "--runtime", "ray"], "--time on CPUs is for --runtime local"),
    ],
)
def test_what_decides_the_time_and_is_unknown_is_refused(plan, cache, flags, said):
    assert said in refused(
        plan("--actor.model", "quickstart", "--data", "arithmetic", *flags, "--reward", f"{learner}:right_answer")
    )


def test_without_data_the_time_on_a_gpu_needs_the_length_of_prompts(plan, directory):
    words = ("--actor.model", directory("7B"), "--reward", f"{learner}:right_answer", "--time", "--gpu", "H100")
    assert "how long prompts are is unknown: give --data, or --prompt-tokens N" in refused(plan(*words))


def test_answers_longer_than_a_micro_batch_are_counted_whole(plan, directory):
    words = ("--actor.model", directory("7B"), "--train.max-tokens-per-microbatch", "1024", "--json")
    few, many = (plan(*words, "--rollout.max-new-tokens", tokens) for tokens in ("1024", "16000"))
    few, many = (next(each for each in json.loads(one.stdout)["phases"] if each["phase"] == "training") for one in (few, many))
    assert many["bytes"]["activations"] > 10 * few["bytes"]["activations"]


def test_gpus_that_a_placement_names_are_planned_as_gpus(plan, directory):
    words = ("--actor.model", directory("7B"), "--runtime", "ray", "--device", "cpu", "--json", "--placement")
    named, unnamed = (plan(*words, place) for place in ("actor+rollout=8:gpu", "actor+rollout=8"))
    named, unnamed = (json.loads(each.stdout)["phases"][1]["bytes"]["weights"] for each in (named, unnamed))
    assert named != unnamed


@pytest.mark.slow
def test_dry_steps_a_run_and_its_page(tmp_path, monkeypatch, cache):
    for package in ("rlhf_plugin_rloo", "rlhf_plugin_math_verifier", "rlhf_runs"):
        pytest.importorskip(package)
    from click.testing import CliRunner

    from rlhf_host.commands import main

    monkeypatch.chdir(tmp_path)
    flags = ("--algo", "rloo", "--reward", "math_verifier", "--train.batch-size", "16", "--rollout.max-new-tokens", "4")
    planned = CliRunner().invoke(main, ["plan", *flags, "--time", "--price", "1", "--json"])
    assert planned.exit_code == 0, planned.output
    found = json.loads(planned.stdout)
    assert (found["steps"], found["devices"]) == (150, 1)
    assert all(found["parts"][part]["high"] > 0 for part in ("sampling", "passes", "optimizer", "host"))
    ran = CliRunner().invoke(main, ["train", *flags, "--train.steps", "4", "--run-dir", "run"])
    assert "predicted for" in ran.output, ran.output
    record = json.loads(Path("run/plan.json").read_text())
    assert record["predicted"]["step"] == found["step"]
    shown = CliRunner().invoke(main, ["show", "run"]).output
    assert record["lines"][0] in " ".join(shown.split()), shown
