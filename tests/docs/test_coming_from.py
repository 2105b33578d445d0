"""The flag tables: names on the left are in the published packages, names on the right are ours."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rlhf_translate.elsewhere import names
from ruamel.yaml import YAML

from rlhf_host.cli.main import main
from rlhf_host.config.flag_names import known_flags
from rlhf_host.config.tree import MANY, SINGLE, Names
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.options import describe_options, options_model
from rlhf_host.plugins.selection import find, load

from .conftest import DOCS, ROOT, blocks

ORACLES = ROOT / ".oracles"
WITHOUT = ("Not needed here", "Not here yet")
CONTROL = {"resume", "config"}
CHOSEN_BY = {"agents": "agent", "reward": "reward", "with": "extension", "tracker": "tracker"}


def theirs(section):
    return sorted({name.text for name in names() if name.project == section})


def ours():
    return sorted({text for name in names() for text in filter(None, name.here.split(" and "))})


def oracle(name):
    path = ORACLES / name / name
    if not path.is_dir():
        pytest.skip("make oracles fetches the published packages")
    return path


def test_there_is_a_table_for_each():
    assert list(dict.fromkeys(name.project for name in names())) == ["OpenRLHF", "TRL", "verl", *WITHOUT]
    assert len(names()) > 500
    assert all(bool(name.here) == (name.project not in WITHOUT) for name in names())


def test_every_row_of_the_page_is_read():
    read = {name.text for name in names()}
    for line in (DOCS / "reference/names.md").read_text().splitlines():
        if line.startswith("| ") and "`" in line:
            there = line.split(" | `--", 1)[0] if "| here" in line else line.split("|")[1]
            assert set(re.findall(r"`([^`]+)`", there)) <= read, line


def test_the_transcript_is_what_the_command_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, _, said, written = blocks(DOCS / "coming-from.md")[:4]
    Path(script.title).write_text(script.body)
    done = CliRunner().invoke(main, ["translate", script.title, "-o", written.title])
    assert done.exit_code == 0, done.output
    assert re.sub(r"\S*rlhf train", "rlhf train", done.output) == said.body
    assert Path(written.title).read_text() == written.body


def test_openrlhf_has_these_arguments():
    source = "".join(path.read_text() for path in sorted((oracle("openrlhf") / "cli").glob("train_*.py")))
    known = set(re.findall(r"[\"'](--[\w.]+)[\"']", source))
    known |= {
        prefix + rest for rest in re.findall(r"f[\"']--\{prefix\}([\w.]+)[\"']", source) for prefix in ("--actor", "--critic")
    }
    choices = set(re.findall(r"[\"'](\w+)[\"']", source))
    for text in (text for text in theirs("OpenRLHF") if "." in text):  # the others are those of earlier versions
        flag, *values = text.split()
        assert flag in known, flag
        assert set(values) <= choices, text


def test_trl_has_these_arguments():
    folder = oracle("trl")
    known, values = set(), set()
    base = Path(importlib.util.find_spec("transformers").origin).parent / "training_args.py"  # what its configurations inherit
    for path in (
        base,
        "trainer/grpo_config.py",
        "trainer/rloo_config.py",
        *(f"trainer/{name}_config.py" for name in ("base", "dpo", "kto", "model", "reward", "sft")),
        "scripts/utils.py",
        "scripts/grpo.py",
    ):
        source = (folder / path).read_text()
        values |= set(re.findall(r"\w+", source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                known |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    launch = Path(importlib.util.find_spec("accelerate.commands.launch").origin).read_text()
    known |= set(re.findall(r"--(fsdp_\w+)", launch))
    for text in theirs("TRL"):
        name, *given = text.split()
        assert name in known, name
        assert set(given) <= values, text


def test_verl_has_these_keys():
    tree = YAML(typ="safe").load((oracle("verl") / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    for key in theirs("verl"):
        value = tree
        for part in key.partition(" ")[0].split("."):
            assert part in value, key
            value = value[part]


@pytest.mark.parametrize("text", ours())
def test_our_side_exists(text):
    words = text.split()
    while words:
        flag = words.pop(0).removeprefix("--")
        value = words.pop(0) if words and not words[0].startswith("--") else None
        assert exists(flag, value), f"--{flag} {value or ''}"


def exists(flag, value):
    flag = flag.replace("eval.data.SOURCE", "data.SOURCE")
    head, *rest = flag.split(".")
    if flag in CONTROL:
        return True
    if head in {*SINGLE, *CHOSEN_BY} and not rest:
        kind = SINGLE.get(head) or CHOSEN_BY[head]
        return value is None or find(kind, value) is not None
    if head in SINGLE:
        kind = SINGLE[head]
        return any(rest[0] in options(info) for info in discover() if info.kind == kind)
    if head in CHOSEN_BY:
        return rest == ["ALIAS", "weight"] or rest[1] in options(find(CHOSEN_BY[head], rest[0]))
    if head == "data" and rest[:1] == ["SOURCE"]:
        return f"data.{rest[1]}" in known_flags() or rest[1] in ("subset", "split")
    if kind := Names().plugins.get(head):
        option = next((o for o in described(find(kind, head)) if o.name.replace("_", "-") == ".".join(rest)), None)
        return option is not None and (value is None or repr(value) in option.type or "str" in option.type)
    return flag in set(known_flags()) and (value is None or takes(flag, value))


def described(info):
    return describe_options(options_model(load(info)))


def options(info):
    return {spelling for option in described(info) for spelling in (option.name, option.name.replace("_", "-"))}


def takes(flag, value):
    """Whether the setting's type has the value among its choices."""
    text = (DOCS / "reference/configuration.md").read_text()
    (kind,) = re.findall(rf"^\| `--{re.escape(flag)}` \| `(.*?)` \|", text, re.M)
    return repr(value) in kind or "str" in kind


def test_every_selection_of_the_schema_is_understood_here():
    assert set(MANY) == set(CHOSEN_BY)
