"""Exceptions of a plugin's own that are no ``Exception``, and ``sys.exit``: failures of the plugin, in one line that names it."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel, field_validator

import rlhf_host
from rlhf_host import hookimpl
from rlhf_host.errors import PluginError, RunError, blaming
from rlhf_host.hookspecs import RULES
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager
from rlhf_host.plugins.options import parse_options
from rlhf_host.plugins.python_objects import describe, make_object


class Boom(BaseException):
    """Not an ``Exception``."""


def failing(hook, error, *, later=False):
    """A plugin whose hook raises."""

    def now(self):
        raise error("out\nof order")

    async def afterwards(self):
        raise error("out\nof order")

    hooks = {hook: hookimpl(specname=hook)(afterwards if later else now)}
    if hook == "state_dict":  # a run wants both
        hooks["load_state_dict"] = hookimpl(lambda self, state: None)
    return type("Plugin", (), hooks)()


def managed(plugin):
    return PluginManager(
        [Loaded("extension", "p0", PluginInfo("extension", "p0", "made-up", "1", "any", "ok", "", "m:X"), plugin)]
    )


@pytest.mark.parametrize("error", [Boom, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("hook", RULES)
def test_every_hook_is_named(hook, error):
    arguments = dict.fromkeys(arguments_of(hook))
    message = rf"^extension:p0 \(made-up 1\) failed in {hook}: {error.__name__}: out of order$"
    with pytest.raises(RunError, match=message):
        managed(failing(hook, error)).call("extension:p0", hook, **arguments)
    if RULES[hook].awaited or RULES[hook].threaded:
        for later in (False, True):
            plugins = managed(failing(hook, error, later=later))
            with pytest.raises(RunError, match=message):
                asyncio.run(plugins.acall("extension:p0", hook, **arguments))
            plugins.close()


def arguments_of(hook):
    import inspect

    from rlhf_host import hookspecs

    return list(inspect.signature(getattr(hookspecs, hook)).parameters)


def test_an_interrupt_of_the_main_thread_passes():
    with pytest.raises(KeyboardInterrupt):
        managed(failing("log_metrics", KeyboardInterrupt)).call("extension:p0", "log_metrics", step=1, metrics={})
    with pytest.raises(KeyboardInterrupt), blaming("engine mine", "start"):
        raise KeyboardInterrupt
    with pytest.raises(GeneratorExit), blaming("engine mine", "start"):
        raise GeneratorExit


def test_a_cancellation_passes_where_somebody_cancels():
    async def waits(self):
        await asyncio.Event().wait()

    hook = "agent_close"
    plugins = managed(type("Plugin", (), {hook: hookimpl(specname=hook)(waits)})())

    async def cancelled():
        call = asyncio.create_task(plugins.acall("extension:p0", hook, episode=None))
        await asyncio.sleep(0)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    plugins.close()


@pytest.mark.parametrize("error", [Boom, SystemExit])
def test_so_are_the_other_ways_into_a_plugin(error):
    class Refuses(BaseModel):
        size: int = 1

        @field_validator("size")
        @classmethod
        def check(cls, size):
            raise error("out\nof order")

    class Made:
        def __init__(self, options):
            raise error("out\nof order")

        @hookimpl
        def needs(self):
            return None

    message = rf"^engine mine failed in start: {error.__name__}: out of order$"
    with pytest.raises(RunError, match=message), blaming("engine mine", "start"):
        raise error("out\nof order")
    with pytest.raises(PluginError, match=f"building it failed: {error.__name__}: out of order$"):
        make_object(describe("extension", "mine", Made), Made, {})
    if error is Boom:  # pydantic gives others as they are
        with pytest.raises(PluginError, match=r"checking its options raised Boom: out of order$"):
            parse_options(Refuses, {"size": 2}, "extension 'mine'")


FUNCTIONS = """
import asyncio
import sys

class Boom(BaseException):
    pass

def now(text):
    raise Boom("out\\nof order")

async def later(text):
    raise Boom("out\\nof order")

def leaves(text):
    sys.exit("out\\nof order")

async def leaves_later(text):
    sys.exit("out\\nof order")

def of_trl(completions, **columns):
    raise Boom("out\\nof order")

async def of_verl(solution_str, ground_truth):
    sys.exit("out\\nof order")

async def interrupts(text):
    raise KeyboardInterrupt("out\\nof order")

def cancels(text):
    raise asyncio.CancelledError("out\\nof order")

async def cancels_later(text):
    raise asyncio.CancelledError("out\\nof order")

def ends_a_generator(text):
    raise GeneratorExit("out\\nof order")
"""
LEAVING = ("leaves", "leaves_later", "of_verl")
OTHERS = ("interrupts", "cancels", "cancels_later", "ends_a_generator")


@pytest.mark.parametrize("name", [*OTHERS, "now", "later", "leaves", "leaves_later", "of_trl", "of_verl"])
def test_a_function_of_a_file_ends_the_run_in_one_line(rlhf_here, small_run, tmp_path, name):
    (tmp_path / "judges.py").write_text(FUNCTIONS)
    flags = [f"{tmp_path}/judges.py:{name}" if flag == "vowels" else flag for flag in small_run]
    ended = rlhf_here(*flags, "--train.steps", "1", "--run-dir", tmp_path / "run")
    assert ended.exit_code == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("Error")]
    assert f"most often: {name}: " in line
    raised = {"interrupts": "KeyboardInterrupt", "ends_a_generator": "GeneratorExit"} | dict.fromkeys(LEAVING, "SystemExit")
    raised |= dict.fromkeys(("cancels", "cancels_later"), "CancelledError")
    assert f"{raised.get(name, 'Boom')}: out of order" in line
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "what", ['class Boom(BaseException): pass\nraise Boom("out\\nof order")', 'import sys\nsys.exit("out of order")']
)
def test_so_does_a_file_as_it_is_imported(rlhf_here, small_run, tmp_path, what):
    (tmp_path / "judges.py").write_text(what)
    flags = [f"{tmp_path}/judges.py:now" if flag == "vowels" else flag for flag in small_run]
    ended = rlhf_here(*flags, "--run-dir", tmp_path / "run")
    assert ended.exit_code == 2
    assert "out of order (importing a file runs it" in ended.stderr
    assert "Traceback" not in ended.stderr


IN_RUNS = {
    "agent_run": "agent",
    "compute_loss": "extensions",
    "keep_group": "extensions",
    "run_started": "trackers",
    "step_finished": "extensions",
    "state_dict": "extensions",
}


@pytest.mark.parametrize("hook", IN_RUNS)
def test_a_run_ends_by_the_plugin_s_failure(tiny_model, prompts, tmp_path, hook):
    plugin, kind = failing(hook, Boom), IN_RUNS[hook]
    chosen = {"algo": "rloo", "rewards": {"length": lambda text: float(len(text))}}
    chosen |= {kind: {"mine": plugin}} if kind in ("extensions", "trackers") else {kind: plugin}
    small = {"rollout": {"n": 2, "max_new_tokens": 4}, "kernels": "none", "train.steps": 1, "train.batch_size": 2}
    with pytest.raises(RunError, match=f"(failed in {hook}|mine|python object).*: Boom: out of order"):
        rlhf_host.train(
            **chosen, model=tiny_model, data=prompts, run_dir=str(tmp_path / "run"), **small, **{"train.threads": 1}
        )
