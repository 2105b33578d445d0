"""``rollout`` and ``replay`` from Python: trajectories and objects where the commands have files and names."""

import pytest
import rlhf_samples
from pydantic import BaseModel

from rlhf_host import Advantages, LossTerm, Needs, RoleNeed, UserError, hookimpl


def vowels(text, label):
    return sum(char in "aeiou" for char in text) / 8


class Plain:
    """Rewards as advantages."""

    class Options(BaseModel):
        pass

    @hookimpl
    def needs(self):
        return Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))

    @hookimpl
    def compute_advantages(self, experience):
        return Advantages(experience.rewards[:, None] * experience.action_mask)

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        yield LossTerm("plain", -batch.advantages * outputs.logprobs)


@pytest.fixture
def small(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(8)]
    return {"model": tiny_model, "data": rows, "n": 4, "max_new_tokens": 8, "batch_size": 2, "train": {"threads": 1}}


def test_rollouts_come_as_trajectories_and_are_replayed(small):
    rows = rlhf_samples.rollout(rewards=vowels, output="rolled.jsonl", **small)
    assert len(rows) == 8
    assert [row.reward for row in rows] == [vowels(row.text, None) for row in rows]
    found = rlhf_samples.replay(rows, rewards=lambda text: float(len(text)))
    assert [change.reward for change in found.changes] == [float(len(row.text)) for row in rows]
    again = rlhf_samples.replay("rolled.jsonl", rewards=lambda text: float(len(text)), algo=Plain)
    assert [change.new.advantage for change in again.changes] == [float(len(row.text)) for row in rows]
    assert again.summary()["trajectories"] == 8


def test_rollouts_without_a_reward_wait_for_one(small):
    rows = rlhf_samples.rollout(**small)
    assert {row.reward for row in rows} == {None}
    found = rlhf_samples.replay(rows, rewards=vowels)
    assert [change.reward for change in found.changes] == [vowels(row.text, None) for row in rows]


def test_what_is_wrong_is_told_of_arguments(small):
    with pytest.raises(UserError, match="give one"):
        rlhf_samples.rollout(steps=1, rollouts=4, **small)
    with pytest.raises(UserError, match="no data: give data=PATH"):
        rlhf_samples.rollout(model=small["model"], data=None, config=[])
    with pytest.raises(UserError, match="there are no trajectories to replay"):
        rlhf_samples.replay([], rewards=vowels)
    with pytest.raises(UserError, match="nothing is chosen to replay with: give rewards=NAME, algo=NAME or extensions=NAME"):
        rlhf_samples.replay("rolled.jsonl")
