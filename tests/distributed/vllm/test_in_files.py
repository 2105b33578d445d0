"""Weights on their way to vLLM are those of the model's files, whatever transformers makes of them."""

from __future__ import annotations

import asyncio

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlhf_host.distributed import as_in_files, outline_of
from rlhf_host.records.episodes import Sampling

from .rig import SIZE, Rig, make_engine, mismatch, prompts_of, write_model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=64),
    "tied": transformers.Qwen2Config(**SIZES, intermediate_size=64, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, intermediate_size=64, num_experts=4, head_dim=32),
    "olmoe": transformers.OlmoeConfig(**SIZES, intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES, **EXPERTS, intermediate_size=64, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_the_files(family, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    outline = outline_of(transformers.AutoConfig.from_pretrained(tmp_path))
    sent = {}
    for weight in model.state_dict().items():  # a bucket for each
        sent.update(as_in_files(outline, [weight]))
    tied = {"lm_head.weight"} if family == "tied" else set()
    assert sent.keys() - tied == files.keys()
    assert all(torch.equal(sent[name], files[name]) for name in files)


def test_a_model_that_transformers_does_not_know_is_left_as_it_is():
    bucket = [("weight", torch.ones(1))]
    assert as_in_files(None, bucket) is bucket


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_vllm_samples_from_every_version_of_a_model_with_experts(family, tmp_path):
    pytest.importorskip("vllm")
    directory = write_model(tmp_path / "model", tied=False)
    larger = {"hidden_size": 128, "num_attention_heads": 4, "vocab_size": SIZE, "head_dim": 32, "eos_token_id": None}
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), **larger})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    rig = Rig(make_engine(directory), transformers.AutoModelForCausalLM.from_pretrained(directory))
    try:
        prompts = prompts_of(4, 40)
        for version in (0, 1):
            rig.sync(version)
            assert mismatch(rig.model, prompts, rig.sample(prompts, Sampling(8))) <= 1e-4
            rig.train(version + 1)
            assert mismatch(rig.model, prompts, rig.sample(prompts, Sampling(8))) > 0.01, "a skipped sync must show"
    finally:
        asyncio.run(rig.engine.close())
