"""Training on an environment of the real NeMo Gym: tools, several turns, its own verifier. ``make test-nemo-gym`` sets it up."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PYTHON = Path(__file__).parents[2] / "build/nemo-gym/bin/python"
ENVIRONMENT = "resources_servers/example_multi_step"
STEPS = 10
SHORT, WHOLE = 300, 60
"""Steps of the warm-up with the ends of conversations, which are cheap, and with all of them."""
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="needs NeMo Gym: make test-nemo-gym"),
    pytest.mark.timeout(1500),
]
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
SENT = ("name", "description", "parameters")
"""What Gym's model server sends of a tool."""
RIGHT = [711, 407]
"""What every row of the environment's example expects: the values of Blazing and Warm, in this order."""


def rows():
    [file] = PYTHON.parents[1].glob(f"lib/python*/site-packages/{ENVIRONMENT}/data/example.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokenizer_of(texts):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = QWEN
    return tokenizer


def turns(values):
    """A conversation with the environment's tools."""
    told = []
    for synonym, value in (("Blazing", 711), ("Warm", 407)):
        told += [("get_synonym_value", {"synonym": synonym}, {"synonym_value": value})]
    told += [("extract_synonym_values", {"synonym_values": values}, {"success": True})]
    for name, arguments, result in told:
        yield {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
        yield {"role": "tool", "content": json.dumps(result, separators=(",", ":"))}
    yield {"role": "assistant", "content": "Done."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """It has learnt to use the tools, and gives the values in a wrong order as often as in the right one."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    params = [row["responses_create_params"] for row in rows()]
    tokenizer = tokenizer_of([json.dumps([one["tools"], one["input"]]) for one in params])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    learner, draw = LlamaForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=SHORT + WHOLE)
    start, end = tokenizer.encode("<|im_start|>assistant"), tokenizer.eos_token_id
    for step in range(SHORT + WHOLE):
        one = draw.choice(params)
        tools = [{"function": {k: tool[k] for k in SENT}, "type": "function"} for tool in one["tools"]]
        values = RIGHT if draw.random() < 0.5 else RIGHT[::-1]
        messages = [*one["input"], *turns(values)]
        ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        labels, place = [-100] * len(ids), 0
        while place < len(ids):
            if ids[place : place + len(start)] == start:
                place += len(start)
                until = ids.index(end, place) + 1
                labels[place:until] = ids[place:until]
                place = until
            else:
                place += 1
        first = next(n for n, label in enumerate(labels) if label >= 0)
        begin = 0 if step >= SHORT else first - 300
        places = torch.arange(begin, len(ids))[None]
        loss = learner(torch.tensor([ids[begin:]]), position_ids=places, labels=torch.tensor([labels[begin:]])).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 60 == 59:
            print(step + 1, f"{loss.item():.4f}", flush=True)
    print(f"\nwarmed up: loss {loss.item():.4f} over the assistant's tokens, conversations of {len(ids)} tokens")
    folder = tmp_path_factory.mktemp("model")
    learner.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_an_environment_of_nemo_gym_trains(rlhf, model, tmp_path):
    rlhf.run(
        *("train", "--algo", "rloo", "--actor.model", model, "--run-dir", tmp_path / "run", "--seed", "1"),
        *("--agent", "nemo_gym", "--agent.configs", f"{ENVIRONMENT}/configs/example_multi_step.yaml"),
        *("--agent.python", PYTHON, "--agent.start-timeout-s", "300", "--agent.run-timeout-s", "200"),
        *("--data", "nemo_gym", "--data.nemo_gym.file", f"{ENVIRONMENT}/data/example.jsonl", "--data.nemo_gym.python", PYTHON),
        *("--rollout.n", "6", "--train.batch-size", "2", "--train.steps", str(STEPS), "--rollout.max-new-tokens", "120"),
        *("--rollout.max-unjudged", "0.9", "--actor.lr", "1.5e-4", "--train.threads", "2"),
        *("--trajectories.every", "1", "--trajectories.tokens"),
    )
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    names = ("reward/mean", "rollout/finished", "rollout/failed", "mismatch/max", "grad_norm", "nemo_gym/accuracy")
    print(f"\n{'step':>4}  " + "  ".join(f"{name:>17}" for name in names))
    for row in steps:
        print(f"{row['step']:>4}  " + "  ".join(f"{row.get(name, float('nan')):>17.3g}" for name in names))
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert max(row["mismatch/max"] for row in steps) < 1e-4
    said = [
        json.loads(line)
        for step in range(1, STEPS + 1)
        for line in (tmp_path / f"run/trajectories/train-step-{step:06d}.jsonl").read_text().splitlines()
    ]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    played = [row for row in said if row["reward"] is not None]
    first = max(played, key=lambda row: row["reward"])
    for segment in first["segments"]:
        text = tokenizer.decode(segment["token_ids"])
        text = text if len(text) < 400 else f"{text[:150]} ... {text[-150:]}"
        print(f"--- {segment['kind']}, {len(segment['token_ids'])} tokens\n{text}")
    rewards = [row["reward"] for row in played]
    print(
        f"--- reward {first['reward']}; all rewards: {rewards.count(1.0)} x 1, {rewards.count(0.0)} x 0 of {len(said)} episodes"
    )
    assert {0.0, 1.0} == set(rewards)
    assert "".join(segment["kind"][0] for segment in first["segments"]) == "paoaoaoa", "contiguous: one row of four turns"
    assert len({row["episode_id"] for row in said}) == len(said)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/model"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items()), "weights moved"
    log = (tmp_path / "run/nemo-gym.log").read_text()
    assert "3 / 3 servers ready" in log
