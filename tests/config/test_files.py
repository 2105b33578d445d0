"""YAML in, with line numbers; YAML out, loading back to the same configuration; presets beneath."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_host.config.load import load_config, read_config
from rlhf_host.config.run_dir import config_yaml
from rlhf_host.config.schema import PluginChoice, RewardChoice, RunConfig
from rlhf_host.config.yaml_file import plain, read_yaml
from rlhf_host.directories import write_file
from rlhf_host.errors import UserError


def write(text: str) -> Path:
    path = Path("run.yaml")
    path.write_text(text)
    return path


def refusal(text: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(write(text))
    return str(error.value).splitlines()


def test_friendly_and_canonical_forms_mean_the_same():
    friendly = load_config(
        write("""
actor: {model: m, lr: 1e-5}
critic: {lr: 2e-5}
reward_model: {model: rm}
data: [a.jsonl, b.jsonl@2]
eval: {data: a.jsonl, reward: length}
algo: {name: toy, clip-eps: 0.3}
reward:
  length:
  strict: {name: length, weight: 0.5, timeout_s: 5}
with: [sift, again=sift]
agent: {max_turns: 4}
train: {shared-prefix: off}
""")
    )
    canonical = load_config(
        write("""
roles:
  actor: {model: m, lr: 0.00001}
  critic: {lr: 0.00002}
  reward: {model: rm}
data: {sources: [{path: a.jsonl}, {path: b.jsonl, weight: 2}]}
eval: {data: {sources: [{path: a.jsonl}]}, reward: {length: {name: length}}}
algo: {name: toy, clip_eps: 0.3}
reward:
  length: {name: length}
  strict: {name: length, weight: 0.5, timeout_s: 5}
with: {sift: {name: sift}, again: {name: sift}}
agent: {name: single_turn, max_turns: 4}
train: {shared_prefix: "off"}
""")
    )
    assert friendly == canonical
    assert list(friendly.extensions) == ["sift", "again"]


def test_flags_override_the_file_and_the_file_overrides_presets():
    path = write("actor: {model: m}\ndata: d\nrollout: {n: 4, temperature: 0.5}\n")
    config = load_config(["paper", path], ["--rollout.temperature", "0.7"])
    assert (config.rollout.n, config.rollout.temperature, config.algo.options["mode"]) == (4, 0.7, "slow")


def test_a_preset_may_be_a_file_and_the_later_one_wins():
    Path("mine.yaml").write_text("rollout: {n: 3}\n")
    assert load_config(["paper", "mine.yaml"]).rollout.n == 3
    assert load_config(["mine.yaml", "paper"]).rollout.n == 16


def test_another_algorithm_leaves_the_options_below_behind():
    assert load_config("paper", ["--algo", "toy"]).algo.options == {"clip_eps": 0.1, "mode": "slow"}
    assert load_config("paper", ["--algo", "picky"]).algo.options == {}


def test_rewards_and_data_replace_those_below_and_extensions_add():
    path = write("data: d\nreward: {length: {timeout_s: 3}, judge: }\nwith: other\n")
    config = load_config(["paper", path], ["--reward", "length", "--data", "e", "--with", "again=sift"])
    assert {alias: choice.options for alias, choice in config.reward.items()} == {"length": {"timeout_s": 3}}
    assert [source.path for source in config.data.sources] == ["e"]
    assert list(config.extensions) == ["sift", "other", "again"]
    assert list(load_config(["paper", path], ["--with", "sift=none"]).extensions) == ["other"]


def test_one_plugin_spelled_out_is_one_plugin():
    config = load_config(write("data: d\nreward: {name: length, timeout_s: 3, weight: 2}\nwith: {name: other}\n"))
    assert list(config.reward) == ["length"]
    assert (config.reward["length"].options, config.reward["length"].weight) == ({"timeout_s": 3}, 2.0)
    assert [choice.name for choice in config.extensions.values()] == ["other"]


def test_with_neither_model_nor_data_the_quickstart_is_taken_and_says_so():
    loaded = read_config()
    assert loaded.notices == (
        "Neither --model nor --data is given: using the preset 'quickstart', a tiny model on arithmetic.",
    )
    assert (loaded.config.roles["actor"].model, loaded.config.data.sources[0].path) == ("quickstart", "arithmetic")
    assert load_config(flags=["--rollout.n", "3"]).rollout.n == 3
    assert read_config(write("actor: {model: m}\n")).notices == ()
    assert load_config(write("data: d\n")).roles["actor"].model is None


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("seed: 1\nrolout:\n  n: 4\n", ["run.yaml:2: rolout: no such key; did you mean 'rollout'?"]),
        ("rollout:\n  n: 4\n  temprature: 1\n", ["run.yaml:3: rollout.temprature: no such key; did you mean 'temperature'?"]),
        ("actor: {lr: fast}\n", ["run.yaml:1: actor.lr: should be a valid number, not 'fast'"]),
        ("rollout:\n  n: true\n", ["run.yaml:2: rollout.n: should not be true"]),
        ("rollout: 4\n", ["run.yaml:1: rollout: is a mapping, such as '{\"KEY\": VALUE}', so it cannot be 4"]),
        ("name: 2024\n", ["run.yaml:1: name: should be a valid string, not 2024"]),
        ("a: 1\nb: 2\n", ["run.yaml:1: a: no such key", "run.yaml:2: b: no such key"]),
        ("seed: 1\nseed: 2\n", ["run.yaml:2: 'seed' is already set on line 1"]),
        ("seed: 1\nkl-coef: 2\n", ["run.yaml:2: kl-coef: no such key; did you mean '--kl.coef'?"]),
        ("wandb: true\n", ["run.yaml:1: wandb: should be a mapping of the options of 'wandb', not True"]),
        ("lr: 1e-5\n", ["run.yaml:1: lr: no such key; did you mean '--actor.lr' or '--critic.lr' or '--reference.lr'?"]),
        ("cpu: true\n", ["run.yaml:1: cpu: no such key; here it is --actor.device cpu"]),
        ("seed: [1\n", ["run.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"]),
        ("- 1\n", ["run.yaml:1: a configuration is a mapping of sections, such as 'rollout:'"]),
        ("1: 2\n", ["run.yaml:1: keys are names, not '1'"]),
        ("algo: &a\n  x: *a\n", ["run.yaml:2: algo.x: refers to itself"]),
        ("algo: 3\n", ["run.yaml:1: algo: should be a plugin's name, or a mapping with 'name' and its options, not 3"]),
        ("algo: {clip_eps: 1}\n", ["run.yaml:1: algo.clip_eps: no algo is chosen; add --algo NAME"]),
        ("reward:\n- length\n- {weight: 2}\n", ["run.yaml:3: reward: each entry needs the plugin's 'name'"]),
        ("reward: [length, length]\n", ["run.yaml:1: reward: 'length' is chosen twice; give one its own name: OTHER=length"]),
        (
            "actor: {lr: 1}\nroles:\n  actor:\n    lr: 2\n",
            ["run.yaml:4: roles.actor.lr: is set already by run.yaml:1: actor.lr: leave one out"],
        ),
        (
            "with:\n  kl: {coef: 1}\nkl: {coef: 2}\n",
            ["run.yaml:3: kl.coef: is set already by run.yaml:2: with.kl.coef: leave one out"],
        ),
        (
            "learning_rate: 1\n",
            ["run.yaml:1: learning_rate: no such key; OpenRLHF's and TRL's --learning_rate is --actor.lr here"],
        ),
        (
            "actor: {learning_rate: 1}\n",
            ["run.yaml:1: actor.learning_rate: no such key; OpenRLHF's and TRL's --learning_rate is --actor.lr here"],
        ),
        ("lr: 1\n", ["run.yaml:1: lr: no such key; did you mean '--actor.lr' or '--critic.lr'"]),
        (
            "data:\n  train_files: x\n",
            ["run.yaml:2: data.train_files: 'train_files' is neither a data setting nor a source; verl's data.train_files is"],
        ),
        (
            "actor_rollout_ref: {model: {path: m}}\n",
            [
                "run.yaml:1: actor_rollout_ref: no such key; docs/reference/names.md says what verl's actor_rollout_ref.* are here"
            ],
        ),
        *(
            (f"train: {{steps: {prefix}{digit * 60_000}}}\n", ["run.yaml:1: train.steps: cannot be read as int: "])
            for prefix, digit in (("", "9"), ("0x", "f"), ("0o", "7"), ("0b", "1"))
        ),
        ("data: {sources: [{weight: 2}]}\n", ["run.yaml:1: data.sources: path is required"]),
    ],
)
def test_mistakes_name_file_line_and_key(text, lines):
    found = refusal(text)
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(expected)


def test_a_file_that_cannot_be_read():
    for name, content, reason in (
        ("gone.yaml", None, "No such file or directory"),
        ("latin.yaml", b"name: \xe9", "not UTF-8 text"),
    ):
        if content:
            Path(name).write_bytes(content)
        with pytest.raises(UserError, match=f"^{name}: cannot be read: {reason}$"):
            load_config(name)


def test_a_name_that_several_things_have_is_refused_with_what_to_write():
    Path("paper").write_text("rollout: {n: 3}\n")
    with pytest.raises(
        UserError,
        match=r"^--config paper: a preset and a file are called so: write --config preset:paper or --config \./paper$",
    ):
        load_config("paper")
    assert [load_config(f"{place}paper").rollout.n for place in ("preset:", "./")] == [16, 3]
    assert load_config("paper.yaml" if Path("paper").rename("paper.yaml") else "").rollout.n == 3
    with pytest.raises(UserError, match=r"^--config recipe:papr: no such recipe; there are "):
        load_config("recipe:papr")
    with pytest.raises(UserError, match=r"^--config preset:papr: no preset named 'papr' is installed; did you mean 'paper'\?$"):
        load_config("preset:papr")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("recipe:paper", "'paper' is a preset: --config preset:paper"),
        ("preset:gsm8k_rloo", "'gsm8k_rloo' is a recipe: --config recipe:gsm8k_rloo"),
        ("environment:gsm8k_rloo", "'gsm8k_rloo' is a recipe: --config recipe:gsm8k_rloo"),
        ("environment:mine", "mine.py is a file: --config mine.py"),
        ("environment:mine.py", "mine.py is a file: --config mine.py"),
        ("recipe:own.yaml", "own.yaml is a file: --config own.yaml"),
        ("environment:theirs", "no preset or environment named 'theirs' is installed"),
        ("environment:theirs.py", "no preset or environment named 'theirs.py' is installed"),
    ],
)
def test_a_name_of_another_sort_is_told_with_what_to_write(typed, told):
    Path("mine.py").write_text("")
    Path("own.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match=re.escape(f"--config {typed}: {told}")):
        load_config(typed)


def test_unknown_presets_have_near_matches():
    with pytest.raises(
        UserError, match=r"^--config papr: no file, preset, recipe or environment is called so; did you mean 'paper'\?$"
    ):
        load_config(["papr"])


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["on", "no", "null", "1e-5", "0x1", "~", "="]
)
value = st.recursive(text | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False), st.lists, max_leaves=4)
options = st.dictionaries(st.sampled_from(["a", "b"]), value)
choice = options.map(lambda own: PluginChoice(name="p", **own))
configs = st.builds(
    lambda name, stop, lr, n, algo, agent, rewards, extensions, trackers, temperature, roles: RunConfig.model_validate(
        {
            "name": name,
            "rollout": {"stop": stop, "n": n, "temperature": temperature},
            "roles": {"actor": {"model": "m", "lr": lr}} | {role: {} for role in roles},
            "data": {"sources": [{"path": "d", "name": name}], "system_prompt": name},
            "algo": algo,
            "agent": agent,
            "reward": rewards,
            "eval": {"reward": rewards, "k": [1, n]},
            "with": extensions,
            "tracker": trackers,
        }
    ),
    st.none() | text,
    st.lists(text.filter(bool), max_size=3),
    st.floats(0, 1e9),
    st.integers(1, 1000),
    st.none() | choice,
    choice,
    st.dictionaries(st.sampled_from(["one", "two"]), st.builds(RewardChoice, name=st.just("r"), weight=st.floats(-3, 3))),
    st.dictionaries(st.sampled_from(["x", "y"]), choice),
    st.dictionaries(st.sampled_from(["console", "wandb"]), choice),
    st.just(0.0) | st.floats(0.01, 2),
    st.lists(st.sampled_from(["critic", "helper"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(configs)
def test_what_is_printed_loads_back_to_the_same_configuration(config):
    loaded = load_config(write(config_yaml(config)))
    assert loaded == config
    assert (list(loaded.extensions), list(loaded.reward)) == (list(config.extensions), list(config.reward))


def test_saving_writes_a_whole_file_or_leaves_the_old_one(monkeypatch):
    config = load_config(flags=["--rollout.n", "3"])
    path = Path("config.yaml")
    write_file(path, config_yaml(config).encode())
    assert load_config("config.yaml") == config
    assert plain(read_yaml("config.yaml"))["rollout"]["n"] == 3
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match=r"disk full: 'config\.yaml'"):
        write_file(path, config_yaml(RunConfig()).encode())
    assert load_config("config.yaml") == config
    assert [path.name for path in Path.cwd().iterdir()] == ["config.yaml"]
