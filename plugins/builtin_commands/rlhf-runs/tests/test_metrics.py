"""The table of metrics, from which the page of a run and docs/reference/metrics.md are made."""

from __future__ import annotations

import pytest
from rlhf_runs.metrics import OTHERS, described, described_all, in_order, table

from rlhf_host import RunDirectory


def test_each_metric_has_one_row_with_a_unit_and_one_sentence():
    names = [name for row in table() for name in row.names]
    assert len(names) == len({*names})
    for row in table():
        assert row.unit, row
        assert row.help[-1] == ".", row
        assert ". " not in row.help, f"one sentence, and the rest as 'more': {row}"


@pytest.mark.parametrize(
    ("name", "question", "help"),
    [
        ("reward/mean", "Is it learning?", "Mean reward of the step's answers: it should rise."),
        ("reward/vowels", "Is it learning?", "Mean of what one reward plugin (or the agent) gave, before transforms."),
        ("eval/pass@8", "Is it learning?", "Chance that at least one of K answers solves a task of the evaluation."),
        ("eval/pass@8/stderr", "Is it learning?", "Standard error of an evaluation's mean:"),
        ("eval/sums.jsonl/pass@1", "Is it learning?", "Of the source sums.jsonl: share of the evaluation's tasks that one"),
        ("critic/grad_norm", "Is it stable?", "Of the critic: size of the gradient before clipping:"),
        ("staleness/lag12", "Is it stable?", "Share of the tokens that are N versions old."),
        ("engine/requests", "Is it fast?", "What the engine measures of itself."),
        ("rollout/failed/tutor:TimeoutError", "What does it say?", "Failed episodes, by agent and kind of error."),
        ("tutor/tries", OTHERS, "Measured by the agent tutor."),
        ("eval/tutor/tries", OTHERS, "At evaluations: measured by the agent tutor."),
        ("other", OTHERS, "Measured by a plugin, or by what the run was given."),
    ],
)  # fmt: skip
def test_a_metric_is_described(name, question, help):
    row = described(name, ["actor", "critic"], {"tutor": "the agent tutor"})
    assert row.question == question
    assert row.help.startswith(help)


def test_the_order_is_that_of_the_table(make):
    run = RunDirectory(make("one"))
    assert [*described_all(run)] == ["eval/pass@1", "reward/mean", "entropy"]
    assert in_order(["entropy", "time/log", "reward/mean"]) == ["reward/mean", "entropy"]
