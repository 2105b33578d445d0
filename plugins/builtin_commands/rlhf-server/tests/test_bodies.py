"""Bodies of requests: who may not come in is told so before any of it is read, and long ones keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
import time
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from rlhf_server import bodies
from rlhf_server.app import PolicyServer
from rlhf_server.json_reader import DEPTH, NESTED, VALUES, read_object
from rlhf_server.limits import Limits
from rlhf_server.rewards import RewardServer

from rlhf_host.distributed import reserved

USER = [{"role": "user", "content": "hi"}]
CHAT, JUDGE = "/v1/chat/completions", "/get_reward"
SIZE = 60 << 20
LONG = f"Content-Length: {SIZE}\r\n"


class Judge:
    """A reward model that nobody reaches."""

    context_length = 8

    tokenizer = None


async def first_line(reader):
    async with asyncio.timeout(5):
        return (await reader.readline()).decode().split(" ", 1)[1].strip()


async def asked(url, path, headers, body=b"", method="POST"):
    """The first line of the answer to a head and what there is of a body."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode() + body)
    try:
        return await first_line(reader)
    finally:
        writer.close()


def run(test):
    return asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize(
    ("path", "headers", "told"),
    [
        (CHAT, LONG, "401 Unauthorized"),
        (CHAT, LONG + "Authorization: Bearer wrong\r\n", "401 Unauthorized"),
        (CHAT, LONG + "Authorization: Basic KEY\r\n", "401 Unauthorized"),
        (CHAT, "Transfer-Encoding: chunked\r\n", "401 Unauthorized"),
        (CHAT, LONG + "Expect: 100-continue\r\n", "401 Unauthorized"),
        (CHAT, LONG + "Content-Encoding: gzip\r\n", "401 Unauthorized"),
        (CHAT, LONG + "Connection: Upgrade\r\nUpgrade: websocket\r\n", "401 Unauthorized"),
        ("/v1/completions", LONG, "401 Unauthorized"),
        ("/v1/responses", LONG, "401 Unauthorized"),
        ("/v1/tokenize", LONG, "401 Unauthorized"),
        ("/v1/models", LONG, "405 Method Not Allowed"),
        ("/nowhere", LONG, "404 Not Found"),
        ("/e/nobody" + CHAT, LONG, "410 Gone"),
        ("/e/nobody/reward", LONG, "410 Gone"),
        (CHAT, LONG + "Authorization: Bearer KEY\r\n", f"413 {HTTPStatus(413).phrase}"),
        (CHAT, "Content-Length: 99\r\nContent-Encoding: gzip\r\nAuthorization: Bearer KEY\r\n", "415 Unsupported Media Type"),
        ("/e/TOKEN/reward", "Content-Length: 100000\r\n", f"413 {HTTPStatus(413).phrase}"),
    ],
)
def test_the_policy_server_answers_before_the_body_comes(stage, path, headers, told):
    async def test():
        made = stage(lambda ids: "x")
        server = await PolicyServer.start(shared=made.policy)
        session = server.open(made.policy())
        names = {"KEY": server.api_key, "TOKEN": session.token}
        for name, value in names.items():
            path_, headers_ = path.replace(name, value), headers.replace(name, value)
            if (path_, headers_) != (path, headers):
                break
        answer = await asked(server.url, path_, headers_)
        await server.close()
        return answer

    assert run(test()) == told


@pytest.mark.parametrize(
    ("port", "episode", "told"), [(False, True, "404 Not Found"), (True, False, "410 Gone"), (True, True, None)]
)
def test_of_a_run_nobody_is_read_without_an_episode(stage, port, episode, told):
    """The episode in the body counts only at the port that was asked for, for programs that run already."""

    async def test():
        made, place = stage(lambda ids: "x"), reserved("127.0.0.1")
        server = await PolicyServer.start(port=place.getsockname()[1] if port else 0)
        session = server.open(made.policy()) if episode else None
        said = await asked(server.url, CHAT, LONG) if told else None
        if session is not None:
            body = {"messages": USER, "metadata": {"rlhf_episode": session.token}}
            async with httpx.AsyncClient() as client:
                answers = [
                    await client.post(f"{session.shared_url}/chat/completions", json=one)
                    for one in (body, {"messages": USER}, {"messages": USER, "metadata": {"rlhf_episode": "x"}})
                ]
            assert [answer.status_code for answer in answers] == [200, 404, 410]
        await server.close()
        place.close()
        return said

    assert run(test()) == told


@pytest.mark.parametrize("path", [JUDGE, "/v1/score"])
def test_the_reward_server_answers_before_the_body_comes(path):
    async def test():
        server = RewardServer(Judge(), "m", key="k" * 16)
        await server.start("127.0.0.1", 0)
        found = [await asked(server.url, path, f"{LONG}{key}") for key in ("", "Authorization: Bearer x\r\n")]
        await server.close()
        return found

    assert run(test()) == ["401 Unauthorized"] * 2


def test_a_client_that_asks_first_is_told_to_go_on(stage):
    async def test():
        server = await PolicyServer.start(shared=stage(lambda ids: "x").policy)
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": USER}).encode()
        head = f"Host: {host}\r\nAuthorization: Bearer {server.api_key}\r\nExpect: 100-continue\r\n"
        writer.write(f"POST {CHAT} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
        found = [await first_line(reader), (await reader.readline()).strip()]
        writer.write(body)
        found.append(await first_line(reader))
        writer.close()
        await server.close()
        return found

    assert run(test()) == ["100 Continue", b"", "200 OK"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"[" * 3_000_000, f"more than {NESTED:,} lists and objects, or {VALUES:,} values"),
        (b'{"messages": [' + b"[]," * 900_000 + b"1]}", "more than"),
        (b'{"prompt": [' + b"1," * (VALUES + 1) + b"1]}", "more than"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, f"nested too deeply: at most {DEPTH} levels"),
        (b'{"a": ' * 20_000 + b"1" + b"}" * 20_000, f"nested too deeply: at most {DEPTH} levels"),
        (json.dumps({"messages": USER, "a": "x" * 900_000})[:-1].encode(), "JSON: "),
        (json.dumps({"messages": "x" * 900_000}).encode(), "a list of messages"),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode(), "maximum context length is 2000"),
        (json.dumps({"messages": USER, "a": "\ud800" * 20_000}).encode(), "surrogates not allowed"),
        (b'{"messages": "\xff' + b"x" * 90_000 + b'"}', "JSON: 'utf-8' codec can't decode"),
        (json.dumps({"messages": [*USER, 3] * 40_000}).encode(), "80000 messages; at most 4096"),
    ],
)
def test_long_bodies_are_answered_as_short_ones_and_others_need_not_wait(stage, body, told):
    gaps = []

    async def ticking():
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - began)

    async def test():
        server = await PolicyServer.start()
        session = server.open(stage(lambda ids: "x").policy())
        ticks = asyncio.create_task(ticking())
        # In a thread: what is measured is the loop's wait alone.
        answer = await asyncio.to_thread(httpx.post, f"{session.base_url}/chat/completions", content=body, timeout=60)
        ticks.cancel()
        await server.close()
        return answer

    answer = run(test())
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert max(gaps) < 0.5


def test_a_long_conversation_is_answered(stage):
    texts = ["[{,\"'" * 30_000, "ä日😀" * 5_000]

    async def test():
        made = stage(lambda ids: "x", max_tokens=10**7)
        server = await PolicyServer.start()
        session = server.open(made.policy())
        messages = [{"role": "user", "content": text} for text in texts]
        async with httpx.AsyncClient(base_url=session.base_url, timeout=60) as client:
            answer = await client.post("/chat/completions", json={"messages": messages})
            tokens = await client.post("/tokenize", json={"messages": messages})
        assert answer.status_code == tokens.status_code == 200, (answer.text[:200], tokens.text[:200])
        assert session.policy.tree.calls[0].prompt_ids == tokens.json()["tokens"] == made.codec.render(messages)
        await server.close()

    run(test())


def test_a_body_of_pieces_is_bounded_and_one_that_breaks_off_is_refused(stage):
    async def test():
        server = await PolicyServer.start(limits=Limits(body_bytes=1000))
        session = server.open(stage(lambda ids: "x").policy())
        path = f"/e/{session.token}{CHAT}"
        chunked = "Transfer-Encoding: chunked\r\n"
        found = [
            await asked(server.url, path, chunked, b"200\r\n" + b" " * 512 + b"\r\n200\r\n" + b" " * 512 + b"\r\n0\r\n\r\n"),
            await asked(server.url, path, chunked, b"2\r\n{}\r\nxyz\r\n"),
        ]
        await server.close()
        return found

    assert run(test()) == [f"413 {HTTPStatus(413).phrase}", "400 Bad Request"]


def test_a_body_that_does_not_arrive_is_given_up(stage, monkeypatch):
    monkeypatch.setattr(bodies, "ARRIVAL_S", 0.1)

    async def test():
        server = await PolicyServer.start()
        session = server.open(stage(lambda ids: "x").policy())
        found = await asked(server.url, f"/e/{session.token}{CHAT}", "Content-Length: 99\r\n", b"{")
        await server.close()
        return found

    assert run(test()) == "408 Request Timeout"


def test_a_client_that_leaves_amid_a_long_body_leaves_no_process(stage):
    async def test():
        server = await PolicyServer.start()
        session = server.open(stage(lambda ids: "x").policy())
        host, _, port = server.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /e/{session.token}{CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 900000\r\n\r\n".encode())
        writer.write(b"[" * 200_000)
        while not _parsers():
            await asyncio.sleep(0.01)
        writer.close()
        while _parsers():
            await asyncio.sleep(0.01)
        await server.close()

    run(test())


def _parsers():
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            line = Path(f"/proc/{child}/cmdline")
            found += [child] if line.exists() and "json_reader" in line.read_text() else []
    return found


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "Expecting value"),
        (b"null", "no object"),
        (b"[]", "no object"),
        (b"{", "Expecting property name"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
        (b'{"a": ' * (DEPTH + 1) + b"1" + b"}" * (DEPTH + 1), "nested too deeply"),
    ],
)
def test_what_is_no_object_says_why(raw, told):
    with pytest.raises(ValueError, match=told):
        read_object(raw)


def test_what_is_in_strings_is_no_list():
    text = '[{,\\"' * (VALUES // 2)
    assert read_object(json.dumps({"a": text}).encode()) == {"a": text}
    assert read_object(b'{"a": "\\ud83d\\ude00", "b": ' + b"[" * (DEPTH - 1) + b"]" * (DEPTH - 1) + b"}")["a"] == "😀"


@pytest.mark.parametrize(
    "sent",
    [
        b"x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 100_000,
        b"GET /health HTTP/1.1\r\na: " + b"b" * 3_000_000,
        b"GET /" + b"a" * 3_000_000,
        b"POST /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_answered_in_a_line(sent, caplog):
    async def test():
        server = await PolicyServer.start()
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        found = await first_line(reader)
        writer.close()
        await server.close()
        return found

    assert run(test()).startswith("400 ")
    assert not caplog.records
