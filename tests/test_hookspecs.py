"""The contract holds together."""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path

import pluggy
import pytest

from rlhf_host import hookspecs


def names():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    return sorted(name for name in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None)


@pytest.mark.parametrize("hook", names())
def test_hook_says_what_it_is_for_and_its_rule_says_how_it_is_called(hook):
    function = getattr(hookspecs, hook)
    assert inspect.getdoc(function)
    assert function.rule is hookspecs.RULES[hook]
    assert function.rule.calls in typing.get_args(hookspecs.Calls)
    assert function.rule.where in ("controller", "worker")
    assert (function.rule.awaited or function.rule.threaded) is ("Awaitable" in inspect.signature(function).return_annotation)


@pytest.mark.parametrize("hook", names())
def test_hook_has_plain_arguments_without_defaults(hook):
    for parameter in inspect.signature(getattr(hookspecs, hook)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default is inspect.Parameter.empty
        assert parameter.annotation is not inspect.Parameter.empty


def test_every_hook_has_a_rule_and_nothing_else_has():
    assert sorted(hookspecs.RULES) == names()
    assert all(rule.calls == "one" for rule in hookspecs.RULES.values() if rule.per == "agent")
    workers = {name for name, rule in hookspecs.RULES.items() if rule.where == "worker"}
    assert workers == {"importance_weights", "around_pass", "batch_statistics", "compute_loss"}
    assert not any(rule.threaded for rule in hookspecs.RULES.values() if rule.where == "worker")


def test_no_other_module_keeps_a_list_of_hooks():
    """A new hook is one function with one rule: neither the manager nor a runtime has to learn its name."""
    root = Path(hookspecs.__file__).parent
    some = {name for name, rule in hookspecs.RULES.items() if rule.where == "worker" or rule.per == "agent"}
    for folder in ("plugins", "runtimes", "config", "engines", "backends", "weight_sync", "distributed"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Set | ast.Tuple | ast.List):
                    listed = {item.value for item in node.elts if isinstance(item, ast.Constant)} & some
                    assert len(listed) < 3, f"{path} lists {listed}"
