"""``rlhf export``: what it writes loads elsewhere and computes what the run's model does; the card says what the run says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from rlhf_runs.commands.export import described
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlhf_host
from rlhf_host.config.load import load_config
from rlhf_host.config.resolve import resolve
from rlhf_host.config.schema import RoleConfig
from rlhf_host.models.loading import load_model
from rlhf_host.runs import RunModel
from rlhf_host.runs.directory import RunDirectory

from ..conftest import ROOT

pytest.importorskip("peft")
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct"
IDS = torch.tensor([[5, 9, 7, 3, 11, 6]])


def small(model, prompts, algo="rloo"):
    """Flags of a run of two steps, evaluated before and after."""
    size = ("--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.threads", "1")
    judged = () if algo == "rm" else ("--reward", "vowels", *size[:4])
    chosen = ("train", "--algo", algo, "--actor.model", model, "--data", prompts, "--eval.data", prompts, *judged)
    return [*chosen, *size[4:], "--kernels", "none", "--train.steps", "2", "--actor.lr", "1e-2", "--checkpoint.keep", "2"]


@pytest.fixture(scope="module")
def runs(rlhf, tiny_model, prompts, tmp_path_factory):
    """``runs(name)``: the run directory, trained at its first use."""
    folder = tmp_path_factory.mktemp("runs")
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    commands = {
        "plain": [*small(tiny_model, prompts), "--checkpoint.best", "eval/pass@1", "--checkpoint.every", "1"],
        "lora": [*small(tiny_model, prompts), "--actor.lora.rank", "4"],
        "critic": small(tiny_model, prompts, "ppo"),
        "rm": small(tiny_model, pairs, "rm"),
    }

    def run(name):
        if not (path := folder / name).exists():
            rlhf.run(*commands[name], "--run-dir", path)
        return path

    return run


@pytest.fixture(scope="module")
def interrupted(rlhf_process, tiny_model, prompts, tmp_path_factory):
    run = tmp_path_factory.mktemp("interrupted") / "run"
    process = rlhf_process.start(
        *small(tiny_model, prompts), "--train.steps", "1000", "--checkpoint.every", "2", "--run-dir", run
    )
    until = time.monotonic() + 60
    while not (run / "checkpoints/step-000002").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    return run


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def gap(directory, path, head="lm"):
    """The largest difference of logits: the exported directory in transformers, and the run's model in the host."""
    classes = {"lm": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}
    ours = load_model(RoleConfig(model=str(path)), head=head)
    return float((logits(classes[head].from_pretrained(directory)) - logits(ours)).abs().max())


def test_a_finished_run(rlhf_process, runs, tmp_path):
    run, to = runs("plain"), tmp_path / "to"
    to.mkdir()  # an empty directory is as none
    assert rlhf_process.run("export", run, "--output", to).stdout == f"{to}: model of {run}, step 2, float32\n"
    assert gap(to, run / "model") == 0
    assert {path.name for path in to.iterdir()} == {path.name for path in (run / "model").iterdir()} | {"README.md"}
    tokenizer = AutoTokenizer.from_pretrained(to)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(run / "model").chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["to"]
    assert f"{to} exists: choose another --output" in rlhf_process.run("export", run, "--output", to, code=2).stderr


def test_a_step_that_was_rebuilt_is_called_by_its_name(tmp_path):
    """Not by the directory that goes with the command."""
    run = tmp_path / "run"
    assert described(RunModel(tmp_path / "cache/steps/step-1", run, 17)) == f"{run}@17"
    assert described(RunModel(run / "checkpoints/step-000017/model", run, 17)) == (
        f"checkpoints/step-000017/model of {run}, step 17"
    )


def test_the_card_says_what_the_run_directory_says(rlhf_here, runs, tmp_path):
    run, to = RunDirectory(runs("plain")), tmp_path / "to"
    assert rlhf_here("export", run.path, "--output", to).exit_code == 0
    card = ModelCard.load(to / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf-host", "rloo"],
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.text.splitlines() if line.startswith("| ")]
    table = {row[0]: row[1:] for row in rows}
    before, after = run.metrics[0], run.metrics[-1]
    assert table["metric"] == ["step 0", "step 2"]
    for name in ("pass@1", "reward/mean"):
        figures = [(row[f"eval/{name}"], row[f"eval/{name.removesuffix('/mean')}/stderr"]) for row in (before, after)]
        assert table[f"eval/{name}"] == [
            f"{mean:.4g}" + (f" ± {1.96 * error:.2g} (95 %)" if error else "") for mean, error in figures
        ]
    assert table["base model"] == [str(run.settings["roles"]["actor"]["model"])]
    assert table["algorithm"] == [f"rloo: rloo (rlhf-plugin-rloo {rlhf_host.__version__})"]
    assert table["reward"] == ["vowels: vowels (test-rewards 1.0), weight 1"]
    assert table["rows for training"] == ["prompts: 24"]
    assert (table["temperature"], table["max_new_tokens"]) == (["1.0"], ["4"])
    assert f"torch {version('torch')}" in table["libraries"][0]
    settings = tmp_path / "run.yaml"
    settings.write_text(card.text.partition("```yaml\n")[2].partition("```")[0])
    again, then = (resolve(load_config(path)).config.model_dump() for path in (settings, run.path / "config.yaml"))
    assert {**again, "run_dir": None, "name": None} == {**then, "run_dir": None, "name": None}


def test_adapters_are_merged(rlhf_here, runs, tiny_model, tmp_path):
    run, to = runs("lora"), tmp_path / "to"
    result = rlhf_here("export", run, "--output", to, "--checkpoint", "last")
    assert result.exit_code == 0, result.output
    assert "float32, logits differ by at most" in result.stdout
    assert gap(to, run / "model") < 1e-4
    assert gap(to, tiny_model) > 1e-3, "it was trained"
    assert "LoRA of rank 4, merged here" in (to / "README.md").read_text()
    assert not (to / "adapter_config.json").exists()


def test_an_interrupted_run_gives_its_newest_checkpoint_and_says_so(rlhf_here, interrupted, tmp_path):
    step = RunDirectory(interrupted).step
    result = rlhf_here("export", interrupted, "--output", tmp_path / "to")
    assert result.exit_code == 0, result.output
    assert f"the run has not finished: this is its newest checkpoint, of step {step}" in result.stderr
    assert gap(tmp_path / "to", interrupted / f"checkpoints/step-{step:06d}/model") == 0
    assert f"after step {step} of 1000" in (tmp_path / "to/README.md").read_text()


def test_a_reward_model_and_a_critic(rlhf_here, runs, tmp_path):
    assert rlhf_here("export", runs("rm"), "--output", tmp_path / "rm").exit_code == 0
    assert gap(tmp_path / "rm", runs("rm") / "model", "scalar") == 0
    assert ModelCard.load(tmp_path / "rm/README.md").data.pipeline_tag == "text-classification"
    result = rlhf_here("export", runs("critic"), "--role", "critic", "--output", tmp_path / "critic")
    assert result.exit_code == 0, result.output
    assert gap(tmp_path / "critic", runs("critic") / "checkpoints/last/roles/critic", "scalar") == 0


def test_checkpoints_by_name_step_or_directory(rlhf_here, runs, tmp_path):
    run = runs("plain")
    best = (run / "checkpoints/best").resolve()
    ways = {
        "best": (run, "--checkpoint", "best"),
        "last": (run, "--checkpoint", "last"),
        "1": (run, "--checkpoint", "1"),
        "step-000002": (run, "--checkpoint", "step-000002"),
        "directory": (run / "checkpoints/best",),
        "model": (run / "checkpoints/step-000001/model",),
    }
    wanted = {"best": best, "directory": best} | dict.fromkeys(("1", "model"), run / "checkpoints/step-000001")
    for way, arguments in ways.items():
        result = rlhf_here("export", *arguments, "--output", tmp_path / way)
        assert result.exit_code == 0, result.output
        model = wanted.get(way, run / "checkpoints/step-000002") / "model"
        assert (tmp_path / way / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert f"after step {int(model.parent.name[5:])} of 2" in (tmp_path / way / "README.md").read_text()


def test_a_checkpoint_is_called_by_its_place_in_the_run(rlhf_here, runs, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/first").symlink_to(runs("plain").absolute())
    monkeypatch.chdir(tmp_path)
    for number, place in enumerate(("runs/first/checkpoints/step-000001", "first/checkpoints/step-000001")):
        result = rlhf_here("export", place, "--output", f"to{number}")
        assert result.stdout == f"to{number}: checkpoints/step-000001/model of runs/first, step 1, float32\n"


def test_the_type_of_the_weights(rlhf_here, runs, tmp_path):
    for name in ("plain", "lora"):
        result = rlhf_here("export", runs(name), "--output", tmp_path / name, "--dtype", "bfloat16")
        assert result.exit_code == 0, result.output
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == torch.bfloat16
        assert AutoTokenizer.from_pretrained(tmp_path / name)("1+1").input_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--role", "critc"], "has no such model; it has actor, critic; did you mean 'critic'?"),
        (["RUN", "--checkpoint", "7"], "has no checkpoint of step 7; it has those of steps 0, 2"),
        (["RUN", "--checkpoint", "lst"], "--checkpoint lst: should be best, last or a step; did you mean 'last'?"),
        (["RUN", "--checkpoint", "best"], "has no checkpoints/best; it has those of steps 0, 2"),
        (["RUN/checkpoints/last", "--checkpoint", "2"], "is no run directory, so it has no checkpoints to choose from"),
        (["RUN/model", "--role", "critic"], "is one model: give the run directory or a checkpoint"),
        (["RUNs"], "no such directory; did you mean"),
        (["MODEL"], "is in no run directory"),
        (["RUN", "--converter", "x.py"], "--converter is for GGUF files"),
        (["RUN", "--output", "RUN"], "exists: choose another --output"),
        (["RUN", "--output", "x.gguf"], "llama.cpp's convert_hf_to_gguf.py, which is not on the PATH"),
        (["RUN", "--output", "x.gguf", "--converter", "x.py"], "--converter x.py: no such file"),
    ],
)
def test_refusals(rlhf_here, runs, tiny_model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [word.replace("RUN", str(runs("critic"))).replace("MODEL", str(tiny_model)) for word in arguments]
    result = rlhf_here("export", *words, *([] if "--output" in words else ["--output", "to"]))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_any_model_yet(rlhf_here, runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("lora"), run, symlinks=True)
    for name in ("model", "checkpoints"):
        shutil.rmtree(run / name)
    result = rlhf_here("export", run, "--output", tmp_path / "to")
    assert (result.exit_code, f"{run} has no model yet" in result.output) == (2, True)


def test_a_damaged_checkpoint(rlhf_here, runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs("plain"), run, symlinks=True)
    weights = run / "checkpoints/step-000001/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    result = rlhf_here("export", run, "--output", tmp_path / "to", "--checkpoint", "1")
    assert result.exit_code == 2
    assert "step-000001 is damaged: model/model.safetensors is not as it was written; take another checkpoint" in result.output
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", lambda file: file.write_bytes(b"xx"), "model/model.safetensors is damaged: "),
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-1]), "model/model.safetensors is damaged: "),
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes() + b"x"), "model/model.safetensors is damaged: "),
        ("model.safetensors", Path.unlink, "model is damaged: it has no safetensors file"),
        (
            "model.safetensors.index.json",
            lambda file: file.write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
            "model is damaged: model-2.safetensors is missing",
        ),
        ("model.safetensors.index.json", lambda file: file.write_text("[]"), "index.json is damaged: it is no list of weights"),
        ("config.json", lambda file: file.write_text("[]"), "config.json is damaged: it is no configuration of a model"),
    ],
)
def test_a_damaged_final_model(rlhf_here, runs, tmp_path, file, change, message):
    run = tmp_path / "run"
    shutil.copytree(runs("plain"), run, symlinks=True)
    change(run / "model" / file)
    result = rlhf_here("export", run, "--output", tmp_path / "to")
    assert result.exit_code == 2, result.output
    last = result.output.splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("flags", [(), ("--dtype", "bfloat16")])
def test_all_files_may_be_read_by_those_who_may_read_one(rlhf_here, runs, tmp_path, flags):
    assert rlhf_here("export", runs("plain"), "--output", tmp_path / "to", *flags).exit_code == 0
    assert len({path.stat().st_mode for path in (tmp_path / "to").iterdir()}) == 1


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("", "--output '' names no directory to write"),
        (".", "--output '.' names no directory to write"),
        ("RUN/config.yaml/to", "config.yaml is not a directory; choose another --output"),
        ("RUN/config.yaml/to.gguf", "config.yaml is not a directory; choose another --output"),
        ("RUN/model/to", "which the run keeps for itself"),
        ("RUN/checkpoints/last/to/to", "which the run keeps for itself"),
    ],
)
def test_places_that_cannot_be_written(rlhf_here, runs, tmp_path, monkeypatch, to, message):
    run = runs("plain")
    monkeypatch.chdir(tmp_path)
    result = rlhf_here("export", run, "--output", to.replace("RUN", str(run)))
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert list(tmp_path.iterdir()) == []
    assert not list(run.rglob("to*/"))


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_what_cannot_be_written_is_not_half_there(rlhf_here, runs, tmp_path, name):
    run = runs(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        result = rlhf_here("export", run, "--output", tmp_path / "to")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert re.search(rf"{tmp_path / 'to'} cannot be written: [^(]*File too large", result.output), result.output
    assert "[(" not in result.output, "the first error of several"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(rlhf_here, runs, tmp_path):
    (closed := tmp_path / "closed").mkdir(mode=0o555)
    result = rlhf_here("export", runs("plain"), "--output", closed / "to")
    assert (result.exit_code, "make the directory writable" in result.output) == (1, True)


CONVERTER = """import pathlib, sys
directory, _, outfile, _, outtype = sys.argv[1:]
assert (pathlib.Path(directory) / "model.safetensors").is_file()
if outtype == "f16":
    sys.exit("this family is not known")
pathlib.Path(outfile).write_text(outtype)
"""
"""Stands for llama.cpp's: its command line, and how it may end."""


def test_gguf_files_are_written_by_the_converter(rlhf_here, runs, tmp_path, monkeypatch):
    (tmp_path / "convert.py").write_text(CONVERTER)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = runs("lora")
    for to, flags, outtype in (("gguf", [], "f32"), ("a.gguf", ["--dtype", "bfloat16"], "bf16")):
        result = rlhf_here("export", run, "--output", to, "--converter", tmp_path / "convert.py", *flags)
        assert result.exit_code == 0, result.output
        assert Path("lora.gguf" if to == "gguf" else to).read_text() == outtype
    result = rlhf_here("export", run, "--output", "b.gguf", "--converter", tmp_path / "convert.py", "--dtype", "float16")
    assert (result.exit_code, "ended with code 1:\nthis family is not known" in result.output) == (1, True)
    assert sorted(path.name for path in Path().iterdir()) == ["a.gguf", "lora.gguf"]
    assert "lora.gguf exists" in rlhf_here("export", run, "--output", "gguf", "--converter", tmp_path / "convert.py").output


@pytest.mark.skipif(
    shutil.which("convert_hf_to_gguf.py") is None or not SMOLLM2.exists() or importlib.util.find_spec("gguf") is None,
    reason="llama.cpp's convert_hf_to_gguf.py, gguf or SmolLM2 is not here",
)
def test_the_real_converter(rlhf, prompts, tmp_path):
    import gguf
    from safetensors.torch import load_file

    run = tmp_path / "run"
    rlhf.run(*small(SMOLLM2, prompts), "--run-dir", run)
    rlhf.run("export", run, "--output", tmp_path / "model.gguf")
    written = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = load_file(run / "model/model.safetensors")
    assert len(written) == len(weights)
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.layers.3.mlp.up_proj", "blk.3.ffn_up")):
        assert torch.equal(torch.from_numpy(written[f"{theirs}.weight"].copy()), weights[f"{ours}.weight"])
