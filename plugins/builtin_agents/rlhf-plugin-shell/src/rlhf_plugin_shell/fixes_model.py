"""A tiny model that repairs functions with mini-swe-agent, with rows that teach it to write commands, and tasks.

    python -m rlhf_plugin_shell.fixes_model DIRECTORY

A task is a repository with a function whose operator is wrong, such as ``mul.py`` with ``return a + b``, and a test that fails.
The directory gets ``tasks.jsonl``, the same tasks in Harbor's format in ``harbor``, ``conversations.jsonl`` for supervised
fine-tuning, ``mini_swe.yaml`` with mini-swe-agent's settings, and a random Llama with a tokenizer of these texts.
"""

from __future__ import annotations

import json
import operator
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FUNCTIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "mod": ("%", operator.mod),
}
"""Name of a function → its operator, and what it does."""
NUMBERS = ((6, 4), (9, 7), (5, 3), (8, 5), (7, 2))
CONVERSATIONS = 2000
SYSTEM = "Repair the function. Write one command."
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Command that ends an episode of mini-swe-agent."""
SETTINGS: dict[str, Any] = {
    "agent": {"system_template": SYSTEM, "instance_template": "{{task}}", "step_limit": 4, "cost_limit": 0.0},
    "environment": {"timeout": 10},
    "model": {
        "model_class": "openrouter_textbased",
        "observation_template": "{{output.returncode}}\n{{output.output}}",
        "format_error_template": "{{error}}",
    },
}
START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message.role }}}}\n{{{{ message.content }}}}{END}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)
TOKENS = 400
POSITIONS = 512


def tasks() -> Iterator[dict[str, Any]]:
    """Yields rows for the agent ``harness``: each function with each wrong operator and each pair of numbers."""
    for a, b in NUMBERS:
        for name, (right, does) in FUNCTIONS.items():
            for wrong, _ in FUNCTIONS.values():
                if wrong != right:
                    yield _task(name, wrong, does, a, b)


def conversations(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields conversations as mini-swe-agent has them. The operator that they put in is any: who learns from them writes commands,
    and rewards teach which.
    """
    dice = random.Random(seed)
    given = list(tasks())
    for _ in range(CONVERSATIONS):
        task = dice.choice(given)
        [(file, source), *_] = task["files"].items()
        wrong = source.split()[-2]
        put_in = dice.choice([each for each, _ in FUNCTIONS.values() if each != wrong])
        yield {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": task["prompt"]},
                {"role": "assistant", "content": command(f"cat {file}")},
                {"role": "user", "content": f"0\n{source}"},
                {"role": "assistant", "content": command(f"sed -i 's/{wrong}/{put_in}/' {file}")},
                {"role": "user", "content": "0\n"},
                {"role": "assistant", "content": command(DONE)},
            ]
        }


def command(text: str) -> str:
    """Returns an answer with a command, in mini-swe-agent's form."""
    return f"```mswea_bash_command\n{text}\n```"


def write_harbor(folder: Path) -> None:
    """Writes the tasks as directories in Harbor's format."""
    for number, task in enumerate(tasks()):
        (file, source), *_ = task["files"].items()
        right, _ = FUNCTIONS[file.removesuffix(".py")]
        texts = {
            "instruction.md": f"{task['prompt']}\n",
            "task.toml": 'version = "1.0"\n\n[agent]\ntimeout_sec = 60.0\n\n[verifier]\ntimeout_sec = 60.0\n',
            "environment/Dockerfile": f"FROM ubuntu:24.04\nWORKDIR /app\nCOPY {' '.join(task['files'])} ./\n",
            **{f"environment/{name}": content for name, content in task["files"].items()},
            "solution/solve.sh": f"#!/bin/bash\nsed -i 's/{source.split()[-2]}/{right}/' {file}\n",
            "tests/test.sh": f"#!/bin/bash\n{task['tests']}echo $((!$?)) > /logs/verifier/reward.txt\n",
        }
        for name, text in texts.items():
            path = folder / f"{file.removesuffix('.py')}-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def make_model(folder: Path, seed: int = 0) -> None:
    """Writes the model, its tokenizer, the rows and the settings."""
    import torch
    from ruamel.yaml import YAML
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    taught, special = list(conversations()), [PAD, START, END]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = (message["content"] for row in taught for message in row["messages"])
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=END, additional_special_tokens=[START])
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, rows in (("tasks", tasks()), ("conversations", taught)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    YAML().dump(SETTINGS, folder / "mini_swe.yaml")
    write_harbor(folder / "harbor")


def _task(name: str, wrong: str, does: Callable[[int, int], int], a: int, b: int) -> dict[str, Any]:
    more = [(a, b), (11, 4), (3, 9)]
    checks = "\n".join(f"assert {name}({x}, {y}) == {does(x, y)}" for x, y in more)
    files = {
        f"{name}.py": f"def {name}(a, b):\n    return a {wrong} b\n",
        f"test_{name}.py": f"from {name} import {name}\n\nassert {name}({a}, {b}) == {does(a, b)}\n",
    }
    tests = f"python3 - <<'END'\nimport sys\nsys.path.insert(0, '.')\nfrom {name} import {name}\n{checks}\nEND\n"
    return {"prompt": f"{name}({a}, {b}) is not {does(a, b)}: test_{name}.py fails.", "files": files, "tests": tests}


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
