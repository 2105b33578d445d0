"""Reward functions and agents as other projects publish them, unchanged, in their own files: two steps of training each.
``make test-foreign`` fetches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_models import save_chat_model

HERE = Path(__file__).parent
ORACLES = HERE.parent.parent / ".oracles"
pytestmark = pytest.mark.skipif(not ORACLES.exists(), reason="needs published code: make test-foreign")

REWARDS = {
    "trl/trl/rewards/format_rewards.py:think_format_reward": (0.0, 1.0),
    "verl/verl/utils/reward_score/gsm8k.py:compute_score": (0.0, 1.0),
    "verl/verl/utils/reward_score/math_dapo.py:compute_score": (-1.0, 1.0),
    "verl/verl/utils/reward_score/math_reward.py:compute_score": (0.0, 1.0),
}
"""Where it is published, and which rewards it can give."""

MADE = """
import sys
sys.path.insert(0, {trl!r})
from trl.rewards.other_rewards import get_repetition_penalty_reward
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
repeated = get_repetition_penalty_reward(ngram_size=1)
long = get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)
"""


@pytest.fixture
def train(rlhf, tmp_path):
    model = save_chat_model(tmp_path / "model", hidden=64)
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1?"}], "label": str(n + 1), "solution": f"\\boxed{{{n + 1}}}"}
        for n in range(4)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*flags, data="data.jsonl"):
        rlhf.run(
            *(
                "train",
                "--algo",
                "rloo",
                "--actor.model",
                model,
                "--data",
                tmp_path / data,
                "--run-dir",
                tmp_path / "run",
                *flags,
            ),
            *("--data.label-key", "label", "--rollout.n", "4", "--train.batch-size", "2", "--train.steps", "2"),
            *("--rollout.max-new-tokens", "16", "--train.threads", "1", "--trajectories.every", "1"),
        )
        files = sorted((tmp_path / "run/trajectories").iterdir())
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    return run


@pytest.mark.parametrize("place", REWARDS)
def test_a_published_reward_function_judges(place, train):
    rows = train("--reward", ORACLES / place)
    assert len(rows) == 16
    low, high = REWARDS[place]
    assert all(low <= row["reward"] <= high for row in rows)


@pytest.mark.parametrize("name", ["repeated", "long"])
def test_rewards_that_trl_makes_judge_token_ids(name, train, tmp_path):
    (tmp_path / "made.py").write_text(MADE.format(trl=str(ORACLES / "trl")))
    rows = train("--reward", f"{tmp_path}/made.py:{name}")
    assert all(-1.0 <= row["reward"] <= 0.0 for row in rows)
    assert len({row["reward"] for row in rows}) > 1


def test_a_reward_that_a_file_imports_judges_against_a_column(train, tmp_path):
    pytest.importorskip("math_verify")
    (tmp_path / "made.py").write_text(MADE.format(trl=str(ORACLES / "trl")))
    assert {row["reward"] for row in train("--reward", f"{tmp_path}/made.py:accuracy_reward")} <= {0.0, 1.0}


def test_agents_of_openrlhf_play_with_its_own_base_classes():
    """The package's tests once more, where ``openrlhf`` can be imported."""
    tests = HERE.parent.parent / "plugins/builtin_agents/rlhf-plugin-multi-turn/tests"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "(openrlhf or execute) and not default",
        str(tests),
    ]
    own = {"PYTHONPATH": str(HERE / "beside_openrlhf"), "PUBLISHED_UTILS": str(ORACLES / "openrlhf/openrlhf/utils")}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
