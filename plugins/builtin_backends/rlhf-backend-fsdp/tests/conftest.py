"""Ranks in processes of their own, which run the functions of ``ranks.py``."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_authoring import write_tiny_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlhf_host.distributed import reserved

torch.set_num_threads(1)

PROGRAM = Path(__file__).with_name("ranks.py")


class Group:
    """Ranks in processes of their own: ``group(name, ...)`` gives what the function of that name returned on each."""

    def __init__(self, size: int, directory: Path):
        self.place = reserved("127.0.0.1")
        port = self.place.getsockname()[1]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.logs = [directory / f"rank-{size}-{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            command = [sys.executable, str(PROGRAM), str(rank), str(size), str(port)]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("wb")}
            self.processes.append(subprocess.Popen(command, env=environment, **pipes))

    def __call__(self, name: str, *arguments: Any, **named: Any) -> list[Any]:
        for process in self.processes:
            pickle.dump((name, arguments, named), process.stdin)
            process.stdin.flush()
        answers = []
        for process, log in zip(self.processes, self.logs, strict=True):
            try:
                answers.append(pickle.load(process.stdout))
            except EOFError:
                pytest.fail(f"a rank ended:\n{log.read_text()[-3000:]}")
        failed = [f"rank {rank}: {answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.place.close()


@pytest.fixture(scope="session")
def group(tmp_path_factory):
    """``group(size)``: ranks that are started once."""
    groups: dict[int, Group] = {}
    with contextlib.ExitStack() as stack:

        def of(size: int) -> Group:
            if size not in groups:
                groups[size] = Group(size, tmp_path_factory.mktemp("ranks"))
                stack.callback(groups[size].close)
            return groups[size]

        yield of


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Another width than the ranks divide: pieces are of different sizes."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=36, heads=6, layers=2)


@pytest.fixture(scope="session")
def scalar(tmp_path_factory, model):
    """The same with a scalar head in its files too."""
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    loaded.score.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    path = tmp_path_factory.mktemp("model") / "scalar"
    loaded.save_pretrained(path)
    causal: Any = AutoModelForCausalLM.from_pretrained(model)
    weights = {**causal.state_dict(), "score.weight": loaded.score.weight.detach()}
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A model whose blocks have experts, of which a router chooses."""
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "experts")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=58, pad_token_id=0, **sizes, **heads)).save_pretrained(path)
    return path
