"""Servers that answer anything: what is wrong is named, and nothing else than the project's errors comes out."""

import copy
import json
import os
import random
import time
from types import SimpleNamespace

import pytest
from rlhf_engine_http import Http, weights
from rlhf_engine_http.answers import Aborted, Expected, Wrong, checked
from rlhf_engine_http.dialects import DIALECTS
from rlhf_engine_http.meeting import read
from safetensors import SafetensorError

from rlhf_host import RunError, Sampling, UserError
from rlhf_host.engines import Request

from .conftest import PROMPTS
from .sglang import Sglang

ODD = (
    None,
    -1,
    2,
    2**70,
    -(10**400),
    1e308,
    1.5,
    "",
    "x",
    "rlhf-",
    [],
    [None],
    [[1]],
    {},
    True,
    False,
    float("nan"),
    float("-inf"),
)


def places(value, path=()):
    """Every place in a JSON value, the whole one too."""
    yield path
    if isinstance(value, dict | list):
        for key, own in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(own, (*path, key))


def changed(value, draw):
    """A JSON value in which something at a random place is another, or is gone."""
    way = draw.choice(list(places(value)))
    odd = draw.choice(ODD)
    if not way:
        return odd
    inside = value = copy.deepcopy(value)
    for key in way[:-1]:
        inside = inside[key]
    if draw.random() < 0.3:
        del inside[way[-1]]
    else:
        inside[way[-1]] = odd
    return value


def replies():
    """A reply of each kind of server to the request below."""
    parts = [[-1.5, 5, None], [-0.5, 6, None]]
    about = {"finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 3, "weight_version": "rlhf-1-0"}
    sglang = {"output_ids": [5, 6], "meta_info": about | {"output_token_logprobs": parts}}
    content = [{"token_id": token, "logprob": value} for value, token, _ in parts]
    choice = {"token_ids": [5, 6], "logprobs": {"content": content}, "finish_reason": "length"}
    vllm = {"choices": [choice | {"weight_versions": [{"version": "rlhf-1-0"}]}], "usage": {"prompt_tokens": 3}}
    return {"sglang": sglang, "vllm": vllm}


@pytest.mark.parametrize("name", DIALECTS)
def test_an_odd_reply_is_a_completion_or_wrong(name):
    draw, good, server = random.Random(name), replies()[name], SimpleNamespace(dialect=DIALECTS[name])
    request, expected = Request.of([1, 2, 3], Sampling(2), (0, 0)), Expected(10, frozenset([0]), 2)
    taken = 0
    for number in range(2000):
        odd = changed(good, draw)
        reply = json.loads(json.dumps(changed(odd, draw) if number % 2 else odd))
        try:
            answer = read(server, reply)
            tokens, logprobs, _ = checked(answer, request, expected)
        except (Wrong, Aborted) as error:
            message = str(error)
        else:
            taken, message = taken + 1, ""
            assert all(0 <= token < 10 for token in tokens)
            assert all(-9998 < value <= 0 for value in logprobs)
            assert all(isinstance(label, str) for label in answer.labels)
        assert len(message) < 400
    assert 0 < taken < 1900


def test_an_odd_reply_ends_a_run_by_name_or_is_asked_again(rig, server):
    draw, engine, messages = random.Random(3), rig(server), []
    good = engine.sample(PROMPTS[:1])[0]
    for _ in range(12):
        server.faults.append(lambda answer: json.dumps(changed(answer, draw)))
        try:
            assert engine.sample(PROMPTS[:1])[0].token_ids == good.token_ids
        except (RunError, UserError) as error:
            messages.append(str(error))
        server.faults.clear()
    assert messages
    assert all(server.url in message for message in messages)


class Odd(Sglang):
    """Says odd things of itself, and of what it loaded."""

    change = staticmethod(lambda path, value: value)

    async def _model_info(self, request):
        return self._odd(request, await super()._model_info(request))

    async def _server_info(self, request):
        return self._odd(request, await super()._server_info(request))

    async def _update(self, request):
        return self._odd(request, await super()._update(request))

    def _odd(self, request, response):
        response.text = json.dumps(self.change(request.path, json.loads(response.text)))
        return response


@pytest.mark.parametrize("path", ["/get_model_info", "/get_server_info", "/update_weights_from_disk"])
def test_odd_facts_are_taken_or_refused_by_name(tiny, rig, path):
    draw, messages = random.Random(path), []
    with Odd(tiny) as server:
        server.change = lambda at, value: changed(value, draw) if at == path else value
        for _ in range(4):
            try:
                rig(server, load_s=5.0, retries=0).close()
            except (RunError, UserError) as error:
                messages.append(str(error))
        assert all(server.url in message for message in messages)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_ends_a_sync_by_name_and_keeps_a_newcomer_out_until_it_has_room(
    tiny, rig, monkeypatch, tmp_path, caplog, error
):
    def full(*_, **__):
        raise error

    with Sglang(tiny) as one, Sglang(tiny) as other:
        listed = tmp_path / "servers.txt"
        listed.write_text(one.url)
        engine = rig(servers=listed, transfer="auto")
        engine.train()
        with monkeypatch.context() as patched:
            patched.setattr(weights, "save_file", full)
            with pytest.raises(RunError, match=r"cannot write version 1 in .*No space left on device"):
                engine.sync(1)
        engine.sync(1)
        listed.write_text(f"{one.url}\n{other.url}")
        end = time.monotonic() + 30
        while other.url not in {server.url for server in engine.engine._fleet.servers}:
            assert time.monotonic() < end, caplog.text
            time.sleep(0.02)


def test_a_file_that_cannot_be_read_again_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="it is no file, and is read again and again"):
        Http(Http.Options(servers=pipe))
    with pytest.raises(UserError, match="it is no file, and is read again and again"):
        Http(Http.Options(servers="/dev/zero"))


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:1\nhttp://127.0.0.1:1",
        "http://[::1]\nhttp://localhost:80/v1",
        "http://localhost:1/\nHTTP://LocalHost:1",
    ],
)
def test_one_server_under_two_addresses_is_named(tmp_path, text):
    (tmp_path / "servers.txt").write_text(text)
    with pytest.raises(UserError, match=r"is given twice in .*servers.txt"):
        Http(Http.Options(servers=tmp_path / "servers.txt"))


@pytest.mark.parametrize("host", [f"{'a' * 70}.com", "a..b", "."])
def test_a_name_that_no_host_can_have_is_no_address(host):
    with pytest.raises(UserError, match="is no address of a server"):
        Http(Http.Options(urls=[f"http://{host}:8000"]))


def test_a_mark_of_the_byte_order_is_no_part_of_an_address(tmp_path):
    (tmp_path / "servers.txt").write_bytes(b"\xef\xbb\xbfhttp://127.0.0.1:1\r\n")
    assert Http(Http.Options(servers=tmp_path / "servers.txt")).listed.urls == ["http://127.0.0.1:1"]
