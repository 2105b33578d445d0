"""The contract holds together."""

from __future__ import annotations

import inspect

import pluggy
import pytest

from rlhf_host import hookspecs


def names():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    return sorted(name for name in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None)


@pytest.mark.parametrize("hook", names())
def test_hook_says_what_it_is_for_and_where_it_runs(hook):
    doc = inspect.getdoc(getattr(hookspecs, hook))
    assert doc
    assert "Controller" in doc or "Worker" in doc


@pytest.mark.parametrize("hook", names())
def test_hook_has_plain_arguments_without_defaults(hook):
    for parameter in inspect.signature(getattr(hookspecs, hook)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default is inspect.Parameter.empty
        assert parameter.annotation is not inspect.Parameter.empty


def test_hooks_with_one_implementation_exist_and_say_one():
    assert names()
    assert set(names()) >= hookspecs.ONE | hookspecs.PER_AGENT
    assert not hookspecs.ONE & hookspecs.PER_AGENT
    one = {name for name in names() if ", one" in inspect.getdoc(getattr(hookspecs, name))}
    assert one == hookspecs.ONE | hookspecs.PER_AGENT
