"""SDPO's prompts, masks and metrics, and a real run in which a policy learns from its own solutions."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_distill import SDPO
from rlhf_plugin_distill.prompts import Hints, hinted

import rlhf_host
from rlhf_host import Follow, LossTerm, Metric, Output, Outputs, Reward, RunError, Segment, Task, Trajectory, UserError

SHORT = {"template": "{solution}{feedback} {prompt}", "solution_template": "{solution}", "feedback_template": "[{feedback}]"}


def render(task):
    return [ord(letter) for letter in task.prompt]


def plugin(room=1000, **options):
    one = SDPO(SDPO.Options(**{**SHORT, **options}))
    one.run_started(SimpleNamespace(roles={"teacher": SimpleNamespace(context_length=room)}, render=render))
    return one


def episode(group, answer, reward, feedback=None, final=True):
    task = Task(f"p{group}", prompt_ids=tuple(render(Task(f"p{group}"))))
    segments = [Segment("prompt", list(task.prompt_ids)), Segment("action", [ord(letter) for letter in answer])]
    told = {"check": Reward(reward, feedback=feedback)}
    return Trajectory("e", f"g{group}", task, segments, rewards=told, final=final, decode=lambda ids: "".join(map(chr, ids)))


def batch_of(*rows):
    """Rows are ``(group, answer, reward, feedback)``."""
    trajectories = [episode(*row) for row in rows]
    batch = make_batch([len(row[1]) for row in rows], groups=[row[0] for row in rows], rewards=[float(row[2]) for row in rows])
    batch.trajectories = trajectories
    batch.prompt_ids = [list(row.prompt_ids) for row in trajectories]
    return batch


def prompts_of(one, batch):
    [(role, prompts)] = one.rewrite_prompts(batch).items()
    assert role == "teacher"
    batch.prompts = {role: prompts}
    return ["".join(map(chr, ids)) for ids in prompts]


ROWS = [(0, "bad", 0, "off by one"), (0, "good", 1), (0, "better", 1), (1, "no", 0, "slow"), (1, "nope", 0), (2, "yes", 1)]


def test_the_teacher_reads_the_first_solution_of_another_row_and_the_rows_own_feedback():
    assert prompts_of(plugin(), batch_of(*ROWS)) == ["good[off by one] p0", "better p0", "good p0", "[slow] p1", "p1", "p2"]
    assert prompts_of(plugin(own_solution=True), batch_of(*ROWS))[1:3] == ["good p0", "good p0"]
    assert prompts_of(plugin(own_solution=True), batch_of(*ROWS))[5] == "yes p2"
    assert prompts_of(plugin(feedback="never"), batch_of(*ROWS))[::3] == ["good p0", "p1"]
    assert prompts_of(plugin(feedback="without_solution"), batch_of(*ROWS))[::3] == ["good p0", "[slow] p1"]
    assert prompts_of(plugin(solutions=False), batch_of(*ROWS))[:2] == ["[off by one] p0", "p0"]
    assert prompts_of(plugin(success=2.0), batch_of(*ROWS))[:2] == ["[off by one] p0", "p0"]


def test_rows_without_a_hint_leave_the_loss_and_are_counted():
    one, batch = plugin(), batch_of(*ROWS)
    prompts_of(one, batch)
    batch.logprobs["teacher"] = batch.sampler_logprobs + 0.5
    kept = one.loss_masks(batch)
    assert kept.any(-1).tolist() == [True, True, True, True, False, False]
    assert kept.sum(-1).tolist() == [3, 4, 6, 2, 0, 0]
    found = {metric.name: metric for metric in one.compute_advantages(batch).metrics}
    assert {name: float(found[f"teacher/{name}"].values) for name in ("solution", "feedback", "too_long")} == {
        "solution": 3 / 6,
        "feedback": 2 / 6,
        "too_long": 0.0,
    }
    assert found["teacher/taught"].values.tolist() == [1, 1, 1, 1, 0, 0]
    assert float(found["teacher/kl"].values[kept].mean()) == pytest.approx(-0.5)
    assert SDPO(SDPO.Options(alpha=0.5)).loss_masks(batch) is None


def test_a_hint_for_which_there_is_no_room_is_left_out():
    one, batch = plugin(room=16), batch_of(*ROWS)
    assert prompts_of(one, batch) == ["p0", "better p0", "good p0", "[slow] p1", "p1", "p2"]
    [metric] = [metric for metric in one.compute_advantages(batch).metrics if metric.name == "teacher/too_long"]
    assert metric.values == pytest.approx(1 / 6)


def test_thoughts_may_be_left_out_of_solutions_and_braces_stay():
    options = SDPO.Options(**SHORT, remove_thinking=True)
    assert hinted("p", Hints("<think>so\nso</think> {prompt} 4"), options) == "{prompt} 4 p"
    assert hinted("p", Hints("<think>so</think>4"), SDPO.Options(**SHORT)) == "<think>so</think>4 p"
    with pytest.raises(UserError, match="ends with the role 'assistant'"):
        hinted([{"role": "user", "content": "p"}, {"role": "assistant", "content": "4"}], Hints("4"), options)


def test_an_agent_with_another_prompt_ends_the_run():
    batch = batch_of(*ROWS)
    batch.trajectories[0].segments[0] = Segment("prompt", [1, 2, 3])
    with pytest.raises(RunError, match="the agent began with another prompt"):
        prompts_of(plugin(), batch)


def test_the_loss_of_sampled_tokens_pulls_them_towards_the_teacher():
    one, batch = plugin(), batch_of((0, "ab", 1), (0, "cd", 1))
    prompts_of(one, batch)
    batch.own = one.prepare_batch(batch)
    batch.logprobs["teacher"] = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]])
    logprobs = torch.full((2, 2), -2.0, requires_grad=True)
    [term] = one.compute_loss(Outputs(logprobs=logprobs), batch)
    term.values.sum().backward()
    assert logprobs.grad.tolist() == [[-1.0, 1.0], [0.0, 0.0]]  # up where the teacher finds it likelier
    assert (term.coefficient, term.corrected, term.mask.name) == (1.0, True, "taught")
    batch.old_logprobs = logprobs.detach() - math.log(4.0)  # the ratio is 4, and counts as 2
    [term] = one.compute_loss(Outputs(logprobs=logprobs), batch)
    assert term.values.tolist() == [[4.0, -4.0], [-0.0, -0.0]]


def test_the_rest_of_alpha_is_the_policy_loss():
    one, batch = plugin(alpha=0.75), batch_of(*ROWS)
    prompts_of(one, batch)
    batch.logprobs["teacher"] = batch.sampler_logprobs
    batch.advantages = one.compute_advantages(batch).advantages
    batch.own = one.prepare_batch(batch)
    terms = [
        item for item in one.compute_loss(Outputs(logprobs=batch.sampler_logprobs.clone()), batch) if isinstance(item, LossTerm)
    ]
    assert [(term.name, term.coefficient) for term in terms] == [("self_distillation", 0.75), ("policy", 0.25)]
    assert [Metric] == [type(item) for item in one.compute_loss(Outputs(logprobs=batch.sampler_logprobs), batch)][2:3]


def test_needs():
    role = SDPO(SDPO.Options()).needs().roles[1]
    assert (role.name, role.source, role.follows) == ("teacher", "actor", Follow(0.05))
    assert SDPO(SDPO.Options(teacher_share=0)).needs().roles[1].follows is None
    assert SDPO(SDPO.Options(teacher_share=1)).needs().roles[1].follows.live
    assert SDPO(SDPO.Options()).needs().outputs == (Output("logprobs", role="teacher"),)
    assert SDPO(SDPO.Options(signal="full", top_k=9)).needs().outputs == (Output("distribution", role="teacher", top=9),)
    assert [SDPO(SDPO.Options(alpha=alpha)).needs().min_group_size for alpha in (1.0, 0.5)] == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solutions": False, "feedback": "never"}, "neither solutions nor feedback"),
        ({"template": "{solution}"}, "template has no {prompt}"),
        ({"solution_template": "It is:"}, "solution_template has no {solution}"),
        ({"loss": "gspo"}, "alpha 1 has no policy loss and so no loss: leave it out, or set alpha below 1"),
        ({"beta": 0.5}, "signal sample compares sampled tokens and has no beta"),
        ({"alpha": 0.0}, "alpha"),
    ],
)
def test_options_without_effect_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SDPO.Options(**options)


# --- real runs ------------------------------------------------------------------------------------


DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]


def right(text, label):
    return float(text.strip() == label)


def train(run, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 8, "batch_size": 4, "steps": 3}
    words = {"template": "{solution} {prompt}", "solution_template": "{solution}", "feedback": "never"}
    algo = {"name": "sdpo", **words, **more.pop("options", {})}
    return rlhf_host.train(algo=algo, reward=right, data=DATA, run_dir=str(run), **{**fixed, **more})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"teacher_share": 1.0, "signal": "full", "beta": 0.5},
        {"teacher_share": 0.0, "signal": "full", "top_k": 4, "alpha": 0.5},
    ],
)
def test_a_run_learns_from_its_own_solutions_and_resumes_as_if_it_had_not_stopped(tmp_path, options):
    train(tmp_path / "whole", options=options)
    train(tmp_path / "run", options=options, steps=2)
    rlhf_host.train(resume=str(tmp_path / "run"), reward=right, data=DATA, steps=3)
    whole, resumed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "run")
    )
    assert [row["step"] for row in resumed] == [1, 2, 3]
    for name in ("loss", "grad_norm", "teacher/taught", "reward/mean"):
        assert [row[name] for row in resumed] == [row[name] for row in whole], name
    assert all(0 < row["teacher/solution"] <= 1 for row in whole)
    assert any(row["grad_norm"] > 0 for row in whole)


def test_texts_without_tokens_are_refused_before_the_run(tmp_path):
    with pytest.raises(UserError, match=r"reads the text of template as .*give algo.template"):
        train(tmp_path / "run", options={"template": "{prompt}{solution} Try again."})
    assert not (tmp_path / "run").exists()
