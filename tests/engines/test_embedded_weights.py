"""Weights under the embedded engine: their versions, new ones under way, and the trainer's model left as it was."""

import asyncio
import copy

import pytest
import torch
from torch import nn

from rlhf_host.engines import sampling
from rlhf_host.engines.plain_path import PlainKernels
from rlhf_host.engines.requests import Request
from rlhf_host.engines.transformers import Transformers
from rlhf_host.errors import RunError
from rlhf_host.protocols import EngineStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.compute import OneThread

from .embedded_rig import PROMPTS, decoder_of, engine_for, mismatch, requests_for, sample, trainer_logprobs

PLAIN = ["llama", "qwen2", "qwen3", "mistral_window", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "opt", "gpt_oss"]
GENERIC = ["bloom", "mamba"]


def test_every_token_carries_its_weight_version(llama):
    llama.generation_config.eos_token_id = None
    engine = engine_for(llama, version=4)
    (before,) = sample(engine, [Request((3, 5), Sampling(6), (0,))])
    assert before.versions == [4] * 6
    engine.set_version(5)
    (after,) = sample(engine, [Request((3, 5), Sampling(6), (0,))])
    assert after.versions == [5] * 6


def test_a_version_that_changes_under_way_shows_in_the_tokens(llama):
    llama.generation_config.eos_token_id = None
    engine = engine_for(llama)
    sample(engine, [Request((3, 5), Sampling(8), (0,))])
    steps = iter(range(100))
    hook = llama.model.norm.register_forward_hook(lambda *_: engine.set_version(1) if next(steps) == 3 else None)
    (generation,) = sample(engine, [Request((3, 5), Sampling(8), (0,))])
    hook.remove()
    assert generation.versions == [0, 0, 0, 0, 1, 1, 1, 1]


def versions_of(model, count):
    """The model and ``count - 1`` others, as different as training seldom makes them."""
    noise, models = torch.Generator().manual_seed(1), [model]
    for _ in range(count - 1):
        models.append(copy.deepcopy(models[-1]))
        with torch.no_grad():
            for weight in models[-1].parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=noise)
    return models


def loading(monkeypatch, engine, models):
    """Have the engine load them one after the other: version → after how many tokens."""

    def plan(when):
        draw, steps, versions = sampling.Sampler.draw, iter(range(1000)), {step: version for version, step in when.items()}

        def drawing(self, logits, uniforms):
            drawn = draw(self, logits, uniforms)
            if (version := versions.get(next(steps) + 1)) is not None:
                engine._loader.load([list(models[version].state_dict().items())], version)
            return drawn

        monkeypatch.setattr(sampling.Sampler, "draw", drawing)

    return plan


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3", "bloom", "mamba"])
def test_three_updates_in_one_answer_and_each_token_has_the_log_probability_of_its_version(build, monkeypatch, name):
    models = versions_of(build(name), 4)
    for model in models:
        model.generation_config.eos_token_id = None
    engine = engine_for(copy.deepcopy(models[0]))
    loading(monkeypatch, engine, models)({1: 1, 2: 7, 3: 23})
    requests = [Request(prompt, Sampling(8 + 8 * j), (i, j)) for i, prompt in enumerate(PROMPTS[:3]) for j in range(3)]
    requests = [one for one in requests if len(one.token_ids) == 3] if name in GENERIC else requests  # one batch
    for request, generation in zip(requests, sample(engine, requests), strict=True):
        length = request.sampling.max_new_tokens
        assert generation.versions == ([0] + [1] * 6 + [2] * 16 + [3] * 20)[:length]
        of_versions = torch.stack([trainer_logprobs(model, request, generation) for model in models])
        expected = of_versions.gather(0, torch.tensor(generation.versions)[None])[0]
        assert (expected - torch.tensor(generation.logprobs)).abs().max() <= (1e-3 if name == "mamba" else 1e-5)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_an_answer_that_is_begun_again_at_every_token_is_the_same(build, monkeypatch, name):
    model = build(name)
    model.generation_config.eos_token_id = None
    engine = engine_for(copy.deepcopy(model))
    requests = [Request((3, 5, 7), Sampling(12 + 3 * j), (j,)) for j in range(3)]
    whole = sample(engine, requests)
    loading(monkeypatch, engine, [model] * 20)({step: step for step in range(1, 18)})
    for uncut, cut in zip(whole, sample(engine, requests), strict=True):
        assert cut.versions == list(range(len(uncut.token_ids)))
        assert cut.token_ids == uncut.token_ids
        assert cut.logprobs == pytest.approx(uncut.logprobs, abs=1e-5)


def test_keys_and_values_may_be_kept(llama, monkeypatch):
    models = versions_of(llama, 2)
    for model in models:
        model.generation_config.eos_token_id = None
    request, gaps = Request((3, 5), Sampling(12), (0,)), {}
    for policy in ("recompute", "keep"):
        engine = engine_for(copy.deepcopy(models[0]), kv_after_sync=policy)
        with monkeypatch.context() as patch:
            loading(patch, engine, models)({1: 6})
            (generation,) = sample(engine, [request])
        assert generation.versions == [0] * 6 + [1] * 6
        again = trainer_logprobs(models[1], request, generation)[6:]
        gaps[policy] = float((again - torch.tensor(generation.logprobs[6:])).abs().max())
    assert gaps["recompute"] <= 1e-5
    assert gaps["keep"] > 1e-3, "what came before was seen by the old weights"


def test_weights_that_cannot_be_loaded_under_an_answer_end_it(llama, monkeypatch):
    llama.generation_config.eos_token_id = None
    engine, draw, failures = engine_for(llama), sampling.Sampler.draw, []

    def drawing(self, logits, uniforms):
        if not failures:
            with pytest.raises(RunError, match="there is no weight 'nowhere'") as failure:
                engine._loader.load([[("nowhere", torch.zeros(1))]], 1)
            failures.append(failure)
        return draw(self, logits, uniforms)

    monkeypatch.setattr(sampling.Sampler, "draw", drawing)
    with pytest.raises(RunError, match="has no weights of this run"):
        sample(engine, [Request((3, 5), Sampling(8), (0,))])


def test_weights_come_between_two_tokens_from_another_thread(llama):
    """As in an engine's own process, with a compute thread."""
    models = versions_of(llama, 2)
    for model in models:
        model.generation_config.eos_token_id = None
    compute = OneThread(1)
    start = EngineStart(model=copy.deepcopy(models[0]), tokenizer=None, version=0, compute=compute, kernels=PlainKernels())
    engine = Transformers(Transformers.Options()).start(start)
    request = Request((3, 5), Sampling(60), (0,))

    async def ask():
        asked = asyncio.create_task(engine.generate(request.token_ids, request.sampling, request.key))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine._loader.load, [list(models[1].state_dict().items())], 1)
        assert engine.version == 1
        later = await engine.generate((4, 5), Sampling(4), (1,))
        generation = await asked
        await engine.close()
        return generation, later

    generation, later = asyncio.run(ask())
    compute.close()
    assert later.versions == [1] * 4
    assert sorted(generation.versions) == generation.versions
    of_versions = torch.stack([trainer_logprobs(model, request, generation) for model in models])
    expected = of_versions.gather(0, torch.tensor(generation.versions)[None])[0]
    assert (expected - torch.tensor(generation.logprobs)).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_the_trainers_model_is_left_as_it_was(build, name):
    model = build(name)
    model.gradient_checkpointing_enable()
    structure = [(name, sorted(vars(module))) for name, module in model.named_modules()]
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    attention = model.config._attn_implementation
    engine = engine_for(model)
    sample(engine, requests_for(lambda i, j: Sampling(8)))

    assert not any(module.training for module in model.modules())
    assert [(name, sorted(vars(module))) for name, module in model.named_modules()] == structure
    assert model.config._attn_implementation == attention
    assert all(parameter.grad is None and not parameter.is_inference() for parameter in model.parameters())
    for key, value in model.named_buffers():
        assert not value.is_inference()
        assert torch.equal(value, buffers[key])
    ids = torch.randint(3, 20, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_a_training_step_is_the_same_with_and_without_generation(build):
    trained = []
    for generates in (False, True):
        model = build("llama")
        if generates:
            sample(engine_for(model), requests_for(lambda i, j: Sampling(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids = torch.arange(24).view(2, 12) + 3
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        trained.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(trained[0][key], trained[1][key]) for key in trained[0])


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Phi3"])
def test_new_weights_are_used_at_once(kind):
    import transformers as hf

    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = getattr(hf, f"{kind}ForCausalLM")(config)
    engine = engine_for(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    requests = [Request((3, 5, 7), Sampling(40), (i,)) for i in range(16)]
    for version in range(3):
        engine.set_version(version)
        assert mismatch(model, requests, sample(engine, requests)) <= 1e-5
        ids = torch.randint(3, 300, (2, 12))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_replaced_parameters_are_noticed(llama):
    engine = engine_for(llama)
    requests = requests_for(lambda i, j: Sampling(8))
    sample(engine, requests)
    llama.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn_like(llama.model.layers[0].mlp.up_proj.weight))
    assert mismatch(llama, requests, sample(engine, requests)) <= 1e-5


def test_adapters_are_generated_with(llama):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.eval()
    requests = requests_for(lambda i, j: Sampling(8))
    engine = engine_for(model)
    assert mismatch(model, requests, sample(engine, requests)) <= 1e-5
    assert decoder_of(engine) == "PlainDecoder"
