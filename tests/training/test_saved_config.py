"""Fields that plugins add to the ``config.json`` of saved roles: ``saved_config``."""

from __future__ import annotations

import json

import pytest

import rlhf_host
from rlhf_host import RunError, hookimpl

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26))]


def right(completions, label, **_):
    return [float(text.strip() == want) for text, want in zip(completions, label, strict=True)]


class Signed:
    """Counts the roles that it is asked about."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    @hookimpl
    def saved_config(self, role):
        self.asked.append(role)
        return self.answer


def train(tmp_path, *plugins, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 2, "batch_size": 2, "steps": 1}
    return rlhf_host.train(
        algo="rloo",
        reward=right,
        data=DATA,
        extensions={f"p{n}": plugin for n, plugin in enumerate(plugins)},
        run_dir=str(tmp_path / "run"),
        **{**fixed, **more},
    )


def test_hook_saved_config_adds_fields_that_come_with_the_model(tmp_path):
    first, second, silent = Signed({"mean": 0.5, "hidden_act": "silu"}), Signed({"mean": 1.5, "by": ["b"]}), Signed(None)
    train(tmp_path, first, second, silent, **{"eval.at_start": False})
    for place in ("checkpoints/step-000001/model", "model"):
        config = json.loads((tmp_path / "run" / place / "config.json").read_text())
        assert (config["mean"], config["by"], config["hidden_act"]) == (1.5, ["b"], "silu"), "the last plugin counts"
        assert config["model_type"] == "llama"
    assert first.asked == second.asked == silent.asked == ["actor"]
    rlhf_host.train(
        resume=str(tmp_path / "run"), extensions={"p0": first, "p1": second, "p2": silent}, reward=right, data=DATA, steps=2
    )
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["mean"] == 1.5


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_what_json_cannot_hold_ends_the_run_with_the_plugins_name(tmp_path, value):
    with pytest.raises(RunError, match=r"extension:\S*.* gave values from saved_config that JSON cannot hold"):
        train(tmp_path, Signed({"mean": value}))
