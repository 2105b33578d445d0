"""``rlhf doctor --chat``: what a chat template can express."""

from __future__ import annotations

import json
import shutil

import pytest
from rlhf_authoring.models import TOOLS_TEMPLATE as QWEN

from tests.data.conftest import CHATML, byte_tokenizer

DATED = CHATML + "{# {{ strftime_now('%d %b %Y') }} #}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
FORGETS = QWEN.replace(
    "{{ message.content }}{%- for call",
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{%- for call",
)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (QWEN, {"tools": "ok", "parallel calls": "ok", "calls are written as": "ok", "earlier reasoning": "ok"}),
        (CHATML, {"several turns": "ok", "tools": "absent", "calls are written as": "absent"}),
        (DATED, {"date": "note"}),
        (NO_SYSTEM, {"system messages": "absent"}),
        (FORGETS, {"earlier answers": "ok", "earlier reasoning": "note"}),
        (None, {"template": "note"}),
    ],
)
def test_what_a_template_can_express(rlhf_here, tiny_model, tmp_path, template, found):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    byte_tokenizer(template).save_pretrained(model)
    result = rlhf_here("doctor", "--chat", model, "--json")
    assert result.exit_code == 0, result.output
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert {name: findings[name]["status"] for name in found} == found
    if template == CHATML:
        assert findings["tools"]["detail"] == "the chat template leaves out tools"
        assert findings["tools"]["advice"].startswith("put the tools into the system prompt")


def test_a_run_stands_for_its_model(rlhf_here, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "runs/first/model")
    (tmp_path / "runs/first/config.yaml").write_text("{}\n")
    for name in ("first", "runs/first", "runs/first/model"):
        result = rlhf_here("doctor", "--chat", name)
        assert result.exit_code == 0, result.output
        assert "Chat template" in result.stdout


def test_a_model_that_is_not_there(rlhf_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = rlhf_here("doctor", "--chat", "./nowhere")
    assert result.exit_code == 2
    assert "no model at ./nowhere" in result.output
