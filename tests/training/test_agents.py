"""Programs that talk to the policy over HTTP: what they said trains under the log-probabilities with which it was sampled."""

from __future__ import annotations

import datetime
import json

import pytest
import torch
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN
from safetensors.torch import load_file

from tests.chat_models import save_chat_model
from tests.data.conftest import byte_tokenizer

PROGRAM = '''
"""A conversation with all that happens to one: cut by length, ended by a stop text, tools, an edit, two answers to one question."""

import zlib

from openai import AsyncOpenAI

ADD = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]


async def talk(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages, **more):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, **more)
            return {"role": "assistant", "content": answer.choices[0].message.content}

        messages = [{"role": "user", "content": task["prompt"]}]
        messages.append(await ask(messages, max_tokens=3))
        messages.append({"role": "tool", "tool_call_id": "x", "content": "3 \\u00e4 <|im_end|>"})
        messages.append(await ask(messages, stop=list("abcdefghij")))
        messages.append({"role": "user", "content": "and now?"})
        first, second = await ask(messages), await ask(messages)
        edited = [{"role": "user", "content": "another question"}, *messages[1:]]
        last = await ask(edited)
        await client.completions.create(model="policy", prompt="plain text", max_tokens=4)
        words = str([first, second, last])
        return {"reward": zlib.crc32(words.encode()) % 7 / 6, "metrics": {"words": len(words)}}
'''


@pytest.fixture
def flags(tmp_path):
    model = save_chat_model(tmp_path / "model", hidden=128, layers=2, context=1024)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {n}", "label": "1"}) + "\n" for n in range(8))
    )
    return [
        *("train", "--algo", "rloo", "--agent", "openai_agent", "--agent.function", f"{tmp_path}/program.py:talk"),
        *("--actor.model", model, "--actor.lr", "1e-3", "--data", tmp_path / "data.jsonl", "--run-dir", tmp_path / "run"),
        *("--rollout.n", "4", "--rollout.max-new-tokens", "8", "--train.batch-size", "2", "--train.steps", "3"),
        *("--train.threads", "1", "--trajectories.every", "1", "--trajectories.tokens"),
    ]


def check(tmp_path, tolerance):
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    print("mismatch/max", [row["mismatch/max"] for row in rows])
    assert max(row["mismatch/max"] for row in rows) < tolerance
    assert min(row["grad_norm"] for row in rows) > 0
    ended = [(row["rollout/finished"] + row["rollout/truncated"], row["rollout/failed"]) for row in rows]
    assert ended == [(8, 0)] * 3
    said = [json.loads(line) for line in (tmp_path / "run/trajectories/train-step-000003.jsonl").read_text().splitlines()]
    first = [row for row in said if row["episode_id"] == said[0]["episode_id"]]
    kinds = [[segment["kind"][0] for segment in row["segments"]] for row in first]
    assert kinds == [list("paoaoa"), list("pa"), list("pa"), list("pa")], "one conversation, its branch, its edit, plain text"
    assert [row.get("final", True) for row in first] == [False, False, False, True]
    assert len({row["reward"] for row in first}) == 1
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("model", "run/model"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_what_a_program_said_trains_as_it_was_sampled(rlhf, flags, tmp_path):
    pytest.importorskip("aiohttp")
    rlhf.run(*flags)
    check(tmp_path, 1e-5)


@pytest.mark.timeout(900)
def test_on_ray_with_vllm_too(rlhf, flags, tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    ray = ("--runtime", "ray", "--ray.num-cpus", "4", "--ray.num-gpus", "0", "--ray.object-store-mb", "200")
    rlhf.run(*flags, *ray, "--engine", "vllm")
    check(tmp_path, 1e-4)


def test_a_template_that_writes_the_day_writes_the_same_one_in_a_resumed_run(rlhf, flags, tmp_path):
    byte_tokenizer("{{ strftime_now('%Y-%m-%d') }}" + QWEN).save_pretrained(tmp_path / "model")
    start = flags.index("--agent")
    plain = [*flags[:start], "--agent", "single_turn", "--reward", "math_verifier", *flags[start + 4 :]]
    rlhf.run(*plain, "--train.steps", "1")
    config = tmp_path / "run/config.yaml"
    day = datetime.date.today().isoformat()
    assert f"day: '{day}'" in config.read_text()
    config.write_text(config.read_text().replace(day, "2001-02-03"))
    rlhf.run("train", "--resume", tmp_path / "run", "--train.steps", "2")
    said = [(tmp_path / f"run/trajectories/train-step-00000{step}.jsonl").read_text() for step in (1, 2)]
    assert [json.loads(text.splitlines()[0])["prompt"][:10] for text in said] == [day, "2001-02-03"]
