"""A step whose draws were all dropped or unjudged is in the ledger too, until a resume draws them again."""

from __future__ import annotations

import json

import pytest

import rlhf_host
from rlhf_host import Drop, RunError, hookimpl


class Filter:
    """Drops every group from a moment on."""

    def __init__(self, keeps):
        self.left = keeps

    @hookimpl
    def keep_group(self, group):
        self.left -= 1
        return True if self.left >= 0 else Drop("too easy")


def ledger(run_dir):
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture
def train(tiny_model, prompts, tmp_path):
    def run(keep, judge=lambda text: float(len(text)), **settings):
        small = {"rollout": {"n": 2, "max_new_tokens": 4, "max_refills": 2}, "kernels": "none", "checkpoint.every": 0}
        small |= {"train.steps": 3, "train.batch_size": 2, "train.threads": 1}
        where = {"resume": tmp_path / "run"} if (tmp_path / "run").exists() else {"run_dir": str(tmp_path / "run")}
        chosen = {"algo": "rloo", "rewards": {"judge": judge}, "extensions": {"filter": Filter(keep)}}
        return rlhf_host.train(**chosen, model=tiny_model, data=prompts, **where, **(small | settings))

    return run


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_was_dropped_is_there_and_is_drawn_again_by_a_resume(train, tmp_path, depth, steps):
    with pytest.raises(RunError, match=r"no group was kept of 6 drawn: too easy \(6\)"):
        train(2 * steps, async_depth=depth)
    rows = ledger(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, steps + 2)]
    last = rows[-1]
    assert (last["version"], last["failed"]) == (steps, True)
    assert [draw[0] for draw in last["draws"]] == [*range(2 * steps, 2 * steps + 6)]
    assert {draw[-1] for draw in last["draws"]} == {"dropped: too easy"}

    train(100, async_depth=depth)
    rows = ledger(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [draw[0] for row in rows for draw in row["draws"]] == [*range(6)]
    assert all("failed" not in row for row in rows)
    assert rows[steps]["draws"][0][1:3] == last["draws"][0][1:3]


def test_what_could_not_be_judged_is_there(train, tmp_path):
    def down(text):
        raise ConnectionError("the judge is down")

    with pytest.raises(RunError, match="4 of 4 trajectories could not be judged"):
        train(100, judge=down)
    (row,) = ledger(tmp_path / "run")
    assert (row["failed"], [draw[0] for draw in row["draws"]]) == (True, [0, 1])
    assert {draw[-1] for draw in row["draws"]} == {"unjudged"}
