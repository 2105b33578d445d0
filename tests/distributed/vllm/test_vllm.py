"""The vLLM engine on real models: what it samples is the trainer's distribution, before, during and after syncs."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import types
from functools import partial

import pytest
import torch
from rlhf_authoring.models import tiny_tokenizer

from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.distributed.sync.plugin import Checkpoint
from rlhf_host.distributed.vllm import engine, plugin, requests, startup
from rlhf_host.distributed.vllm.arguments import versions_by_token
from rlhf_host.distributed.vllm.requests import request_seed
from rlhf_host.distributed.vllm.startup import ends_of
from rlhf_host.errors import RunError, UserError
from rlhf_host.protocols import Counting, SyncTarget
from rlhf_host.records.episodes import Sampling
from rlhf_host.records.token_sets import unpack_tokens
from rlhf_host.weight_sync.local_source import LocalSource

from .rig import KIB, SIZE, Rig, logprobs_of, make_engine, mismatch, prompts_of, write_model

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def rig(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path_factory.mktemp("vllm") / request.param, tied=request.param == "tied")
    rig = Rig(make_engine(directory), AutoModelForCausalLM.from_pretrained(directory))
    try:
        rig.sample([[3, 4]], Sampling(2))
    except Exception as error:
        rig.refused.append(error)
    rig.sync(0)
    yield rig
    asyncio.run(rig.engine.close())


tied = pytest.mark.parametrize("rig", ["tied"], indirect=True)
untied = pytest.mark.parametrize("rig", ["untied"], indirect=True)
both = pytest.mark.parametrize("rig", ["untied", "tied"], indirect=True)


# --- weights ------------------------------------------------------------------------------------


@untied
def test_it_refuses_before_the_first_sync(rig):
    (error,) = rig.refused
    assert isinstance(error, RunError)
    assert "no weights of this run" in str(error)


@both
def test_after_every_sync_it_samples_from_the_trainers_weights(rig):
    # Four samples of a prompt share its cached blocks, and both rounds have the same prompts: stale keys would be used.
    prompts = [prompt for prompt in prompts_of(4, 140) for _ in range(4)]
    for version in (1, 2):
        rig.train(version)
        assert mismatch(rig.model, prompts, rig.sample(prompts, Sampling(12))) > 0.1, "a skipped sync must show"
        rig.sync(version)
        generations = rig.sample(prompts, Sampling(12))
        assert mismatch(rig.model, prompts, generations) <= 1e-4
        assert all(made.versions == [version] * 12 for made in generations)
        assert all(0 <= token < SIZE for made in generations for token in made.token_ids)
        assert rig.engine.version == version


@tied
def test_a_tied_head_that_is_left_out_is_noticed(rig):
    with pytest.raises(RunError, match=r"no weights came for lm_head\.weight .*tied embeddings are sent under both names"):
        rig.sync(4, list(rig.model.named_parameters()))
    with pytest.raises(RunError, match="no weights of this run"):
        rig.sample([[3, 4]], Sampling(2))
    rig.sync(5)
    assert mismatch(rig.model, [[3, 4]], rig.sample([[3, 4]], Sampling(8))) <= 1e-4


@untied
def test_a_sync_that_breaks_off_leaves_no_trace_in_the_next(rig):
    weights = list(named_weights(rig.model))
    place = [name for name, _ in weights].index("model.layers.1.self_attn.k_proj.weight")

    def broken():
        """One part of a layer that vLLM keeps in one piece has come, with weights that are nobody's, then nothing."""
        yield [(name, torch.full_like(weight, 7.0)) for name, weight in weights[:place]]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(RunError, match=r"loading version 6 failed \(the trainer is gone\)"):
        rig.load(broken(), 6)
    assert rig.engine.version == -1
    with pytest.raises(RunError, match="no weights of this run"):
        rig.sample([[3, 4]], Sampling(2))
    rig.sync(7)
    prompts = prompts_of(4, 70)
    assert mismatch(rig.model, prompts, rig.sample(prompts, Sampling(8))) <= 1e-4


@untied
def test_a_buckets_memory_may_be_used_again_for_the_next(rig):
    def reused():
        memory = torch.empty(1 << 16)
        for name, weight in named_weights(rig.model):
            piece = memory[: weight.numel()].view(weight.shape)
            piece.copy_(weight)
            yield [(name, piece)]
            memory.fill_(float("nan"))

    rig.train(8)
    rig.load(reused(), 8)
    prompts = prompts_of(4, 70)
    assert mismatch(rig.model, prompts, rig.sample(prompts, Sampling(8))) <= 1e-4


@untied
def test_weights_that_do_not_fit_are_an_error(rig):
    for weights, message in (
        ([("model.norm.weight", torch.zeros(3))], "loading version 9 failed"),
        ([("model.nowhere.weight", torch.zeros(3))], "loading version 9 failed"),
        ([], "no weights came for"),
    ):
        with pytest.raises(RunError, match=message):
            rig.sync(9, weights)
    rig.sync(9)
    assert mismatch(rig.model, [[3, 4]], rig.sample([[3, 4]], Sampling(8))) <= 1e-4


@untied
@pytest.mark.skipif(not versions_by_token(), reason="takes vLLM 0.32")
def test_tokens_of_a_request_in_flight_carry_the_version_they_were_sampled_with(rig):
    from copy import deepcopy

    rig.sync(20)
    prompts = prompts_of(6, 100)

    async def main():
        begun = rig.engine.busy_s
        jobs = [asyncio.create_task(rig.engine.generate(prompt, Sampling(400), (9, i))) for i, prompt in enumerate(prompts)]
        while rig.engine.busy_s == begun:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(rig.load, in_buckets(named_weights(rig.model), KIB), 21)
        return await asyncio.gather(*jobs)

    before = deepcopy(rig.model)
    rig.train(21)
    for prompt, made in zip(prompts, asyncio.run(main()), strict=True):
        old = made.versions.count(20)
        assert made.versions == [20] * old + [21] * (400 - old)
        assert 0 < old < 400
        expected = torch.cat(
            [
                logprobs_of(before, prompt, made.token_ids)[:old],
                logprobs_of(rig.model, prompt, made.token_ids)[old:],
            ]
        )
        assert float((expected - torch.tensor(made.logprobs)).abs().max()) <= 1e-4


@untied
def test_kept_keys_and_values_are_never_those_of_later_groups(rig, monkeypatch):
    """A prompt of ten cache blocks, and three syncs."""
    monkeypatch.setattr(rig.engine.options, "kv_after_sync", "keep")
    (prompt,) = prompts_of(1, 320)
    gaps = {}
    for salted in (True, False):
        with monkeypatch.context() as patch:
            if not salted:
                patch.setattr(rig.engine, "_salt", lambda request: None)
            for version in (22, 23, 24) if salted else (25, 26):
                rig.train(version)
                rig.sync(version)
                (made,) = rig.sample([prompt], Sampling(8), [(9, version, 0, 0)])
                assert made.versions == [version] * 8
                gaps[version] = mismatch(rig.model, [prompt], [made])
    assert max(gaps[version] for version in (22, 23, 24)) <= 1e-4
    assert gaps[26] > 1e-3, "without salts the old ones are found"


@untied
@pytest.mark.skipif(not versions_by_token(), reason="takes vLLM 0.32")
def test_a_request_goes_on_with_the_keys_and_values_that_are_kept(rig, monkeypatch):
    monkeypatch.setattr(rig.engine.options, "kv_after_sync", "keep")
    rig.sync(27)

    async def main():
        begun = rig.engine.busy_s
        job = asyncio.create_task(rig.engine.generate(prompts_of(1, 100)[0], Sampling(400), (9, 0, 0)))
        while rig.engine.busy_s == begun:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(rig.load, in_buckets(named_weights(rig.model), KIB), 28)
        return await job

    made = asyncio.run(main())
    old = made.versions.count(27)
    assert made.versions == [27] * old + [28] * (400 - old)
    assert 0 < old < 400
    assert mismatch(rig.model, prompts_of(1, 100), [made]) <= 1e-4, "the weights are the same"


@untied
def test_a_request_that_comes_while_weights_load_waits_for_them(rig):
    async def main():
        buckets, started = in_buckets(named_weights(rig.model), KIB), threading.Event()

        def slow():
            for bucket in buckets:
                started.set()
                time.sleep(0.01)
                yield bucket

        loading = asyncio.create_task(asyncio.to_thread(rig.load, slow(), 29))
        await asyncio.to_thread(started.wait)
        made = await rig.engine.generate([3, 4], Sampling(8), (9, 0, 0))
        await loading
        return made

    assert asyncio.run(main()).versions == [29] * 8


@untied
def test_functions_run_beside_it_get_a_loader(rig, monkeypatch):
    def bring(loader, version):
        loader.load(in_buckets(named_weights(rig.model), KIB), version)
        loader.state["calls"] = loader.state.get("calls", 0) + 1
        return [loader.engine, loader.rank, loader.size, str(loader.device), loader.state["calls"]]

    module = types.ModuleType("sync_of_a_plugin")
    module.bring = bring
    monkeypatch.setitem(sys.modules, "sync_of_a_plugin", module)
    rig.train(30)
    assert asyncio.run(rig.engine.run("sync_of_a_plugin:bring", version=30)) == [["vllm", 0, 1, "cpu", 1]]
    assert asyncio.run(rig.engine.run("sync_of_a_plugin:bring", version=31)) == [["vllm", 0, 1, "cpu", 2]]
    (made,) = rig.sample([[3, 4]], Sampling(8))
    assert made.versions == [31] * 8
    assert mismatch(rig.model, [[3, 4]], [made]) <= 1e-4


@untied
def test_it_reads_the_versions_that_a_sync_writes(rig, tmp_path):
    async def main():
        plugin = Checkpoint(Checkpoint.Options(directory=tmp_path, bucket_mb=1))
        await plugin.connect([SyncTarget("engine", rig.engine)])
        await plugin.send(LocalSource(rig.model), 40)
        await plugin.close()

    rig.train(40)
    asyncio.run(main())
    (made,) = rig.sample([[3, 4]], Sampling(8))
    assert made.versions == [40] * 8
    assert mismatch(rig.model, [[3, 4]], [made]) <= 1e-4


# --- sampling -----------------------------------------------------------------------------------


@untied
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_logprobs_are_of_the_distribution_sampled_from(rig, temperature):
    prompts = prompts_of(16, 40)
    generations = rig.sample(prompts, Sampling(32, temperature=temperature))
    assert mismatch(rig.model, prompts, generations, temperature) <= 1e-4


@untied
@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}])
def test_truncated_sampling_gives_the_renormalised_logprobs(rig, truncation):
    prompts = prompts_of(8, 40)
    sampling = Sampling(8, temperature=1.2, **truncation)
    for prompt, made in zip(prompts, rig.sample(prompts, sampling), strict=True):
        with torch.no_grad():
            logits = rig.model(torch.tensor([[*prompt, *made.token_ids]])).logits[0, len(prompt) - 1 : -1].double() / 1.2
        for token, logprob, row in zip(made.token_ids, made.logprobs, logits, strict=True):
            probabilities = row.softmax(-1)
            ordered = probabilities.sort(descending=True).values
            if sampling.top_k:
                kept = ordered[:3]
            elif sampling.top_p < 1:
                kept = ordered[: int((ordered.cumsum(-1) < 0.6).sum()) + 1]
            else:
                kept = ordered[ordered >= 0.4 * ordered[0]]
            assert len(kept) < SIZE
            assert probabilities[token] >= kept[-1] - 1e-7
            assert logprob == pytest.approx(float((probabilities[token] / kept.sum()).log()), abs=1e-4)


@untied
@pytest.mark.parametrize("more", [{}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_p": 0.8, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("top_k", [1, 5, SIZE])
def test_it_tells_which_tokens_could_be_drawn(rig, top_k, more):
    """In a vocabulary that top-k may exhaust."""
    prompts = prompts_of(8, 40)
    sampling = Sampling(8, temperature=1.2, top_k=top_k, support=True, **more)
    for prompt, made in zip(prompts, rig.sample(prompts, sampling), strict=True):
        sets = made.traces["support"]
        assert len(sets) == len(prompt) + 7
        assert not any(sets[: len(prompt) - 1])
        with torch.no_grad():
            logits = rig.model(torch.tensor([[*prompt, *made.token_ids]])).logits[0, len(prompt) - 1 : -1].double() / 1.2
        for token, logprob, row, one in zip(made.token_ids, made.logprobs, logits, sets[len(prompt) - 1 :], strict=True):
            own = unpack_tokens(one).astype(int)
            assert logprob == pytest.approx(float(row[token] - row[torch.from_numpy(own)].logsumexp(0)), abs=1e-4)
            order = row.argsort(descending=True)
            if "min_p" in more:  # vLLM leaves its tokens out first
                order = order[row[order].softmax(-1) >= more["min_p"] * row.softmax(-1).max()]
            order = order[:top_k]
            wanted = order[: int((row[order].softmax(-1).cumsum(-1) < more.get("top_p", 2.0)).sum()) + 1]
            assert set(own.tolist()) == set(wanted.tolist())


@untied
def test_requests_that_do_not_ask_which_tokens_could_be_drawn_are_told_nothing(rig):
    prompts = prompts_of(6, 40)
    for silent in (Sampling(4, top_p=0.5, support=True), Sampling(4, top_k=3), Sampling(4, 0.0, top_k=3, support=True)):
        assert all(made.traces == {} for made in rig.sample(prompts, silent))

    async def main(asked):
        jobs = [rig.engine.generate(prompt, asked[i % 3], (3, i)) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*jobs)

    asked = [Sampling(6), Sampling(6, top_k=9, support=True), Sampling(6, top_k=3, support=True)]
    for i, made in enumerate(asyncio.run(main(asked))):
        sizes = [len(unpack_tokens(one)) for one in made.traces.get("support", ())][len(prompts[i]) - 1 :]
        assert sizes == ([asked[i % 3].top_k] * 6 if i % 3 else [])
        assert len(made.logprobs) == 6


@untied
def test_greedy_is_transformers_own_greedy(rig):
    prompts = prompts_of(4, 40)
    for prompt, made in zip(prompts, rig.sample(prompts, Sampling(12, temperature=0.0)), strict=True):
        ids = torch.tensor([prompt])
        expected = rig.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert made.token_ids == expected[0, len(prompt) :].tolist()
        assert made.logprobs == [0.0] * 12


@untied
def test_tokens_follow_the_distribution(rig):
    """Eight thousand first tokens against the model's own probabilities, by chi-square (0.999 quantile)."""
    prompt = prompts_of(1, 40)[0]
    generations = rig.sample([prompt] * 8000, Sampling(1), [(11, i) for i in range(8000)])
    counts = torch.bincount(torch.tensor([made.token_ids[0] for made in generations]), minlength=SIZE).double()
    with torch.no_grad():
        expected = 8000 * rig.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = SIZE - 1
    # Wilson and Hilferty's approximation of the quantile, 3.09 being the normal one.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@untied
def test_tokens_are_counted_while_they_are_sampled(rig):
    before, seen, watching = rig.engine.sampled, [], threading.Event()

    def look():
        while not watching.wait(0.002):
            seen.append(rig.engine.sampled - before)

    thread = threading.Thread(target=look)
    thread.start()
    answers = rig.sample(prompts_of(4, 20), Sampling(60))
    watching.set()
    thread.join()
    assert isinstance(rig.engine, Counting)
    whole = rig.engine.sampled - before
    assert whole == sum(len(answer.token_ids) for answer in answers)
    assert any(0 < count < whole for count in seen)


@untied
def test_a_completion_depends_on_its_key_not_on_what_else_runs(rig):
    prompts = prompts_of(20, 50)
    keys = [(5, i, 0) for i in range(20)]
    together = rig.sample(prompts, Sampling(24), keys)
    order = random.Random(1).sample(range(20), 20)
    shuffled = rig.sample([prompts[i] for i in order], Sampling(24), [keys[i] for i in order])
    assert [made.token_ids for made in shuffled] == [together[i].token_ids for i in order]
    for i in (3, 17):
        (alone,) = rig.sample([prompts[i]], Sampling(24), [keys[i]])
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-5)


@untied
def test_samples_of_one_prompt_differ_by_key(rig):
    generations = rig.sample([[3, 5]] * 32, Sampling(12))
    assert len({tuple(made.token_ids) for made in generations}) == 32


@untied
def test_without_seeds_a_key_decides_nothing(rig, monkeypatch):
    monkeypatch.setattr(rig.engine.options, "seeds", False)
    prompts = prompts_of(4, 40)
    first, second = rig.sample(prompts, Sampling(24)), rig.sample(prompts, Sampling(24))
    assert all(one.token_ids != other.token_ids for one, other in zip(first, second, strict=True))
    assert mismatch(rig.model, prompts, first) <= 1e-4


def test_a_seed_is_63_bits_of_the_key():
    seeds = {request_seed((seed, sample, turn)) for seed in range(10) for sample in range(10) for turn in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed((1, 2, 3)) == 8149998584550362645


@untied
def test_more_prompt_tokens_than_a_step_takes(rig):
    """On CPUs vLLM dies of a seeded request whose prompt it computes in two steps."""
    prompts = prompts_of(64, 400)
    generations = rig.sample(prompts, Sampling(4))
    assert mismatch(rig.model, prompts, generations) <= 1e-4


# --- ends ---------------------------------------------------------------------------------------


@untied
def test_a_stop_token_ends_the_completion_and_is_kept(rig):
    prompts = prompts_of(12, 20)
    for made in rig.sample(prompts, Sampling(200, stop_token_ids=(7, 8, 9))):
        ends = [place for place, token in enumerate(made.token_ids) if token in (7, 8, 9)]
        assert ends == [len(made.token_ids) - 1]
        assert made.finish_reason == "stop"
        assert len(made.logprobs) == len(made.versions) == len(made.token_ids)


@untied
def test_a_stop_string_ends_the_completion_and_its_tokens_are_kept(rig):
    prompts = prompts_of(12, 20)
    generations = rig.sample(prompts, Sampling(60, stop=("7", "ab")))
    reasons = set()
    for prompt, made in zip(prompts, generations, strict=True):
        text = tiny_tokenizer().decode(made.token_ids)
        reasons.add(made.finish_reason)
        assert text.endswith(("7", "ab")) == (made.finish_reason == "stop")
        assert text.count("7") + text.count("ab") == (made.finish_reason == "stop")
        assert len(made.logprobs) == len(made.versions) == len(made.token_ids)
        assert mismatch(rig.model, [prompt], [made]) <= 1e-4
    assert "stop" in reasons


@untied
def test_the_engines_context_ends_a_completion(rig):
    (made,) = rig.sample(prompts_of(1, 500), Sampling(100))
    assert len(made.token_ids) == 512 - 500
    assert made.finish_reason == "length"


def test_end_tokens_are_the_generation_configs_and_the_tokenizers(tiny_model, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert ends_of(str(tiny_model), tokenizer) == {2}
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    tokenizer.eos_token = None
    assert ends_of(str(tmp_path), tokenizer) == {2}, "the config's, without a generation config"
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert ends_of(str(tmp_path), tokenizer) == {5, 6}


# --- requests -----------------------------------------------------------------------------------


@untied
def test_cancelling_aborts_the_request_and_nothing_else(rig):
    async def main():
        begun = rig.engine.busy_s
        jobs = [asyncio.create_task(rig.engine.generate([3, 4, i + 5], Sampling(300), (i,))) for i in range(8)]
        while rig.engine.busy_s == begun:
            await asyncio.sleep(0.01)
        assert len(rig.engine._running) == 8
        for job in jobs[:6]:
            job.cancel()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        return results

    results = asyncio.run(main())
    assert all(isinstance(result, asyncio.CancelledError) for result in results[:6])
    assert [len(result.token_ids) for result in results[6:]] == [300, 300]
    assert len(rig.engine._running) == 0
    assert mismatch(rig.model, [[3, 4, 11]], [results[6]]) <= 1e-4


@untied
def test_requests_that_cannot_be_served_say_why(rig):
    for ids, sampling, message in (
        ([], Sampling(4), "an empty prompt"),
        ([3] * 512, Sampling(4), "leaves no room in the engine's 512 positions"),
        ([3, SIZE], Sampling(4), f"token {SIZE} is not in the model's vocabulary of {SIZE}"),
        ([3], Sampling(0), "max_new_tokens should be"),
        ([3], Sampling(4, temperature=0.001), "temperature should be"),
        ([3], Sampling(4, stop_token_ids=(10**12,)), "engine vllm"),
    ):
        with pytest.raises(UserError, match=message):
            rig.sample([ids], sampling)
    assert len(rig.sample([[3, 4]], Sampling(4))[0].token_ids) == 4


@untied
def test_asleep_it_refuses_until_it_wakes(rig):
    asyncio.run(rig.engine.sleep())
    with pytest.raises(RunError, match="asleep"):
        rig.sample([[3, 4]], Sampling(4))
    with pytest.raises(RunError, match="asleep"):
        rig.sync(40)
    asyncio.run(rig.engine.wake())
    assert mismatch(rig.model, [[3, 4]], rig.sample([[3, 4]], Sampling(4))) <= 1e-4


@untied
def test_it_does_not_sleep_under_requests(rig):
    async def main():
        job = asyncio.create_task(rig.engine.generate([3, 4], Sampling(400), (1,)))
        while not rig.engine._running:
            await asyncio.sleep(0.01)
        with pytest.raises(RunError, match="cannot sleep with 1 requests in flight"):
            await rig.engine.sleep()
        return await job

    assert len(asyncio.run(main()).token_ids) == 400


@tied
def test_closing_fails_what_is_pending(rig):
    """The last one: after it the engine is no more."""

    async def main():
        job = asyncio.create_task(rig.engine.generate([3, 4], Sampling(400), (1,)))
        while not rig.engine._running:
            await asyncio.sleep(0.01)
        await rig.engine.close()
        with pytest.raises(RunError, match="closed while requests were pending"):
            await job
        with pytest.raises(RunError, match="the engine is closed"):
            await rig.engine.generate([3, 4], Sampling(4), (1,))
        with pytest.raises(RunError, match="the engine is closed"):
            await asyncio.to_thread(rig.load, in_buckets(named_weights(rig.model), KIB), 50)

    asyncio.run(main())


# --- vLLM before 0.32, whose answers do not say which weights sampled a token ----------------------


@pytest.fixture
def older(monkeypatch):
    """Takes away what is new: code that asks for it ends in an AttributeError."""
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    for module in (engine, plugin, requests, startup):
        monkeypatch.setattr(module, "versions_by_token", lambda: False)
    monkeypatch.delattr(LLMEngine, "set_weight_version", raising=False)
    if versions_by_token():
        monkeypatch.delattr(CompletionOutput, "weight_versions")
        step = LLMEngine.step

        def older_step(self):
            outputs = step(self)
            for completion in (completion for output in outputs for completion in output.outputs):
                del completion.weight_versions
            return outputs

        monkeypatch.setattr(LLMEngine, "step", older_step)


def test_with_an_older_vllm_answers_have_the_version_of_the_engine_and_no_weights_come_under_them(older, tmp_path):
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", tied=True)
    old = Rig(make_engine(directory, version=0), AutoModelForCausalLM.from_pretrained(directory))
    try:
        assert not plugin.Vllm(plugin.Vllm.Options()).traits.in_flight, "so a run waits for requests before it syncs"
        for version in (0, 1, 2):
            if version:
                old.train(version)
                old.sync(version)
            made = old.sample([[3, 4], [5, 6]], Sampling(8))
            assert [one.versions for one in made] == [[version] * 8] * 2
            assert mismatch(old.model, [[3, 4], [5, 6]], made) <= 1e-4

        async def in_flight():
            job = asyncio.create_task(old.engine.generate([3, 4], Sampling(200), (9, 0)))
            while not old.engine.sampled > 48:
                await asyncio.sleep(0.01)
            for bring in (partial(old.sync, 3), partial(old.engine.set_version, 3)):
                with pytest.raises(RunError, match=r"before 0\.32 vLLM takes no weights under requests: give --in-flight"):
                    await asyncio.to_thread(bring)
            return await job

        made = asyncio.run(in_flight())
        assert made.versions == [2] * 200
        assert mismatch(old.model, [[3, 4]], [made]) <= 1e-4, "nothing of the refused weights came"
        old.sync(3)
        assert old.sample([[3, 4]], Sampling(8))[0].versions == [3] * 8
    finally:
        asyncio.run(old.engine.close())
