"""Extensions and runtimes set by their own names: what a name at the top means, and when two choices contradict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_host
from rlhf_host.arguments import Arguments
from rlhf_host.config.load import load_config, read_config
from rlhf_host.errors import UserError

KL = {"kl": {"name": "kl", "coef": 0.01}}


def write(text: str, name: str = "run.yaml") -> Path:
    Path(name).write_text(text)
    return Path(name)


def chosen(config, key="with"):
    return config.model_dump()[key]


def refusal(*flags: str, file: str | None = None, presets=()) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config([*presets, *([write(file)] if file else [])], flags)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "with: {kl: {name: kl, coef: 0.01}}",
        "with: {kl: {coef: 0.01}}",
        "with: [{name: kl, coef: 0.01}]",
        "kl: {coef: 0.01}",
        "with: kl\nkl: {coef: 0.01}",
        "with: {kl: }\nkl: {coef: 0.01}",
    ],
)
def test_files_that_mean_the_same(text):
    assert chosen(load_config(write(text))) == KL


@pytest.mark.parametrize(
    "flags",
    [
        ["--kl.coef", "0.01"],
        ["--with", "kl", "--with.kl.coef", "0.01"],
        ["--with", "kl", "--kl.coef", "0.01"],
        ["--kl.coef", "0.01", "--with", "kl"],
        ["--kl", "--kl.coef=0.01"],
    ],
)
def test_flags_that_mean_the_same(flags):
    assert chosen(load_config(flags=flags)) == {"kl": {"name": "kl", "coef": "0.01"}}


def test_python_takes_it_too():
    for settings in (
        {"kl": {"coef": 0.01}},
        {"kl.coef": 0.01},
        {"extensions": {"kl": {"coef": 0.01}}},
        {"with": "kl", "kl.coef": 0.01},
    ):
        assert chosen(read_config(Arguments({}, settings).settings).config) == KL


def test_the_printed_form_is_the_canonical_one(rlhf):
    flags = [
        "--algo",
        "toy",
        "--algo.clip-eps",
        "0.3",
        "--reward",
        "short=length",
        "--reward.short.weight",
        "2",
        "--kl.coef",
        "0.01",
    ]
    printed = rlhf("train", *flags, "--ray.num-cpus", "4", "--sync.verify", "off", "--print-config")
    assert printed.exit_code == 0, printed.output
    for part in (
        "algo:\n  name: toy\n  clip_eps: 0.3\n",
        "reward:\n  short:\n    name: length\n    weight: 2.0\n    timeout_s: 1.0\n",
        "with:\n  kl:\n    name: kl\n    coef: 0.01\n",
        "tracker:\n  console:\n    name: console\n",
        "runtime:\n  name: ray\n  address: null\n  temp_dir: null\n  num_cpus: 4\n",
        "sync:\n  name: broadcast\n  verify: off\n  adapter: merged\n  dtype: auto\n",
    ):
        assert part in printed.stdout
    assert not {"plugin:", "options:", "extensions:"} & set(printed.stdout.split())


def test_a_shorthand_changes_what_a_lower_layer_chose():
    path = write("with: {kl: {name: rlhf-host:kl, coef: 0.1, place: loss}, sift: }\n")
    both = {"kl": {"name": "rlhf-host:kl", "coef": "0.2", "place": "loss"}, "sift": {"name": "sift"}}
    assert chosen(load_config(path, ["--kl.coef", "0.2"])) == both
    assert chosen(load_config(path, ["--kl.coef", "0.2", "--with", "sift=none"])) == {"kl": both["kl"]}
    assert chosen(load_config(path, ["--with", "kl=none"])) == {"sift": both["sift"]}


def test_an_alias_of_the_name_is_not_chosen_again():
    assert chosen(load_config(write("with: {kl: {name: sift}}\n"), ["--kl.coef", "1"])) == {"kl": {"name": "sift", "coef": "1"}}


def test_a_runtime_is_chosen_by_its_options():
    ray = {"name": "ray", "num_cpus": 4}
    for text in (
        "ray: {num_cpus: 4}",
        "ray: {num-cpus: 4}",
        "runtime: ray\nray: {num_cpus: 4}",
        "runtime: {name: ray, num_cpus: 4}",
    ):
        assert chosen(load_config(write(text)), "runtime") == ray
    assert chosen(load_config(write("ray:\n")), "runtime") == {"name": "ray"}
    assert chosen(load_config(flags=["--ray"]), "runtime") == {"name": "ray"}
    path = write("runtime: {name: rlhf-host:ray, num_gpus: 2}\n")
    assert chosen(load_config(path, ["--ray.num-cpus", "4"]), "runtime") == {
        "name": "rlhf-host:ray",
        "num_gpus": 2,
        "num_cpus": "4",
    }


def test_a_tracker_is_chosen_by_its_name():
    for flags in (["--wandb"], ["--tracker", "wandb"], ["--tracker", "wandb", "--wandb"]):
        assert [*chosen(load_config(flags=flags), "tracker")] == ["console", "jsonl", "wandb"]
    wandb = {"name": "wandb", "project": "sums"}
    assert chosen(load_config(flags=["--wandb.project", "sums"]), "tracker")["wandb"] == wandb
    assert chosen(load_config(write("wandb: {project: sums}\n")), "tracker")["wandb"] == wandb


SHORT_FLAGS = ["--model", "m", "--lr", "1e-5", "--steps", "7", "--batch-size", "8", "--n", "4", "--max-new-tokens", "16"]


def test_settings_that_everybody_sets_have_short_names():
    long = {
        "actor.model": "m",
        "actor.lr": 1e-5,
        "train.steps": 7,
        "train.batch_size": 8,
        "rollout.n": 4,
        "rollout.max_new_tokens": 16,
    }
    assert load_config(flags=SHORT_FLAGS) == read_config(Arguments({}, long).settings).config
    arguments = {"model": "m", "lr": 1e-5, "steps": 7, "batch_size": 8, "n": 4, "max_new_tokens": 16}
    assert load_config(flags=SHORT_FLAGS) == read_config(Arguments(arguments, {}).settings).config
    assert refusal("--lr", "1", "--actor.lr", "2") == ["--lr and --actor.lr set the same: leave one out"]
    assert refusal("--steps", "many") == ["--steps: should be a valid integer, not 'many'"]
    assert load_config(write("actor: {lr: 1e-3}\n"), ["--lr", "1e-5"]).roles["actor"].lr == 1e-5


def test_a_short_name_means_what_the_command_uses(rlhf):
    assert "--n, --eval.n" in rlhf("eval", "--help").stdout
    (line,) = rlhf.refused("chat", "m", "--lr", "1")
    assert line.startswith("--lr: rlhf chat does not use it; it takes --actor.model")
    assert rlhf("train", "--algo", "toy", "--reward", "length", "--n", "3", "--print-config").stdout.count("\n  n: 3\n") == 1


def test_two_runtimes_are_an_error_that_names_both():
    says = "belongs to the runtime 'ray', and {} chooses 'local': leave one out"
    assert refusal(file="runtime: local\nray: {num_cpus: 4}\n") == ["run.yaml:2: ray: " + says.format("run.yaml:1: runtime")]
    assert refusal(file="ray: {num_cpus: 4}\nruntime: local\n") == ["run.yaml:1: ray: " + says.format("run.yaml:2: runtime")]
    assert refusal("--ray.num-cpus", "4", file="runtime: local\n") == ["--ray.num-cpus: " + says.format("run.yaml:1: runtime")]
    assert refusal("--ray.num-cpus", "4", "--runtime", "local") == ["--ray.num-cpus: " + says.format("--runtime")]


def test_flags_override_the_runtime_of_a_file():
    assert chosen(load_config(write("ray: {num_cpus: 4}\n"), ["--runtime", "local"]), "runtime") == {"name": "local"}


@pytest.mark.parametrize(
    ("flags", "file", "line"),
    [
        ([], "kl: 0.1\n", "run.yaml:1: kl: should be a mapping of the options of 'kl', not 0.1"),
        ([], "ray: auto\n", "run.yaml:1: ray: should be a mapping of the options of 'ray', not 'auto'"),
        ([], "kll: {coef: 1}\n", "run.yaml:1: kll: no such key; did you mean 'kl'?"),
        (["--kl", "0.1"], None, "--kl takes no value: set an option of 'kl', --kl.coef VALUE"),
        (["--kll.coef", "0.1"], None, "--kll.coef: no such flag; did you mean '--kl.coef'"),
    ],
)
def test_mistakes_in_a_shorthand(flags, file, line):
    (found,) = refusal(*flags, file=file)
    assert found.startswith(line)


def test_options_of_a_shorthand_are_checked_where_they_were_set(rlhf):
    path = write("algo: toy\nreward: length\nkl:\n  coef: 0.1\n  plaice: loss\n")
    assert rlhf.refused("train", "--config", path, "--kl.estimator", "k4", "--tis.cap", "x") == [
        "run.yaml:5: kl.plaice: extension 'kl' has no option 'plaice'; did you mean 'place'?",
        "--kl.estimator: should be 'auto', 'k1', 'k2', 'k3' or 'unbiased', not 'k4'",
        "--tis.cap: should be a valid number, not 'x'",
    ]


def test_options_that_are_no_switches_need_a_value(rlhf):
    flags = ["--algo", "toy", "--reward", "length", "--kl.coef", "--console.every", "--console.width", "30"]
    assert rlhf.refused("train", *flags) == ["--kl.coef: needs a value", "--console.every: needs a value"]


def test_one_that_is_not_installed_says_what_to_install(rlhf):
    flags = ["--algo", "toy", "--reward", "length", "--tis.cap", "2"]
    assert rlhf.refused("train", *flags, "--disable", "tis") == [
        "--tis.cap: extension 'tis' is disabled: left out by --disable or RLHF_DISABLE_PLUGINS"
    ]


def test_names_are_read_from_metadata_alone(made_up):
    script = (
        "import sys\nfrom rlhf_host.config.load import load_config\n"
        "config = load_config(flags=['--sift.clip-eps', '0.1', '--kl.coef', '0.1', '--ray.num-cpus', '4'])\n"
        "print(list(config.extensions), config.runtime.name)\n"
        "print([name for name in ('torch', 'ray', 'made_up.plugins', 'rlhf_host.extensions.kl') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": ":".join([str(made_up), *sys.path])}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["['sift', 'kl'] ray", "[]"], done.stderr


def test_kl_of_strength_zero_needs_no_reference_model(rlhf):
    flags = ["--algo", "toy", "--reward", "length", "--actor.model", "quickstart", "--data", "sums", "--dry-run"]
    off = rlhf("train", *flags, "--kl.coef", "0")
    assert off.exit_code == 0, off.output
    assert "extension:kl" in off.stdout
    assert "role reference" not in off.stdout
    assert "role reference" in rlhf("train", *flags, "--kl.coef", "0.1").stdout


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        (["--sift", "--kl.coef", "0.1"], ["sift", "kl"]),
        (["--kl.coef", "0.1", "--sift"], ["kl", "sift"]),
        (["--with", "sift", "--kl.coef", "0.1"], ["sift", "kl"]),
        (["--kl.coef", "0.1", "--with", "sift"], ["kl", "sift"]),
        (["--with.sift.low", "1", "--kl", "--with", "sift"], ["sift", "kl"]),
    ],
)
def test_extensions_have_the_order_of_the_flags(flags, order):
    assert [*chosen(load_config(flags=flags))] == order


def test_a_python_object_is_chosen_by_name_only_where_it_is_given():
    with pytest.raises(UserError, match="no algorithm is chosen"):
        rlhf_host.train(rewards=lambda text: 1.0, kl={"coef": 0.1}, model="m", data=[{"prompt": "1+1=", "label": "2"}])
