"""Roles that read the batch's rows in their own tokens: ``rewrite_rows``, with plain transformers as the judge."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import torch
from rlhf_authoring.models import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rlhf_host
from rlhf_host import Advantages, LossTerm, Metric, Needs, Output, PluginError, RoleNeed, RunError, Segment, hookimpl

DATA = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in ((17, 35), (38, 26), (41, 29), (56, 17))]
SIZE = 259


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model over bytes, whose vocabulary is much larger than that of the quickstart."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@cache
def plain(path):
    return AutoModelForCausalLM.from_pretrained(path)


def retold(row):
    """A row in bytes, said twice: so it is longer than the actor's."""
    tokenizer = byte_tokenizer()
    prompt, answer = (tokenizer(text * 2 or "?", add_special_tokens=False)["input_ids"] for text in (row.prompt_text, row.text))
    return dataclasses.replace(row, segments=[Segment("prompt", prompt), Segment("action", answer)])


def longer(row):
    return dataclasses.replace(row, segments=[Segment("prompt", [3] * 500), row.segments[1]])


class Retold:
    """The teacher reads each row twice over; everything is kept to be looked at."""

    def __init__(self, path, *outputs, rows=None, own=True):
        self.path, self.outputs, self.rows, self.own = path, outputs, rows, own
        self.seen = []

    @hookimpl
    def needs(self):
        teacher = RoleNeed("teacher", source=None, own_tokens=self.own)
        actor = RoleNeed("actor", trainable=True, source=None)
        return Needs(data="prompts", roles=(actor, teacher), outputs=self.outputs, rewards=False)

    @hookimpl
    def rewrite_rows(self, experience):
        rows = [retold(row) for row in experience.trajectories]
        return {"teacher": rows} if self.rows is None else self.rows(rows)

    @hookimpl
    def compute_advantages(self, experience):
        self.seen.append(experience)
        return Advantages(torch.zeros(experience.action_mask.shape))

    @hookimpl
    def compute_loss(self, outputs, batch):
        yield LossTerm("nothing", outputs.logprobs * 0.0)
        if self.outputs[0].what != "distribution" or self.outputs[0].top is not None:
            return
        other = outputs.others["teacher"]
        seen = batch.rows["teacher"]
        errors = [(other.logprobs[row, : len(logs)] - logs).abs().max() for row, logs in self.logs(seen)]
        yield Metric("error", torch.stack(errors), reduce="max")
        own = other.own.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
        yield Metric("own_error", (own - outputs.logprobs).abs(), batch.action_mask, reduce="max")
        yield Metric("wider", float(other.logprobs.shape[1] - other.own.shape[1]), reduce="min")

    def logs(self, seen):
        """Yields each row's ``[T', V']`` by transformers alone, one row at a time."""
        for row in range(len(seen)):
            length, prompt = int(seen.lengths[row]), list(seen.prompt_ids[row])
            ids = torch.tensor([prompt + seen.completion_ids[row, :length].tolist()])
            with torch.no_grad():
                logits = plain(self.path)(input_ids=ids).logits
            yield row, (logits[0, len(prompt) - 1 : -1] / seen.temperature).log_softmax(-1)


def train(tmp_path, plugin, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 3, "batch_size": 4, "steps": 1}
    teacher = {"model": plugin.path}
    return rlhf_host.train(algo=plugin, data=DATA, teacher=teacher, run_dir=str(tmp_path / "run"), **{**fixed, **more})


def test_hook_rewrite_rows_gives_a_role_its_own_tokens(tmp_path, teacher):
    plugin = Retold(teacher, Output("logprobs", role="teacher"))
    train(tmp_path, plugin)
    [batch] = plugin.seen
    seen = batch.rows["teacher"]
    assert "teacher" not in batch.logprobs
    for row, logs in plugin.logs(seen):
        ids = seen.completion_ids[row, : len(logs)]
        found = seen.logprobs["teacher"][row, : len(logs)]
        torch.testing.assert_close(found, logs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), rtol=1e-5, atol=1e-5)


def test_its_likeliest_tokens_are_numbers_of_its_own(tmp_path, teacher):
    plugin = Retold(teacher, Output("distribution", role="teacher", top=SIZE))
    train(tmp_path, plugin)
    [batch] = plugin.seen
    seen = batch.rows["teacher"]
    found = seen.distributions["teacher"]
    assert int(found.ids.max()) == SIZE - 1
    for row, logs in plugin.logs(seen):
        expected = logs.gather(-1, found.ids[row, : len(logs)])
        torch.testing.assert_close(found.logprobs[row, : len(logs)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["auto", "off"])
def test_its_whole_distribution_is_there_in_every_micro_batch(tmp_path, teacher, layout):
    plugin = Retold(teacher, Output("distribution", role="teacher"))
    train(tmp_path, plugin, train={"minibatches": 2, "max_tokens_per_microbatch": 64, "shared_prefix": layout})
    [row] = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["error"] < 1e-4
    assert row["own_error"] < 1e-5
    assert row["wider"] > 0


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda rows: {"actor": rows}, "gave rows for the role 'actor', and with own_tokens are teacher"),
        (lambda rows: {"teacher": rows[1:]}, "gave rows for the role 'teacher': 11, expected 12 with tokens"),
        (lambda rows: {"teacher": [dataclasses.replace(rows[0], segments=[]), *rows[1:]]}, "expected 12 with tokens"),
        (lambda rows: {}, "gave no rows for the role 'teacher', which has its own tokens"),
        (lambda rows: {"teacher": [longer(rows[0]), *rows[1:]]},
            "with which a row has 50. tokens, and it takes 128"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_end_the_run(tmp_path, teacher, rows, said):
    with pytest.raises(RunError, match=said):
        train(tmp_path, Retold(teacher, Output("logprobs", role="teacher"), rows=rows))


def test_a_role_with_the_actors_tokens_gets_no_rows(tmp_path):
    with pytest.raises(RunError, match=r"gave rows for the role 'teacher', and with own_tokens are "):
        train(tmp_path, Retold("quickstart", Output("logprobs", role="teacher"), own=False))


def test_two_plugins_agree_on_whose_tokens_a_role_has(tmp_path, teacher):
    class Other:
        @hookimpl
        def needs(self):
            return Needs(roles=(RoleNeed("teacher", source=None),))

    with pytest.raises(PluginError, match=r"need the role 'teacher' differently: .* and with its own tokens"):
        train(tmp_path, Retold(teacher, Output("logprobs", role="teacher")), extensions=[Other()])


@pytest.mark.parametrize("more", [{"trainable": True, "source": None}, {"source": "actor"}])
def test_own_tokens_are_for_frozen_models_of_their_own(more):
    with pytest.raises(ValueError, match="has its own tokens, so it is frozen, and another model than the actor"):
        RoleNeed("teacher", own_tokens=True, **more)


def test_parts_of_a_batch_have_the_same_part_of_its_rows(tmp_path, teacher):
    """Also where both are equally wide, and where rows train beside the batch."""
    plugin = Retold(teacher, Output("logprobs", role="teacher"))
    train(tmp_path, plugin)
    [batch] = plugin.seen
    part = batch.select([4, 1])
    whole, some = batch.rows["teacher"], part.rows["teacher"]
    assert some.prompt_ids == [whole.prompt_ids[4], whole.prompt_ids[1]]
    for place, row in enumerate((4, 1)):
        length = int(whole.lengths[row])
        assert some.completion_ids[place, :length].tolist() == whole.completion_ids[row, :length].tolist()
        assert torch.equal(some.logprobs["teacher"][place, :length], whole.logprobs["teacher"][row, :length])
    assert int(some.lengths.max()) > int(part.lengths.max())
