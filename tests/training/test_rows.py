"""Training on the rows of a data set: the same loop, without sampling, rewards or an engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rlhf_rows import data as rows_data
from rlhf_rows.units import Row, Unit, UnitSet
from transformers import AutoModelForCausalLM

import rlhf_host
from rlhf_host import AlgoNeeds, LossTerm, Metric, Needs, Output, RoleNeed, hookimpl
from rlhf_host.errors import RunError, UserError


class Sft:
    """Negative log-likelihood of trained tokens."""

    @hookimpl
    def needs(self):
        return Needs(data="prompt_completion", rewards=False, roles=(RoleNeed("actor", trainable=True),))

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        assert torch.isnan(batch.sampler_logprobs[batch.action_mask]).all()  # nothing sampled them
        yield LossTerm("nll", -outputs.logprobs)
        yield Metric("nll", -outputs.logprobs.detach(), batch.loss_mask)


class Dpo:
    """Direct preference optimisation (arXiv:2305.18290, eq. 7)."""

    @hookimpl
    def needs(self):
        roles = (RoleNeed("actor", trainable=True), RoleNeed("reference"))
        outputs = (Output("logprobs", "reference"),)
        return AlgoNeeds(data="preference", rewards=False, unit_rows=True, roles=roles, outputs=outputs)

    @hookimpl
    def compute_loss(self, role, outputs, batch):
        ratios = torch.where(batch.loss_mask, outputs.logprobs - batch.logprobs["reference"], 0.0).sum(-1)
        order = torch.argsort(2 * batch.unit_id + (batch.columns["label"] == 0))
        chosen, rejected = ratios[order][0::2], ratios[order][1::2]
        losses = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected))
        yield LossTerm("dpo", torch.empty_like(ratios).index_put((order,), losses.repeat_interleave(2)))
        yield Metric("accuracy", (chosen > rejected).float())


def rows(count: int, seed: int = 0, *, pairs: bool = False) -> list[Unit]:
    """Units over 40 tokens, of ragged lengths; in every third row a span in the middle is not trained."""
    draw = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (), generator=draw))
        return torch.randint(3, 40, (size,), generator=draw).tolist()

    def row(prompt: list[int], number: int, **columns: float) -> Row:
        completion = ids(4, 12)
        spans = [(0, 1), (3, len(completion))] if number % 3 == 0 else [(0, len(completion))]
        return Row(prompt, completion, spans, columns)

    prompts = [ids(2, 9) for _ in range(count)]
    if pairs:
        return [Unit((row(p, i, label=1.0), row(p, i + 1, label=0.0))) for i, p in enumerate(prompts)]
    return [Unit((row(p, i),)) for i, p in enumerate(prompts)]


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """``run(algo, units, ...)`` trains on these units; the metrics of every step, and the outcome."""

    def train(algo, units, held_out=None, *, name="run", resume=False, **settings):
        sets = {"train": units, "eval": held_out}

        def load(data, *, split, **rest):
            sources = sets[split] if isinstance(sets[split], dict) else {"made-up": sets[split]}
            return UnitSet(sources, dict.fromkeys(sources, 1.0), repr(sources), [])

        monkeypatch.setattr(rows_data, "load_units", load)
        config = {"train.batch_size": 4, "actor.lr": 1e-3, "checkpoint.every": 0, **settings}
        folder = tmp_path / name
        where = {"resume": folder} if resume else {"run_dir": folder, "model": tiny_model, "data": "made-up.jsonl"}
        if held_out is not None and not resume:
            where["eval_data"] = "held-out.jsonl"
        outcome = rlhf_host.train(algo=algo, **where, **(settings if resume else config))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], outcome

    return train


def values(curve: list[dict]) -> list[dict]:
    """Without what measures this machine."""
    machine = ("time/", "memory/", "engine/", "sync/", "tokens_per_s", "tflops", "mfu")
    return [{name: value for name, value in row.items() if not name.startswith(machine)} for row in curve]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def test_the_curve_is_that_of_a_plain_loop(run, tiny_model):
    units = rows(20)
    curve, outcome = run(Sft(), units, **{"data.shuffle": False, "actor.max_grad_norm": 0.0})
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(5):
        losses = []
        for unit in units[4 * step : 4 * step + 4]:
            (row,) = unit.rows
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            trained = [len(row.prompt_ids) - 1 + place for begin, end in row.trained for place in range(begin, end)]
            losses.append(-logprobs[trained])
        loss = torch.cat(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert curve[step]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    trained = weights(outcome.run_dir / "model")
    for name, tensor in model.state_dict().items():
        assert torch.allclose(trained[name], tensor, atol=1e-5), name


@pytest.mark.parametrize(("algo", "pairs"), [(Sft(), False), (Dpo(), True)])
def test_losses_are_at_temperature_1_and_a_kl_beside_them_is_finite(run, algo, pairs):
    plain, _ = run(algo, rows(8, pairs=pairs), name="plain")
    kept, _ = run(algo, rows(8, pairs=pairs), name="kept", **{"rollout.temperature": 0.5, "kl.coef": 1.0, "kl.place": "loss"})
    term = "dpo" if pairs else "nll"
    assert kept[0][f"loss/{term}"] == plain[0][f"loss/{term}"]
    assert kept[0]["loss/kl"] == 0.0
    assert 0.0 < kept[1]["loss/kl"] < 1.0


@pytest.mark.parametrize(("algo", "pairs"), [(Sft(), False), (Dpo(), True)])
def test_lines_padded_rows_and_rows_alone_train_the_same(run, algo, pairs):
    units = rows(8, pairs=pairs)
    long = [Row(row.prompt_ids, list(row.completion_ids) * 8, [(0, 8)], row.columns) for row in units[0].rows]
    units[0] = Unit(tuple(long))  # short and long rows beside each other
    layouts = {
        "line": {"train.shared_prefix": "on"},
        "padded": {"train.shared_prefix": "off"},
        "alone": {"train.max_tokens_per_microbatch": 210 if pairs else 1, "train.shared_prefix": "off"},
    }
    curves = {name: run(algo, units, name=name, kernels="none", **settings)[0] for name, settings in layouts.items()}
    for other in ("padded", "alone"):
        for one, two in zip(curves["line"], curves[other], strict=True):
            assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


def test_epochs_end_the_run_and_the_last_batch_may_be_smaller(run):
    curve, _ = run(Sft(), rows(10), **{"data.epochs": 1.5})
    assert [row["units"] for row in curve] == [4, 4, 4, 3]  # 15 rows
    assert curve[-1]["epoch"] == 1
    again, _ = run(Sft(), rows(10), name="steps", **{"train.steps": 3})
    assert [row["loss"] for row in again] == [row["loss"] for row in curve[:3]]


def test_every_row_comes_once_in_an_epoch(run):
    seen = []

    class Spy(Sft):
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            seen.extend(batch.task_index.tolist())
            return super().compute_loss(role, outputs, batch)

    run(Spy(), rows(10), **{"data.epochs": 2.0})
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize(("algo", "pairs"), [(Sft(), False), (Dpo(), True)])
def test_a_resumed_run_is_the_run_that_never_stopped(run, algo, pairs):
    units, held_out = rows(14, pairs=pairs), rows(5, 7, pairs=pairs)
    whole, _ = run(algo, units, held_out, name="whole", **{"train.steps": 6, "eval.every": 2})
    run(algo, units, held_out, name="cut", **{"train.steps": 3, "eval.every": 2, "eval.at_end": False})
    again, _ = run(algo, units, held_out, name="cut", resume=True, **{"train.steps": 6, "eval.at_end": True})
    assert values(again) == values(whole)


def test_a_resume_with_other_rows_is_refused(run):
    units = rows(12)
    run(Sft(), units, **{"train.steps": 2})
    (row,) = units[11].rows
    units[11] = Unit((Row(row.prompt_ids, [*row.completion_ids[:-1], 3], row.trained),))
    with pytest.raises(UserError, match="the data, or its tokens, changed since the checkpoint"):
        run(Sft(), units, resume=True, **{"train.steps": 4})


@pytest.mark.parametrize(("prefix", "cost"), [("auto", 21), ("on", 21), ("off", 32)])
def test_a_pair_too_large_for_a_micro_batch_is_refused_before_the_run(run, tmp_path, prefix, cost):
    units = [
        Unit(tuple(Row([5] * 3, [6] * length, [(0, length)], {"label": label}) for length, label in ((4, 1.0), (5, 0.0))))
    ] * 3
    units[1] = Unit(
        tuple(Row([5] * 6, [6] * length, [(0, length)], {"label": label}) for length, label in ((11, 1.0), (6, 0.0)))
    )
    settings = {"train.shared_prefix": prefix, "train.batch_size": 2, "train.steps": 1}
    with pytest.raises(
        UserError, match=rf"made-up: pair 2 \(a prompt of 6 tokens, answers of 11 and 6\) costs {cost} tokens"
    ) as error:
        run(Dpo(), units, **settings, **{"train.max_tokens_per_microbatch": cost - 1})
    assert f"train.max_tokens_per_microbatch={cost} or more" in str(error.value)
    assert not (tmp_path / "run").exists()
    run(Dpo(), units, **settings, **{"train.max_tokens_per_microbatch": cost})


def test_a_finished_run_says_how_to_go_on(run):
    run(Sft(), rows(8))
    with pytest.raises(UserError, match=r"is finished at step 2; raise data.epochs to continue"):
        run(Sft(), rows(8), resume=True)


def test_an_evaluation_is_the_mean_over_all_held_out_tokens(run, tiny_model, monkeypatch):
    monkeypatch.setattr("rlhf_rows.evaluation.UNITS", 3)  # several batches, of unequal sizes
    one, two = rows(7, 3), rows(4, 4)
    settings = {"train.steps": 1, "eval.at_end": False}
    curve, _ = run(Sft(), rows(4), {"one": one, "two": two}, **settings)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def nll(units):
        losses = []
        for unit in units:
            (row,) = unit.rows
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            losses += [-logprobs[len(row.prompt_ids) - 1 + i].item() for begin, end in row.trained for i in range(begin, end)]
        return sum(losses) / len(losses)

    start = curve[0]
    for name, units in (("eval/", one + two), ("eval/one/", one), ("eval/two/", two)):
        assert start[f"{name}loss"] == pytest.approx(nll(units), abs=1e-5)
        assert start[f"{name}perplexity"] == pytest.approx(math.exp(nll(units)), rel=1e-4)


def test_an_evaluation_of_pairs_is_the_mean_over_pairs_and_changes_nothing(run, monkeypatch):
    held_out = rows(9, 5, pairs=True)
    settings = {"train.steps": 2, "eval.every": 1}
    plain, _ = run(Dpo(), rows(8, pairs=True), name="plain", **{"train.steps": 2})
    small, _ = run(Dpo(), rows(8, pairs=True), held_out, name="small", **settings)
    monkeypatch.setattr("rlhf_rows.evaluation.UNITS", 2)
    large, _ = run(Dpo(), rows(8, pairs=True), held_out, name="large", **settings)
    assert small[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    for one, two in zip(small, large, strict=True):
        assert one["eval/loss"] == pytest.approx(two["eval/loss"], abs=1e-6)
        assert one["eval/accuracy"] == pytest.approx(two["eval/accuracy"])
    assert [row["loss"] for row in plain] == [row["loss"] for row in small[1:]]


REFUSED = {
    "leave rewards out": {"reward": "math_verifier"},
    "for more passes set data.epochs": {"train.minibatches": 2},
    "which nothing sampled: leave train.old_logprobs out": {"train.old_logprobs": "recompute"},
    "train.steps and data.epochs both say": {"train.steps": 3, "data.epochs": 2.0},
    "give data=PATH instead of from_trajectories": {"from_trajectories": "some.jsonl"},
    "tis corrects for a sampler": {"with": "tis"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_place_in_such_a_run_is_refused(run, message):
    with pytest.raises(UserError, match=message):
        run(Sft(), rows(4), **REFUSED[message])


def test_log_probabilities_of_rows_that_depend_on_the_run_cannot_be_computed_before(run):
    class Chooser(Dpo):
        @hookimpl
        def make_rows(self, groups):
            return [row for group in groups for row in group.trajectories]

        @hookimpl
        def draw_tasks(self, tasks, count, step):
            return range(count)

    with pytest.raises(UserError, match=r"makes rows of whole batches, .* chooses these during the run, .*leave reference.pre"):
        run(Chooser(), rows(4, pairs=True), **{"reference.precompute": True})


def test_epochs_of_a_run_that_samples_are_refused(run):
    class Online:
        @hookimpl
        def needs(self):
            return Needs(roles=(RoleNeed("actor", trainable=True),), rewards=False)

    with pytest.raises(UserError, match=r"data\.epochs 2 is for data that is trained on as it is: set steps"):
        run(Online(), rows(4), **{"data.epochs": 2.0})


def test_an_algorithm_that_gives_no_loss_term_is_an_error(run):
    class Forgetful(Sft):
        @hookimpl
        def compute_loss(self, role, outputs, batch):
            list(super().compute_loss(role, outputs, batch))  # and no return

    with pytest.raises(RunError, match=r"step 1: no plugin gave a loss term, so nothing was trained: .* for actor"):
        run(Forgetful(), rows(4))
