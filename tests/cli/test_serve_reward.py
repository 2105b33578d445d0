"""``rlhf serve-reward``: the real command, a trainer that asks it, and its end."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import torch
from rlhf_server import rewards
from rlhf_server.errors import ApiError
from rlhf_server.rewards import RewardServer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

import rlhf_host
from rlhf_host.records.episodes import Segment, Task, Trajectory

pytest.importorskip("aiohttp")
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    """A random one with the policy's vocabulary."""
    directory = tmp_path_factory.mktemp("reward") / "model"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = CHAT
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForSequenceClassification(config)
    model.score.weight.data.normal_()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(reward_model, tmp_path_factory):
    """The command as a process, and its address."""
    command = [sys.executable, "-m", "rlhf_host.cli.main", "serve-reward", str(reward_model), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path_factory.mktemp("served"),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


def post(url, body, data=None):
    request = urllib.request.Request(url, data or json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def expected(reward_model, text):
    """What transformers itself computes."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad():
        return model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits.item()


def test_rewards_are_those_of_the_model(served, reward_model):
    _, url = served
    end = AutoTokenizer.from_pretrained(reward_model).eos_token
    texts = [f"1+1=2{end}", "1+1=3", f"what?{end}no.{end}"]
    status, told = post(url, {"query": texts, "prompts": ["1+1="] * 3, "labels": [None] * 3})
    wanted = [expected(reward_model, text) for text in texts]
    assert status == 200
    assert told["rewards"] == pytest.approx(wanted, abs=1e-5)
    assert told["scores"] == pytest.approx([1 / (1 + math.exp(-value)) for value in wanted], abs=1e-5)
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    score = url.replace("/get_reward", "/v1/score")
    _, told = post(score, {"messages": [talk]})
    assert told["rewards"] == pytest.approx([expected(reward_model, f"u1+1={end}a2{end}")], abs=1e-5)
    assert post(score, {"texts": texts})[1]["rewards"] == pytest.approx(wanted, abs=1e-5)
    for few in (["2"], [end, "2", "1+1=2"]):  # texts of one token too
        wanted = [expected(reward_model, text) for text in few]
        assert post(score, {"texts": few})[1]["rewards"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "data", "status", "told"),
    [
        ("/get_reward", {"query": ["a" * 200, "", "1+1=2"]}, None, 200, [None, None, True]),
        ("/get_reward", {"query": []}, None, 200, []),
        ("/get_reward", {}, None, 400, "query: a list of texts"),
        ("/get_reward", {"query": [1]}, None, 400, "query: a list of texts"),
        ("/get_reward", None, b"{", 400, "body: JSON"),
        ("/v1/score", {}, None, 400, "either messages"),
        ("/v1/score", {"messages": "x"}, None, 400, "a list of conversations"),
        ("/v1/score", {"messages": [["x"]]}, None, 400, "messages[0]: a list of messages"),
        ("/v1/score", {"messages": [[{"role": 1}]]}, None, 400, "messages[0]: a list of messages"),
        ("/v1/score", {"messages": [[{"role": "tool", "content": ""}]]}, None, 400, "cannot write it: no tools"),
        ("/other", {}, None, 404, "Not Found"),
    ],
)
def test_odd_requests(served, path, body, data, status, told):
    found, answer = post(served[1].replace("/get_reward", path), body, data)
    assert found == status
    if status == 200:
        assert [value if value is None else True for value in answer["rewards"]] == told
    else:
        assert told in answer["error"]["message"]


def test_a_run_trains_on_it_as_on_the_model_itself(served, reward_model, tiny_model, tmp_path):
    pytest.importorskip("rlhf_plugin_http_reward")
    settings = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 6}
    settings |= {"model": str(tiny_model), "data": [{"prompt": "12+34="}, {"prompt": "5+6="}]}
    there = rlhf_host.train(algo="rloo", rewards=served[1], run_dir=str(tmp_path / "there"), **settings)
    model = {"name": "reward_model", "model": str(reward_model)}
    here = rlhf_host.train(algo="rloo", rewards={"model": model}, run_dir=str(tmp_path / "here"), **settings)
    assert [row["reward/mean"] for row in there.metrics] == pytest.approx(
        [row["reward/mean"] for row in here.metrics], abs=1e-5
    )


def test_it_ends_with_ctrl_c(served):
    process, _ = served
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 0, told
    assert told.rstrip().endswith("Ended.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model is given: rlhf serve-reward MODEL"),
        (["MODEL"], "has no scalar head"),
        (["MODEL", "--host", "0.0.0.0"], "give --key-file FILE with a key of your own"),
        (["MODEL", "--port", "70000"], "--port 70000: should be a whole number from 0 to 65535"),
    ],
)
def test_what_cannot_be_served(rlhf_here, tiny_model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    result = rlhf_here("serve-reward", *(str(tiny_model) if word == "MODEL" else word for word in flags))
    assert result.exit_code == 2
    assert message in result.output


class Slow:
    """A role whose passes take a while, and fail where a text says so."""

    context_length = 64

    def __init__(self):
        self.passes, self.go_on = [], asyncio.Event()
        self.go_on.set()

    class Letters:
        def __call__(self, texts, add_special_tokens):
            assert max(map(len, texts)) < 1000, "what cannot fit is not read"
            return {"input_ids": [[*map(ord, text)] for text in texts]}

        def get_vocab(self):
            return {chr(number): number for number in range(128)}

    tokenizer = Letters()

    async def scores(self, trajectories):
        self.passes.append([len(row.segments[1].token_ids) for row in trajectories])
        await asyncio.sleep(0.05)
        await self.go_on.wait()
        if any(ord("!") in row.segments[1].token_ids for row in trajectories):
            raise ValueError("the device is lost")
        return [float(len(row.segments[1].token_ids)) for row in trajectories]


def test_requests_share_passes_and_keys_are_checked():
    async def main():
        import aiohttp

        role = Slow()
        server = RewardServer(role, "m", key="k" * 16)
        await server.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession() as client:

                async def ask(text, key="k" * 16):
                    headers = {"Authorization": f"Bearer {key}"}
                    async with client.post(f"{server.url}/get_reward", json={"query": [text]}, headers=headers) as answer:
                        return answer.status, (await answer.json()).get("rewards")

                assert await ask("ab", key="wrong") == (401, None)
                role.go_on.clear()
                first = asyncio.create_task(ask("ab"))
                while not role.passes:
                    await asyncio.sleep(0.01)
                later = [asyncio.create_task(ask("a" * length)) for length in (9, 3, 5)]
                while len(server._waiting) < 3:  # the others come while the first pass runs
                    await asyncio.sleep(0.01)
                role.go_on.set()
                assert await asyncio.gather(first, *later) == [(200, [1.0]), (200, [8.0]), (200, [2.0]), (200, [4.0])]
                assert role.passes == [[1], [2, 4, 8]]
                assert await ask("a!") == (500, None)
                assert await ask("ab") == (200, [1.0]), "one failure is that request's alone"
        finally:
            await server.close()

    asyncio.run(main())


def test_requests_at_once_are_bounded_together_but_one_alone_is_answered(monkeypatch):
    monkeypatch.setattr(rewards, "WAITING", 100)

    async def main():
        server = RewardServer(Slow(), "m")
        asked = [server.values(["ab"] * 30) for _ in range(10)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, ApiError) for answer in found] == [False] * 4 + [True] * 6
        assert await server.values(["ab"] * 1000) == [1.0] * 1000, "what is answered waits no more"
        await server.close()

    asyncio.run(main())


def test_a_request_of_many_texts_is_worked_off_in_parts(monkeypatch):
    monkeypatch.setattr(rewards, "PASS", 8192)
    monkeypatch.setattr(rewards, "PART", 100_000)
    role = Slow()
    texts = ["ab", "a" * 63, ""] * 8_000 + ["abc" * 30_000] * 20

    async def main():
        server = RewardServer(role, "m")
        assert await server.values(texts) == [1.0, 62.0, None] * 8_000 + [None] * 20
        assert sum(map(len, role.passes)) == 16_000
        assert max(sum(lengths) for lengths in role.passes) <= rewards.PART
        await server.close()

    asyncio.run(main())


def test_a_key_of_odd_bytes_is_a_wrong_key():
    async def main():
        server = RewardServer(Slow(), "m", key="k" * 16)
        await server.start("127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n")
            writer.write(b"Content-Length: 2\r\n\r\n{}")
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()
        finally:
            await server.close()

    asyncio.run(main())


def test_a_row_is_one_text():
    [row] = RewardServer(Slow(), "m")._rows(["abc"])
    assert row == Trajectory("text", "text", Task(""), [Segment("prompt", [97]), Segment("action", [98, 99])])
