"""One test per hook, named after it: when the host calls it, with what, and what becomes of the answer."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from rlhf_authoring.contracts.reinforce import manager_of

from rlhf_host import Needs, RoleNeed, hookimpl
from rlhf_host.rollouts.experience import apply_rewards
from rlhf_host.testing import make_batch

HERE = Path(__file__).parent

ENTRY_POINTS = """
[rlhf.algos]
recorder = rlhf_recorder:Algorithm
selecting = rlhf_recorder:Selecting
[rlhf.rewards]
recorder = rlhf_recorder:Judge
[rlhf.extensions]
recorder = rlhf_recorder:Extension
rewarding = rlhf_recorder:Rewarding
chooser = rlhf_recorder:Chooser
standing = rlhf_recorder:Standing
[rlhf.agents]
recorder = rlhf_recorder:Agent
owner = rlhf_recorder:Owner
guest = rlhf_recorder:Guest
[rlhf.tasks]
recorder = rlhf_recorder:Tasks
[rlhf.trackers]
recorder = rlhf_recorder:Tracker
[rlhf.weight_sync]
recorder = rlhf_recorder:Sync
"""

PLUGINS = ["--algo", "recorder", "--reward", "recorder", "--data", "recorder"]
ALL = ["--with", "recorder", "--tracker", "recorder", "--sync", "recorder", "--eval.data", "recorder"]
SMALL = ["--rollout.n", "2", "--rollout.max-new-tokens", "4", "--train.batch-size", "2", "--train.threads", "1"]


class Record:
    """What a run called, in order."""

    def __init__(self, calls, run_dir, output):
        self.calls = list(calls)
        self.run_dir = run_dir
        self.output = output

    def of(self, hook):
        """Every call's arguments."""
        return [call.arguments for call in self.calls if call.hook == hook]

    @property
    def order(self):
        return [call.hook for call in self.calls]

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """Run ``rlhf train`` in this process, the recorder installed; gives its ``Record``."""
    site = tmp_path_factory.mktemp("recorder")
    about = site / "rlhf_recorder-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rlhf-recorder\nVersion: 1.0\nRequires-Dist: rlhf-host>=0.10,<0.11\n"
    )
    (about / "entry_points.txt").write_text(ENTRY_POINTS)

    def train(*flags, code=0, resume=None, plugins=PLUGINS):
        from rlhf_host.cli.main import main

        run_dir = resume or tmp_path_factory.mktemp("run") / "run"
        start = ["--resume", resume] if resume else [*plugins, *SMALL, "--actor.model", tiny_model, "--run-dir", run_dir]
        steps = [] if "--train.steps" in flags else ["--train.steps", "1"]
        if (module := sys.modules.get("rlhf_recorder")) is not None:
            module.CALLS.clear()
        result = CliRunner().invoke(main, ["train", *map(str, [*start, *steps, *flags])])
        assert result.exit_code == code, result.output
        return Record(sys.modules["rlhf_recorder"].CALLS, run_dir, result.output)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.syspath_prepend(str(HERE / "recorder"))
        patch.setenv("COLUMNS", "200")
        yield train
    sys.modules.pop("rlhf_recorder", None)


@pytest.fixture(scope="module")
def whole(run):
    """Two steps with every kind of plugin, an evaluation before and after, a checkpoint after each step."""
    return run(*ALL, "--agent", "recorder", "--train.steps", "2", "--checkpoint.every", "1", "--checkpoint.keep", "0")


@pytest.fixture(scope="module")
def resumed(run, whole):
    return run("--train.steps", "3", resume=whole.run_dir)


# --- before and around the run ------------------------------------------------------------------


def test_hook_needs_is_asked_before_any_model_or_file_is_touched(run, whole, tmp_path):
    assert whole.order[0] == "needs"
    refused = run("--actor.model", tmp_path / "nowhere", "--algo.group-size", "9", code=2)
    assert "needs groups of 9 or more, and rollout.n is 2: set --rollout.n 9" in refused.output
    assert set(refused.order) == {"needs"}
    assert not refused.run_dir.exists()


def test_hook_check_run_is_asked_before_models_are_loaded_and_by_a_dry_run(run, whole, tmp_path):
    (call,) = whole.of("check_run")
    assert call["config"]["rollout"]["n"] == 2
    assert call["tokenizers"]["actor"].decode([13])
    assert whole.order[: whole.order.index("check_run")] == ["needs"] * whole.order.index("check_run")
    for more in (), ("--dry-run",):
        refused = run("--with", "recorder", "--with.recorder.first", "99", *more, code=2)
        assert "extension:recorder (rlhf-recorder 1.0): first is 99" in refused.output
        assert "run_started" not in refused.order
        assert not refused.run_dir.exists()


def test_hook_run_started_comes_before_anything_is_sampled(whole):
    (call,) = whole.of("run_started")
    context = call["context"]
    assert context.run_dir == whole.run_dir
    assert context.config["rollout"]["n"] == 2
    assert context.seed == 0
    assert context.tokenizer.decode([13])
    assert set(context.roles) == {"actor"}
    assert not context.resumed
    assert whole.order.index("run_started") < min(whole.order.index(hook) for hook in ("send", "agent_reset", "score"))


def test_hook_run_finished_comes_last_and_after_a_failure_too(run, whole):
    assert whole.order[-2:] == ["run_finished", "close"], "of the weight sync"
    (call,) = whole.of("run_finished")
    assert (call["outcome"].status, call["outcome"].step, call["outcome"].error) == ("finished", 2, None)
    assert "eval/reward/mean" in call["outcome"].metrics
    failed = run("--with", "recorder", "--algo.shape", "wrong", code=1)
    (call,) = failed.of("run_finished")
    assert call["outcome"].status == "failed"
    assert "compute_advantages gave advantages" in call["outcome"].error


def test_hook_draw_tasks_chooses_what_comes_next(run):
    record = run("--with", "chooser", "--train.steps", "2")
    assert [(call["count"], call["step"], len(call["tasks"])) for call in record.of("draw_tasks")] == [(2, 1, 2), (2, 2, 2)]
    groups = [row for call in record.of("score") for row in call["trajectories"]]
    assert {row.task.prompt for row in groups} == {"1+2="}
    assert len({tuple(row.actions[0].token_ids) for row in groups}) > 2, "the same task is sampled anew"
    own = run("--with", "chooser", "--with.chooser.own")
    assert {row.task.prompt for call in own.of("score") for row in call["trajectories"]} == {"7+7="}


def test_hook_load_tasks_gives_tasks_or_mappings_of_a_split(whole):
    assert {(call["split"], call["seed"]) for call in whole.of("load_tasks")} == {("train", 0), ("eval", 0)}
    tasks = {call["episode"].task.prompt: call["episode"].task for call in whole.of("agent_reset")}
    assert {prompt: task.ground_truth for prompt, task in tasks.items()} == {"1+1=": "2", "1+2=": "3"}
    assert [tasks[prompt].index for prompt in ("1+1=", "1+2=")] == [0, 1]


def test_hook_check_labels_sees_the_tasks_of_each_source_before_anything_is_sampled(run, whole):
    assert [[task.ground_truth for task in call["tasks"]] for call in whole.of("check_labels")] == [["2", "3"], ["2", "3"]]
    assert whole.order.index("check_labels") < whole.order.index("run_started")
    refused = run("--reward.recorder.unread", "3", code=2)
    assert "recorder, task 2: reward:recorder cannot judge the row: no such label" in refused.output
    assert "score" not in refused.order


# --- agents -------------------------------------------------------------------------------------


def episodes_of(record, hook):
    return [call["episode"].episode_id for call in record.of(hook)]


def test_hook_agent_reset_begins_each_episode_once(whole):
    begun = episodes_of(whole, "agent_reset")
    assert len(begun) == len(set(begun)) == 2 * 2 * 2 + 2 * 2, "two steps of two groups of two, two evaluations of two tasks"
    assert {call["episode"].sample for call in whole.of("agent_reset")} == {0, 1}
    rows = [row for call in whole.of("log_trajectories") for row in call["trajectories"]]
    assert {row.prompt_text for row in rows} == {"1+1=", "1+2="}, "an observation of None is the task's own prompt"


def test_hook_agent_step_answers_each_action_until_done(whole):
    assert sorted(episodes_of(whole, "agent_step")) == sorted(2 * episodes_of(whole, "agent_reset"))
    for row in (row for call in whole.of("log_trajectories") for row in call["trajectories"]):
        assert [segment.kind for segment in row.segments] == ["prompt", "action", "observation", "action"]
        assert "again" in row.full_text
        assert "again" not in row.text


def test_hook_agent_close_follows_every_episode_and_failures_too(run, whole):
    assert sorted(episodes_of(whole, "agent_close")) == sorted(episodes_of(whole, "agent_reset"))
    failed = run("--agent", "recorder", "--agent.fails", "--with", "recorder")
    assert sorted(episodes_of(failed, "agent_close")) == sorted(episodes_of(failed, "agent_reset"))
    assert failed.metrics[-1]["rollout/failed"] == 2
    assert failed.metrics[-1]["reward/mean"] == 1.0, "the sample that failed is no reward of 0"


def test_hook_agent_run_owns_the_whole_episode(run):
    record = run("--agent", "owner", "--tracker", "recorder")
    assert len(record.of("agent_run")) == 4
    (logged,) = record.of("log_trajectories")
    for row in logged["trajectories"]:
        (action,) = row.actions
        assert 1 <= len(action.token_ids) <= 4
        assert len(action.logprobs) == len(action.versions) == len(action.token_ids)


def test_hook_choose_role_says_who_answers_where_an_agent_asks_for_a_role(run):
    """The roles are told apart by their tokenizers, which each has of its own."""
    alone, record = run("--agent", "guest"), run("--agent", "guest", "--with", "standing")
    chosen = [(call["episode"].episode_id, call["role"]) for call in record.of("choose_role")]
    assert sorted(chosen) == sorted((call["episode"].episode_id, "host") for call in record.of("asked"))
    assert len({id(call["tokenizer"]) for call in alone.of("asked")}) == 1
    by_sample = {(call["episode"].sample, id(call["tokenizer"])) for call in record.of("asked")}
    assert len(by_sample) == len({tokenizer for _, tokenizer in by_sample}) == 2
    nobody = run("--agent", "guest", "--with", "standing", "--standing.other", "nobody")
    assert nobody.metrics[-1]["rollout/failed/guest:ValueError"] == 2, "no such role generates"


# --- rewards and filters ------------------------------------------------------------------------


def test_hook_score_judges_a_whole_group_and_none_leaves_it(run, whole):
    training = [call for call in whole.of("score") if call["context"].split == "train"]
    assert [call["context"].step for call in training] == [1, 1, 2, 2]
    for call in training:
        assert len({row.group_id for row in call["trajectories"]}) == 1
        assert sorted(row.sample for row in call["trajectories"]) == [0, 1]
    assert whole.metrics[1]["reward/mean"] == 0.5
    unjudged = run("--reward.recorder.unjudged", "0")
    assert unjudged.metrics[-1]["rollout/unjudged"] == 2
    assert unjudged.metrics[-1]["reward/mean"] == 1.0, "the mean over those that were judged"


def test_hook_keep_group_drops_with_a_reason_and_others_are_drawn(run):
    record = run("--with", "recorder", "--with.recorder.refuse", "1+1=")
    row = record.metrics[-1]
    assert row["rollout/dropped"] == row["rollout/dropped/refused"] >= 1
    assert row["rollout/drawn"] == 2 + row["rollout/dropped"]
    assert {call["group"].task.prompt for call in record.of("keep_group")} == {"1+1=", "1+2="}


@pytest.mark.parametrize(("order", "mean"), [(["add", "times"], (0.5 + 1) * 2), (["times", "add"], 0.5 * 2 + 1)])
def test_hook_transform_rewards_is_chained_in_order(run, order, mean):
    chosen = [part for name in order for part in ("--with", f"{name}=recorder")]
    record = run(*chosen, "--with.add.add", "1", "--with.times.times", "2")
    assert record.metrics[-1]["reward/mean"] == mean
    first, second = record.of("transform_rewards")
    assert sorted(first["rewards"].tolist()) == [0, 0, 1, 1]
    assert second["rewards"].tolist() == [value + 1 if order[0] == "add" else value * 2 for value in first["rewards"].tolist()]


def test_hook_shape_rewards_is_summed(run):
    record = run("--with", "a=recorder,b=recorder", "--with.a.shaped", "0.25", "--with.b.shaped", "-1")
    assert record.metrics[-1]["seen/shaped"] == -0.75


def test_hook_loss_masks_are_joined(run):
    record = run("--with", "a=recorder,b=recorder", "--with.a.first", "1", "--with.b.last", "2", "--rollout.n", "1")
    (call,) = record.of("compute_advantages")
    experience = call["experience"]
    position = experience.action_mask.long().cumsum(-1) - 1
    expected = experience.action_mask & (position >= 1) & (position <= 2)
    assert expected.any()
    assert experience.loss_mask.equal(expected)


@pytest.mark.parametrize("makes_rows", [False, True])
def test_hook_loss_masks_are_joined_with_groups_that_are_too_small(makes_rows):
    class Compares:
        @hookimpl
        def needs(self):
            return Needs(min_group_size=3)

    class Makes(Compares):
        @hookimpl
        def make_rows(self, groups):
            return []

    batch = make_batch([2] * 7, groups=[0, 0, 0, 1, 1, 2, 2])
    apply_rewards(batch, manager_of(algo=Makes() if makes_rows else Compares()))
    assert batch.loss_mask.any(-1).tolist() == [True] * 3 + [makes_rows] * 4


# --- the learning signal ------------------------------------------------------------------------


def test_hook_compute_advantages_sees_the_whole_rollout_batch(run, whole):
    assert [len(call["experience"]) for call in whole.of("compute_advantages")] == [4, 4]
    assert whole.order.index("loss_masks") < whole.order.index("compute_advantages") < whole.order.index("compute_loss")
    refused = run("--algo.shape", "wrong", code=1)
    assert "compute_advantages gave advantages [4, 1], expected [4, " in refused.output


def test_hook_importance_weights_multiply_into_corrected_terms_only(run):
    record = run("--with", "a=recorder,b=recorder", "--with.a.factor", "0.5", "--with.b.factor", "0.25")
    row = record.metrics[-1]
    assert row["correction/mean"] == 0.125
    assert row["loss/corrected"] == pytest.approx(0.125)
    assert row["loss/plain"] == pytest.approx(1.0)
    for call in record.of("importance_weights"):
        logprobs, batch = call["logprobs"], call["batch"]
        assert not any(each.requires_grad for each in logprobs)
        assert logprobs.old.equal(logprobs.current), "one update per batch"
        assert logprobs.sampler.equal(batch.sampler_logprobs)
        assert set(batch.versions[batch.action_mask].tolist()) == {batch.version}


def test_hook_prepare_batch_is_what_its_own_worker_hooks_see(run):
    record = run("--with", "a=recorder,b=recorder", "--with.b.factor", "2", "--train.minibatches", "2")
    assert len(record.of("prepare_batch")) == 2, "once a step for each"
    assert all(call["experience"].advantages is not None for call in record.of("prepare_batch"))
    seen = record.of("own")
    assert {call["own"]["weight"] for call in seen} == {1.0, 2.0}
    assert all(set(call["extra"]) == {"a", "b"} for call in seen)
    rows = [row for call in seen if call["own"]["weight"] == 2.0 for row in call["own"]["row"].tolist()]
    assert sorted(rows) == [0, 0, 1, 1], "sliced with the batch"


SELECTING = ["--algo", "selecting", "--reward", "recorder", "--data", "recorder"]


def test_hook_make_rows_chooses_what_is_trained_on_in_place_of_advantages(run):
    record = run("--with", "rewarding", plugins=SELECTING)
    (call,) = record.of("make_rows")
    rows = [row for group in call["groups"] for row in group.trajectories]
    shaped = [0.5 * row.action_length for row in rows]
    assert [row.reward for row in rows] == [value + part for value, part in zip([0.0, -2.0] * 2, shaped, strict=True)]
    assert "compute_advantages" not in record.order
    row = record.metrics[-1]
    assert (row["rows/count"], row["rows/groups_left_out"], row["reward/mean"]) == (2, 0, -1.0)
    assert row["rows/reward"] == pytest.approx(sum(shaped[::2]) / 2)
    assert not [name for name in row if name.startswith("advantages/")]
    (prepared,) = record.of("prepare_batch")
    assert prepared["experience"].advantages is None
    assert [row.sample for row in prepared["experience"].trajectories] == [0, 0]


def test_rows_in_place_of_advantages_are_refused_beside_what_needs_advantages(run):
    refused = run("--with", "recorder", code=2, plugins=SELECTING)
    assert (
        "extension:recorder gives importance_weights, and algo:selecting trains on the rows that it chooses" in refused.output
    )
    assert "make_rows" not in refused.order


def test_hook_batch_statistics_are_reduced_over_the_optimizer_batch_before_any_loss(run, whole):
    assert whole.order.index("batch_statistics") < whole.order.index("compute_loss")
    split = run("--train.max-tokens-per-microbatch", "1", "--train.minibatches", "2")
    assert len(split.of("batch_statistics")) > 2, "the batches are split"
    assert split.metrics[-1]["seen/rows"] == 2, "rows of the optimizer batch, whatever the split"
    assert not any(call["outputs"].logprobs.requires_grad for call in split.of("batch_statistics"))


def test_hook_around_pass_surrounds_the_layers_of_every_pass_over_rows(run, whole):
    split = run("--train.max-tokens-per-microbatch", "1")
    assert len(split.of("around_pass")) > len(whole.of("around_pass"))
    for record in (whole, split):
        order = [name for name in record.order if name in ("around_pass", "passed", "batch_statistics", "compute_loss")]
        pairs = list(pairwise(order))
        assert order.count("around_pass") == pairs.count(("around_pass", "passed")) == order.count("passed")
        for hook in ("batch_statistics", "compute_loss"):
            assert pairs.count(("passed", hook)) == order.count(hook) > 0
        for call in record.of("around_pass"):
            assert (call["role"], call["head"], call["traces"]) == ("actor", True, None)
            assert all(length > 2 for length in call["lengths"])


def test_hook_compute_loss_is_asked_for_every_micro_batch_and_reduced_over_all(run, whole):
    split = run("--train.max-tokens-per-microbatch", "1")
    assert len(split.of("compute_loss")) > len(whole.of("compute_loss")) / 2
    assert sum(len(call["batch"]) for call in split.of("compute_loss")) == 4
    for call in split.of("compute_loss"):
        assert call["role"] == "actor"
        assert call["outputs"].logprobs.requires_grad
        assert not hasattr(call["batch"], "trajectories"), "workers have no records"
    assert split.metrics[-1]["loss/plain"] == pytest.approx(1.0)
    assert split.metrics[-1]["loss"] == pytest.approx(2.0)


def test_hook_compute_loss_is_asked_of_plugins_that_train_the_role():
    class Trains:
        def __init__(self, *roles):
            self.roles = roles

        @hookimpl
        def needs(self):
            return Needs(roles=tuple(RoleNeed(name, trainable=trainable) for name, trainable in self.roles))

        @hookimpl
        def compute_loss(self):
            return []

    class NoNeeds:
        @hookimpl
        def compute_loss(self):
            return []

    both, reference = Trains(("actor", True), ("critic", True)), Trains(("reference", False))
    manager = manager_of(algo=both, extension=reference, reward=NoNeeds(), agent=Trains(("critic", True)))
    assert manager.names_for("compute_loss", "actor") == ["algo:algo", "extension:extension", "reward:reward"]
    assert manager.names_for("compute_loss", "critic") == ["algo:algo", "agent:agent"]
    assert manager.names_for("compute_loss", "reference") == []


# --- weights ------------------------------------------------------------------------------------


def test_a_weight_sync_is_started_with_the_run_and_connected_to_the_engines_once(whole):
    (start,) = whole.of("start")
    assert start["start"].run_dir == whole.run_dir
    (call,) = whole.of("connect")
    (target,) = call["targets"]
    assert target.name
    assert target.engine.version == whole.of("send")[-1]["version"]
    assert whole.order.index("connect") < whole.order.index("send")


def test_a_weight_sync_gives_each_step_its_version(whole):
    versions = [call["version"] for call in whole.of("send")]
    assert versions == sorted(set(versions))
    assert len(versions) == 3, "before the first step, and after each"
    for call, version in zip(
        [call for call in whole.of("log_trajectories") if call["split"] == "train"], versions[:2], strict=True
    ):
        sampled = {number for row in call["trajectories"] for action in row.actions for number in action.versions}
        assert sampled == {version}


def test_a_weight_sync_is_closed_last(whole):
    assert whole.order.count("close") == 1
    assert whole.order.index("close") > max(i for i, hook in enumerate(whole.order) if hook in ("send", "run_finished"))


# --- reporting and state ------------------------------------------------------------------------


def test_hook_step_finished_sees_the_reduced_metrics_before_the_next_batch(whole):
    first, second = whole.of("step_finished")
    assert (first["step"], second["step"]) == (1, 2), "an evaluation before the first step is no step"
    assert first["metrics"]["loss"] == pytest.approx(2.0)
    assert {"loss", "eval/reward/mean"} <= second["metrics"].keys(), "of the evaluation after it too"
    assert [call["step"] for call in whole.of("step_finished of tasks")] == [1, 1, 2, 2], "task plugins take part in the run"
    last_loss = whole.order.index("compute_loss")
    next_batch = [i for i, hook in enumerate(whole.order) if hook == "compute_advantages"][1]
    assert any(hook == "step_finished" for hook in whole.order[last_loss:next_batch])


def test_hook_step_finished_may_stop_the_run_after_its_step(run):
    record = run("--with", "recorder", "--with.recorder.stop", "1", "--train.steps", "3", "--eval.data", "recorder")
    assert [row["step"] for row in record.metrics] == [0, 1]
    assert "eval/reward/mean" in record.metrics[-1], "the evaluation of the end, in the row of the step"
    (call,) = record.of("run_finished")
    assert (call["outcome"].status, call["outcome"].step, call["outcome"].reason) == (
        "finished",
        1,
        "extension:recorder: enough",
    )
    assert (record.run_dir / "model/config.json").exists()
    assert (record.run_dir / "checkpoints/step-000001").is_dir()
    assert "Finished after step 1 (extension:recorder: enough)." in record.output
    refused = run(resume=record.run_dir, code=2)
    assert "was stopped after step 1 by extension:recorder: enough; to train further, start a new run" in refused.output
    shutil.rmtree(record.run_dir / "model")  # as if killed before the end
    resumed = run("--train.steps", "3", resume=record.run_dir)
    assert [row["step"] for row in resumed.metrics] == [0, 1]
    assert (record.run_dir / "model/config.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--with.b.adjust", "actor.lr"], "extension:a and extension:b both adjust actor.lr after step 1: leave one out"),
        (["--with.b.adjust", "nobody.coef"], "adjusts nobody.coef, which does not exist; there is actor.lr, a.NAME, b.NAME"),
        (["--with.b.adjust", "critic.lr"], "adjusts critic.lr, which does not exist"),
        (["--with.a.to", "-99"], "extension:a adjusts actor.lr to nan after step 1, expected a finite number"),
        (["--with.a.to", "-1"], "extension:a adjusts actor.lr to -1 after step 1, expected a finite number that is 0 or more"),
    ],
)
def test_hook_step_finished_may_adjust_only_what_there_is_and_one_of_them(run, flags, message):
    record = run("--with", "a=recorder,b=recorder", "--with.a.adjust", "actor.lr", *flags, code=1)
    assert message in record.output


def test_hook_adjust_brings_what_another_plugin_wants(run):
    record = run("--with", "a=recorder,b=recorder", "--with.a.adjust", "b.coef", "--with.a.to", "0.5", "--train.steps", "2")
    assert [call["settings"] for call in record.of("adjust")] == [{"coef": 0.5}] * 2
    assert all(call.who.options.adjust == "" for call in record.calls if call.hook == "adjust")


def test_hook_step_metrics_are_in_the_row_of_their_step_by_the_plugin_s_alias(run, whole):
    assert [call["step"] for call in whole.of("step_metrics")] == [0, 1, 2]
    assert [row["recorder/judged"] for row in whole.metrics] == [2.0, 2.0, 4.0], "the groups of a step and of its evaluation"
    assert all(call["metrics"]["recorder/judged"] for call in whole.of("step_finished")), "other plugins see them"
    refused = run("--reward.recorder.figure", "-1", code=1)
    assert "reward:recorder gave a float in a list from step_metrics, expected a list of Metric or None" in refused.output


def test_hook_log_metrics_gets_a_row_per_step(whole):
    assert [call["step"] for call in whole.of("log_metrics")] == [0, 1, 2]
    for call, row in zip(whole.of("log_metrics"), whole.metrics, strict=True):
        assert call["metrics"].keys() <= row.keys()


def test_hook_log_trajectories_gets_both_splits(whole):
    found = [(call["step"], call["split"], len(call["trajectories"])) for call in whole.of("log_trajectories")]
    assert found == [(0, "eval", 2), (1, "train", 4), (2, "train", 4), (2, "eval", 2)]


def test_hook_state_dict_is_asked_at_the_start_and_around_the_end_of_every_step(whole):
    assert len(whole.of("state_dict")) == 1 + 2 * len(whole.metrics)
    assert len(list((whole.run_dir / "checkpoints").glob("step-*"))) == len(whole.metrics) == 3


def test_hook_load_state_dict_gives_it_back_before_the_run_starts_again(resumed):
    (call,) = resumed.of("load_state_dict")
    assert call["state"] == {"steps": 2}
    (started,) = resumed.of("run_started")
    assert started["steps"] == 2
    assert started["context"].resumed
    assert started["context"].resume_step == 2
