"""Criteria of a row, judged in one call."""

import json

import pytest
from rlhf_authoring import reward_contract
from rlhf_plugin_llm_judge import Rubrics
from rlhf_plugin_llm_judge.criteria import criteria_of, share

import rlhf_host
from rlhf_host import Task, Unjudged, UserError

from .judges import Judge, judged, met, row

CRITERIA = [
    {"criterion": "has an a", "weight": 3, "required": True},
    {"description": "has a b", "points": 1},
    {"criterion": "has a c", "points": -2, "tags": ["fault"], "title": None},
]


def letters(criterion, answer):
    return criterion[-1] in answer


@pytest.fixture(scope="module", autouse=True)
def reachable():
    """For the contract, whose options are made before any test."""
    with Judge(met(letters)) as judge, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", judge.url)
        yield


TestContract = reward_contract(
    "rubrics", {"model": "m"}, tasks=[Task("p", None, {"rubric": CRITERIA})], texts=["ab", "b", "abc"]
)


def rubrics(judge, **options):
    return Rubrics(Rubrics.Options(**{"model": "m", "base_url": judge.url, **options}))


def of(*texts, criteria=CRITERIA, column="rubric"):
    return [row(text, metadata={column: criteria}) for text in texts]


def test_the_weights_of_what_is_met_count_and_a_required_one_that_is_not_makes_nothing():
    with Judge(met(letters)) as judge:
        rewards = judged(rubrics(judge), *of("ab", "a", "b", "abc", "ac", "ab"))
        assert [reward.value for reward in rewards] == [1.0, 0.75, 0.0, 0.5, 0.25, 1.0]
        assert rewards[3].metrics == {"rubrics/met": 1.0, "rubrics/faults": 1.0, "rubrics/required": 1.0}
        assert rewards[2].metrics == {"rubrics/met": 0.5, "rubrics/faults": 0.0, "rubrics/required": 0.0}
        assert rewards[3].feedback == "has a c: so"
        assert rewards[0].feedback is None
        assert len(judge.asked) == 5, "one call for an answer, and equal ones are asked once"


@pytest.mark.parametrize(
    ("weights", "met", "value"),
    [
        ([10, 5, -3], [1, 0, 0], 10 / 15),  # HealthBench: points of what is met by those that can be had
        ([10, 5, -3], [1, 1, 1], 12 / 15),
        ([1, -8], [1, 1], 0.0),
        ([2.5], [1], 1.0),
    ],
)
def test_the_share_is_that_of_healthbench(weights, met, value):
    criteria = criteria_of([{"criterion": "c", "points": weight} for weight in weights])
    assert share(criteria, [bool(one) for one in met]) == pytest.approx(value)


WRONG = [
    (None, "it is nothing"),
    ([], "it is nothing"),
    ("be nice", "it is a text that is not JSON"),
    ({"criterion": "c"}, "it is a dict, not a list"),
    (["c"], "item 1 is a str"),
    ([{"criterion": " "}], "item 1 has no criterion"),
    ([{"criterion": "c", "weight": 0}], "item 1 has the weight 0"),
    ([{"criterion": "c", "weight": True}], "item 1 has the weight True"),
    ([{"criterion": "c", "weight": "3"}], "item 1 has the weight '3'"),
    ([{"criterion": "c", "weight": float("inf")}], "item 1 has the weight inf"),
    ([{"criterion": "c", "weight": 1, "points": 1}], "item 1 has weight and points: keep one"),
    ([{"criterion": "c", "wieght": 1}], "item 1 has 'wieght'; an item may have criterion, description, weight"),
    ([{"criterion": "c"}, {"criterion": "d", "weight": -1, "required": True}], "item 2 is required and has a weight below 0"),
    ([{"criterion": "c", "required": "yes"}], "item 1: required is true or false, not 'yes'"),
    ([{"criterion": "c", "weight": -1}], "no criterion has a weight above 0"),
    ([{"criterion": "c", "weight": 10**400}], "item 1 has the weight 1000"),
    ([{"criterion": "c", "weight": 1e308}, {"criterion": "d", "weight": 1e308}], "its weights are too large"),
    ('[{"criterion": "c", "weight": 1, "weight": -5}]', "its JSON cannot be read: a key twice"),
]


@pytest.mark.parametrize(("value", "why"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_criteria_are_no_reward_and_told_before_the_run(value, why):
    with Judge(met(letters)) as judge:
        plugin = rubrics(judge)
        [told] = judged(plugin, *of("a", criteria=value))
        assert isinstance(told, Unjudged)
        assert why in told.reason
        tasks = [Task("p", None, {"rubric": CRITERIA}), Task("p", None, {"rubric": value}), Task("p")]
        problems = plugin.check_labels(tasks)
        assert problems.keys() == {1, 2}
        assert why in problems[1]
        assert "no column 'rubric'" in problems[2]
        assert not judge.asked


def test_a_run_does_not_start_on_wrong_criteria_and_names_file_and_line(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    rows = [{"prompt": "1+1=", "rubric": json.dumps(CRITERIA)}, {"prompt": "1+2=", "rubric": [{"criterion": "c", "weight": 0}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    settings = {"model": "quickstart", "data": str(tmp_path / "rows.jsonl"), "run_dir": str(tmp_path / "run")}
    reward = {"rubrics": {"name": "rubrics", "model": "m", "base_url": "http://127.0.0.1:9/v1"}}
    with pytest.raises(UserError) as refused:
        rlhf_host.train(algo="rloo", rewards=reward, **settings)
    assert "rows.jsonl:2" in str(refused.value)
    assert "column 'rubric': item 1 has the weight 0; it is a number other than 0" in str(refused.value)
    assert "--data.label-key" not in str(refused.value), "a label would not help"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"criteria": [{"id": 1, "met": true}, {"id": 2, "met": true}]}', "left out the id 3 of 3"),
        ('{"criteria": [{"id": 1, "met": 1}, {"id": 2, "met": true}, {"id": 3, "met": true}]}', "said 1 of the id 1"),
        ('{"criteria": [{"id": 1, "met": "yes"}, {"id": 2, "met": true}, {"id": 3, "met": true}]}', "said 'yes' of the id 1"),
    ],
)
def test_what_is_no_judgement_of_every_criterion_is_no_reward(said, why):
    with Judge(lambda text, number: said) as judge:
        [told] = judged(rubrics(judge), *of("a"))
        assert isinstance(told, Unjudged)
        assert why in told.reason


def test_another_column_that_holds_json_and_answers_of_several_turns():
    with Judge(met(letters)) as judge:
        metadata = {"rubrics": json.dumps(CRITERIA)}
        turns = row("b", "go on", "a", metadata=metadata)
        assert judged(rubrics(judge, column="rubrics"), turns)[0].value == 1.0
        assert judged(rubrics(judge, column="rubrics", answer="last"), turns)[0].value == 0.75
