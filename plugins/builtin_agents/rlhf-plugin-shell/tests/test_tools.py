"""Ordinary tools in a shell: what is installed works, at both levels."""

import asyncio

import pytest
from rlhf_plugin_code_exec.runner import JailFailed
from rlhf_plugin_shell import ShellAgent, tools
from rlhf_plugin_shell.work import Work

SOME = ("make", "node", "python multiprocessing", "git", "sqlite3")


@pytest.fixture(params=["A", "B"])
def agent(request):
    """An agent whose shells are at a level that this machine has."""
    made = ShellAgent(ShellAgent.Options())
    made.sandboxes._level = request.param
    try:
        asyncio.run(asyncio.wait_for(_opened(made), 60))
    except JailFailed as failure:
        pytest.skip(f"no level {request.param}: {failure}")
    return made


async def _opened(made):
    shell = await made.opened(Work())
    await shell.close()


def failed(agent, names, monkeypatch):
    monkeypatch.setattr(tools, "TOOLS", [tool for tool in tools.TOOLS if tool.name in names])
    told = asyncio.run(tools.outcomes(agent))
    assert list(told) == [tool.name for tool in tools.TOOLS]
    return {name: outcome for name, outcome in told.items() if outcome not in tools.Outcome.__args__}


def test_some_tools_work(agent, monkeypatch):
    assert failed(agent, SOME, monkeypatch) == {}


def test_all_tools_work(agent, monkeypatch):
    assert failed(agent, [tool.name for tool in tools.TOOLS], monkeypatch) == {}
    assert len(tools.TOOLS) >= 20


def test_a_tool_that_fails_and_one_that_is_not_there_are_named(agent, monkeypatch):
    broken = [
        tools.Tool("sed", "echo a", "b"),
        tools.Tool("no-such-tool", "true", ""),
        tools.Tool("awk", "exit 3", "", own=True),
    ]
    monkeypatch.setattr(tools, "TOOLS", broken)
    told = asyncio.run(tools.outcomes(agent))
    assert told["sed"] == "ended, exit code 0: a"
    assert told["no-such-tool"] == "not installed"
    assert told["awk"] == ("ended, exit code 3: " if agent.sandboxes._level == "A" else "needs a file system of its own")
