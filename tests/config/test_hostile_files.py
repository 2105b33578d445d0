"""Files that are no configuration: each is refused in one line with its place, quickly and without a traceback."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhf_host.config.load import load_config
from rlhf_host.config.yaml_file import LARGEST, plain, read_yaml, write_yaml
from rlhf_host.errors import UserError

LEVELS = range(1, 12)
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in LEVELS)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in LEVELS)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ALIASES, f"run.yaml:1: a5: the file holds more than {LARGEST:,} values; aliases (*NAME) repeat what they name"),
        (MERGES, f"the file holds more than {LARGEST:,} values; aliases (*NAME) repeat what they name"),
        ("a: " + "[" * 20_000, "not valid YAML: brackets or indents are nested more than 100 deep"),
        ("a: " + "{a: " * 5_000 + "1" + "}" * 5_000, "not valid YAML: brackets or indents are nested more than 100 deep"),
        ("".join(" " * i + "a:\n" for i in range(2_000)), "not valid YAML: brackets or indents are nested more than 100 deep"),
        ("seed: " + "9" * 5_000, "run.yaml:1: seed: cannot be read as int: '" + "9" * 40 + "'"),
        ("seed: !!int abc", "run.yaml:1: seed: cannot be read as int: 'abc'"),
        ("debug: !!bool maybe", "run.yaml:1: debug: cannot be read as bool: 'maybe'"),
        ("seed: !secret 1", "run.yaml:1: seed: YAML tags are not supported, and this value has '!secret'"),
        (
            "name: !!python/object/apply:os.getcwd []",
            "run.yaml:1: name: YAML tags are not supported, and this value has 'tag:yaml.org,2002:python/object/apply:os.getcwd'",
        ),
        ("with: !!set {kl}", "run.yaml:1: with: YAML tags are not supported, and this value has 'tag:yaml.org,2002:set'"),
        ("seed: !!map 3", "run.yaml:1: seed: YAML tags are not supported, and this value has 'tag:yaml.org,2002:map'"),
        ("seed: !!seq 3", "run.yaml:1: seed: YAML tags are not supported, and this value has 'tag:yaml.org,2002:seq'"),
        (
            "rollout: !!str {n: 4}",
            "run.yaml:1: rollout: YAML tags are not supported, and this value has 'tag:yaml.org,2002:str'",
        ),
        ("seed: !!null 5", "run.yaml:1: seed: cannot be read as null: '5'"),
        ("a: &a {n: 1}\nb: &b {n: 2}\nrollout:\n  <<: *a\n  <<: *b\n", "run.yaml:5: '<<' is already set on line 4"),
        ("rollout: &r\n  <<: *r\n  n: 1\n", "run.yaml:1: rollout: refers to itself"),
        ("a: *nothing", "run.yaml:1: not valid YAML: found undefined alias 'nothing'"),
        ("<<: 3", "run.yaml:1: '<<' takes a mapping, or a list of them"),
        ("seed: 1\n---\nseed: 2\n", "run.yaml:2: not valid YAML: but found another document"),
        ("rollout:\n\tn: 1\n", "run.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("? [1, 2]\n: 3\n", "run.yaml:1: keys are names, not a list or mapping"),
        (
            "train: {batch-size: 1, batch_size: 2}",
            "run.yaml:1: train.batch_size: 'batch_size' is already set, with dashes or underscores",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_it_is_one_line(text, line):
    Path("run.yaml").write_text(text)
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        load_config("run.yaml")
    assert time.monotonic() - started < 10
    (message,) = str(error.value).splitlines()
    assert line in message


def test_keys_cannot_move_the_cursor(rlhf):
    Path("run.yaml").write_text('"\\e[2J\\e[31mkey": 1\n')
    (line,) = rlhf.refused("train", "--config", "run.yaml")
    assert line.startswith("run.yaml:1: \\x1b[2J\\x1b[31mkey: no such key")


def test_json_on_the_command_line_may_be_nested_too():
    assert load_config(flags=["--rollout.stop", "[" * 100_000]).rollout.stop == ["[" * 100_000]
    with pytest.raises(UserError, match=r"^--eval.k: should be a valid integer, not '\[{59}… \(100002 characters\)$"):
        load_config(flags=["--eval.k", "[" * 100_000])


def test_long_values_are_cut_in_messages():
    with pytest.raises(UserError, match=r"^--train.steps: .*, not '7{59}… \(1002 characters\)$"):
        load_config(flags=["--train.steps", "7" * 999 + "x"])


def test_words_are_those_of_yaml_1_2():
    Path("run.yaml").write_text(
        "[on, off, no, yes, 1e-5, 012, 0o14, 0x1f, ~, 2001-01-01, 1:30, =, .inf, True]\n".join(["a: ", ""])
    )
    assert plain(read_yaml("run.yaml"))["a"] == [
        *("on", "off", "no", "yes", 1e-5, 12, 12, 31, None, "2001-01-01", "1:30", "=", float("inf"), True)
    ]


def test_merged_keys_keep_the_line_they_are_on():
    Path("run.yaml").write_text("rollout: &common\n  n: 4\n  top_k: many\neval:\n  <<: *common\n  n: 2\n")
    with pytest.raises(UserError) as error:
        load_config("run.yaml")
    assert {line.partition(": should")[0] for line in str(error.value).splitlines()} == {
        "run.yaml:3: rollout.top_k",
        "run.yaml:3: eval.top_k",
    }


def test_what_is_written_reads_back():
    values = {
        "a": ["on", "1e-5", "2001-01-01", " x", "\x85\u2028", "\n", "😀", "0x1", "~", "#", "a: b"],
        "b": {},
        "c": [],
        "d": 1e-5,
    }
    Path("out.yaml").write_text(write_yaml(values), encoding="utf-8")
    assert plain(read_yaml("out.yaml")) == values


def test_a_plugin_without_a_name_and_a_section_by_its_name_in_python_are_refused(rlhf):
    Path("run.yaml").write_text("algo: {plugin: toy}\nreward: length\nextensions:\n  sift: {name: sift}\n")
    assert rlhf.refused("train", "--config", "run.yaml", "--actor.model", "m") == [
        "run.yaml:1: algo.plugin: no algo is chosen; add --algo NAME",
        "run.yaml:3: extensions: no such key",
    ]


def test_options_apart_from_the_name_are_refused(rlhf):
    Path("run.yaml").write_text(
        "algo: {name: toy, options: {clip_eps: 0.3}}\nreward: length\ndata: [{path: sums, options: {largest: 4}}]\n"
    )
    assert rlhf.refused("train", "--config", "run.yaml", "--actor.model", "m") == [
        "run.yaml:1: algo.options: algo 'toy' has no option 'options'; write its options beside its name, without 'options:'",
        "run.yaml:3: data.options: tasks 'sums' has no option 'options'; write its options beside its name, without 'options:'",
    ]
