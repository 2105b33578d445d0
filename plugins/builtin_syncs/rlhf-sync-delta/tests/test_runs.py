"""Real runs by the command line: the model after any step, kills and resumes, and the search for a change."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from rlhf_authoring import learner, write_tiny_model
from rlhf_sync_delta import Delta
from rlhf_sync_delta.files import DELTA, WHOLE, files_of, path_of, rebuild, steps_of
from rlhf_sync_delta.step_models import KEPT
from safetensors.torch import load_file

import rlhf_host
from rlhf_host import UserError
from rlhf_host.commands import main
from rlhf_host.protocols import WeightSyncStart
from rlhf_host.runs import model_steps, run_model

PLUGINS = '''"""Rewards and a schedule: these tests run where no other plugin is installed."""
from rlhf_host import Adjust, Reward, hookimpl

class Right:
    """1 for the right sum."""
    @hookimpl
    def score(self, trajectories):
        return [Reward(float(t.text.strip() == str(t.task.ground_truth))) for t in trajectories]

class Even:
    """The share of even digits: any model can raise it."""
    @hookimpl
    def score(self, trajectories):
        return [Reward(sum(c in "02468" for c in t.text) / 4) for t in trajectories]

class Blow:
    """A learning rate that is far too high in step 6."""
    @hookimpl
    def step_finished(self, step, metrics):
        if step in (5, 6):
            return Adjust({"actor.lr": 0.3 if step == 5 else 1e-7})
'''
DATA = [(17, 35), (38, 26), (41, 29), (56, 17), (23, 44), (12, 61)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "mine.py").write_text(PLUGINS)
    rows = [json.dumps({"prompt": f"{a}+{b}=", "label": str(a + b)}) for a, b in DATA]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def flags(place, run, reward="Right", **more):
    asked = {
        "--algo": f"{learner.__file__}:Learner",
        "--reward": f"mine.py:{reward}",
        "--data": "data.jsonl",
        "--sync": "delta",
        "--rollout.n": "4",
        "--rollout.max-new-tokens": "4",
        "--train.batch-size": "4",
        "--train.threads": "1",
        "--eval.at-start": "false",
        "--run-dir": run,
        **more,
    }
    return [word for pair in asked.items() for word in map(str, pair)]


def rlhf(place, *words, code=0):
    """The command line in this process. Returns what it prints, or the message with which it ends."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        patched.setenv("RLHF_CACHE", str(place / "cache"))
        patched.setenv("COLUMNS", "200")
        done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


@pytest.fixture(scope="module")
def twenty(place):
    """A run of 20 steps that keeps every checkpoint too."""
    model = write_tiny_model(place / "tiny")
    more = {"--actor.model": model, "--checkpoint.every": 1, "--checkpoint.keep": 0, "--actor.lr": "1e-3"}
    rlhf(place, "train", *flags(place, "twenty", "Even", **more, **{"--train.steps": 20, "--sync.whole-every": 8}))
    return place / "twenty"


def weights_of(model):
    return load_file(model / "model.safetensors")


def test_every_step_of_a_run_is_that_of_its_checkpoint(twenty):
    assert steps_of(twenty / "deltas") == list(range(21))
    assert [step for step, kind, _ in files_of(twenty / "deltas") if kind == WHOLE] == [0, 8, 16]
    assert path_of(twenty / "deltas", 0, WHOLE).stat().st_size < 20_000, "the first step refers to the model's files"
    for step in range(1, 21):
        own, built = weights_of(twenty / f"checkpoints/step-{step:06d}/model"), rebuild(twenty / "deltas", step).tensors
        assert own.keys() <= built.keys()
        assert all(torch.equal(tensor, built[name]) for name, tensor in own.items())


def test_the_model_of_a_step_loads_as_the_checkpoint_does(twenty, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    shutil.copytree(twenty, tmp_path / "run", ignore=shutil.ignore_patterns("step-000013"))
    built = run_model(tmp_path / "run@13")
    assert (built.run, built.step) == (tmp_path / "run", 13)
    assert built.path.parent == tmp_path / "cache/steps"
    assert run_model(tmp_path / "run@12").path == tmp_path / "run/checkpoints/step-000012/model", "needs no package"
    assert run_model(tmp_path / "run", "13").path == built.path
    own, other = (AutoModelForCausalLM.from_pretrained(path) for path in (twenty / "checkpoints/step-000013/model", built.path))
    assert own.dtype == other.dtype
    tokens = AutoTokenizer.from_pretrained(built.path)("1+1=", return_tensors="pt")
    assert torch.equal(own(**tokens).logits, other(**tokens).logits)
    assert model_steps(tmp_path / "run") == list(range(21))


def test_a_run_without_a_checkpoint_has_the_configuration_that_it_began_with(twenty, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(twenty.parent)
    shutil.copytree(twenty, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "model"))
    KEPT.write(tmp_path / "run", 5, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    own = weights_of(twenty / "checkpoints/step-000005/model")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in own.items())
    assert len(AutoTokenizer.from_pretrained(tmp_path)("1+1=")["input_ids"]) == 4


def test_a_step_that_is_not_there_is_refused_with_those_that_are(twenty, place):
    said = rlhf(place, "eval", "--checkpoint", "twenty@21", code=2)
    kept = "it has those of steps 13, 14, 15, 16, 17, 18, 19, 20 (21 in all, from 0 to 20)"
    assert said == f"Error: twenty has no checkpoint of step 21; {kept}\n"
    with pytest.raises(UserError, match=r"--checkpoint 4: .*twenty@3 names a step already"):
        run_model(twenty.with_name("twenty@3"), "4")
    with pytest.raises(UserError, match=r"twenty@soon: should be best, last or a step"):
        run_model(twenty.with_name("twenty@soon"))
    assert run_model(twenty.with_name("twenty@last")).step == 20


def test_a_damaged_step_is_refused_by_name(twenty, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    shutil.copytree(twenty, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    path = path_of(tmp_path / "run/deltas", 10, DELTA)
    content = bytearray(path.read_bytes())
    content[500] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"step-000010.delta is damaged"):
        run_model(tmp_path / "run@12")
    assert not list((tmp_path / "cache/steps").iterdir()), "nothing half-written"


def test_commands_take_the_model_of_a_step(place, twenty):
    shutil.copytree(twenty, place / "short", ignore=shutil.ignore_patterns("checkpoints", "model"), dirs_exist_ok=True)
    one = json.loads(rlhf(place, "eval", "--checkpoint", "short@17", "--eval.temperature", "0", "--json"))
    here = rlhf_host.evaluate(
        model=str(twenty / "checkpoints/step-000017/model"),
        data=str(place / "data.jsonl"),
        rewards=f"{place}/mine.py:Even",
        eval={"temperature": 0},
        rollout={"max_new_tokens": 4},
    )
    for name in ("eval/reward/mean", "eval/length/mean"):
        assert one[name] == here[name]
    sampling = {"data": str(place / "data.jsonl"), "n": 2, "max_new_tokens": 4}
    with rlhf_host.session(model=str(place / "short@17"), **sampling) as running:
        assert len(running.sample(1, 3).unjudged_rows) == 6


def test_steps_that_another_sync_trained_again_are_not_those_that_were_kept(place, twenty):
    """The run goes back to step 10 and on without this sync, and from step 15 on with it."""
    shutil.copytree(twenty, run := place / "changed", ignore=shutil.ignore_patterns("checkpoints", "model"))
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml.until-step-000010").write_text(settings)
    (run / "config.yaml").write_text(settings.replace("  name: delta\n", "  name: in_process\n"))
    assert KEPT.steps(run) == list(range(11))
    (run / "config.yaml").rename(run / "config.yaml.until-step-000015")
    (run / "config.yaml").write_text(settings)
    assert KEPT.steps(run) == [*range(11), *range(15, 21)]
    with pytest.raises(UserError, match="has no checkpoint of step 13; "):
        run_model(place / "changed@13")


def test_a_killed_run_goes_on_and_writes_its_steps_again(place):
    """Checkpoints of every third step; what was trained after the last one is trained again."""
    more = {"--checkpoint.every": 3, "--train.steps": 500, "--actor.model": "quickstart"}
    command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags(place, "killed", **more)]
    process = subprocess.Popen(command, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    steps, deadline = place / "killed/deltas", time.monotonic() + 240
    while not list((place / "killed/checkpoints").glob("step-*")) or steps_of(steps)[-1] % 3 == 0:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed = steps_of(steps)[-1]
    (steps / "step-000900.delta").write_bytes(path_of(steps, 1, DELTA).read_bytes())
    rlhf(place, "train", "--resume", "killed", "--train.steps", killed + 3)
    assert steps_of(steps) == list(range(killed + 4))
    assert len(files_of(steps)) == killed + 4
    final = weights_of(place / "killed/model")
    assert all(torch.equal(rebuild(steps, killed + 3).tensors[name], tensor) for name, tensor in final.items())
    for step in range(killed + 4):
        rebuild(steps, step)


def test_bisect_finds_the_step_at_which_a_run_broke(place):
    """The learning rate is far too high in step 6 alone."""
    more = {"--train.steps": 12, "--actor.model": "quickstart", "--actor.lr": "1e-7", "--with": "mine.py:Blow"}
    rlhf(place, "train", *flags(place, "broken", **more))
    before, after = (
        json.loads(rlhf(place, "bisect", "broken", "--reward", "mine.py:Right", *words, "--json"))
        for words in (("--threshold", "0.1"), ())
    )
    assert (before["before"], before["step"]) == (after["before"], after["step"]) == (5, 6)
    assert before["tried"]["5"] > 0.1 > before["tried"]["6"]
    assert len(before["tried"]) <= 6
    told = rlhf(place, "bisect", "broken", "--reward", "mine.py:Right", "--good", "4", "--bad", "7", "--threshold", "0.1")
    rows = [line.split() for line in told.splitlines()]
    assert rows[0] == ["step", "eval/reward/mean"]
    assert [row[0] for row in rows[1:-1]] == ["4", "5", "6", "7"]
    assert [row[0] for row in rows[1:-1] if row[-1] == "changed"] == ["6"]
    assert told.splitlines()[-1].startswith("Step 6: eval/reward/mean is 0, and was ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no run is given: rlhf bisect RUN_DIR"),
        (["nowhere"], "nowhere: no such run directory"),
        (["twenty", "--good", "70"], "--good 70: should be a step whose weights are there, of 21 from 0 to 20"),
        (["twenty", "--bad", "x"], "--bad x: should be a step whose weights are there"),
        (["twenty", "--good", "5", "--bad", "5"], "--good and --bad are both step 5: give two steps"),
        (["twenty", "--threshold", "much"], "--threshold much: should be a number"),
        (["twenty", "--metric", "eval/rewards/mean"], "rlhf eval has no such metric; did you mean 'eval/reward/mean'"),
        (["twenty", "--metric", "xyz"], "rlhf eval has no such metric; it has eval/samples, "),
        (
            ["twenty", "--reward", "mine.py:Even", "--eval.reward", "mine.py:Right"],
            "--reward has no effect beside --eval.reward",
        ),
        (["twenty", "--threshold", "9"], "both below 9: give another --threshold, or other steps"),
        (["twenty", "--actor.lr", "1"], "--actor.lr: rlhf bisect does not use it"),
        (["twenty", "--model", "x"], "--model: rlhf bisect does not use it"),
        (["twenty", "--config", "grpo"], "rlhf bisect uses the run's own models and settings: leave --config out"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(place, twenty, words, said):
    assert said in rlhf(place, "bisect", *words, code=2)


def test_an_adapter_is_not_kept(place):
    more = {"--actor.model": "quickstart", "--train.steps": 1, "--actor.lora.rank": 2}
    rlhf(place, "train", *flags(place, "lora", **more))
    built = rebuild(place / "lora/deltas", 1)
    assert not [name for name in built.tensors if "lora" in name], "whole weights, merged"
    (place / "merged").mkdir()
    KEPT.write(place / "lora", 1, place / "merged")
    assert not (place / "merged/adapter_config.json").exists()
    assert rlhf(place, "eval", "--checkpoint", "lora@0", "--eval.temperature", "0")
    settings = (place / "lora/config.yaml").read_text()
    (place / "lora/config.yaml").write_text(settings.replace("adapter: merged", "adapter: adapter"))
    with pytest.raises(UserError, match=r"sync delta keeps whole models: leave --sync\.adapter out"):
        Delta(Delta.Options()).start(WeightSyncStart(run_dir=place / "lora"))._model()
