"""``rlhf train`` up to the first step: help, printing, refusals, dry runs, run directories and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from rlhf_host.config.load import load_config
from rlhf_host.config.run_dir import HOLDER, LOCK, locked, with_run_dir
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.errors import UserError
from rlhf_host.records.needs import Outcome

ONE = ("--algo", "toy", "--reward", "length")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch):
    """What would be trained, instead of training it; ``trained.status`` decides how that ends."""
    from rlhf_host.training import run

    class Trained:
        status = "finished"

        def __call__(self, config, manager, *, resume=None):
            self.config, self.resume, self.plugins = config, resume, [item.key for item in manager.loaded]
            return Outcome(self.status, 1)

    trained = Trained()
    monkeypatch.setattr(run, "train", trained)
    return trained


def test_help_lists_the_schema_with_the_important_flags_first(rlhf):
    text = rlhf("train", "--help").stdout
    assert re.findall(r"^  (--[a-z.-]+),? ", text, re.M)[:4] == ["--algo", "--reward", "--model", "--data"]
    for flag in (
        "--n, --rollout.n",
        "--train.old-logprobs",
        "--sync.verify",
        "--checkpoint.best",
        "--trajectories.show",
        "--eval.k",
    ):
        assert f"  {flag} " in text
    assert text.endswith("Example:\n  rlhf train --algo rloo --reward math_verifier --model models/x --data x.jsonl\n")
    assert "samples per prompt (int, default 8)" in text
    assert "--critic.*" in text


def test_help_names_what_is_installed_and_the_defaults(rlhf):
    text = " ".join(rlhf("train", "--help").stdout.split())
    assert "the algorithm (installed: " in text
    assert re.search(r"an extension .*\(installed: [^)]*\bkl, [^)]*\bsift\b", text)
    assert "in which processes models run (default local; installed: local, ray)" in text
    assert "(default console, jsonl; installed: " in text
    kl = " ".join(rlhf("train", "--kl.coef", "0.1", "--help").stdout.split())
    assert "Options of extension 'kl' from rlhf-host" in kl
    assert "--kl.coef coefficient of the penalty; 0: off" in kl
    assert "--with.kl.coef coefficient of the penalty; 0: off" in " ".join(
        rlhf("train", "--with", "kl", "--help").stdout.split()
    )


def test_help_shows_the_chosen_plugins_options(rlhf):
    text = rlhf("train", "--algo", "toy", "--help", "--reward", "strict=length").stdout
    assert "Options of algo 'toy' from made-up 1.0:" in text
    assert re.search(r"--algo\.clip-eps +how far the ratio may go \(float, default 0\.2\)", text)
    assert re.search(r"--algo\.mode +\(fast \| slow, default fast\)", text)
    assert re.search(r"--reward\.strict\.timeout-s +\(float, default 1\.0\)", text)
    assert "--reward.strict.weight" in text
    assert "Options of" not in rlhf("train", "--help").stdout


def test_help_for_a_plugin_that_is_not_there_says_so(rlhf):
    assert rlhf.refused("train", "--algo", "tyo", "--help") == [
        "no algo named 'tyo' is installed; did you mean 'tpo' or 'toy' or 'kto'?"
    ]


def test_help_imports_neither_torch_nor_plugins_that_nobody_chose(made_up):
    script = (
        "import sys\nfrom rlhf_host.cli.main import main\n"
        "main(['train', *sys.argv[1:], '--help'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'made_up.plugins') if name in sys.modules])"
    )
    for flags, imported in (([], "[]"), (["--config", "paper"], "['made_up.plugins']")):
        done = subprocess.run(
            [sys.executable, "-c", script, *flags],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(made_up), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == imported


def test_print_config_is_the_whole_configuration_and_loads_back(rlhf):
    flags = ["--algo", "toy", "--algo.layers", "1,2", "--algo.dual-clip", "none", "--algo.whiten", "--rollout.n", "4"]
    first = rlhf("train", *flags, "--print-config")
    assert first.exit_code == 0, first.output
    assert first.stderr.startswith("Neither --model nor --data is given")
    Path("run.yaml").write_text(first.stdout)
    config = load_config("run.yaml")
    assert config.algo.options == {"clip_eps": 0.2, "dual_clip": None, "layers": [1, 2], "whiten": True, "mode": "fast"}
    assert config.run_dir is None
    assert rlhf("train", "--config", "run.yaml", "--print-config").stdout == first.stdout


def test_wrong_options_name_the_flag_or_the_line(rlhf):
    Path("run.yaml").write_text("algo:\n  name: toy\n  clip_esp: 1\n  mode: fats\nreward:\n  length:\n    timeout_s: soon\n")
    assert rlhf.refused("train", "--config", "run.yaml", "--algo.clip-eps", "3", "--with", "sfit", "--tracker", "jsnol") == [
        "run.yaml:3: algo.clip_esp: algo 'toy' has no option 'clip_esp'; did you mean 'clip_eps'?",
        "--algo.clip-eps: should be less than 1, not '3'",
        "run.yaml:4: algo.mode: should be 'fast' or 'slow', not 'fats'; did you mean 'fast'?",
        "run.yaml:7: reward.length.timeout_s: should be a valid number, not 'soon'",
        "--with: no extension named 'sfit' is installed; did you mean 'sift'?",
        "--tracker: no tracker named 'jsnol' is installed; did you mean 'jsonl'?",
    ]


def test_an_option_of_another_plugin_of_the_kind_says_which_has_it(rlhf):
    run = ("train", *ONE, "--engine", "transformers", "--engine.quantization", "fp8", "--print-config")
    assert rlhf.refused(*run) == [
        "--engine.quantization: engine 'transformers' has no option 'quantization'; engine 'vllm' has it"
    ]


def test_options_of_task_plugins_are_checked_too(rlhf):
    flags = ["train", *ONE, "--data", "sums", "--eval.data", "sums", "--print-config"]
    printed = rlhf(*flags, "--data.sums.largest", "4").stdout
    Path("run.yaml").write_text(printed)
    assert [source.options for source in load_config("run.yaml").data.sources] == [{"largest": 4}]
    assert rlhf.refused(*flags, "--data.sums.largset", "4", "--eval.data.sums.largest", "x") == [
        "--data.sums.largset: tasks 'sums' has no option 'largset'; did you mean 'largest'?",
        "--eval.data.sums.largest: should be a valid integer, not 'x'",
    ]


def test_keys_of_a_source_that_is_no_task_plugin_are_those_of_the_schema(rlhf):
    Path("run.yaml").write_text("data:\n- sums\n- {path: e, wieght: 2}\neval: {data: [{path: f, largest: 2}]}\n")
    assert rlhf.refused("train", *ONE, "--config", "run.yaml", "--print-config") == [
        "run.yaml:3: data.wieght: no such key; did you mean 'weight'?",
        "run.yaml:4: eval.data.largest: no such key",
    ]


def test_a_file_sets_a_source_that_a_preset_names():
    Path("beneath.yaml").write_text("data: [sums, other.jsonl]\n")
    Path("run.yaml").write_text("data: {sums: {largest: 4, weight: 2}, shuffle: false}\n")
    data = load_config(["beneath.yaml", "run.yaml"]).data
    assert [(source.path, source.weight, source.options) for source in data.sources] == [
        ("sums", 2, {"largest": 4}),
        ("other.jsonl", 1, {}),
    ]
    assert not data.shuffle


REFUSALS = {
    "no algorithm": (
        ["--reward", "length"],
        "no algorithm is chosen: give --algo NAME (rlhf plugins --kind algo lists them)",
    ),
    "no reward": (
        ["--algo", "toy"],
        "no reward is chosen: give --reward NAME (rlhf plugins --kind reward lists them)",
    ),
    "no reward but that of steps": (
        ["--algo", "toy", "--agent", "maze"],
        "no reward is chosen: give --reward NAME (rlhf plugins --kind reward lists them);"
        " where the steps of agent:maze give rewards, its hook needs returns Needs(rewards=False)",
    ),
    "a reward that scores nothing": (
        ["--algo", "toy", "--reward", "mute"],
        "reward:mute (made-up 1.0) has no score hook, so it scores nothing",
    ),
    "a reward beside a data set": (
        ["--algo", "pairs", "--reward", "length"],
        "pairs trains on preference data, and samples and scores nothing: leave --reward out",
    ),
    "small groups": (
        [*ONE, "--rollout.n", "1"],
        "algo:toy needs groups of 2 or more, and rollout.n is 1: set --rollout.n 2",
    ),
    "an alias that is a metric": (
        [*ONE, "--reward", "max=length"],
        "the alias 'max' is reserved as reward/max is of all rewards together: choose another alias",
    ),
    "greedy training": (
        [*ONE, "--rollout.temperature", "0"],
        "rollout.temperature is 0: greedy samples of a group are all the same; train with a temperature above 0",
    ),
    "top-p without top-k": (
        [*ONE, "--engine", "vllm", "--rollout.top-p", "0.9"],
        "rollout.top_p is 0.9: training has to know which tokens could be drawn, and engine vllm tells up to 128:"
        " set --rollout.top-k from 1 to 128, too, or choose another --engine, or set --rollout.top-p 1"
        " (eval.top_p may be set)",
    ),
    "a large top-k": (
        [*ONE, "--engine", "vllm", "--rollout.top-k", "129"],
        "rollout.top_k is 129: training has to know which tokens could be drawn, and engine vllm tells up to 128:"
        " set --rollout.top-k from 1 to 128, too, or choose another --engine, or set --rollout.top-k 0"
        " (eval.top_k may be set)",
    ),
    "no room for prompts": (
        [*ONE, "--rollout.max-tokens", "8"],
        "rollout.max_new_tokens 8 leaves no room for a prompt in rollout.max_tokens 8: lower the first or raise the second",
    ),
    "too many minibatches": (
        [*ONE, "--train.batch-size", "2", "--train.minibatches", "3"],
        "train.minibatches 3 is more than train.batch_size 2:"
        " a batch is split between groups, so there can be at most one minibatch per prompt",
    ),
    "fused with several updates": (
        [*ONE, "--train.old-logprobs", "fused", "--train.epochs", "2"],
        "train.old_logprobs fused works only with one update per batch, and epochs 2 × minibatches 1 make 2:"
        " set --train.old-logprobs recompute",
    ),
    "k1 in the loss": (
        [*ONE, "--kl.coef", "0.1", "--kl.place", "loss", "--kl.estimator", "k1"],
        "--kl.estimator: k1 has zero expected gradient in the loss: set it to unbiased, or place to reward",
    ),
    "biased KL in the reward": (
        [*ONE, "--kl.coef", "0.1", "--kl.estimator", "k3"],
        "--kl.estimator: k3 is biased in the reward: set it to k1, or set force to true to allow it",
    ),
    "kl without a coefficient": (
        [*ONE, "--with", "kl"],
        "--with: extension 'kl' needs 'coef'",
    ),
    "forbidden settings": (
        ["--algo", "picky", "--reward", "length", "--critic.model", "c", "--train.old-logprobs", "sampler"],
        "algo:picky does not work with train.old_logprobs sampler (made up): set --train.old-logprobs fused or recompute",
    ),
    "forbidden numbers": (
        ["--algo", "picky", "--reward", "length", "--critic.model", "c", "--rollout.n", "16"],
        "algo:picky does not work with rollout.n 16 (made up): set --rollout.n to something else",
    ),
    "roles without a model": (
        ["--algo", "picky", "--reward", "length"],
        "the role 'critic' has no model: give --critic.model PATH",
    ),
    "nothing to train": (
        ["--algo", "headless", "--reward", "length"],
        "no chosen plugin trains the actor: needs() of 'headless' lacks RoleNeed('actor', trainable=True)",
    ),
    "unknown roles": (
        [*ONE, "--roles.critik.lr", "1"],
        "roles.critik: no chosen plugin knows this role; did you mean 'critic'?",
    ),
    "roles needed in two ways": (
        ["--algo", "toy", "--reward", "judge", "--with", "other"],
        "reward:judge and extension:other need the role 'reward_model' differently:"
        " scalar head, frozen, from its own model, and lm head, frozen, from its own model",
    ),
    "pass@k without k samples": (
        [*ONE, "--eval.k", "4"],
        "eval.k 4 needs at least as many samples, and eval.n is 1: set --eval.n 4",
    ),
    "several greedy samples": (
        [*ONE, "--eval.n", "4", "--eval.temperature", "0"],
        "eval.temperature 0 makes 4 equal samples: set --eval.n 1, or a temperature above 0",
    ),
    "no data": (
        [*ONE, "--actor.model", "m"],
        "no training data: give --data PATH",
    ),
    "no model": (
        [*ONE, "--data", "sums"],
        "no model to train: give --actor.model PATH",
    ),
    "evaluations of nothing": (
        [*ONE, "--actor.model", "m", "--data", "sums", "--eval.every", "5"],
        "eval.every is 5, and nothing is evaluated: give --eval.data PATH",
    ),
    "kernels that are not there": (
        [*ONE, "--kernels", "zzz"],
        "--kernels: no kernels named 'zzz' are installed; rlhf plugins lists what is installed",
    ),
    "the best of nothing": (
        [*ONE, "--actor.model", "m", "--data", "sums", "--checkpoint.best", "eval/pass@1"],
        "checkpoint.best is eval/pass@1, and nothing is evaluated: give --eval.data PATH",
    ),
    "the best of k that is not measured": (
        [*ONE, "--actor.model", "m", "--data", "sums", "--eval.data", "sums", "--checkpoint.best", "eval/pass@8"],
        "checkpoint.best is eval/pass@8, and evaluations have no such metric;"
        " k is 1, eval.n (1) or in eval.k: set --eval.n or --eval.k",
    ),
    "the best of what is not measured": (
        [*ONE, "--actor.model", "m", "--data", "sums", "--eval.data", "sums", "--checkpoint.best", "eval/rewrd/mean"],
        "checkpoint.best is eval/rewrd/mean, and evaluations have no such metric; did you mean 'eval/reward/mean'?",
    ),
    "names of other projects": (
        [*ONE, "--algo.kl.init_coef", "0.1"],
        "--algo.kl.init_coef: algo 'toy' has no option 'kl'; OpenRLHF's --algo.kl.init_coef is --kl.coef here"
        " (no KL by default; 0.01 there)",
    ),
    "engines that are not there": (
        [*ONE, "--engine", "abacus"],
        "--engine: no engine named 'abacus' is installed; rlhf plugins lists what is installed",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_impossible_runs_are_refused_first(rlhf, case):
    flags, line = REFUSALS[case]
    assert rlhf.refused("train", *flags) == [line]


def test_all_reasons_are_told_at_once(rlhf):
    assert len(rlhf.refused("train", "--algo", "toy", "--rollout.temperature", "0", "--rollout.n", "1")) == 3


def test_engines_name_the_extra_that_brings_their_library(rlhf, monkeypatch):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: False)
    message = "engine 'vllm' needs vllm: pip install 'rlhf-host[vllm]'"
    assert rlhf.refused("train", *ONE, "--engine", "vllm") == [message]


def test_forced_kl_and_idle_roles_pass_with_a_warning(rlhf, trained):
    flags = [*ONE, "--kl.coef", "0.1", "--kl.estimator", "k3", "--kl.force", "--critic.lr", "1e-5"]
    result = rlhf("train", *flags)
    assert result.exit_code == 0, result.output
    assert "Warning: roles.critic is set, but no chosen plugin needs it: it is not loaded" in result.stderr
    assert trained.plugins == [
        *("agent:single_turn", "algo:toy", "reward:length", "extension:kl"),
        *("tracker:console", "tracker:jsonl"),
    ]


def test_how_the_run_ended_is_the_exit_code(rlhf, trained):
    for status, code in (("finished", 0), ("interrupted", 130)):
        trained.status = status
        result = rlhf("train", *ONE)
        assert result.exit_code == code


# --- run directories ----------------------------------------------------------------------------


def test_the_default_run_directory_has_time_and_name(rlhf, trained):
    rlhf("train", *ONE)
    assert re.fullmatch(r"runs/\d{8}-\d{6}-toy-length", trained.config.run_dir)
    assert trained.config.name == "toy-length"
    config = trained.config.model_copy(update={"run_dir": None, "name": "a b/c"})
    now = datetime(2025, 1, 2, 3, 4, 5)
    assert with_run_dir(config, now).run_dir == "runs/20250102-030405-a-b-c"
    Path("runs/20250102-030405-a-b-c").mkdir(parents=True)
    assert with_run_dir(config, now).run_dir == "runs/20250102-030405-a-b-c-2"


def test_runs_that_start_together_have_directories_of_their_own(rlhf, trained):
    rlhf("train", *ONE)
    config = trained.config.model_copy(update={"run_dir": None})
    now = datetime(2025, 1, 2, 3, 4, 5)
    paths = [with_run_dir(config, now, make=True).run_dir for _ in range(2)]
    assert paths == ["runs/20250102-030405-toy-length", "runs/20250102-030405-toy-length-2"]
    assert all(Path(path).is_dir() for path in paths)


def test_a_run_directory_is_held_by_one_process_at_a_time():
    run_dir = Path("run")
    mine = re.escape(f"run is in use by process {os.getpid()} on {socket.gethostname()}: wait for it or stop it")
    for file in (None, "metrics.jsonl"):
        with locked(run_dir):
            with pytest.raises(UserError, match=mine), locked(run_dir):
                pass
            if file:
                (run_dir / file).write_text("")
        assert run_dir.exists() == bool(file), "what is empty goes"
    with locked(run_dir):
        pass


def test_what_the_user_made_stays_and_no_cleaning_up_hides_the_error():
    Path("mine").mkdir()
    Path("link").symlink_to("mine")
    for name in ("mine", "link"):
        with pytest.raises(UserError, match="no such model"), locked(Path(name)):
            raise UserError("no such model")
        assert list(Path(name).iterdir()) == []
    with pytest.raises(SystemExit), locked(Path("gone")):
        sys.exit(shutil.rmtree("gone"))
    Path("nowhere").symlink_to("missing")
    with (
        pytest.raises(UserError, match="nowhere is a link to missing, which does not exist: --run-dir names a directory"),
        locked(Path("nowhere")),
    ):
        pass


def test_a_directory_that_only_a_killed_start_has_touched_is_free(rlhf, trained):
    Path("run").mkdir()
    for name in (LOCK, HOLDER):
        Path("run", name).write_text("process 1 on elsewhere")
    assert rlhf("train", *ONE, "--run-dir", "run").exit_code == 0


def test_a_run_directory_in_use_is_refused(rlhf, trained):
    Path("mine").mkdir()
    assert rlhf("train", *ONE, "--run-dir", "mine").exit_code == 0
    Path("mine/notes").write_text("")
    message = "mine is not empty: continue with --resume mine, or choose another --run-dir"
    assert rlhf.refused("train", *ONE, "--run-dir", "mine") == [message]
    Path("my run").mkdir()
    Path("my run/notes").write_text("")
    message = "my run is not empty: continue with --resume 'my run', or choose another --run-dir"
    assert rlhf.refused("train", *ONE, "--run-dir", "my run") == [message]
    assert rlhf.refused("train", *ONE, "--run-dir", "mine/notes") == ["mine/notes is a file: --run-dir names a directory"]


def test_resume_takes_the_runs_settings_and_flags_on_top(rlhf, trained):
    printed = rlhf("train", *ONE, "--rollout.n", "4", "--run-dir", "elsewhere", "--print-config").stdout
    Path("run/checkpoints/step-000002").mkdir(parents=True)
    Path("run/config.yaml").write_text(printed)
    result = rlhf("train", "--resume", "run", "--train.steps", "7")
    assert result.exit_code == 0, result.output
    assert (trained.resume, trained.config.run_dir) == (Path("run"), "run")
    assert (trained.config.rollout.n, trained.config.train.steps) == (4, 7)


def test_resume_refuses_what_is_no_run(rlhf):
    Path("run").mkdir()
    assert rlhf.refused("train", "--resume", "runn") == ["runn: no such run directory (a run that has just begun has none yet)"]
    Path("run2").mkdir()
    Path("run2/config.yaml").touch()
    assert rlhf.refused("train", "--resume", "runn") == ["runn: no such run directory; did you mean 'run2'?"]
    message = "run has no config.yaml: a run directory is what rlhf train writes, such as runs/<time>-<name>"
    assert rlhf.refused("train", "--resume", "run") == [message]
    Path("run/config.yaml").write_text("seed: 1\n")
    message = "--resume uses the run's own directory and settings: leave --config out"
    assert rlhf.refused("train", "--resume", "run", "--config", "a.yaml") == [message]
    assert rlhf.refused("train", "--resume") == ["--resume needs a value"]


def test_a_run_killed_before_its_first_checkpoint_starts_over_in_its_directory(rlhf, trained):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(rlhf("train", *ONE, "--print-config").stdout)
    assert rlhf("train", "--resume", "run").exit_code == 0
    assert (trained.resume, trained.config.run_dir) == (Path("run"), "run")


@pytest.fixture
def begun(rlhf):
    """A run directory whose run was begun with ``ONE``."""
    Path("run").mkdir()
    Path("run/config.yaml").write_text(rlhf("train", *ONE, "--print-config").stdout)


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize(
    ("flags", "name", "then", "now"),
    [
        (["--seed", "5"], "seed", "0", "5"),
        (["--algo", "picky"], "algo.name", "toy", "picky"),
        (["--actor.model", "other"], "roles.actor.model", "quickstart", "other"),
    ],
)
def test_a_resume_cannot_become_another_run_by_the_way(rlhf, trained, flags, name, then, now):
    before = Path("run/config.yaml").read_text()
    message = f"{name} is {then} in run, and cannot become {now}: start a new run, or add --force"
    assert rlhf.refused("train", "--resume", "run", *flags) == [message]
    assert rlhf.refused("train", "--resume", "run", *flags, "--dry-run") == [message]
    assert Path("run/config.yaml").read_text() == before
    result = rlhf("train", "--resume", "run", *flags, "--force", "--critic.model", "quickstart")
    assert result.exit_code == 0, result.output
    assert "Warning: not as in the run so far: " in result.stderr
    assert f"{name} {then} → {now}" in result.stderr
    assert rlhf.refused("train", *flags, "--force") == ["--force goes with --resume"]


@pytest.mark.usefixtures("begun", "trained")
def test_a_resume_says_what_it_changes(rlhf):
    flags = ["--rollout.n", "6", "--train.batch-size", "2", "--kl.coef", "0.1", "--tracker", "tensorboard"]
    line, phase = rlhf("train", "--resume", "run", *flags).stderr.splitlines()
    changes = "with.kl not set → kl, tracker.tensorboard not set → tensorboard, rollout.n 4 → 6, train.batch_size 128 → 2"
    assert line == f"Warning: not as in the run so far: {changes}"
    assert rlhf("train", "--resume", "run").stderr.splitlines() == [phase] == ["Loading libraries ..."]


@pytest.mark.usefixtures("begun")
def test_a_resume_without_a_plugin_that_was_uninstalled_names_its_distribution(rlhf):
    path = Path("run/config.yaml")
    path.write_text(path.read_text().replace("name: toy", "name: gone"))
    entry = {"kind": "algo", "alias": "gone", "name": "gone", "distribution": "rlhf-plugin-gone", "version": "1.2"}
    Path("run/plugins.json").write_text(json.dumps([entry]))
    message = "algo 'gone' of this run was in rlhf-plugin-gone 1.2, which is not installed any more"
    assert rlhf.refused("train", "--resume", "run") == [f"{message}: pip install rlhf-plugin-gone==1.2"]


# --- dry runs -----------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_looked_at_and_what_not_and_writes_nothing(rlhf, tmp_path):
    rows = [{"question": f"What is {i}?", "answer": str(i)} for i in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = sorted(tmp_path.rglob("*"))
    result = rlhf("train", *ONE, "--actor.model", "quickstart", "--data", "rows.jsonl", "--eval.data", "sums", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "role actor: quickstart, lm head, trainable" in result.stdout
    assert "train data: rows: 8 tasks from rows.jsonl" in result.stdout
    assert "eval data: sums: 8 tasks from" in result.stdout
    assert "100 steps of 32 prompts × 8 samples, updates per step: 1, old log-probabilities fused" in result.stdout
    assert "rows.jsonl (prompt 'question', label 'answer')" in result.stdout
    assert result.stdout.count("later rows are not checked") == 3
    assert "the tokenizer has no tokens for ? a h i s t w, so the model does not see them in its prompts" in result.stdout
    assert (
        "Not checked: weights, other machines, rewards and trackers at work, and memory beyond what is said above."
        in result.stdout
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_finds_missing_models_and_malformed_data(rlhf):
    assert "no model at ./gone" in rlhf.refused("train", *ONE, "--actor.model", "./gone", "--data", "sums", "--dry-run")[0]
    Path("rows.jsonl").write_text('{"question": "1?", "answer": "1"}\nnonsense\n')
    flags = [*ONE, "--actor.model", "quickstart", "--dry-run"]
    assert rlhf.refused("train", *flags, "--data", "rows.jsonl")[0].startswith("rows.jsonl:2: ")
    assert "gone.jsonl" in rlhf.refused("train", *flags, "--data", "gone.jsonl")[0]


def test_control_flags_have_near_matches_and_take_no_surplus(rlhf):
    assert "did you mean '--dry-run'" in rlhf.refused("train", *ONE, "--dryrun")[0]
    assert rlhf.refused("train", *ONE, "--dry-run", "now") == ["unexpected argument 'now': flags look like --rollout.n 8"]
    assert rlhf.refused("train", "--resume", "a", "--resume", "b") == ["--resume can be given once"]


@pytest.mark.parametrize(
    ("flags", "sync"),
    [
        (["--runtime", "ray", "--sync.bucket-mb", "3"], "broadcast"),
        (["--runtime", "ray", "--sync.verify", "on"], "broadcast"),
        (["--engine", "vllm"], "ipc"),
        (["--runtime", "ray", "--engine", "vllm", "--sync", "checkpoint"], "checkpoint"),
        (["--engine", "vllm", "--debug"], "in_process"),
    ],
)
def test_engines_with_weights_of_their_own_get_a_sync_that_reaches_them(rlhf, monkeypatch, flags, sync):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: True)
    result = rlhf("train", *ONE, *flags, "--print-config")
    assert result.exit_code == 0, result.output
    Path("run.yaml").write_text(result.stdout)
    assert plain(read_yaml("run.yaml"))["sync"]["name"] == sync


@pytest.mark.parametrize("flags", [["--runtime", "ray"], ["--engine", "vllm"]])
def test_a_sync_that_reaches_nobody_is_refused(rlhf, monkeypatch, flags):
    monkeypatch.setattr("rlhf_host.plugins.libraries._is_there", lambda library: True)
    (line,) = rlhf.refused("train", *ONE, *flags, "--sync", "in_process")
    assert "leave --sync out" in line
    assert " ".join(flags).removeprefix("--") in line
