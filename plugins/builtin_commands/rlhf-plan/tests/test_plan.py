"""Plans of real shapes, pinned; refusals; bad input. Of models there is a ``config.json`` and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from rlhf_authoring.learner import __file__ as learner
from transformers import CTRLConfig, MixtralConfig

from rlhf_host.commands import main

FSDP = ("--runtime", "ray", "--backend", "fsdp", "--actor.gradient-checkpointing", "true")
ENGINE = ("--engine", "vllm", "--engine.sleep", "true")

PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "sum")
TRAINING = {
    ("7B", 8): (3.8, 3.8, 7.6, 4.5, 7.3, 5.7, 32.8),
    ("32B", 16): (8.2, 8.2, 16.4, 8.0, 16.6, 7.1, 64.5),
    ("70B", 48): (5.9, 5.9, 11.8, 12.8, 28.8, 8.7, 73.8),
    ("70B", 64): (4.4, 4.4, 8.8, 12.8, 28.8, 8.7, 67.9),
}
"""GB on each device, with 16,384 tokens in a micro-batch."""
LOADING = {"7B": 5.3, "32B": 10.1, "70B": 11.8}
"""The same while models are read in pieces."""


def phases(result: Result) -> dict[str, dict[str, float]]:
    """Phase → part → GB, rounded to a tenth."""
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["phases"]
    return {
        each["phase"]: {part: round(size / 1e9, 1) for part, size in (each["bytes"] | {"sum": each["sum"]}).items()}
        for each in found
    }


def refused(result: Result) -> str:
    assert (result.exit_code, "Traceback" in result.output) == (2, False), result.output
    return result.stderr


def config_of(path: str) -> Path:
    return Path(path, "config.json")


@pytest.mark.parametrize(("name", "devices"), TRAINING)
def test_shapes_of_known_models(plan, directory, name, devices):
    parts = {"7B": "1", "32B": "4", "70B": "8"}[name]
    placed = ("--placement", f"actor+rollout={devices}", "--engine.tensor-parallel-size", parts)
    found = phases(plan("--actor.model", directory(name), *FSDP, *ENGINE, *placed, "--json"))
    assert list(found) == ["engines start", "models are loaded", "training", "weights are sent", "sampling"]
    assert found["training"] == dict(zip(PARTS, TRAINING[name, devices], strict=True))
    assert found["models are loaded"]["sum"] == LOADING[name]


def test_a_run_that_does_not_fit_is_refused_with_settings_that_would(plan, directory):
    model = directory("7B")
    placed = ("--runtime", "ray", "--placement", "actor+rollout=8", "--backend", "fsdp", *ENGINE, "--memory-gb", "80")
    said = refused(plan("--actor.model", model, *placed))
    assert "in the phase 'training' the run needs" in said
    assert "which is more than 90 % of its 80.0 GB: it would fit with --actor.gradient-checkpointing true\n" in said
    assert plan("--actor.model", model, *placed, "--actor.gradient-checkpointing", "true").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ("--backend.expert-parallel", "2", "--actor.lora.rank", "4", "--actor.lora.targets", "experts"),
            "leave them out of lora",
        ),
        (("--backend.expert-parallel", "3"), "3 does not divide the 4 experts"),
        (("--backend.optimizer", "Muon"), "steps its own pieces of the weights"),
    ],
)
def test_what_the_backend_refuses_has_no_plan(plan, tmp_path, flags, why):
    """For experts, from ``config.json`` alone, as always here."""
    pytest.importorskip("rlhf_backend_fsdp")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4).save_pretrained(tmp_path)
    placed = (*FSDP[:4], "--placement", "actor=6", "--placement", "rollout=1")
    assert plan("--actor.model", tmp_path, *placed).exit_code == 0
    assert why in refused(plan("--actor.model", tmp_path, *placed, *flags))


def test_on_one_device_the_cache_is_there_while_answers_are(plan, directory):
    flags = ("--memory-gb", "80", "--engine.autocast", "bfloat16")
    said = refused(plan("--actor.model", directory("7B"), *flags))
    assert "cache" not in said
    advice = "--actor.gradient-checkpointing true --actor.lora.rank 16 --actor.dtype bfloat16"
    assert said.endswith(f"it would fit with {advice}\n")
    assert plan("--actor.model", directory("7B"), *flags, *advice.split()).exit_code == 0


def test_a_frozen_model_that_answers_has_an_engine_on_the_devices_of_its_role(plan, directory):
    """Beside its worker; a mixture has both models, and gets weights from syncs."""
    pytest.importorskip("rlhf_plugin_online_dpo")

    def planned(name, *flags):
        chosen = ("--algo", name, "--agent", name, "--reward", f"{learner}:right_answer", "--runtime", "ray", "--json")
        placed = ("--placement", "actor+rollout=4", "--placement", "reference=1", "--backend", "fsdp")
        result = plan("--actor.model", directory("7B"), *chosen, *placed, "--actor.gradient-checkpointing", "true", *flags)
        assert result.exit_code == 0, result.output
        found = {}
        for phase in json.loads(result.stdout)["phases"]:
            found.setdefault(phase["devices"], {})[phase["phase"]] = phase["bytes"]
        return found[4], found[1]

    (_, alone), (_, mixed) = planned("xpo"), planned("nash_md")
    one, weights = alone["sampling"]["engine"], alone["sampling"]["weights"]
    assert 2 * one == weights > 0  # its file has 16 bits, and the worker computes in 32
    assert "weights are sent" not in alone
    assert mixed["sampling"]["engine"] == 2 * one
    assert mixed["sampling"]["cache"] == 2 * alone["sampling"]["cache"] > 0
    assert "weights are sent" in mixed


def test_numbers_can_be_given(plan, directory):
    model = directory("7B")
    placed = ("--placement", "actor+rollout=8", *FSDP, *ENGINE, "--json")
    found = phases(plan("--actor.model", model, *placed, "--activations-gb", "1", "--engine-gb", "2.5"))
    assert (found["training"]["activations"], found["sampling"]["engine"]) == (1.0, 2.5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--memory-gb", "0"], "--memory-gb 0: give the memory of a device"),
        (["--weights-gb", "1e308"], "--weights-gb 1e308: give a number of gigabytes"),
        (["--runtime", "local", "--placement", "actor=8"], "takes no placement"),
        (["--memory-gb", "much"], "--memory-gb much: give a number of gigabytes"),
        (["--weights-gb", "-1"], "--weights-gb -1: give a number of gigabytes"),
        (["--activation-gb", "1"], "did you mean '--activations-gb'"),
        (["--device", "tpu"], "--device tpu: it is cuda or cpu"),
    ],
)
def test_bad_flags(plan, directory, flags, said):
    assert said in refused(plan("--actor.model", directory("7B"), *flags))


def test_what_engines_take_by_themselves_is_no_reason_to_refuse(plan, directory):
    apart = ("--runtime", "ray", "--placement", "actor=8", "--placement", "rollout=4", *FSDP, "--engine", "vllm")
    assert plan("--actor.model", directory("7B"), *apart, "--memory-gb", "80").exit_code == 0
    adapter = ("--actor.lora.rank", "8", "--actor.dtype", "bfloat16", "--actor.gradient-checkpointing", "true")
    said = refused(plan("--actor.model", directory("7B"), *adapter, "--engine", "vllm", "--memory-gb", "80"))
    assert "--engine.gpu-memory-utilization 0." in said


def test_everything_that_is_too_large_is_named(plan, directory):
    apart = ("--runtime", "ray", "--placement", "actor=2", "--placement", "rollout=1", "--backend", "fsdp", "--engine", "vllm")
    said = refused(plan("--actor.model", directory("70B"), *apart, "--memory-gb", "80"))
    assert "on each device of actor=2" in said
    assert "; rollout=1 needs " in said


def test_a_row_that_is_longer_than_the_budget_is_counted_whole(plan, directory):
    small = ("--placement", "actor+rollout=8", *FSDP, *ENGINE, "--train.max-tokens-per-microbatch", "1024", "--json")
    rows = ("--rollout.max-tokens", "16384", "--rollout.max-new-tokens", "16000")
    found = phases(plan("--actor.model", directory("7B"), *small, *rows))["training"]
    assert found["activations"] == TRAINING["7B", 8][4]


def test_as_many_layers_are_recomputed_as_memory_asks_for(plan, directory):
    def chosen(*flags: str) -> tuple[int, float, str]:
        result = plan("--actor.model", model, *placed, *flags, "--json")
        training = next(each for each in json.loads(result.stdout)["phases"] if each["phase"] == "training")
        return training["choices"]["actor"]["recomputed"], training["bytes"]["activations"] / 1e9, result.output

    model = directory("7B")
    placed = ("--runtime", "ray", "--placement", "actor+rollout=8", "--backend", "fsdp", *ENGINE)
    auto = ("--actor.gradient-checkpointing", "auto", "--memory-gb")
    (few, most, _), (some, less, _), (every, least, _) = (chosen(*auto, size) for size in ("160", "80", "34"))
    assert (few, every) == (0, 28)
    assert 0 < some < 28
    assert most > less > least
    assert chosen(*auto[:2])[:2] == (28, least), "the memory of the devices is unknown"
    table = plan("--actor.model", model, *placed, *auto, "80")
    assert f"actor recomputes {some} of 28 layers" in table.output
    fixed = ("--actor.gradient-checkpointing", str(some), "--memory-gb", "80")
    assert plan("--actor.model", model, *placed, *fixed).output.splitlines()[3] == table.output.splitlines()[3]
    one_less = ("--actor.gradient-checkpointing", str(some - 1), "--memory-gb", "80")
    assert "it would fit with --actor.gradient-checkpointing true" in refused(plan("--actor.model", model, *placed, *one_less))
    many = plan("--actor.model", model, *placed, "--actor.gradient-checkpointing", "29")
    alone = "Qwen2ForCausalLM has 28 layers that can be recomputed one by one; true recomputes all"
    assert f"--actor.gradient-checkpointing 29: {alone}" in refused(many)
    unknown = "actor recomputes 28 of 28 layers, because the memory of the devices is not known (--memory-gb)."
    assert unknown in plan("--actor.model", model, *placed, *auto[:2]).output


@pytest.mark.parametrize("asked", ["true", "3", "auto"])
def test_a_model_that_cannot_recompute_is_refused_as_by_a_run(plan, tmp_path, asked):
    small = {"n_embd": 64, "dff": 128, "n_layer": 4, "n_head": 2, "vocab_size": 97, "architectures": ["CTRLLMHeadModel"]}
    CTRLConfig(**small).save_pretrained(tmp_path)
    said = refused(plan("--actor.model", tmp_path, "--actor.gradient-checkpointing", asked))
    assert f"--actor.gradient-checkpointing {asked}: CTRLLMHeadModel does not support gradient checkpointing" in said
    assert phases(plan("--actor.model", tmp_path, "--json"))
    said = refused(plan("--actor.model", tmp_path, "--memory-gb", "0.06"))
    assert "would fit with --" in said
    assert "gradient-checkpointing" not in said


def test_logits_that_are_kept_are_counted(plan, directory):
    flags = ("--actor.model", directory("7B"), "--placement", "actor+rollout=8", *FSDP, *ENGINE)
    off, on = (phases(plan(*flags, "--train.keep-logits", each, "--json"))["training"]["logits"] for each in ("off", "on"))
    assert on - off == pytest.approx(16_384 * 152_064 * 2 / 1e9, abs=0.1)
    said = refused(plan(*flags, "--train.keep-logits", "on", "--memory-gb", "39"))
    assert "it would fit with --train.keep-logits off" in said


def test_flex_attention_is_planned_as_sdpa(plan, directory):
    flags = ("--actor.model", directory("7B"), "--placement", "actor+rollout=8", *FSDP, *ENGINE, "--json")
    assert phases(plan(*flags)) == phases(plan(*flags, "--actor.attn-implementation", "flex_attention"))


def test_without_an_algorithm_there_is_nothing_to_plan(directory):
    result = CliRunner().invoke(main, ["plan", "--actor.model", directory("7B")])
    assert (result.exit_code, "give --algo NAME" in result.stderr) == (2, True)


def test_models_that_cannot_be_planned(plan, directory, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(plan("--actor.model", str(tmp_path / "empty")))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file, and a plan of memory is made from a config.json" in refused(
        plan("--actor.model", str(tmp_path / "model.gguf"))
    )
    config = config_of(directory("7B"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": "wide"}))
    assert "no memory can be planned for it: " in refused(plan("--actor.model", str(config.parent)))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 3584, "vocab_size": 0}))
    assert "has an impossible vocab_size: 0" in refused(plan("--actor.model", str(config.parent)))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_the_table_fits_the_terminal(width):
    from rlhf_plan.command import NOTE, Plan
    from rlhf_plan.items import GB, PARTS
    from rlhf_plan.phases import Phase

    parts = {part: place * GB for place, part in enumerate(PARTS, start=1)}
    phases = [
        Phase(SimpleNamespace(name="actor+reference", devices=8, device=None), name, parts, 0.9)
        for name in ("models are loaded", "training")
    ]
    lines = Plan(phases, [NOTE], None, "cuda").lines(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace(",", " ").replace(":", " ").split()
    assert {*PARTS, "sum", "training", *(f"{place:.1f}" for place in range(1, len(PARTS) + 1))} <= {*words}
    if width == 200:
        assert len(lines) == 4, "a row is a line where there is room"


def test_without_model_and_data_the_plan_is_that_of_the_quickstart(plan):
    result = plan("--device", "cpu", "--json", "--reward", f"{learner}:right_answer")
    assert "using the preset 'quickstart'" in result.stderr
    assert "training" in phases(result)
