"""Roles that see the batch's completions under other prompts: ``rewrite_prompts``, with plain transformers as the judge."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import Advantages, Follow, LossTerm, Metric, Needs, Output, RoleNeed, RunError, hookimpl
from rlhf_host.models.locations import find_model

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
HINT = [5, 6, 7]


class Hinted:
    """Every second row's teacher reads a hint; nothing is learnt from it, and everything is kept to be looked at."""

    def __init__(self, *outputs, follows=None, prompts=None):
        self.outputs, self.follows, self.prompts = outputs, follows, prompts
        self.seen = []

    @hookimpl
    def needs(self):
        teacher = RoleNeed("teacher", source="actor", follows=self.follows)
        return Needs(
            data="prompts", roles=(RoleNeed("actor", trainable=True, source=None), teacher), outputs=self.outputs, rewards=False
        )

    @hookimpl
    def rewrite_prompts(self, experience):
        if self.prompts is not None:
            return self.prompts(experience)
        return {"teacher": [[*HINT, *ids] if row % 2 else ids for row, ids in enumerate(experience.prompt_ids)]}

    @hookimpl
    def compute_advantages(self, experience):
        self.seen.append(experience)
        return Advantages(torch.zeros(experience.action_mask.shape))

    @hookimpl
    def compute_loss(self, outputs, batch):
        yield LossTerm("nothing", outputs.logprobs * 0.0)
        if not self.outputs or self.outputs[0].what != "distribution":
            return
        other = outputs.others["teacher"]
        if self.outputs[0].top is None:
            at = other.logprobs.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
            expected = torch.stack([row_logprobs(batch, row) for row in range(len(batch))])
            yield Metric("error", (at - expected).abs(), batch.action_mask, reduce="max")
            told = torch.tensor([len(ids) for ids in batch.prompts["teacher"]]) - torch.tensor([*map(len, batch.prompt_ids)])
            yield Metric("hinted", (told == len(HINT)).double())


@cache
def plain_model():
    return AutoModelForCausalLM.from_pretrained(find_model("quickstart").path)


def row_logprobs(batch, row):
    """``[T]``: by transformers alone, one row at a time."""
    length, prompt = int(batch.lengths[row]), list(batch.prompts["teacher"][row])
    ids = torch.tensor([prompt + batch.completion_ids[row, :length].tolist()])
    with torch.no_grad():
        logs = (plain_model()(input_ids=ids).logits[0, len(prompt) - 1 : -1] / batch.temperature).log_softmax(-1)
    values = logs.gather(-1, ids[0, len(prompt) :].unsqueeze(-1)).squeeze(-1)
    return torch.cat([values, torch.zeros(batch.completion_ids.shape[1] - length)])


def train(tmp_path, plugin, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 3, "batch_size": 4, "steps": 1}
    return rlhf_host.train(algo=plugin, data=DATA, run_dir=str(tmp_path / "run"), **{**fixed, **more})


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("follows", [None, Follow(), Follow(0.5)])
def test_hook_rewrite_prompts_changes_what_a_role_computes(tmp_path, follows):
    plugin = Hinted(Output("logprobs", role="teacher"), follows=follows)
    train(tmp_path, plugin)
    [batch] = plugin.seen
    for row in range(len(batch)):
        length = int(batch.lengths[row])
        expected = row_logprobs(batch, row)[:length]
        torch.testing.assert_close(batch.logprobs["teacher"][row, :length], expected, rtol=1e-5, atol=1e-5)


def test_the_likeliest_tokens_are_those_under_the_new_prompt(tmp_path):
    plugin = Hinted(Output("distribution", role="teacher", top=14))
    train(tmp_path, plugin)
    [batch] = plugin.seen
    found = batch.distributions["teacher"]
    for row in range(len(batch)):
        length, expected = int(batch.lengths[row]), row_logprobs(batch, row)
        at = found.ids[row, :length] == batch.completion_ids[row, :length].unsqueeze(-1)
        torch.testing.assert_close(found.logprobs[row, :length][at], expected[:length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("follows", [None, Follow()])
@pytest.mark.parametrize("layout", ["auto", "off"])
def test_the_whole_distribution_is_that_under_the_new_prompt_in_every_minibatch(tmp_path, follows, layout):
    plugin = Hinted(Output("distribution", role="teacher"), follows=follows)
    train(tmp_path, plugin, train={"minibatches": 2, "max_tokens_per_microbatch": 64, "shared_prefix": layout})
    [row] = metrics(tmp_path)
    assert row["error"] < 1e-4
    assert row["hinted"] == 0.5


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (lambda batch: {"actor": batch.prompt_ids}, "gave prompts for the role 'actor', and frozen are teacher"),
        (lambda batch: {"teacher": batch.prompt_ids[1:]}, "gave prompts for the role 'teacher': 11, expected 12"),
        (lambda batch: {"teacher": [[], *batch.prompt_ids[1:]]}, "expected 12 with tokens"),
        (lambda batch: {"teacher": [[3] * 5000, *batch.prompt_ids[1:]]}, "with which a row has 50.. tokens, and it takes"),
    ],
)
def test_prompts_that_cannot_be_used_end_the_run(tmp_path, prompts, said):
    with pytest.raises(RunError, match=said):
        train(tmp_path, Hinted(Output("logprobs", role="teacher"), prompts=prompts))
