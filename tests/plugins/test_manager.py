"""One manager per run: each plugin is called on its own, and named in what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_host import EpisodeFailed, Needs, PluginError, RunError, Step, UserError, hookimpl
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import HookFailed, Loaded, PluginManager


def manager(**plugins):
    """``reward_a=plugin`` is the plugin ``reward:a`` of distribution ``dist-a``."""
    loaded = []
    for name, plugin in plugins.items():
        kind, _, alias = name.partition("_")
        info = PluginInfo(kind, alias, f"dist-{alias}", "1.0", ">=0.10,<0.11", "ok", "", "m:X")
        loaded.append(Loaded(kind, alias, info, plugin))
    return PluginManager(loaded)


def refuses(message):
    return pytest.raises(PluginError, match=f"^{re.escape(message)}$")


class Scores:
    def __init__(self, result):
        self.result = result

    @hookimpl
    def score(self, trajectories):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


GIVEN = {"trajectories": [], "context": None}


# --- calling ------------------------------------------------------------------------------------


def test_each_plugin_answers_under_its_key_in_selection_order():
    plugins = manager(reward_b=Scores([1.0]), reward_a=Scores([2.0]), reward_silent=Scores(None), algo_other=object())
    assert plugins.names("score") == ["reward:b", "reward:a", "reward:silent"]
    assert plugins.each("score", **GIVEN) == [("reward:b", [1.0]), ("reward:a", [2.0])]
    assert plugins.call("reward:a", "score", **GIVEN) == [2.0]
    assert plugins.call("reward:silent", "score", **GIVEN) is None
    assert plugins.call("algo:other", "score", **GIVEN) is None


def test_calls_can_be_limited_to_a_kind():
    plugins = manager(reward_a=Scores([1.0]), agent_b=Scores([2.0]))
    assert plugins.names("score", "agent") == ["agent:b"]
    assert plugins.each("score", "reward", **GIVEN) == [("reward:a", [1.0])]
    assert plugins.one("score", "agent", **GIVEN) == [2.0]


def test_a_failing_plugin_leaves_the_others_their_turn():
    plugins = manager(reward_a=Scores(ValueError("no\nway")), reward_b=Scores([2.0]))
    with pytest.raises(HookFailed) as failure:
        plugins.call("reward:a", "score", **GIVEN)
    assert str(failure.value) == "reward:a (dist-a 1.0) failed in score: ValueError: no way"
    assert (failure.value.key, failure.value.distribution, failure.value.hook) == ("reward:a", "dist-a", "score")
    assert isinstance(failure.value, RunError)
    assert isinstance(failure.value.__cause__, ValueError)
    assert plugins.call("reward:b", "score", **GIVEN) == [2.0]


def test_a_failed_episode_passes_and_bad_input_stays_bad_input():
    plugins = manager(reward_a=Scores(EpisodeFailed("sandbox gone", retryable=True)), reward_b=Scores(UserError("no key set")))
    with pytest.raises(EpisodeFailed) as failure:
        plugins.call("reward:a", "score", **GIVEN)
    assert failure.value.retryable
    with refuses("reward:b (dist-b 1.0): no key set"):
        plugins.call("reward:b", "score", **GIVEN)


def test_an_implementation_names_only_the_arguments_it_wants():
    class Steps:
        @hookimpl
        def log_metrics(self, step):
            return step

    assert manager(tracker_a=Steps()).one("log_metrics", step=3, metrics={}) == 3


def test_one_is_none_without_an_implementation_and_refuses_to_pick():
    assert manager().one("compute_advantages", experience=None) is None
    with refuses("reward:a and reward:b implement score; this call is for one"):
        manager(reward_a=Scores(1), reward_b=Scores(2)).one("score", **GIVEN)


def test_needs_are_asked_once_and_of_plugins_that_join_later_too():
    class Asked:
        def __init__(self, needs):
            self.answers = [needs]

        @hookimpl
        def needs(self):
            return self.answers.pop()

    plugins = manager(algo_a=Asked(Needs(rewards=False)), reward_without=Asked(None))
    assert plugins.needs() == plugins.needs() == {"algo:a": Needs(rewards=False)}
    plugins.add(*manager(extension_late=Asked(Needs())).loaded)
    assert plugins.needs() == {"algo:a": Needs(rewards=False), "extension:late": Needs()}


def test_equal_and_unhashable_plugins_are_still_two():
    @dataclasses.dataclass
    class Constant:
        value: float

        @hookimpl
        def score(self):
            return [self.value]

    plugins = manager(reward_a=Constant(1.0), reward_b=Constant(1.0))
    assert plugins.each("score", **GIVEN) == [("reward:a", [1.0]), ("reward:b", [1.0])]


def test_functions_of_any_binding_and_other_names_are_hooks():
    class Odd:
        @staticmethod
        @hookimpl
        def load_tasks():
            return ["static"]

        @classmethod
        @hookimpl
        def state_dict(cls):
            return {"class": cls.__name__}

        @hookimpl(specname="keep_group")
        def filter(self, group):
            return group == "g"

        @property
        def score(self):
            raise AssertionError("a property is not a hook and is not run")

    plugins = manager(extension_a=Odd())
    assert plugins.hooks("extension:a") == ["load_tasks", "keep_group", "state_dict"]
    assert plugins.one("load_tasks", split="train", seed=0) == ["static"]
    assert plugins.one("state_dict") == {"class": "Odd"}
    assert plugins.one("keep_group", group="g") is True


# --- wrappers -----------------------------------------------------------------------------------


class Doubles:
    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def score(self, trajectories):
        results = yield
        self.seen.append(results)
        return [[2 * value for value in result] for result in results]


def test_wrappers_of_the_selected_plugins_wrap_every_single_call():
    doubles = Doubles()
    plugins = manager(reward_a=Scores([1.0]), extension_d=doubles, reward_b=Scores([2.0]), reward_none=Scores(None))
    assert plugins.names("score") == ["reward:a", "reward:b", "reward:none"]
    assert plugins.each("score", **GIVEN) == [("reward:a", [2.0]), ("reward:b", [4.0])]
    assert doubles.seen == [[[1.0]], [[2.0]], []]
    assert plugins.hooks("extension:d") == ["score"]


def test_a_plugin_may_implement_a_hook_and_wrap_the_others():
    class Both(Scores):
        @hookimpl(wrapper=True, specname="score")
        def around(self, trajectories):
            results = yield
            return [[*result, "wrapped"] for result in results]

    plugins = manager(reward_a=Scores([1.0]), reward_b=Both([2.0]))
    assert plugins.each("score", **GIVEN) == [("reward:a", [1.0, "wrapped"]), ("reward:b", [2.0, "wrapped"])]


def test_old_style_wrappers_wrap_too():
    class Old:
        @hookimpl(hookwrapper=True)
        def score(self, trajectories):
            outcome = yield
            outcome.force_result([[0.0]])

    assert manager(reward_a=Scores([1.0]), extension_o=Old()).one("score", **GIVEN) == [0.0]


def test_a_failing_wrapper_is_the_one_named():
    class Fails:
        @hookimpl(wrapper=True)
        def score(self, trajectories):
            yield
            raise KeyError("mine")

    class Watches:
        @hookimpl(wrapper=True)
        def score(self, trajectories):
            return (yield)

    plugins = manager(reward_a=Scores([1.0]), extension_f=Fails(), extension_w=Watches())
    with pytest.raises(HookFailed, match=re.escape("extension:f (dist-f 1.0) failed in score: KeyError: 'mine'")):
        plugins.call("reward:a", "score", **GIVEN)
    plugins = manager(reward_a=Scores(ValueError("his")), extension_w=Watches())
    with pytest.raises(HookFailed, match=re.escape("reward:a (dist-a 1.0) failed in score: ValueError: his")):
        plugins.call("reward:a", "score", **GIVEN)


def test_a_wrapper_that_forgets_the_list_is_told():
    class Forgets:
        @hookimpl(wrapper=True)
        def score(self, trajectories):
            yield
            return 3.0

    with pytest.raises(HookFailed, match="a wrapper of score returned float instead of the list its yield gave"):
        manager(reward_a=Scores([1.0]), extension_f=Forgets()).call("reward:a", "score", **GIVEN)


# --- refused at once ----------------------------------------------------------------------------


def test_a_hook_that_does_not_exist_gets_its_near_match():
    class Typo:
        @hookimpl
        def compute_advantage(self, experience): ...

    with refuses("algo:a (dist-a 1.0) implements 'compute_advantage', which is not a hook; did you mean 'compute_advantages'?"):
        manager(algo_a=Typo())


def test_an_optional_hook_may_be_unknown():
    class Later:
        @hookimpl(optionalhook=True)
        def hook_of_the_next_version(self): ...

    assert manager(algo_a=Later()).hooks("algo:a") == []


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("trajectory", "; did you mean 'trajectories'? (it has trajectories, context)"),
        ("zzz", " (it has trajectories, context)"),
    ],
)
def test_an_argument_the_hook_does_not_have_is_named(argument, hint):
    plugin = type("Wrong", (), {})
    exec(f"def score(self, {argument}): ...", scope := {})
    plugin.score = hookimpl(scope["score"])
    with refuses(f"reward:a (dist-a 1.0): score() takes {argument!r}, which is no argument of score{hint}"):
        manager(reward_a=plugin())


def test_plugins_that_join_later_are_called_after_the_others_and_alone():
    class Adds:
        def __init__(self, value):
            self.value = value

        @hookimpl
        def load_tasks(self):
            return self.value

    found = manager(extension_a=Adds([1]))
    assert found.call("extension:a", "load_tasks", split="train", seed=0) == [1]
    other = manager(extension_b=Adds([2])).loaded[0]
    found.add(other)
    assert found.call("extension:a", "load_tasks", split="train", seed=0) == [1]
    assert found.each("load_tasks", split="train", seed=0) == [("extension:a", [1]), ("extension:b", [2])]
    assert found.loaded[1] is other
    with pytest.raises(PluginError, match="two plugins are called extension:b"):
        found.add(other)


def test_a_hook_implemented_twice_in_one_plugin_is_refused():
    class Twice(Scores):
        @hookimpl(specname="score")
        def judge(self): ...

    with pytest.raises(PluginError, match="implements score twice"):
        manager(reward_a=Twice(1))


def test_a_wrapper_that_does_not_yield_is_refused():
    class NoYield:
        @hookimpl(wrapper=True)
        def score(self, trajectories):
            return []

    with pytest.raises(PluginError, match=r"reward:a \(dist-a 1.0\): .*generator function"):
        manager(reward_a=NoYield())


class Advantages:
    @hookimpl
    def compute_advantages(self, experience): ...


def test_two_implementations_of_a_hook_for_one_are_refused_naming_both():
    with refuses(
        "algo:a (dist-a 1.0) and extension:b (dist-b 1.0) both implement compute_advantages, and a run has one; leave one out"
    ):
        manager(algo_a=Advantages(), extension_b=Advantages())


def test_a_wrapper_does_not_count_as_an_implementation():
    class Around:
        @hookimpl(wrapper=True)
        def compute_advantages(self, experience):
            return (yield)

    assert manager(algo_a=Advantages(), extension_b=Around()).names("compute_advantages") == ["algo:a"]


class Agent:
    @hookimpl
    def agent_step(self, episode, action):
        return Step(threading.current_thread().name)


class Loop:
    @hookimpl
    async def agent_run(self, episode, policy):
        await asyncio.sleep(0)
        return [threading.current_thread().name]


def test_several_agents_may_be_selected_but_nothing_else_may_play_beside_one():
    assert manager(agent_a=Agent(), agent_b=Agent()).names("agent_step") == ["agent:a", "agent:b"]
    assert manager(extension_a=Agent()).names("agent_step") == ["extension:a"]
    with pytest.raises(PluginError, match=r"extension:b \(dist-b 1.0\) and agent:a \(dist-a 1.0\) both play episodes"):
        manager(agent_a=Agent(), extension_b=Loop())


def test_two_plugins_with_one_alias_are_refused():
    one = manager(reward_a=Scores(1)).loaded[0]
    with refuses("two plugins are called reward:a; give one an alias: ALIAS=a"):
        PluginManager([one, dataclasses.replace(one, plugin=Scores(2))])


# --- threads and awaiting -----------------------------------------------------------------------


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_synchronous_agent_and_score_hooks_run_in_threads_and_the_loop_stays_free():
    arrived = threading.Barrier(8, timeout=10)  # passes only when eight run at once

    class Meets:
        @hookimpl
        def score(self, trajectories):
            arrived.wait()
            return [threading.current_thread() is not threading.main_thread()]

    plugins = manager(reward_a=Meets(), agent_b=Agent())

    async def many():
        return await asyncio.gather(*(plugins.acall("reward:a", "score", **GIVEN) for _ in range(8)))

    assert run(many()) == [[True]] * 8
    (agent,) = plugins.names("agent_step")
    assert run(plugins.acall(agent, "agent_step", episode=None, action=None)).observation.startswith("rlhf-hook-")
    plugins.close()


def test_coroutines_run_on_the_loop_and_other_hooks_too():
    class Starts:
        @hookimpl
        def run_started(self, context):
            return self.later()

        async def later(self):
            return threading.current_thread().name

        @hookimpl
        def run_finished(self, outcome):
            return threading.current_thread().name

    plugins = manager(agent_a=Loop(), extension_b=Starts())
    here = threading.current_thread().name
    assert run(plugins.acall(plugins.names("agent_run")[0], "agent_run", episode=None, policy=None)) == [here]
    assert run(plugins.acall(plugins.names("run_started")[0], "run_started", context=None)) == here
    assert run(plugins.acall(plugins.names("run_finished")[0], "run_finished", outcome=None)) == here
    assert run(plugins.acall("extension:b", "agent_close", episode=None)) is None


@pytest.mark.parametrize("way", ["coroutine", "thread", "coroutine from a thread"])
def test_what_an_awaited_hook_raises_names_the_plugin(way):
    async def fails():
        raise ValueError("no")

    class Fails:
        if way == "coroutine":

            @hookimpl
            async def score(self, trajectories):
                await fails()

        else:

            @hookimpl
            def score(self, trajectories):
                if way == "thread":
                    raise ValueError("no")
                return fails()

    with pytest.raises(HookFailed, match=re.escape("reward:a (dist-a 1.0) failed in score: ValueError: no")):
        run(manager(reward_a=Fails()).acall("reward:a", "score", **GIVEN))


def test_a_deadline_on_a_hanging_thread_returns():
    released, ended = threading.Event(), []

    class Hangs:
        @hookimpl
        def score(self, trajectories):
            released.wait(30)
            ended.append(True)

    async def bounded():
        await asyncio.wait_for(manager(reward_a=Hangs()).acall("reward:a", "score", **GIVEN), 0.05)

    with pytest.raises(TimeoutError):
        run(bounded())
    assert not ended
    released.set()


def test_a_hook_that_hangs_for_ever_does_not_keep_the_process_alive():
    program = (
        "import time; from rlhf_host.plugins.threads import Threads\n"
        "threads = Threads(1); threads.submit(lambda: time.sleep(600)); threads.close(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "done\n"


def test_the_manager_is_usable_from_any_thread():
    plugins = manager(**{f"reward_r{n}": Scores([n]) for n in range(5)}, extension_d=Doubles())
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: plugins.each("score", **GIVEN), range(200)))
    assert results == [[(f"reward:r{n}", [2 * n]) for n in range(5)]] * 200


def test_two_managers_know_nothing_of_each_other():
    first, second = manager(reward_a=Scores([1.0])), manager(reward_a=Scores([2.0]), reward_b=Scores([3.0]))
    assert first.each("score", **GIVEN) == [("reward:a", [1.0])]
    assert second.each("score", **GIVEN) == [("reward:a", [2.0]), ("reward:b", [3.0])]
