"""Metrics against counts by hand, refusals, and runs with a mixture of experts whose engine tells experts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from rlhf_authoring.learner import SUMS, Learner
from rlhf_authoring.models import tiny_tokenizer
from rlhf_authoring.tensors import make_batch
from rlhf_plugin_experts import ExpertMetrics, RouterReplay
from rlhf_plugin_experts.passes import Pass
from transformers import MixtralConfig, MixtralForCausalLM

import rlhf_host
from rlhf_host import Outputs, UserError

LAYERS, EXPERTS, CHOSEN = 2, 4, 2


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny mixture of experts, in a directory."""
    path, tokenizer = tmp_path_factory.mktemp("experts"), tiny_tokenizer()
    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, vocab_size=len(tokenizer), max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def telling(monkeypatch):
    """The engine ``transformers`` tells experts: not those that it took, but some that only the replay can know."""
    from rlhf_host.engines.embedded import EmbeddedEngine

    sample, seen = EmbeddedEngine.generate, []

    async def generate(self, token_ids, sampling, key):
        answer = await sample(self, token_ids, sampling, key)
        tokens = len(token_ids) + len(answer.token_ids) - 1
        first = np.arange(tokens)[:, None] + np.arange(LAYERS)
        answer.traces = {"routed_experts": np.stack([first % EXPERTS, (first + 1) % EXPERTS], -1).astype(np.uint8)}
        seen.append(tokens)
        return answer

    monkeypatch.setattr(EmbeddedEngine, "generate", generate)
    monkeypatch.delattr(RouterReplay, "check_run")  # which knows that this engine has no such option
    return seen


def even(text: str, label: str) -> float:
    """An untrained model is never right, and all of its answers would have one reward."""
    return float(sum(map(ord, text)) % 2)


def train(run, model, names, **more):
    fixed = {"train.threads": 1, "actor.model": str(model), "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 2}
    rlhf_host.train(algo=Learner(), reward=even, data=SUMS, extensions=names, run_dir=str(run), lr=1e-3, **{**fixed, **more})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_loads_are_counted_by_layer_without_padding():
    own = Pass([3, 1])
    own.counts = True
    own.begin({"input_ids": torch.zeros(2, 3, dtype=torch.int64)})
    scores = torch.tensor([[3.0, 2, 1, 0], [0, 3, 2, 1], [3, 0, 2, 1], [0, 1, 2, 3], [9, 9, 0, 0], [9, 9, 0, 0]])
    own.choose(1, scores, scores.topk(2), again=False)
    assert own.real.tolist() == [True, True, True, True, False, False]
    assert own.loads[1].tolist() == [2, 2, 3, 1]
    plugin = ExpertMetrics(ExpertMetrics.Options())
    plugin._passes[False] = own
    found = {
        metric.name: metric.values for metric in plugin.compute_loss(Outputs(logprobs=torch.zeros(2, 3)), make_batch([3, 1]))
    }
    assert float(found["experts/busiest"]) == pytest.approx(3 / 2)
    shares = np.array([2, 2, 3, 1]) / 8
    assert float(found["experts/entropy/layer_1"]) == pytest.approx(-(shares * np.log(shares)).sum() / np.log(4))
    assert float(found["experts/unused"]) == 0
    assert not [name for name in found if name.endswith("layer_0")]
    few = ExpertMetrics(ExpertMetrics.Options(layers=False))
    few._passes[False] = own
    assert len(list(few.compute_loss(Outputs(logprobs=torch.zeros(2, 3)), make_batch([3, 1])))) == 4


def test_a_run_measures_its_experts(tmp_path, experts):
    rows = train(tmp_path / "run", experts, ["expert_metrics"])
    for row in rows:
        assert 1 <= row["experts/busiest"] <= row["experts/busiest_max"] <= EXPERTS / CHOSEN
        assert 0 < row["experts/entropy"] <= 1
        assert row["experts/unused"] == (row["experts/unused/layer_0"] + row["experts/unused/layer_1"]) / 2


@pytest.mark.parametrize("more", [{}, {"train.epochs": 2}, {"async_depth": 1}], ids=["fused", "recompute", "ahead"])
def test_a_run_trains_with_the_experts_of_its_engine(tmp_path, experts, telling, more):
    rows = train(tmp_path / "run", experts, ["router_replay", "expert_metrics"], **more)
    assert telling
    for row in rows:
        assert 0.5 < row["router_replay/changed"] <= 1
        assert row["router_replay/changed"] <= row["router_replay/changed_tokens"]
        assert row.get("mismatch/max", 1) > 1e-3, "the engine took others than it told"
        assert row["experts/entropy"] > 0.98, "the replayed experts are even"
    assert any(row["grad_norm"] > 0 for row in rows)


def test_what_cannot_be_replayed_is_refused(tmp_path, experts):
    with pytest.raises(
        UserError, match=r"the engine transformers does not tell them: choose one that has the option routed_experts"
    ):
        train(tmp_path / "run", experts, ["router_replay"])
    with pytest.raises(UserError, match="LlamaForCausalLM has no layers that choose experts"):
        train(tmp_path / "run", "quickstart", ["expert_metrics"])
    assert not (tmp_path / "run").exists()
    option = {"engine": {"name": "one", "routed_experts": False}, "from_trajectories": None}
    with pytest.raises(UserError, match=r"set --engine.routed-experts true"):
        RouterReplay(RouterReplay.Options()).check_run(option, {})


def test_rows_without_experts_are_refused():
    batch = make_batch([3, 2])
    plugin = RouterReplay(RouterReplay.Options())
    plugin.run_started(None)
    with pytest.raises(UserError, match=r"row 0 .* has 4 tokens, and no experts"):
        plugin.prepare_batch(_with(batch, {}))
    with pytest.raises(UserError, match="experts of 2 tokens"):
        plugin.prepare_batch(_with(batch, {"routed_experts": np.zeros((2, 1, 1), np.uint8)}))


def _with(batch, traces):
    from rlhf_host.records.episodes import Segment, Task, Trajectory

    segments = [Segment("prompt", [1, 2]), Segment("action", [3, 4], [-1.0, -1.0], [0, 0])]
    batch.trajectories = [Trajectory("e", "g", Task("q"), segments, traces=traces)]
    return batch


def test_adapters_leave_experts_and_routers_alone(tmp_path, experts):
    with pytest.raises(UserError, match="MixtralForCausalLM has no linear map 'gate_up_proj'"):
        train(tmp_path / "run", experts, ["expert_metrics"], **{"actor.lora.rank": 2, "actor.lora.targets": ["gate_up_proj"]})
    rows = train(tmp_path / "adapted", experts, ["expert_metrics"], **{"actor.lora.rank": 2})
    assert all(row["experts/busiest"] >= 1 for row in rows)
    settings = json.loads((tmp_path / "adapted/model/adapter_config.json").read_text())
    assert sorted(settings["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_experts_get_adapters_by_name(tmp_path, experts):
    more = {"actor.lora.rank": 2, "actor.lora.targets": ["all-linear", "experts"], "checkpoint.every": 1}
    rows = train(tmp_path / "run", experts, ["expert_metrics"], **more)
    assert all(row["mismatch/max"] < 1e-4 for row in rows if "mismatch/max" in row)
    assert any(row["grad_norm"] > 0 for row in rows)
    settings = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert settings["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    rlhf_host.train(resume=str(tmp_path / "run"), algo=Learner(), reward=even, data=SUMS, steps=3)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3
