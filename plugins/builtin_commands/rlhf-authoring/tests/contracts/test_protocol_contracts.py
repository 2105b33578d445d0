"""The contracts of engines, backends and runtimes against plugins that break each rule on purpose: the templates' own, changed."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rlhf_authoring import run_contract
from rlhf_authoring.commands.new import write_project
from rlhf_authoring.contracts import runtime, traces
from rlhf_authoring.contracts.generators import close_shared
from rlhf_authoring.contracts.subject import Subject
from rlhf_authoring.contracts.suite import all_checks, run_check

KINDS = ("engine", "backend", "runtime")


@functools.cache
def template(kind: str) -> str:
    """Returns what ``rlhf plugins new`` writes, of the class ``Plugin``."""
    with tempfile.TemporaryDirectory() as folder:
        project, _ = write_project(kind, "plugin", Path(folder), {})
        return (project / "src/rlhf_plugin_plugin/__init__.py").read_text()


@dataclass(frozen=True)
class Breaks:
    """The template's plugin with ``old`` replaced by ``new`` breaks the rule ``check``."""

    check: str
    kind: str
    old: str
    new: str
    settings: dict = field(default_factory=dict)

    @property
    def source(self) -> str:
        source = template(self.kind)
        assert self.old in source, f"{self.check}: the old text is not in the template"
        return source.replace(self.old, self.new)


def engine(check, old, new, **settings):
    return Breaks(check, "engine", old, new, settings)


def backend(check, old, new):
    return Breaks(check, "backend", old, new)


def runtime_(check, old, new):
    return Breaks(check, "runtime", old, new)


TABLE = [
    # --- engines --------------------------------------------------------------------------------
    engine(
        "traits_say_what_the_engine_does",
        "        return Sampler(self.options, start)",
        "        import threading\n        threading.Thread(target=threading.Event().wait, args=(9,), daemon=True).start()\n"
        "        return Sampler(self.options, start)",
    ),
    engine(
        "traits_say_what_the_engine_does",
        "        async with self._room:",
        "        await asyncio.sleep(30)\n        async with self._room:",
        deadline_s=1.0,
    ),
    engine("tokens_follow_from_the_key_alone", "random.Random(repr((*request.key, len(answer.token_ids))))", "random"),
    engine("logprobs_are_the_models", "return token, float(logprobs[token])", "return token, float(logprobs[token]) - 0.01"),
    engine("logprobs_are_the_models", "return int(logits.argmax()), 0.0", "return int(logits.argmin()), 0.0"),
    engine("truncated_sampling_is_renormalised", "if sampling.top_p < 1:", "if False:"),
    engine(
        "completions_end_where_they_should",
        "min(sampling.max_new_tokens, self.context_length - len(token_ids))",
        "sampling.max_new_tokens",
        deadline_s=5.0,
    ),
    engine("completions_end_where_they_should", 'answer.finish_reason = "stop"', "answer.token_ids[-1:] = []"),
    engine(
        "what_cannot_be_served_is_refused",
        "        request = Request(",
        "        if sampling.max_new_tokens < 1:\n            raise RunError(str(sampling))\n        request = Request(",
    ),
    engine("what_cannot_be_served_is_refused", "        check_request(", "        dict("),
    engine(
        "cancelling_ends_one_request",
        "            while len(answer",
        "            task = asyncio.current_task()\n"
        "            task.add_done_callback(lambda done: self.__dict__.update(_closed=done.cancelled()))\n"
        "            while len(answer",
    ),
    engine("sleeping_is_undone", '"""Undo ``sleep``."""', "self.version += 1"),
    engine(
        "weights_come_into_an_engine_that_sleeps_without_them",
        '"""Undo ``sleep``."""',
        '"""Undo ``sleep``."""\n\n    async def sleep_empty(self) -> None:\n        pass\n\n'
        "    async def wake_weights(self) -> None:\n        pass",
    ),
    engine("loads_replace_the_weights", "copy_weights(self.model, buckets)", "list(buckets)"),
    engine("loads_replace_the_weights", "        self.version = version\n\n    def _require", "\n    def _require"),
    engine(
        "shared_weights_change_in_place",
        "self.model: Any = start.model",
        "import copy\n\n        self.model: Any = copy.deepcopy(start.model)",
    ),
    engine("without_weights_it_refuses", "        self.version = -1\n        copy_weights", "        copy_weights"),
    engine("without_weights_it_refuses", "if self.version < 0:", "if self.version < -1:"),
    engine(
        "closing_leaves_nothing", "        self._closed = True", "        assert not self._closed\n        self._closed = True"
    ),
    engine(
        "closing_leaves_nothing",
        "        self._closed = True",
        "        self._closed = True\n        import threading\n\n"
        "        threading.Thread(target=threading.Event().wait, args=(2,), daemon=True).start()",
    ),
    engine(
        "a_start_that_fails_leaves_nothing",
        "        return Sampler(self.options, start)\n",
        "        import transformers\n\n        transformers.AutoModelForCausalLM.from_pretrained(start.model)\n",
        takes_a_directory=True,
    ),
    # --- backends -------------------------------------------------------------------------------
    backend(
        "traits_are_constant",
        "    traits = BackendTraits()",
        "    reads = 0\n\n    @property\n    def traits(self):\n        type(self).reads += 1\n"
        "        return BackendTraits(parts=self.reads)",
    ),
    backend("the_gradient_is_torchs", "StepResult(float(norm), rate, applied=True)", "StepResult(0.01, rate, applied=True)"),
    backend("the_gradient_is_torchs", 'group["lr"] = rate', 'group["lr"] = rate\n            group["maximize"] = True'),
    backend("passes_add_up", "loss.backward()", "(loss if last else 0 * loss).backward()"),
    backend("ranks_step_as_one", "self.ranks.sum_([weight.grad for weight in self.weights_])", "pass"),
    backend("steps_follow_the_schedule", "learning_rate(self.role, self.updates, self.total_updates, self.lr)", "self.lr"),
    backend("steps_follow_the_schedule", "self.total_updates, self.lr)", "self.total_updates, self.role.peak_lr)"),
    backend("steps_that_are_not_finite_are_refused", "if not math.isfinite(float(norm)):", "if False:"),
    backend("steps_that_are_not_finite_are_refused", "            self.discard()\n            return", "            return"),
    backend("discarded_gradients_are_forgotten", "        self.optimizer.zero_grad()", "        self.updates += 0"),
    backend("optimizer_state_survives_a_checkpoint", 'self.updates = state["updates"]', "pass"),
    backend("optimizer_state_survives_a_checkpoint", "raise UserError(", "return print("),
    backend("optimizer_state_survives_a_checkpoint", "            torch.save(", "            return lambda: torch.save("),
    backend("weights_have_every_name", "named_weights(self.model)", "list(named_weights(self.model))[1:]"),
    backend("offloading_is_undone", '"""Nothing is moved."""', "self.optimizer.state.clear()"),
    backend(
        "what_is_away_is_saved_as_it_is",
        '"""Nothing is moved."""',
        "kept = [weight.data for weight in self.weights_]\n"
        "        for weight in self.weights_:\n            weight.data = 0 * weight.data\n"
        "        self.reload = lambda: [setattr(*each) for each in zip(self.weights_, ['data'] * len(kept), kept)]",
    ),
    # --- runtimes -------------------------------------------------------------------------------
    runtime_("traits_and_description_come_first", '["roles and engine in this process, each with its own weights"]', "[]"),
    runtime_(
        "a_role_that_cannot_be_loaded_leaves_nothing",
        "        except BaseException:\n",
        "        except BaseException as error:\n            raise RuntimeError from error\n",
    ),
    runtime_(
        "trainers_compute_as_one_process_does",
        "self.home.do(partial(self.worker.outputs, role, what, batch))",
        "self.home.do(partial(self.worker.outputs, role, what, batch)).flip(0)",
    ),
    runtime_(
        "failures_of_a_plugin_name_it",
        "        return self.home.do(partial(self.worker.update, batch, sampled_now=sampled_now))",
        "        try:\n            return self.home.do(partial(self.worker.update, batch, sampled_now=sampled_now))\n"
        "        except Exception:\n            return Update({}, 'failed')",
    ),
    runtime_(
        "syncs_bring_the_trainers_weights",
        "await self.bring(self.targets, self.source, version)",
        "self.engine.set_version(version)",
    ),
    runtime_(
        "requests_are_cancelled_one_by_one",
        "        self.trainer = Trainer(self)",
        "        import asyncio\n\n        generate = self.engine.generate\n\n        async def ask(*request):\n"
        "            try:\n                return await generate(*request)\n            except asyncio.CancelledError:\n"
        "                await self.close()\n                raise\n\n        self.engine.generate = ask\n"
        "        self.trainer = Trainer(self)",
    ),
    runtime_("state_comes_back", "self.do(partial(self.roles.save_state, directory))", "pass"),
    runtime_("closing_fails_what_waits", "        self.sampling.close()\n\n\n", "        del self.sampling\n\n\n"),
    runtime_(
        "three_steps_are_the_local_runtimes",
        "        return self.home.do(partial(self.worker.update",
        "        batch.advantages = 2 * batch.advantages\n        return self.home.do(partial(self.worker.update",
    ),
]


@pytest.fixture(autouse=True)
def no_shared_rigs(monkeypatch):
    monkeypatch.setattr(traces, "PATIENCE_S", 0.5)
    monkeypatch.setattr(runtime, "WAIT_S", 60.0)
    yield
    close_shared()


@pytest.mark.parametrize("kind", KINDS)
def test_the_templates_pass_every_check(kind, install):
    install(kind, template(kind), distribution=f"made-up-{kind}")
    results = run_contract(kind, "made_up")
    assert [result for result in results if not result.passed] == []
    assert len(results) >= 15


@pytest.mark.parametrize("case", TABLE, ids=[f"{case.check}-{number}" for number, case in enumerate(TABLE)])
def test_each_check_reports_the_plugin_that_breaks_it(case, install):
    source, settings = case.source, dict(case.settings)
    if settings.pop("takes_a_directory", False):
        source = source.replace('takes="module"', 'takes="directory"')
    install(case.kind, source, distribution=f"made-up-{case.kind}")
    (check,) = [check for check in all_checks((case.kind,)) if check.name == case.check]
    result = run_check(check, Subject(case.kind, "made_up", **settings))
    assert result.passed is False
    assert result.message


def test_every_check_is_broken_by_some_plugin():
    assert {case.check for case in TABLE} == {check.name for check in all_checks(KINDS)}
