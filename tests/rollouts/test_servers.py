"""Servers come in by a door of their own: found when an episode asks for an endpoint, and missed before a run starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from rlhf_host.errors import PluginError, RunError
from rlhf_host.plugins.discovery import DISABLE
from rlhf_host.plugins.servers import find_server
from rlhf_host.rollouts.endpoints import Endpoints

OURS = "rlhf-server:openai"
INSTALL = "no policy server is installed; pip install -c dist/wheels.txt rlhf-server"
SERVER = '''
"""A server for tests."""
STARTED = []

class Server:
    def __init__(self, *, port):
        STARTED.append(port)

    async def open(self, policy):
        return f"http://served/{policy}"

    def close_session(self, session):
        STARTED.append(session)

    async def close(self):
        STARTED.append("closed")
'''
AGENT = '''
from pydantic import BaseModel
from rlhf_host import AgentNeeds, hookimpl

class Asking:
    """An agent that asks for an endpoint."""

    class Options(BaseModel):
        says: bool = True

    def __init__(self, options):
        self.options = options

    @hookimpl
    def needs(self):
        return AgentNeeds(server=self.options.says)

    @hookimpl
    async def agent_run(self, episode, policy):
        await policy.endpoint()
        return policy.trajectories()
'''


def test_the_installed_one_is_made_when_the_first_episode_asks(here, monkeypatch):
    monkeypatch.setenv(DISABLE, OURS)
    here.install("cmd-server", {"rlhf.servers": "made_up = made_up_server:Server"}, {"made_up_server.py": SERVER})
    endpoints = Endpoints(port=7)

    async def main():
        sessions = [await endpoints.open("one"), await endpoints.open("two")]
        endpoints.close_session(sessions[0])
        await endpoints.close()
        return sessions

    assert asyncio.run(main()) == ["http://served/one", "http://served/two"]
    from made_up_server import STARTED

    assert STARTED == [7, "http://served/one", "closed"]


@pytest.mark.parametrize(
    ("old", "new", "hook"), [("STARTED.append(port)", "1 / 0", "__init__"), ("return f", "raise 5 or f", "open")]
)
def test_a_defect_of_it_is_told_with_its_name(here, monkeypatch, old, new, hook):
    monkeypatch.setenv(DISABLE, OURS)
    source = SERVER.replace(old, new)
    here.install("cmd-server", {"rlhf.servers": "made_up = broken_server:Server"}, {"broken_server.py": source})
    with pytest.raises(RunError, match=rf"server 'made_up' from cmd-server 1\.0.*{hook}"):
        asyncio.run(Endpoints().open("one"))


def test_nobody_asked_so_nothing_is_imported(site):
    site.install(
        "cmd-server", {"rlhf.servers": "made_up = made_up_server:Server"}, {"made_up_server.py": "raise SystemExit(9)"}
    )
    code = (
        "import asyncio, sys; from rlhf_host.rollouts.endpoints import Endpoints; e = Endpoints(); asyncio.run(e.close());"
        "print({'aiohttp', 'made_up_server', 'rlhf_server'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(site.folder)}, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


def test_without_one_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("rlhf_host.plugins.servers.discover", lambda disabled: [])
    with pytest.raises(PluginError) as error:
        find_server()
    assert str(error.value) == INSTALL


def test_one_that_is_left_out_is_named(monkeypatch):
    monkeypatch.setenv(DISABLE, OURS)
    with pytest.raises(PluginError, match=r"the server 'openai' from rlhf-server \S+ is disabled: left out by --disable"):
        find_server()


@pytest.mark.parametrize("name", ["openai", "other"])
def test_two_are_a_conflict(here, name):
    here.install("cmd-server", {"rlhf.servers": f"{name} = made_up_server:Server"}, {"made_up_server.py": SERVER})
    with pytest.raises(PluginError) as error:
        find_server()
    told = str(error.value)
    assert f"server {name!r} from cmd-server 1.0" in told
    assert "server 'openai' from rlhf-server" in told
    either = (f"cmd-server:{name} or {OURS}", f"{OURS} or cmd-server:{name}")
    assert told.endswith(tuple(f" are both installed: leave one out (--disable {names})" for names in either))


def test_one_for_another_host_is_not_used(here, monkeypatch):
    monkeypatch.setenv(DISABLE, OURS)
    here.install("cmd-server", {"rlhf.servers": "made_up = made_up_server:Server"}, requires=("rlhf-host>=7",))
    with pytest.raises(PluginError, match=r"cmd-server 1\.0 is for rlhf-host >=7, and this is"):
        find_server()


@pytest.mark.parametrize(("says", "when"), [("true", "before it starts"), ("false", "when an episode asks")])
def test_a_run_without_a_server_says_what_to_do(site, tiny_model, prompts, says, when):
    site.install("cmd-agent", {"rlhf.agents": "asking = asking_agent:Asking"}, {"asking_agent.py": AGENT})
    flags = [
        "--algo",
        "rloo",
        "--reward",
        "math_verifier",
        "--actor.model",
        tiny_model,
        "--data",
        prompts,
        "--train.steps",
        "1",
    ]
    flags += ["--agent", "asking", "--agent.says", says, "--rollout.max-new-tokens", "4", "--kernels", "none"]
    done = site.rlhf("train", *map(str, flags), "--disable", OURS)
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stderr.split())
    assert "the server 'openai' from rlhf-server" in told
    assert ("agent:asking needs a policy server: " in told) is (when == "before it starts")
    assert "Traceback" not in done.stderr
