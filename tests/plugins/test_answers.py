"""What a hook may answer is in its rule, and what it is given belongs to all plugins: each breach names the plugin."""

from __future__ import annotations

import asyncio
import re
import threading

import numpy as np
import pytest
import torch
from rlhf_authoring.tensors import make_batch

from rlhf_host import Drop, LossTerm, Metric, PolicyLogprobs, RunError, Stop, hookimpl
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.answers import other_answer
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.threads import Threads

ARGUMENTS = {
    "experience",
    "rewards",
    "group",
    "step",
    "metrics",
    "logprobs",
    "role",
    "outputs",
    "batch",
    "trajectories",
    "tasks",
}


def manager(**hooks):
    """One extension ``p0`` of these functions, named as the hooks that they implement."""
    methods = {}
    for name, function in hooks.items():
        scope = {"call": function}
        names = [argument for argument in spec_arguments(name) if argument in ARGUMENTS]
        body = f"call({', '.join(f'{argument}={argument}' for argument in names)})"
        if asyncio.iscoroutinefunction(function):
            exec(f"async def {name}(self, {', '.join(names)}): return await {body}", scope)
        else:
            exec(f"def {name}(self, {', '.join(names)}): return {body}", scope)
        methods[name] = hookimpl(scope[name])
    info = PluginInfo("extension", "p0", "made-up", "1", ">=0.9", "ok", "", "m:X")
    return PluginManager([Loaded("extension", "p0", info, type("Plugin", (), methods)())])


def spec_arguments(hook):
    import inspect

    from rlhf_host import hookspecs

    return list(inspect.signature(getattr(hookspecs, hook)).parameters)


def arguments(hook):
    """What the host would give, small."""
    batch = make_batch([2, 3], rewards=[1.0, 2.0])
    logprobs = PolicyLogprobs(*(torch.zeros(2, 3) for _ in range(3)))
    given = {"experience": batch, "batch": batch, "rewards": batch.rewards, "logprobs": logprobs, "metrics": {"loss": 1.0}}
    given |= {"tasks": [1, 2], "trajectories": [1, 2], "step": 1, "group": "g", "role": "actor"}
    return {name: given.get(name) for name in spec_arguments(hook)}


TERM = LossTerm("x", torch.zeros(2))
LOSS = "a list of LossTerm or Metric or None"


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("needs", {}, "a dict from needs, expected Needs or None"),
        ("load_tasks", 3, "an int from load_tasks, expected a list of tasks or None"),
        ("load_tasks", {"prompt": "a"}, "a dict from load_tasks, expected a list of tasks or None"),
        ("draw_tasks", None, "a NoneType from draw_tasks, expected a list of tasks or their numbers"),
        ("make_rows", None, "a NoneType from make_rows, expected a list of trajectories"),
        ("make_rows", [1], "an int in a list from make_rows, expected a list of trajectories"),
        ("state_dict", [1], "a list from state_dict, expected Mapping or None"),
        ("keep_group", "no", "a str from keep_group, expected bool or Drop or None"),
        ("transform_rewards", None, "NoneType from transform_rewards, expected a tensor [2]"),
        ("shape_rewards", torch.zeros(2), "[2] from shape_rewards, expected a tensor [2, 3]"),
        ("loss_masks", torch.ones(2, 3), "[2, 3] of torch.float32 from loss_masks, expected a tensor [2, 3] of bool"),
        ("compute_advantages", torch.zeros(2, 3), "a Tensor from compute_advantages, expected Advantages"),
        ("prepare_batch", [1], "a list from prepare_batch, expected Mapping or None"),
        ("importance_weights", torch.ones(2, 1), "[2, 1] from importance_weights, expected a tensor [2, 3] or [2]"),
        ("compute_loss", TERM, f"a LossTerm from compute_loss, expected {LOSS}"),
        ("compute_loss", torch.zeros(()), f"a Tensor from compute_loss, expected {LOSS}"),
        ("compute_loss", torch.zeros(2, 3), f"a Tensor from compute_loss, expected {LOSS}"),
        ("compute_loss", np.zeros((2, 3)), f"a ndarray from compute_loss, expected {LOSS}"),
        ("compute_loss", {"loss": TERM}, f"a dict from compute_loss, expected {LOSS}"),
        ("compute_loss", 0.5, f"a float from compute_loss, expected {LOSS}"),
        ("compute_loss", "loss", f"a str from compute_loss, expected {LOSS}"),
        ("compute_loss", (torch.zeros(()), {}), f"a Tensor in a tuple from compute_loss, expected {LOSS}"),
        ("compute_loss", [TERM, None], f"a NoneType in a list from compute_loss, expected {LOSS}"),
        ("compute_loss", iter([1.0]), f"a float in a list from compute_loss, expected {LOSS}"),
        ("batch_statistics", [TERM], "a LossTerm in a list from batch_statistics, expected a list of Metric or None"),
        ("batch_statistics", {"z": 1.0}, "a dict from batch_statistics, expected a list of Metric or None"),
        ("step_finished", "stop", "a str from step_finished, expected Stop or Adjust or None"),
    ],
)
def test_an_answer_that_the_rule_does_not_have_names_the_plugin(hook, answer, message):
    with pytest.raises(RunError, match=f"^{re.escape(f'extension:p0 gave {message}')}$"):
        manager(**{hook: lambda **_: answer}).one(hook, **arguments(hook))


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("keep_group", Drop("no")),
        ("keep_group", None),
        ("shape_rewards", None),
        ("loss_masks", torch.ones(2, 3, dtype=torch.bool)),
        ("importance_weights", torch.ones(2)),
        ("step_finished", Stop("enough")),
        ("compute_loss", ()),
        ("compute_loss", [TERM, Metric("m", 1.0)]),
        ("draw_tasks", np.array([0, 1])),
        ("load_tasks", [1, 2]),
    ],
)
def test_answers_of_the_rule_pass(hook, answer):
    assert manager(**{hook: lambda **_: answer}).one(hook, **arguments(hook)) is answer


WRONG = {
    "None": None,
    "text": "x",
    "number": 0.5,
    "dict": {"x": 1},
    "list": [1],
    "numpy": np.zeros((2, 3)),
    "scalar": torch.zeros(()),
    "tensor [2]": torch.zeros(2),
    "tensor [2, 3]": torch.zeros(2, 3),
    "tensor [3, 2]": torch.zeros(3, 2),
}
FIT = {
    **{
        hook: {"None"}
        for hook in (
            "needs",
            "around_pass",
            "keep_group",
            "loss_masks",
            "step_finished",
            "step_metrics",
            "compute_loss",
            "batch_statistics",
        )
    },
    "load_tasks": {"None", "list", "numpy", "tensor [2]", "tensor [2, 3]", "tensor [3, 2]"},
    "draw_tasks": {"list", "numpy", "tensor [2]", "tensor [2, 3]", "tensor [3, 2]"},
    "choose_role": {"None", "text"},
    "agent_run": {"list", "numpy", "tensor [2]", "tensor [2, 3]", "tensor [3, 2]"},
    "transform_rewards": {"tensor [2]"},
    "shape_rewards": {"None", "tensor [2, 3]"},
    "importance_weights": {"None", "tensor [2]", "tensor [2, 3]"},
    "prepare_batch": {"None", "dict"},
    "check_labels": {"None", "dict"},
    "state_dict": {"None", "dict"},
    "rewrite_prompts": {"None", "dict"},
    "rewrite_rows": {"None", "dict"},
    "auxiliary_rows": {"None"},
    "saved_config": {"None", "dict"},
}
"""What of these a hook may answer; what is in it is checked where it is used."""


@pytest.mark.parametrize("hook", [hook for hook, rule in RULES.items() if rule.gives])
def test_every_hook_is_named_with_what_it_should_have_given(hook):
    for kind, answer in WRONG.items():
        misfit = other_answer(RULES[hook], answer, {"experience": make_batch([2, 3], rewards=[1.0, 2.0])} | arguments(hook))
        assert (misfit is None) == (kind in FIT.get(hook, ())), (kind, misfit)
        assert misfit is None or all(misfit), (kind, misfit)


@pytest.mark.parametrize("hook", ["log_metrics", "state_dict", "compute_advantages", "step_finished"])
def test_a_hook_that_nobody_awaits_may_not_be_a_coroutine(hook):
    async def later(**_):
        raise AssertionError("never runs")

    with pytest.raises(RunError, match=f"extension:p0 gave a coroutine from {hook}, which is not awaited"):
        manager(**{hook: later}).one(hook, **arguments(hook))


def scale(experience=None, batch=None, **_):
    (experience or batch).sampler_logprobs.mul_(2)


def replace_it(experience=None, batch=None, **_):
    (experience or batch).sampler_logprobs = (experience or batch).sampler_logprobs * 2


@pytest.mark.parametrize("change", [scale, replace_it])
@pytest.mark.parametrize("hook", ["shape_rewards", "prepare_batch", "compute_loss"])
def test_a_tensor_that_others_use_may_not_be_changed(hook, change):
    with pytest.raises(RunError, match=f"extension:p0 changed sampler_logprobs in {hook}, which the other plugins"):
        manager(**{hook: change}).one(hook, **arguments(hook))


def test_a_generator_is_watched_to_its_end():
    def loss(batch, **_):
        yield Metric("seen", 1.0)
        batch.action_mask.zero_()

    with pytest.raises(RunError, match="extension:p0 changed action_mask in compute_loss"):
        manager(compute_loss=loss).one("compute_loss", **arguments("compute_loss"))


def test_the_weights_arguments_may_not_be_changed_and_the_rewards_may():
    change = manager(importance_weights=lambda logprobs, **_: logprobs.sampler.mul_(2))
    with pytest.raises(RunError, match="extension:p0 changed logprobs in importance_weights"):
        change.one("importance_weights", **arguments("importance_weights"))
    own, given = manager(transform_rewards=lambda rewards, **_: rewards.mul_(2)), arguments("transform_rewards")
    given["rewards"] = given["rewards"].clone()
    assert own.one("transform_rewards", **given).tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("hook", "name", "change"),
    [
        ("score", "trajectories", lambda trajectories, **_: trajectories.clear()),
        ("draw_tasks", "tasks", lambda tasks, **_: tasks.reverse() or [0]),
        ("log_metrics", "metrics", lambda metrics, **_: metrics.clear()),
        ("step_finished", "metrics", lambda metrics, **_: metrics.clear()),
    ],
)
def test_lists_and_dicts_are_each_plugin_s_own(hook, name, change):
    given = arguments(hook)
    before = given[name].copy()
    manager(**{hook: change}).one(hook, **given)
    assert given[name] == before


def interrupts(**_):
    raise KeyboardInterrupt


async def interrupts_later(**_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("hook", [interrupts, interrupts_later])
def test_a_keyboard_interrupt_of_a_plugin_is_a_failure_and_a_real_one_is_not(hook):
    plugins, failures = manager(score=hook), []

    def loop():
        try:
            asyncio.run(plugins.acall("extension:p0", "score", trajectories=[], context=None))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(20)
    plugins.close()
    (failure,) = failures
    assert isinstance(failure, RunError)
    assert str(failure) == "extension:p0 (made-up 1) failed in score: KeyboardInterrupt"
    with pytest.raises(KeyboardInterrupt):
        manager(log_metrics=interrupts).one("log_metrics", **arguments("log_metrics"))


def test_threads_whose_job_nobody_waits_for_are_replaced_up_to_a_limit():
    threads, release, begun = Threads(2), threading.Event(), threading.Barrier(3)

    def hang():
        begun.wait(20)
        release.wait(20)

    late = [threads.submit(hang) for _ in range(2)]
    begun.wait(20)
    late.append(threads.submit(hang))
    threads.abandon(late[2])
    assert late[2].cancelled(), "what has not begun does not begin"
    for job in late[:2]:
        threads.abandon(job)
    assert threads.submit(lambda: 7).result(timeout=20) == 7
    third = threads.submit(lambda: release.wait(20))
    assert threads.submit(lambda: 8).result(timeout=20) == 8
    with pytest.raises(RunError, match="3 calls of plugins still run after their deadline"):
        threads.abandon(third)
    release.set()
    threads.close()


def test_a_loss_term_is_made_of_a_tensor():
    with pytest.raises(TypeError, match="the values of 'x' are a float, not a tensor"):
        LossTerm("x", 1.0)


def test_hooks_whose_answers_are_used_have_a_rule_for_them():
    free = {hook for hook, rule in RULES.items() if not rule.gives}
    assert free == {
        *("check_run", "run_started", "run_finished", "agent_close", "adjust"),
        *("log_metrics", "log_trajectories", "load_state_dict"),
        "score",  # what it gets wrong leaves trajectories unjudged
    }


def test_work_in_a_thread_that_ends_with_stop_iteration_is_heard_of():
    """asyncio's futures have no room for it: who awaits one would wait for ever."""

    async def run():
        work = Threads(1).submit(lambda: next(iter(())))
        return await asyncio.wait_for(asyncio.wrap_future(work), 5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(run())
