"""The host stands alone, its core too, and packages beside it use what is public of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_host import hookspecs, protocols
from rlhf_host.installed import offered
from rlhf_host.plugins.reward_functions import FOREIGN

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.parent.name: path.parent / "src" for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))}
"""Distribution → the folder of its modules."""
SNAPSHOT = json.loads((ROOT / "tests/api/snapshot.json").read_text(encoding="utf-8"))
PUBLIC = {**SNAPSHOT["names"], "rlhf_host.hookspecs": hookspecs.RULES, "rlhf_host.protocols": protocols.__all__}
"""Module → its public names."""


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yields what a module imports: a module, and the name that is taken from it or nothing."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                yield from ((module, alias.name) for alias in node.names)
            case ast.Import():
                yield from ((alias.name, "") for alias in node.names)
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield module, ""
            case ast.Attribute(value=ast.Name(id="rlhf_host"), attr=name):
                yield "rlhf_host", name


def is_public(module: str, name: str) -> bool:
    return module in PUBLIC and (name in ("", "__version__", *PUBLIC[module]) or f"{module}.{name}" in PUBLIC)


def private(source: str) -> list[str]:
    """Returns what a module imports of the host that is not public."""
    of_host = [(module, name) for module, name in imports(source) if module.partition(".")[0] == "rlhf_host"]
    return [f"{module} {name}".strip() for module, name in of_host if not is_public(module, name)]


def test_the_host_imports_no_package_beside_it():
    beside = {module.stem for source in SOURCES.values() for module in source.iterdir()}
    assert {"rlhf_plugin_rloo", "rlhf_translate"} <= beside
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sorted(ROOT.glob("rlhf_host/**/*.py"))
        for module, _ in imports(path.read_text(encoding="utf-8"))
        if module.partition(".")[0] in beside
    ]
    assert found == []


CHOSEN = re.compile(r'\b(algo|reward)s?="(\w+)"')


def test_tests_of_a_package_train_with_a_plugin_of_another_only_where_that_is_installed():
    """A package alone with the host passes its own tests (test_alone)."""
    loose, found = [], 0
    for name, source in SOURCES.items():
        requires = (source.parent / "pyproject.toml").read_text(encoding="utf-8")
        for path in sorted((source.parent / "tests").rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for kind, chosen in {*CHOSEN.findall(text)} if "train(" in text else ():
                owner = offer.distribution if (offer := offered()[kind].get(chosen)) else name
                found += owner != name
                asked = f'"{owner.replace("-", "_")}"' in text or f'find("{kind}", "{chosen}")' in text
                if owner not in requires and not asked:
                    loose.append(f"{path.relative_to(ROOT)}: {kind} {chosen} is of {owner}")
    assert found > 8
    assert loose == []


def test_tests_of_a_package_judge_with_functions_of_another_project_only_where_their_caller_is_installed():
    foreign, found = re.compile(rf"^\s*def \w+\((?:.*\W)?(?:{'|'.join(FOREIGN)})\b", re.MULTILINE), set()
    for source in SOURCES.values():
        requires = (source.parent / "pyproject.toml").read_text(encoding="utf-8")
        for path in sorted((source.parent / "tests").rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "rlhf-translate" not in requires and "rlhf_translate" not in text and "train(" in text and foreign.search(text):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(), "take (text, label)"


DISTRIBUTED = re.compile(r"(?<!torch\.)\bdistributed[./](deepspeed|ray|split|sync|vllm)\b|\brlhf_host[./]distributed\b")


def distributed(source: str) -> list[str]:
    """Returns where a module imports ``rlhf_host.distributed``, or names it in a text that is no docstring."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose]
    imported = [f"{module}.{name}".strip(".") for module, name in imports(source)]
    return [text for text in (*imported, *(str(node.value) for node in texts)) if DISTRIBUTED.search(text)]


def test_the_core_knows_nothing_of_what_is_for_several_processes():
    host = ROOT / "rlhf_host"
    core = [path for path in sorted(host.rglob("*.py")) if not path.is_relative_to(host / "distributed")]
    found = {str(path.relative_to(ROOT)): texts for path in core if (texts := distributed(path.read_text(encoding="utf-8")))}
    assert core
    assert found == {}, "entry points name what is there"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def late():\n    from rlhf_host.distributed.ray.plugin import Ray", ["rlhf_host.distributed.ray.plugin.Ray"]),
        ("from rlhf_host import distributed", ["rlhf_host.distributed"]),
        ("run('rlhf_host.distributed.sync.buckets:take_sent')", ["rlhf_host.distributed.sync.buckets:take_sent"]),
        ("_HOME = {'ends_of': 'distributed.vllm.startup'}", ["distributed.vllm.startup"]),
        ('"""Syncs are in ``rlhf_host.distributed``."""\nimport torch.distributed\nsay("distributed over ranks")', []),
    ],
)
def test_what_the_core_knows_is_noticed(source, found):
    assert distributed(source) == found


@pytest.mark.parametrize("name", SOURCES)
def test_a_package_imports_public_names_of_the_host(name):
    files = sorted(SOURCES[name].rglob("*.py"))
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := private(path.read_text(encoding="utf-8")))}
    assert files
    assert found == {}, "use a public name (docs/contributing.md)"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from rlhf_host import Reward, functional, __version__\nimport rlhf_host.testing", []),
        ("import rlhf_host\nrlhf_host.UserError\nrlhf_host.installed.find", []),
        ("from rlhf_host import errors", ["rlhf_host errors"]),
        ("from rlhf_host.errors import UserError", ["rlhf_host.errors UserError"]),
        ("from rlhf_host.settings import discover", ["rlhf_host.settings discover"]),
        ("def late():\n    import rlhf_host.cli.main", ["rlhf_host.cli.main"]),
        ("import rlhf_host\nrlhf_host.errors.visible", ["rlhf_host errors"]),
        ("importlib.import_module('rlhf_host.runs.signs')", ["rlhf_host.runs.signs"]),
    ],
)
def test_private_names_are_noticed(source, found):
    assert private(source) == found


def test_algorithms_that_train_on_rows_bring_what_reads_them():
    """Who installs one can train, because its distribution requires ``rlhf-rows``."""
    text = {name: "".join(path.read_text(encoding="utf-8") for path in SOURCES[name].rglob("*.py")) for name in SOURCES}
    users = {name for name, source in text.items() if re.search(r"rlhf_rows", source) and name != "rlhf-rows"}
    users |= {
        name
        for name, source in text.items()
        if "builtin_algos" in SOURCES[name].parts and re.search(r"""data="(?!prompts)\w""", source)
    }
    assert users >= {"rlhf-plugin-sft", "rlhf-plugin-dpo", "rlhf-plugin-kto", "rlhf-plugin-distill", "rlhf-plugin-ptx"}
    projects = {name: (SOURCES[name].parent / "pyproject.toml").read_text(encoding="utf-8") for name in users}
    assert [name for name, project in projects.items() if '"rlhf-rows>=' not in project] == []
