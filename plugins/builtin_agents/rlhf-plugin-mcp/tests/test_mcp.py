"""Tools of MCP servers: over both transports, what the policy sees of them, and how servers fail."""

import asyncio
import contextlib
import gzip
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rlhf_authoring import agent_contract
from rlhf_plugin_mcp import McpAgent
from rlhf_plugin_mcp.connection import Connection, ServerLost
from rlhf_plugin_mcp.servers import servers_of
from rlhf_plugin_mcp.stdio import TAIL

from rlhf_host import EpisodeFailed, Task, UserError

from .conftest import at_an_address, call, text_of

SHARED = {"servers": [at_an_address()], "tools": ["add"], "tool_format": "text", "max_turns": 3}
TestContract = agent_contract(
    "mcp", SHARED, tasks=[Task("1+2=", "3")], texts=(call("add", a=1, b=2), "3", "<tool_call>{", call("sub"))
)


@pytest.fixture(params=["stdio", "http"])
def server(request):
    return request.getfixturevalue(request.param)


def test_the_policy_sees_the_tools_and_their_results(server, play):
    [row] = play(server, [call("add", a=1, b=2), "It is 3."])
    text = text_of(row)
    assert '{"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {' in text
    assert '"required": ["a", "b"]' in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert row.last_text == "It is 3."
    assert [segment.kind[0] for segment in row.segments] == list("paoa")
    assert (row.metrics["agent/turns"], row.metrics["tools/add/calls"], row.metrics["tools/add/errors"]) == (2, 1, 0)
    assert row.agent_rewards == []


def test_plain_text_where_the_template_has_no_tools(http, play):
    [row] = play(http, [call("add", a=1, b=2), "3"], native=False, tools=["add"])
    text = text_of(row)
    assert "You can use these tools:\n" in text
    assert "user\n<tool_response>\n3\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sub"), "Error: there is no tool 'sub'; there are add"),
        (call("add", a=1), "Error: Error executing tool add: 1 validation error"),
        (call("fail"), "Error: Error executing tool fail"),
        ("<tool_call>\n{\n</tool_call>", "This tool call cannot be read: "),
        (call("long"), "x\n[... 99980 characters left out ...]\nx"),
        (call("file"), "<tool_response>\ninside\nmore: file:///b.txt\n</tool_response>"),
        (
            call("add", a=1, b=2) + call("add", a=3, b=4),
            "3\n</tool_response><|im_end|><|im_start|>user\n<tool_response>\n7\n",
        ),
    ],
)
def test_what_is_told(said, told, http, play):
    [row] = play(http, [said, "done"], max_tool_chars=20 if "long" in said else 8000)
    assert told in text_of(row)
    assert row.last_text == "done"


def test_servers_of_a_run_and_of_an_episode(stdio, play):
    says = [call("counted"), "x"]
    shared = [text_of(row) for row in play(stdio, says, says)]
    assert ["\n1\n</tool" in shared[0], "\n2\n</tool" in shared[1]] == [True, True]
    own = [text_of(row) for row in play(stdio, says, says, scope="episode", together=True)]
    assert all("\n1\n</tool" in each for each in own)


def test_a_server_that_ends_fails_its_episode_by_name_and_comes_back(stdio, play):
    dead, alive = play(stdio, [call("die"), "x"], [call("add", a=1, b=2), "3"])
    assert isinstance(dead, EpisodeFailed)
    assert dead.retryable
    assert "the MCP server calc ended in die: last words" in str(dead)
    assert alive.last_text == "3"


def test_a_server_that_hangs_fails_its_episode_by_name_and_comes_back(server, play):
    late, alive = play(server, [call("hang"), "x"], [call("add", a=1, b=2), "3"], tool_timeout_s=3.0)
    assert isinstance(late, EpisodeFailed)
    assert "the MCP server calc did not answer hang in 3 s" in str(late)
    assert "\n3\n</tool_response>" in text_of(alive)


def test_what_no_conversation_has(http, play):
    [sound, picture] = play(http, [call("sound"), "x"], [call("picture"), "x"])
    with pytest.raises(EpisodeFailed, match=r"the MCP server calc: sound gave sound \(audio/wav\), which no conversation has"):
        raise sound
    with pytest.raises(EpisodeFailed, match="the MCP server calc: picture gave a picture: "):
        raise picture


def test_variables_of_commands(stdio, play, monkeypatch):
    monkeypatch.setenv("OF_TEST", "passed")
    monkeypatch.setenv("SECRET", "key")
    [row] = play(stdio, [call("number"), "x"], env=["OF_TEST"])
    assert re.search(r"\n\d+ passed None\n", text_of(row))
    for servers, name, message in (([stdio], "NOT_SET", "NOT_SET is not set"), (["a=http://c"], "OF_TEST", "there are none")):
        with pytest.raises(UserError, match=f"agent.env.*{message}"):
            servers_of(servers, None, [name])


def test_a_full_conversation_is_an_answer_as_it_stands(http, play):
    [row] = play(http, [call("long"), "x"], max_tokens=8000)
    assert row.metrics["agent/no_room"] == 1


def started(**options):
    async def start():
        agent = McpAgent(McpAgent.Options(**options))
        try:
            return await agent.offered()
        finally:
            await agent.run_finished(None)

    return asyncio.run(start())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": ["a=/nowhere/x"]}, "the MCP server a does not start: .*No such file"),
        ({"servers": ["a={python} -c 1/0"]}, "the MCP server a (does not start|ended).*ZeroDivisionError"),
        ({"servers": ["a=sleep 60"], "start_timeout_s": 1.0}, "the MCP server a did not start in 1 s"),
        ({"servers": ["a=http://127.0.0.1:9/mcp"]}, "the MCP server a does not start: "),
    ],
)
def test_a_server_that_is_not_there_stops_the_run(options, message):
    from types import SimpleNamespace

    agent = McpAgent(McpAgent.Options(**options))
    context = SimpleNamespace(config={}, tokenizer=None)
    with pytest.raises(UserError, match=f"mcp: {message}"):
        asyncio.run(agent.run_started(context))


UNRULY = Path(__file__).parent / "unruly_server.py"
ENDLESS = {
    "pages": "lists more than 1,000 tools",
    "empty pages": "did not answer tools/list in 2 s",
    "slow pages": "did not answer tools/list in 2 s",
    "lines": "ended in tools/list: it wrote 10,001 lines with .* bytes that nobody asked for",
    "notifications": "ended in tools/list: it wrote 10,001 lines|did not answer tools/list in 2 s",
    "one line": "ended in tools/list: it wrote a line of more than 16 MiB",
    "lines at once": "does not start: .* it wrote 10,001 lines|did not start in 2 s: it wrote 10,001 lines",
}


@pytest.mark.parametrize("how", ENDLESS)
def test_a_server_without_measure_is_given_up_in_time(how):
    began = time.monotonic()
    with pytest.raises(ServerLost, match=f"the MCP server a ({ENDLESS[how]})"):
        started(servers=[f"a={{python}} {UNRULY} '{how}'"], start_timeout_s=2.0)
    assert time.monotonic() - began < 9


@contextlib.contextmanager
def without_measure(how):
    """The address of a server whose list of tools does not end."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if message.get("method") != "tools/list":
                about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "unruly", "version": "1"}}
                result = {"protocolVersion": message.get("params", {}).get("protocolVersion"), **about}
                body = json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result}).encode()
                self.send_response(200 if "id" in message else 202)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            kind = "text/event-stream" if how == "events" else "application/json"
            event = b'data: {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}\n\n'
            self.send_response(200)
            self.send_header("content-type", kind)
            if how == "packed":
                self.send_header("content-encoding", "gzip")
            self.end_headers()
            part = {"events": event * 500, "packed": gzip.compress(bytes(1 << 20)), "body": b"x" * 65536}[how]
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(part)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"a=http://127.0.0.1:{server.server_port}/mcp"
        server.shutdown()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("body", "it answered with more than 16 MiB"),
        ("packed", "it answered in gzip, which nobody asked for"),
        ("events", "it answered with more than 64 MiB|did not answer tools/list in 5 s"),
    ],
)
def test_answers_of_an_address_have_the_limits_of_a_command(how, message):
    began = time.monotonic()
    with without_measure(how) as address, pytest.raises(ServerLost, match=f"the MCP server a .*({message})"):
        started(servers=[address], start_timeout_s=5.0)
    assert time.monotonic() - began < 12


def test_lines_of_a_log_among_messages_are_no_fault():
    assert list(started(servers=[f"a={{python}} {UNRULY} 'some lines'"])) == ["t0"]


def test_of_errors_without_end_the_last_words_are_kept():
    async def complains():
        connection = Connection(servers_of([f"a={{python}} {UNRULY} errors"], None, [])[0], 20.0)
        await connection.open()
        process = connection._command
        try:
            while len(process.tail) < TAIL:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            return len(process.tail), connection._words()
        finally:
            await connection.close()

    kept, words = asyncio.run(complains())
    assert kept == TAIL
    assert "ouch ouch" in words


def test_names_of_tools(http):
    assert list(started(servers=[http], tools=["add", "fail"])) == ["add", "fail"]
    with pytest.raises(UserError, match="no server has sub, mul; there are add"):
        started(servers=[http], tools=["sub", "add", "mul"])
    with pytest.raises(UserError, match="calc and more both have a tool add"):
        started(servers=[http, http.replace("calc", "more")])


def test_a_file_of_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_TEST", "1")
    file = tmp_path / "servers.json"
    entries = {
        "a": {"command": "x", "args": ["y", "-${OF_TEST}"], "env": {"K": "v${OF_TEST}"}},
        "b": {"type": "http", "url": "http://c/mcp", "headers": {"H": "Bearer ${OF_TEST}$"}},
    }
    file.write_text(json.dumps({"mcpServers": entries}))
    a, b = servers_of([], str(file), [])
    assert (a.command, a.env, b.url, b.headers) == (("x", "y", "-1"), {"K": "v1"}, "http://c/mcp", {"H": "Bearer 1$"})


@pytest.mark.parametrize(
    ("named", "content", "message"),
    [
        ([], None, "name servers: --agent.servers NAME=COMMAND"),
        (["x"], None, "'x': give NAME=COMMAND or NAME=URL"),
        (["a="], None, "'a=': give NAME=COMMAND"),
        (["a='"], None, "No closing quotation"),
        (["a=x", "a=y"], None, "the server name 'a'"),
        ([], "[", "JSONDecodeError"),
        ([], "{}", "KeyError: 'mcpServers'"),
        ([], '{"mcpServers": {"a": {"command": "x", "mood": 1}}}', "a has mood; it may have"),
        ([], '{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "a has "),
        ([], '{"mcpServers": {"a": {"type": "sse", "url": "y"}}}', "the transport 'sse' is not one of stdio, http"),
        ([], '{"mcpServers": {"a": {"args": []}}}', "a has no command"),
        ([], '{"mcpServers": {"a": {"command": "x", "args": "y z"}}}', "a: args is a str; give a list"),
        ([], '{"mcpServers": {"a": {"url": "x", "headers": {"H": "${NO_SUCH}"}}}}', r"\$\{NO_SUCH\} is not set"),
    ],
)
def test_servers_that_cannot_be_read(named, content, message, tmp_path):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=message):
        servers_of(named, str(tmp_path / "x.json") if content is not None else None, [])
