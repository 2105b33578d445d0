"""Checks of engines: what is sampled follows from weights and key alone, under the version that the weights have."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_authoring.contracts import generators
from rlhf_authoring.contracts.generators import PROMPTS, close_shared, shared
from rlhf_authoring.contracts.subject import Broken, Subject, check, expect
from rlhf_authoring.contracts.traces import leaves_nothing
from rlhf_authoring.models import SYMBOLS, write_tiny_model
from rlhf_host import RunError, Sampling, UserError
from rlhf_host.internals import Inline, OneThread, PlainKernels, beyond, in_buckets, named_weights
from rlhf_host.models import quiet_transformers
from rlhf_host.protocols import NO_WEIGHTS, Bucket, Buckets, Engine, EngineStart, EngineTraits, Loader, WakesInParts
from rlhf_host.sampling import unpack_tokens

GAP = {True: 1e-4, False: 0.2}
"""Nats that log-probabilities may differ from the model's own, where the engine is exact and where it is not."""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Directories: of a tiny model (``whole``), of one without weights (``bare``), and an empty one (``empty``).

    Heads are 32 wide, as paged attention on CPUs wants them, and no token ends a completion, so that lengths are known.
    """
    folder = tempfile.TemporaryDirectory(prefix="rlhf-contract-")
    whole, bare, empty = (Path(folder.name, name) for name in ("whole", "bare", "empty"))
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(write_tiny_model(whole, hidden=128))
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(whole, eos_token=None).save_pretrained(whole)
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    empty.mkdir()
    return folder


class Rig(generators.Rig):
    """An engine with the weights of ``model``; ``own`` is the module that it samples from, where it takes one."""

    def __init__(self, subject: Subject, version: int = 0, *, debug: bool = False):
        whole = Path(_folder().name, "whole")
        with quiet_transformers():
            self.model, self.own = (AutoModelForCausalLM.from_pretrained(whole).requires_grad_(False) for _ in range(2))
        self._compute = Inline() if debug else OneThread(1)
        self.engine = _start(subject, self.own, "bare" if version == NO_WEIGHTS else "whole", version, self._compute)
        super().__init__(self.engine, self._end, subject.deadline_s)

    async def _end(self) -> None:
        await self.engine.close()
        self._compute.close()

    def load(self, version: int, failure: str = "") -> None:
        """Bring the model's weights, as a sync does. ``failure``: ``break off`` midway, or ``leave out`` a weight."""
        with tempfile.TemporaryDirectory() as folder:
            torch.save(list(named_weights(self.model)), file := Path(folder, "weights.pt"))
            results = self.wait(self.engine.run(f"{__name__}:load", file=str(file), version=version, failure=failure), "run")
        ranks = [list(result) for result in results] if isinstance(results, list) else results
        expected = [[rank, len(ranks)] for rank in range(len(ranks))] if isinstance(ranks, list) else None
        expect(
            ranks == expected, f"run returned {results!r}: a list with the result of each process that holds weights, by rank"
        )

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """``[T, V]`` of what may stand in each place of the completion, by the model's own pass over the whole row."""
        logits = self.model(input_ids=torch.tensor([[*ids, *completion]]), use_cache=False).logits[0, len(ids) - 1 : -1]
        return (logits.double() / temperature).log_softmax(-1)

    def expect_the_models(self, version: int, when: str, temperature: float = 1.0) -> None:
        """Completions carry the version, and have the model's log-probabilities."""
        for ids, one in zip(PROMPTS, self.sample(sampling=Sampling(12, temperature)), strict=True):
            own = self.logprobs(ids, one.token_ids, temperature).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            gap = float((own - torch.tensor(one.logprobs)).abs().max())
            most = GAP[self.engine.exact]
            expect(gap <= most, f"{when} its log-probabilities are {beyond(gap, most)} nats from the model's")
            expect(set(one.versions) <= {version}, f"{when} tokens carry the versions {sorted(set(one.versions))}")


def _start(subject: Subject, module: Any, directory: str, version: int, compute: OneThread | Inline) -> Engine:
    plugin, folder = subject.build(), Path(_folder().name)
    start = EngineStart(
        model=module if plugin.traits.takes == "module" else folder / directory,
        tokenizer=AutoTokenizer.from_pretrained(folder / "whole"),
        version=version,
        compute=compute,
        kernels=PlainKernels(),
    )
    try:
        return plugin.start(start)
    except BaseException:
        compute.close()
        raise


def _change(*models: Any) -> None:
    """Weights move, by more than rounding."""
    for model in models:
        random = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.data += 0.05 * torch.randn(weight.shape, generator=random)


def load(loader: Loader, file: str, version: int, failure: str) -> tuple[int, int]:
    """Runs beside the engine's weights. Returns the process's number among those that hold them, and theirs."""
    weights: list[tuple[str, torch.Tensor]] = torch.load(file, weights_only=True)
    buckets = in_buckets(weights[1:] if failure == "leave out" else weights, 16 * 1024)
    loader.load(_broken_off(buckets) if failure == "break off" else buckets, version)
    return loader.rank, loader.size


def _broken_off(buckets: Buckets) -> Iterator[Bucket]:
    yield next(buckets)
    raise ConnectionError("the trainer is gone")


@check()
def traits_say_what_the_engine_does(subject: Subject) -> None:
    """Traits are the same at each look. Without ``waves`` no request waits for others; with ``debug`` no thread is started."""
    traits = subject.traits(EngineTraits)
    if not traits.waves:
        try:
            shared(subject, Rig).sample(PROMPTS[:1], expected=1000)
        except Broken as error:
            raise Broken("a request waits for others that may still come; say so with the trait waves=True") from error
    if traits.debug:
        close_shared()
        _folder()
        before = set(threading.enumerate())
        rig = Rig(subject, debug=True)
        rig.sample()
        started = {thread.name for thread in set(threading.enumerate()) - before} - {"rlhf-contract"}
        rig.close()
        expect(not started, f"it computes in {', '.join(started)}, where no debugger can follow; say so with debug=False")


@check()
def tokens_follow_from_the_key_alone(subject: Subject) -> None:
    """A request gets the same tokens alone, beside others and again; requests with other keys get others."""
    rig = shared(subject, Rig)
    together, again, (alone,) = rig.sample(), rig.sample(), rig.sample(PROMPTS[:1])
    expect(again == together, "the same requests get other completions the second time")
    expect(alone.token_ids == together[0].token_ids, "a request alone gets other tokens than beside others")
    expect(together[0].token_ids != together[2].token_ids, "two samples of one prompt, under other keys, are the same")


@check()
def logprobs_are_the_models(subject: Subject) -> None:
    """Log-probabilities are those of the distribution that tokens were drawn from: at any temperature, and 0 for greedy tokens."""
    rig = shared(subject, Rig)
    for temperature in (1.0, 0.5):
        rig.expect_the_models(rig.engine.version, f"at temperature {temperature}", temperature)
    for ids, one in zip(PROMPTS, rig.sample(sampling=Sampling(12, 0.0)), strict=True):
        best = rig.logprobs(ids, one.token_ids).argmax(-1).tolist() == one.token_ids or not rig.engine.exact
        expect(best and not any(one.logprobs), "greedy tokens are not the likeliest, or have log-probabilities other than 0")


@check()
def truncated_sampling_is_renormalised(subject: Subject) -> None:
    """With top-k, top-p or min-p only what is left is drawn, with log-probabilities over that; or the request is refused. An engine
    whose traits say ``support`` tells what is left.
    """
    rig = shared(subject, Rig)
    for name, value in (("top_k", 3), ("top_p", 0.3), ("min_p", 0.5)):
        tells = subject.build().traits.support >= (3 if name == "top_k" else 2**31 - 1)
        sampling = Sampling(12, support=tells, **{name: value})  # type: ignore[arg-type]
        if isinstance(rig.refusal(sampling=sampling), UserError):
            continue
        (one,) = rig.sample(PROMPTS[:1], sampling)
        places = slice(len(PROMPTS[0]) - 1, None)
        sets = [unpack_tokens(each) for each in one.traces["support"][places]] if tells else [None] * len(one.token_ids)
        rows = zip(rig.logprobs(PROMPTS[0], one.token_ids).exp(), one.token_ids, one.logprobs, sets, strict=True)
        for row, token, logprob, own in rows:
            best = row.sort(descending=True).values
            counts = {"top_k": 3, "top_p": int((best.cumsum(0) < 0.3).sum()) + 1, "min_p": int((best >= 0.5 * best[0]).sum())}
            count = counts[name]
            drawable = float(row[token]) >= float(best[count - 1]) - 1e-6
            close = abs(float((row[token] / best[:count].sum()).log()) - logprob) <= GAP[rig.engine.exact]
            expect(drawable and close, f"with {name}={value} a token was drawn as if others could have been")
            if own is not None:
                left = set(own.tolist()) == set(row.topk(count).indices.tolist()) or not rig.engine.exact
                expect(
                    left and token in own,
                    f"with {name}={value} it tells {len(own)} tokens that could be drawn, not these {count}",
                )


@check()
def completions_end_where_they_should(subject: Subject) -> None:
    """At ``max_new_tokens``, at the engine's context length, or after a stop token, which is kept; and the reason says which."""
    rig = shared(subject, Rig)
    stops = tuple(range(3, len(SYMBOLS), 7))
    for one in rig.sample(sampling=Sampling(60, stop_token_ids=stops)):
        stopped = [place for place, token in enumerate(one.token_ids) if token in stops]
        if one.finish_reason == "stop":
            expect(stopped == [len(one.token_ids) - 1], "a stop token is not the last of its completion, or was taken off")
        else:
            expect(not stopped and len(one.token_ids) == 60, f"a completion ended for {one.finish_reason!r} at no limit")
        expect(len(one.logprobs) == len(one.versions) == len(one.token_ids), "each token has a log-probability and a version")
    if rig.engine.context_length is not None:
        (last,) = rig.sample([[5] * (rig.engine.context_length - 3)])
        expect(len(last.token_ids) == 3, f"{len(last.token_ids)} tokens were sampled where the context had room for 3")


@check()
def what_cannot_be_served_is_refused(subject: Subject) -> None:
    """Empty and too long prompts, unknown tokens and impossible sampling are ``UserError``, and the next request is served."""
    rig = shared(subject, Rig)
    bad = [([], Sampling(4)), ([5, len(SYMBOLS)], Sampling(4)), ([5], Sampling(0)), ([5], Sampling(4, -1.0))]
    if rig.engine.context_length is not None:
        bad.append(([5] * rig.engine.context_length, Sampling(4)))
    for ids, sampling in bad:
        error = rig.refusal(ids, sampling)
        expect(isinstance(error, UserError), f"a request of {len(ids)} tokens with {sampling} raised {error!r}, not UserError")
    expect(rig.refusal() is None, "after a request that was refused it serves no other")


@check()
def cancelling_ends_one_request(subject: Subject) -> None:
    """A request that is cancelled in mid-completion leaves the others as they are, and the engine free."""
    shared(subject, Rig).cancel_every_other()


@check()
def sleeping_is_undone(subject: Subject) -> None:
    """``sleep`` and ``wake``, twice each, leave weights and tokens as they were."""
    rig = shared(subject, Rig)
    before = rig.sample()
    for method in (rig.engine.sleep, rig.engine.sleep, rig.engine.wake, rig.engine.wake):
        rig.wait(method(), method.__name__)
    expect(rig.sample() == before, "after sleep and wake the same requests get other completions")


@check()
def weights_come_into_an_engine_that_sleeps_without_them(subject: Subject) -> None:
    """``sleep_empty`` leaves version -1 and refuses requests; after ``wake_weights`` a sync brings weights, after ``wake`` it
    samples with them. Only for engines that wake in parts.
    """
    rig = shared(subject, Rig)
    if not isinstance(rig.engine, WakesInParts):
        return
    engine, version = rig.engine, rig.engine.version + 1
    rig.load(version)
    before = rig.sample()
    for method in (engine.sleep_empty, engine.sleep_empty):
        rig.wait(method(), method.__name__)
    expect(engine.version == NO_WEIGHTS, f"after sleep_empty it has version {engine.version}, and no weights")
    for method in (engine.wake_weights, engine.wake_weights):
        rig.wait(method(), method.__name__)
    rig.load(version)
    rig.wait(engine.wake(), "wake")
    expect(rig.sample() == before, "after sleep_empty, wake_weights and a sync the same requests get other completions")


@check()
def loads_replace_the_weights(subject: Subject) -> None:
    """After ``Loader.load`` the engine has the version, samples from the new weights, and has forgotten prompts of the old ones."""
    rig = shared(subject, Rig)
    for version in (3, 4):
        rig.sample()
        _change(rig.model)
        rig.load(version)
        expect(rig.engine.version == version, f"after loading version {version} it says that it has {rig.engine.version}")
        rig.expect_the_models(version, f"after loading version {version}")


@check()
def shared_weights_change_in_place(subject: Subject) -> None:
    """An engine with the trainer's own module samples from its weights as they are at ``set_version``, under that version."""
    if subject.build().traits.takes == "module":
        close_shared()
        rig = Rig(subject)
        rig.sample()
        _change(rig.model, rig.own)
        rig.engine.set_version(5)
        rig.expect_the_models(5, "after the module's weights changed")
        rig.close()


@check()
def without_weights_it_refuses(subject: Subject) -> None:
    """Started with version -1, and after a load that fails or leaves a weight out, it has version -1 and refuses with ``RunError``
    until a load is whole."""
    close_shared()
    rig = Rig(subject, NO_WEIGHTS)
    for failure in ("", "break off", "leave out"):
        when = f"after a load that should {failure}" if failure else "at the start"
        if failure:
            try:
                rig.load(8, failure)
            except Exception:
                pass
            else:
                raise Broken(f"{when} nothing was raised: the engine would go on with weights that are a mixture")
        expect(rig.engine.version == NO_WEIGHTS, f"{when} its version is {rig.engine.version}, not {NO_WEIGHTS}")
        expect(isinstance(rig.refusal(), RunError), f"{when} it was asked for tokens and did not raise RunError")
        rig.load(9)
        rig.expect_the_models(9, "after a whole load")
    rig.close()


@check()
def closing_leaves_nothing(subject: Subject) -> None:
    """``close`` fails what waits with ``RunError`` and ends threads, processes and files; again it does nothing; requests after
    it are refused."""
    close_shared()
    _folder()
    with leaves_nothing("close", "end it there", daemons=True, files=True):
        rig = Rig(subject)
        rig.close_with_a_request()
        expect(not rig.engine.dead, "after close it says that it is dead, as if it had failed")


@check()
def a_start_that_fails_leaves_nothing(subject: Subject) -> None:
    """A model that cannot be served is a ``UserError`` at ``start``, and nothing stays: here a directory without a model."""
    if subject.build().traits.takes == "directory":
        _folder()
        with leaves_nothing("a failed start", "end it before raising", daemons=True):
            try:
                _start(subject, None, "empty", NO_WEIGHTS, OneThread(1))
            except UserError:
                return
            except Exception as error:
                raise Broken(f"start raises {type(error).__name__}: {error}; raise UserError and say what is wrong") from error
            raise Broken("start serves a directory in which there is no model")
