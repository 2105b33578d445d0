"""The defaults of other projects that ``rlhf translate`` knows are those of the published packages."""

from __future__ import annotations

import ast
import dataclasses

import pytest
from ruamel.yaml import YAML
from transformers import TrainingArguments

from rlhf_host.translate import openrlhf, trl, verl
from rlhf_host.translate.commands import METHODS
from tests.conftest import ROOT


def oracle(name):
    path = ROOT / ".oracles" / name / name
    if not path.is_dir():
        pytest.skip("make oracles fetches the published packages")
    return path


def same(ours, theirs):
    theirs = getattr(theirs, "value", theirs)  # of an enumeration
    theirs = list(theirs) if isinstance(theirs, list | tuple) else [theirs]
    return [plain(value) for value in ours] == [plain(str(value)) for value in theirs]


def plain(text):
    try:
        return float(text)
    except ValueError:
        return {"null": "none"}.get(text.lower(), text.lower())


def compare(ours, theirs, renamed=lambda name: name):
    assert ours
    for name, value in ours.items():
        assert same(value, theirs[renamed(name)]), (name, value, theirs[renamed(name)])


@pytest.mark.parametrize("method", ["ppo_ray", "dpo", "sft", "rm"])
def test_those_of_openrlhf(method):
    source = (oracle("openrlhf") / f"cli/train_{method}.py").read_text()
    theirs = {}
    for prefix in ("actor", "critic"):
        for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
            default = next((word.value for word in call.keywords if word.arg == "default"), None)
            if getattr(call.func, "attr", "") == "add_argument" and default is not None:
                name = evaluated(call.args[0], prefix).removeprefix("--")
                theirs[name] = evaluated(default, prefix)
    compare(openrlhf.defaults(method), theirs, lambda name: name if name in theirs else name.removeprefix("actor."))


def evaluated(node, prefix):
    known = {"prefix": prefix, "float": float, "int": int, "datetime": __import__("datetime").datetime}
    return eval(compile(ast.Expression(node), "", "eval"), known)


@pytest.mark.parametrize("method", METHODS["trl"])
def test_those_of_trl(method):
    folder = oracle("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for path in ("trainer/base_config.py", f"trainer/{method}_config.py", "trainer/model_config.py"):
        for node in ast.walk(ast.parse((folder / path).read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                default = next((word.value for word in node.value.keywords if word.arg == "default"), None)
                theirs |= {node.target.id: ast.literal_eval(default)} if default is not None else {}
    assert "self.bf16 = not (self.fp16) if self.bf16 is None" in (folder / "trainer/base_config.py").read_text()
    compare(trl.defaults(method), theirs | {"bf16": True})


def test_those_of_verl():
    tree = YAML(typ="safe").load((oracle("verl") / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    theirs = {}
    for name in verl.defaults("ppo"):
        value = tree
        for part in name.split("."):
            value = value[part]
        theirs[name] = value
    compare(verl.defaults("ppo"), theirs)
