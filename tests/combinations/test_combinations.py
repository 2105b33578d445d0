"""Combinations that the start admits work: numbers are finite, rates as planned, idle roles rest, temperatures are right."""

from __future__ import annotations

from collections import Counter
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from rlhf_rows import batches

from rlhf_host.backends import torch_backend
from rlhf_host.records.needs import DataFormat
from rlhf_host.training.worker import Worker

from . import one_run
from .kinds import DATA, Files
from .matrix import Matrix, table, topics
from .one_run import Case


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(Files.make(tmp_path_factory.mktemp("matrix")))


def test_a_sample_of_combinations(matrix):
    counts = Counter(one.outcome for one in matrix.sample(7))
    assert counts["wrong"] == 0, table(matrix.found)
    assert counts["run"] >= 10


@pytest.mark.parametrize(("dimension", "value"), topics(), ids=lambda part: part.replace(" ", "-"))
def test_in_pairs(matrix, dimension, value):
    found = matrix.cover(dimension, value)
    outcomes = {one.outcome for one in matrix.found if getattr(one.case, dimension) == value}
    assert "wrong" not in outcomes, table(found)
    assert "run" in outcomes, f"no start admits it, so nothing is known of it:\n{table(found)}"


def test_every_kind_of_data_is_there():
    assert set(get_args(DataFormat)) - {"prompts"} <= {*DATA}


def test_a_pair_goes_with_its_row_where_a_mask_takes_one(matrix):
    found = matrix.runs(Case("online_dpo", extension="overlong_masking"))
    assert found.outcome == "run", found.reasons
    assert 0.0 < found.metrics[1]["truncated"] < 1.0
    assert found.metrics[1]["loss/preference"] > 0.0


@pytest.mark.parametrize("algo", ["raft", "online_dpo"])
def test_a_batch_of_chosen_rows_that_masks_leave_nothing_of_trains_nothing(matrix, algo):
    with patch.object(one_run, "STOPS", []):  # every answer is cut off
        found = matrix.runs(Case(algo, extension="overlong_masking"))
    assert found.outcome == "run", found.reasons
    assert [("lr" in row, row["grad_norm"], row["truncated"]) for row in found.metrics.values()] == [(False, 0.0, 1.0)] * 2


# --- what the matrix looks for, it sees ----------------------------------------------------------

WARM_UP = Case("ppo", algo_option=("critic_warmup", 1))


def constant(role, update, total_updates, peak):
    return peak


def tempered(*arguments, **settings):
    return MAKE(*arguments, **settings | {"temperature": 0.5})


def restless(worker, *arguments, **settings):
    with torch.no_grad():
        next(worker.roles["actor"].passes.model.parameters()).add_(1e-3)
    return UPDATE(worker, *arguments, **settings)


MAKE, UPDATE = batches.make_experience, Worker.update


@pytest.mark.parametrize(
    ("case", "owner", "name", "defect", "seen"),
    [
        (
            Case("rloo", schedule="linear"),
            torch_backend,
            "learning_rate",
            constant,
            "step 2: the rate of actor is 0.01, not 0.005",
        ),
        (Case("sft", data="prompt_completion"), batches, "make_experience", tempered, "log-probabilities of the pass are"),
        (WARM_UP, Worker, "update", restless, "step 1: actor moved, and nothing moves it"),
    ],
    ids=["rate", "temperature", "idle"],
)
def test_a_defect_is_seen(matrix, case, owner, name, defect, seen):
    with patch.object(owner, name, defect):
        found = matrix.runs(case)
    assert found.outcome == "wrong"
    assert any(seen in reason for reason in found.reasons), found.reasons
