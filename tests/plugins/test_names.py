"""The host knows no plugin by name: what depends on one is in its metadata, its traits or its hooks."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import pytest

import rlhf_host
from rlhf_host.config.schema import RunConfig
from rlhf_host.config.tree import MANY, SHORTHANDS, SINGLE, fields_of
from rlhf_host.plugins.discovery import HOST

HOME = Path(rlhf_host.__file__).parent
LISTED = json.loads((resources.files("rlhf_host.plugins") / "index.json").read_text())["distributions"]

FORMS = ("command", "data")
"""Kinds whose names the host has to know: its own commands, and the values of ``Needs.data``."""
PLUGINS = [(plugin["name"], entry["name"]) for entry in LISTED for plugin in entry["plugins"] if plugin["kind"] not in FORMS]
NAMES = {name for name, _ in PLUGINS}
HOSTS = {name for name, distribution in PLUGINS if distribution == HOST}

ALSO = {
    "everyday words": "arithmetic broadcast checkpoint console cpu file format graphs http local retry shapes shell streaming",
    "libraries and kinds of files": "deepspeed jsonl ray tensorboard torch transformers vllm wandb",
    "losses and metrics of the host": "cispo gspo ipo kl",
    "a role, a command and a model of the host": "reward_model rm quickstart",
}
"""Names that mean something else too. They count only where a plugin is chosen or compared by them."""
WORDS = {word for words in ALSO.values() for word in words.split()}

OWN = ("backends", "distributed", "engines", "extensions", "runtimes", "trackers", "weight_sync")
"""Modules of the host's own plugins, which may name these."""
DEFAULTS = ("protocols/runtimes.py",)
"""The host's own plugins as defaults of a run, beside ``defaults.yaml``."""

FLAGS = "|".join(("config", "data", *SINGLE, *MANY))
"""What a plugin's name follows in a command line."""
SECTIONS = {*fields_of(RunConfig), *SHORTHANDS}
"""What is before the dot of a flag, where it is no plugin."""
NAMED = re.compile(r"(^|_)(name|names|plugin|spec|spelling)$")
"""Variables and attributes that hold the name of a plugin."""


def test_the_words_are_names_of_plugins():
    assert WORDS <= NAMES


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """All but docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def _chosen(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings that choose a plugin, or that a plugin's name is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(NAMED.search(getattr(side, "attr", getattr(side, "id", ""))) for side in sides):
                yield from (string for side in sides for string in _strings(side))
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (v for k, v in pairs if getattr(k, "value", "") in ("name", "path") and isinstance(v, ast.Constant))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("find", "build", "PluginChoice", "DataSource"):
            yield from (string for part in (*node.args, *(k.value for k in node.keywords)) for string in _strings(part))


def named(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every plugin that the source knows."""
    tree = ast.parse(source)
    chosen = {id(node) for node in _chosen(tree)}
    for node in _strings(tree):
        text = node.value
        found = {word.strip("-.") for word in re.findall(r"[\w.-]+", text)} - WORDS
        found |= {word for flag, word in re.findall(rf"--({FLAGS})[ =](\w+)", text)}
        found |= set(re.findall(r"--([a-z_]+)\.[a-z]", text)) - SECTIONS
        if id(node) in chosen:
            found.add(text)
        yield from ((node.lineno, name) for name in sorted(found & NAMES))


def test_the_host_knows_no_plugin_by_name():
    places = []
    for file in sorted(HOME.rglob("*.py")):
        place = file.relative_to(HOME).as_posix()
        allowed = HOSTS if _within(place, (*OWN, *DEFAULTS)) else ()
        known = [(line, name) for line, name in named(file.read_text()) if name not in allowed]
        places += [f"rlhf_host/{place}:{line}: {name}" for line, name in known]
    assert not places, "\n".join(["the host names plugins, which should say in their metadata what it must know:", *places])


def _within(place: str, parts: Iterable[str]) -> bool:
    return any(place == part or place.startswith(f"{part}/") for part in parts)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('x = "http_reward"', "http_reward"),
        ('say("tools are for multi_turn, so")', "multi_turn"),
        ('say("correct it with --with tis, or")', "tis"),
        ('if name == "file": pass', "file"),
        ('if choice.name in ("local", "ray"): pass', "local ray"),
        ('{"name": "file", "path": x}', "file"),
        ('say("use --runtime ray")', "ray"),
        ('say("or set --kl.coef")', "kl"),
        ('find("engine", "transformers")', "transformers"),
        ('say("a file, a model of transformers")', ""),
        ('import_module("torch")', ""),
        ('def f():\n    """Ask http_reward."""', ""),
    ],
)
def test_what_counts_as_a_name(source, found):
    assert [name for _, name in named(source)] == found.split()
