"""Several agents in one run, chosen by the tasks."""

from __future__ import annotations

import json

import rlhf_samples

from rlhf_host import EpisodeFailed, Step, hookimpl


def test_a_task_names_the_agent_that_plays_it(rlhf_here, tmp_path):
    rows = [{"prompt": f"12+{n}=", "label": "987654321", "agent": ("single_turn", "again")[n % 2]} for n in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", tmp_path / "data.jsonl", "--data.agent-key", "agent", "--actor.model", "quickstart", "--rollout.n", "2"]
    flags += ["--agents", "again=retry", "--agents.again.feedback", "{prompt}", "--agents.again.max-turns", "3"]
    flags += [
        "--reward",
        "math_verifier",
        "--train.batch-size",
        "4",
        "--rollout.max-new-tokens",
        "4",
        "--output",
        tmp_path / "out.jsonl",
    ]
    result = rlhf_here("rollout", *flags)
    assert result.exit_code == 0, result.output
    played = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    turns = {(row["row"]["agent"], sum(part["kind"] == "action" for part in row["segments"])) for row in played}
    assert turns == {("single_turn", 1), ("again", 3)}


def test_an_agent_that_was_not_chosen_is_named(rlhf_here, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "label": "2", "agent": "game"}\n')
    flags = ["--data", tmp_path / "data.jsonl", "--data.agent-key", "agent", "--actor.model", "quickstart"]
    result = rlhf_here("rollout", *flags, "--reward", "math_verifier", "--output", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "data, row 1 asks for the agent 'game'; the run has single_turn" in result.output


class Unlucky:
    """Every second sample has no sandbox."""

    @hookimpl
    async def agent_reset(self, episode):
        if episode.sample % 2:
            raise EpisodeFailed("no sandbox")
        return Step()

    @hookimpl
    async def agent_step(self, episode, action):
        return Step(done=True)


def test_failed_episodes_are_in_the_log_and_nothing_judges_them(rlhf_here, tmp_path):
    saved, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    settings = {"rollout.n": 2, "train.batch_size": 2, "rollout.max_new_tokens": 6, "rollout.max_unjudged": 0.6}
    rows = rlhf_samples.rollout(
        agent=Unlucky(), rewards="math_verifier", model="quickstart", data="arithmetic", output=saved, **settings
    )
    assert [row.unjudged_reason for row in rows] == [None, None, "failed: no sandbox", "failed: no sandbox"]
    result = rlhf_here("replay", saved, "--reward", "math_verifier", "--output", again)
    assert result.exit_code == 0, result.output
    replayed = [json.loads(line) for line in again.read_text().splitlines()]
    assert [(row["reward"] is None, row.get("unjudged")) for row in replayed] == [
        (False, None),
        (False, None),
        (True, "failed: no sandbox"),
        (True, "failed: no sandbox"),
    ]
    shown = rlhf_here("episodes", saved, "--worst", "--count", "1")
    assert "unjudged: failed: no sandbox, 0 tokens, abort" in shown.stdout
