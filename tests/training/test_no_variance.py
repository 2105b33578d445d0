"""Equal rewards within a group are news to those alone who compare within groups."""

import json

import pytest


@pytest.mark.parametrize(("algo", "said"), [("rloo", True), ("reinforce_pp", False)])
def test_nothing_to_teach_is_said_of_algorithms_that_need_groups(small_run, rlhf_here, tmp_path, algo, said):
    flags = [algo if word == "rloo" else word for word in small_run]
    flags += ["--train.steps", "1", "--run-dir", tmp_path / "run"]
    flags += ["--rollout.n", "1"] if algo == "reinforce_pp" else ["--reward.vowels.weight", "0"]
    result = rlhf_here(*flags)
    assert result.exit_code == 0, result.output
    assert ("this batch has nothing to teach" in result.output) is said
    (row,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert ("groups/no_variance" in row) is said
