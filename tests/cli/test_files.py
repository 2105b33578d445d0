"""``--reward FILE.py:NAME`` and ``--agent FILE.py:NAME``: what they stand for, and what is said of files that will not do."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.chat_models import save_chat_model
from tests.conftest import ROOT

REWARDS = """
from beside import half

def right(text, label):
    return half(float(text.strip() == str(label)))

def long(completions, **columns):
    import beside_later
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def train(rlhf_here, small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("def half(value): return value / 2\n")
    (tmp_path / "beside_later.py").write_text("")
    start = [flag for flag in small_run]
    place = start.index("--reward")
    plain = start[:place] + start[place + 2 :]
    return lambda *flags: rlhf_here(*plain, "--train.steps", "1", "--run-dir", "run", *flags)


def test_functions_of_a_file_judge_together_and_are_found_again(train, rlhf_here, tmp_path, caplog):
    done = train("--reward", "rewards.py:right", "--reward", "len=rewards.py:long", "--reward.len.weight", "0.1")
    assert done.exit_code == 0, done.output
    [row] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/len"])
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["reward"]
    assert (saved["len"]["name"], saved["len"]["path"]) == ("file", str(tmp_path / "rewards.py"))
    (tmp_path / "rewards.py").write_text(REWARDS + "\n# another line\n")
    again = rlhf_here("train", "--resume", "run", "--train.steps", "2")
    assert again.exit_code == 0, again.output
    assert "rewards.py has changed since the run began" in caplog.text


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("rewerds.py", "there is no Python file .*rewerds.py; did you mean 'rewards.py'"),
        ("rewards.py", r"defines right, long: say which one judges, as in rewards\.py:right"),
        ("rewards.py:rigth", "has no 'rigth'; did you mean 'right'"),
        ("broken.py", r"broken.py failed: ZeroDivisionError: .*if __name__ == '__main__'"),
        ("script.py", "script.py failed: SystemExit"),
        ("odd.py:three", r"takes \(a, b, c\).*of TRL.*of verl.*of OpenRLHF"),
        ("odd.py:number", "number is an int, not a function"),
        ("empty.py", "defines no function: say which one judges"),
    ],
)
def test_a_file_that_will_not_do_is_refused_before_anything_is_written(place, message, train, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script FILE')\n")
    (tmp_path / "odd.py").write_text("number = 3\ndef three(a, b, c): return 1.0\n")
    (tmp_path / "empty.py").write_text("")
    done = train("--reward", place)
    assert done.exit_code == 2, done.output

    assert re.search(message, done.output), done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


GSM8K = """
import re

def correct(solution_str, ground_truth):
    said = re.findall(r"-?[0-9]+", solution_str)
    return {"score": float(bool(said) and said[-1] == ground_truth.split("####")[-1].strip()), "acc": 0.0, "numbers": len(said)}

def short(completions, **columns):
    return [-len(completion[0]["content"]) / 1000 for completion in completions]
"""


def test_gsm8k_with_two_rewards_of_a_file(rlhf_here, tmp_path, monkeypatch):
    """One as for verl, one as for TRL, ten steps."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(GSM8K)
    rows = [json.loads(line) for line in (ROOT / "examples/data/gsm8k_sample.jsonl").read_text().splitlines()]
    chat = [{"prompt": [{"role": "user", "content": row["question"]}], "label": row["answer"]} for row in rows]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    model = save_chat_model(tmp_path / "model", hidden=64)
    done = rlhf_here(
        *("train", "--algo", "grpo", "--reward", "judges.py:correct", "--reward", "judges.py:short", "--actor.model", model),
        *("--data", "gsm8k.jsonl", "--run-dir", "run", "--rollout.n", "4", "--train.batch-size", "2", "--train.steps", "10"),
        *("--rollout.max-new-tokens", "16", "--train.threads", "1", "--actor.lr", "1e-3", "--checkpoint.final", "false"),
    )
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row in rows:
        assert row["reward/mean"] == pytest.approx(row["reward/correct"] + row["reward/short"])
        assert row["reward/short"] < 0
        assert row["mismatch/max"] < 1e-4
    assert {"reward/correct/numbers", "score/mean"} <= set(rows[0])
