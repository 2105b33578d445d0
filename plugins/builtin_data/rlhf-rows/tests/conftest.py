"""Tokenizers made on the spot, a tiny model, files and the command line in this process."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from rlhf_authoring import models
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from rlhf_host.commands import main

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None, bos: bool = False, eos_at_end: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, and where asked a post-processor that adds ``<s>`` and ``<|im_end|>``."""
    tokenizer = models.byte_tokenizer(chat_template, special=("<|user|>", "<|assistant|>"))
    if bos or eos_at_end:
        single = ("<s> " if bos else "") + "$A" + (" <|im_end|>" if eos_at_end else "")
        added = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("<|im_end|>", 2)])
        tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


@pytest.fixture
def make_tokenizer():
    return byte_tokenizer


@pytest.fixture
def plain():
    return byte_tokenizer()


@pytest.fixture
def chatml():
    return byte_tokenizer(CHATML)


@pytest.fixture
def write(tmp_path):
    """``write("a.jsonl", text or bytes)`` gives the path of a new file."""

    def make(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return models.write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def rlhf_here(monkeypatch):
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])
