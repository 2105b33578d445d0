"""Every hook has its exact signature in the documentation and a test named after it."""

from __future__ import annotations

import ast
import functools
import inspect
import re

import pytest

from rlhf_host import hookspecs

from .conftest import ROOT


def hooks():
    source = (ROOT / "rlhf_host/hookspecs.py").read_text(encoding="utf-8")
    marked = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in marked if any(ast.unparse(mark).startswith("hookspec(") for mark in node.decorator_list)]


HOOKS = hooks()


@functools.cache
def all_tests():
    """Names of all tests of the repository."""
    names = set()
    for path in [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("plugins/*/*/tests/test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.add(node.name)
    return names


def test_there_are_hooks():
    assert len(HOOKS) >= 28
    assert list(hookspecs.RULES) == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_the_signature_of_a_hook_stands_in_the_documentation(hook):
    text = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python\n(def {hook}\(.*?)^```$", text, re.M | re.S)
    shown = ast.parse(block.rstrip() + ": ...").body[0]
    found = inspect.signature(getattr(hookspecs, hook))
    assert [argument.arg for argument in shown.args.args] == list(found.parameters)
    for argument in shown.args.args:
        assert ast.unparse(argument.annotation) == found.parameters[argument.arg].annotation
    assert ast.unparse(shown.returns) == found.return_annotation
    assert not shown.args.defaults


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_explained_and_linked_to(hook):
    text = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    explained = text.partition(f"### `{hook}`")[2].partition("\n### ")[0]
    assert len(explained.rpartition("```")[2].strip()) > 20
    rule = hookspecs.RULES[hook]
    assert f"Runs on: {rule.where}." in explained
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    assert any(f"`{hook}`" in path.read_text(encoding="utf-8") for path in pages), f"no page speaks of {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_test_named_after_it(hook):
    named = {name for name in all_tests() if re.match(rf"test_hook_{hook}(_|$)", name)}
    assert named, f"write def test_hook_{hook}_...: what the host does with it (tests/api/test_hooks.py)"
