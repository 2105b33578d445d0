"""The page's commands of lm_eval and inspect, against ``rlhf serve``. ``make test-evaluations`` sets them up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chat_models import save_chat_model

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ROOT / "build/evaluations/bin"
PAGE = (ROOT / "docs/runs.md").read_text(encoding="utf-8").partition("## Evaluate elsewhere")[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    line
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.replace("\\\n", " ").splitlines()
    if re.search(r"(^| )(lm_eval run|inspect eval) ", line)
]
QUESTIONS = (2, 3, 4)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "First number."},
                "b": {"type": "integer", "description": "Second number."},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
pytestmark = [
    pytest.mark.skipif(not (PROGRAMS / "lm_eval").exists(), reason="needs lm_eval and inspect: make test-evaluations"),
    pytest.mark.timeout(1800),
]


def conversation(a):
    """A question, a call of the tool, its result, and the answer."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": a + 1}}}
    return [
        {"role": "user", "content": f"What is {a}+{a + 1}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(2 * a + 1)},
        {"role": "assistant", "content": f"It is {2 * a + 1}."},
    ]


def write_model(folder):
    """A model that has learnt these conversations by heart, because random ones call no tools."""
    save_chat_model(folder, hidden=64, layers=2, context=2048)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    rows = [tokenizer.apply_chat_template(conversation(a), tools=[TOOL], return_dict=False) for a in QUESTIONS]
    begin, end = tokenizer.encode("<|im_start|>assistant", add_special_tokens=False), tokenizer.eos_token_id
    ids = torch.full((len(rows), max(map(len, rows))), end)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        for place in range(len(row)):
            if row[place - len(begin) : place] == begin:
                said = slice(place, row.index(end, place) + 1)
                labels[number, said] = ids[number, said]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(800):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.005:
            break
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """The folder of the figures, after all commands of the page."""
    here = tmp_path_factory.mktemp("evaluations")
    write_model(here / "sums-merged")
    lines = [
        {
            "question": f"What is {a}+{a + 1}?",
            "answer": str(2 * a + 1),
            "choices": [f"{2 * a + n}" for n in range(3)],
            "gold": 1,
        }
        for a in QUESTIONS
    ]
    (here / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _, text in BLOCKS:
        if name := re.match(r"# (\S+\.(yaml|py))\n", text):
            (here / name[1]).parent.mkdir(exist_ok=True)
            (here / name[1]).write_text(text)
    assert len(COMMANDS) == 6
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    # Nothing of the environment in which this runs: only what the page tells.
    environment = {name: value for name, value in environment.items() if not name.startswith(("OPENAI_", "PYTHON"))}
    server = subprocess.Popen(
        [sys.executable, "-m", "rlhf_host.cli.main", "serve", "sums-merged", "--port", "0"],
        cwd=here,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        environment |= dict(server.stdout.readline().strip().partition("=")[::2] for _ in range(2))
        for command in COMMANDS:
            done = subprocess.run(
                command, shell=True, cwd=here, env=environment, capture_output=True, text=True, timeout=900, check=False
            )
            print(
                f"$ {command}",
                *(line for line in done.stdout.splitlines() if re.search(r"^\||accuracy|tokens", line)),
                sep="\n",
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        yield here / "figures"
    finally:
        server.kill()
        server.communicate()


def samples(folder, task):
    [file] = folder.glob(f"*/samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["doc_id"]: row["resps"] for row in rows}


def results(folder):
    [file] = folder.glob("*/results_*.json")
    of_tasks = json.loads(file.read_text(encoding="utf-8"))["results"]
    return {
        (task, name): value
        for task, metrics in of_tasks.items()
        for name, value in metrics.items()
        if name.endswith(",none") and isinstance(value, float | int)
    }


def test_lm_eval_computes_the_same_through_the_server(figures):
    ours, theirs = results(figures / "server"), results(figures / "hf")
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert {("sums_choice", "acc,none"), ("sums_choice", "acc_norm,none"), ("sums_generate", "exact_match,none")} <= set(ours)
    likelihoods = []
    for folder in ("server", "hf"):
        rows = samples(figures / folder, "sums_choice")
        flat = [pair for doc in sorted(rows) for [pair] in rows[doc]]
        likelihoods.append(([float(value) for value, _ in flat], [greedy for _, greedy in flat]))
    (own, own_greedy), (other, other_greedy) = likelihoods
    assert len(own) == 3 * len(QUESTIONS)
    assert own == pytest.approx(other, abs=1e-4)
    assert own_greedy == other_greedy
    assert len(set(own)) == len(own)
    print("largest difference of log-likelihoods:", max(abs(a - b) for a, b in zip(own, other, strict=True)))


@pytest.mark.parametrize(("server", "hf"), [("server", "hf"), ("chat", "hf-chat")])
def test_lm_eval_gets_the_same_greedy_answers(figures, server, hf):
    ours, theirs = samples(figures / server, "sums_generate"), samples(figures / hf, "sums_generate")
    print(ours)
    assert ours == theirs
    assert len(ours) == len(QUESTIONS)


def log_of(folder):
    [file] = folder.glob("*.json")
    log = json.loads(file.read_text(encoding="utf-8"))
    assert log["status"] == "success"
    assert len(log["samples"]) == 2 * len(QUESTIONS), "two epochs"
    for sample in log["samples"]:
        usage = next(iter(sample["model_usage"].values()))
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    return log


def test_inspect_has_its_tool_called(figures):
    log = log_of(figures / "inspect")
    [metrics] = [score["metrics"] for score in log["results"]["scores"]]
    assert metrics["accuracy"]["value"] == 1.0
    for sample in log["samples"]:
        assert [message["role"] for message in sample["messages"]] == ["user", "assistant", "tool", "assistant"]
        _, asked, result, said = sample["messages"]
        [call] = asked["tool_calls"]
        assert (call["function"], str(sum(call["arguments"].values()))) == ("add", sample["target"])
        assert result["content"] == sample["target"]
        content = sample["output"]["choices"][0]["logprobs"]["content"]
        assert [len(one["top_logprobs"]) for one in content] == [3] * len(content)
        assert [one["token"] for one in content] == [one["top_logprobs"][0]["token"] for one in content], "greedy"
        assert len(content) >= len(str(said["content"]))


def test_inspect_reads_responses(figures):
    """Its tools are not strict there, which is another prompt than the model has learnt."""
    said = {}
    for sample in log_of(figures / "inspect-responses")["samples"]:
        said.setdefault(sample["id"], []).append(sample["output"]["completion"])
    assert len(said) == len(QUESTIONS)
    assert all(first == second for first, second in said.values()), "greedy"
