"""Online DPO against TRL's trainer: the lines between its rewards and its loss."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from rlhf_plugin_online_dpo import OnlineDPO

from rlhf_host import Group, Outputs, Segment, Task, Trajectory
from rlhf_host.rollouts.experience import make_experience

from .conftest import _borrowed
from .test_offline_losses import Rows


@pytest.fixture(scope="session")
def trainer():
    with _borrowed("trl"):
        return importlib.import_module("trl.experimental.online_dpo.online_dpo_trainer").OnlineDPOTrainer


def sampled(rewards, lengths):
    """Two answers for each prompt, with log-probabilities that go with the sample wherever its row ends up."""
    generator = torch.Generator().manual_seed(1)
    groups, tables = [], {}
    for number, (two, sizes) in enumerate(zip(rewards, lengths, strict=True)):
        name, rows = f"group-{number}", []
        for sample, (reward, size) in enumerate(zip(two, sizes, strict=True)):
            both = -3 * torch.rand(2, size, generator=generator, dtype=torch.float64) - 0.1
            tables[name, sample] = both
            segments = [Segment("prompt", [1]), Segment("action", [5] * size, [-1.0] * size, [0] * size)]
            rows.append(Trajectory(f"{name}-{sample}", name, Task(""), segments, sample=sample, reward=reward))
        groups.append(Group(name, Task(""), rows))
    return groups, tables


def table(names, tables, which):
    width = max(tables[name].shape[1] for name in names)
    return torch.stack([torch.nn.functional.pad(tables[name][which], (0, width - tables[name].shape[1])) for name in names])


def theirs(trainer, names, tables, rewards, loss_type):
    """A function of log-probabilities: all first samples, then all second ones."""
    lines = inspect.getsource(trainer.training_step).splitlines()
    (start,) = [i for i, line in enumerate(lines) if "# Split rewards into chosen/rejected pairs" in line]
    stop = next(i for i, line in enumerate(lines) if i > start and "# Log everything" in line)
    code = textwrap.dedent("\n".join(lines[start:stop]))
    mask = table(names, {name: torch.ones(2, tables[name].shape[1]) for name in names}, 0)

    def of(logprobs):
        scope = {
            **vars(sys.modules[trainer.__module__]),
            "self": SimpleNamespace(beta=0.3, args=SimpleNamespace(loss_type=loss_type)),
            "rewards": torch.tensor([pair[half] for half in (0, 1) for pair in rewards]),
            "batch_size": len(rewards),
            "device": "cpu",
            "completion_mask": mask,
            "logprobs": logprobs,
            "ref_logprobs": table(names, tables, 1),
        }
        exec(code, scope)
        return scope["loss"]

    return of


def ours(groups, tables, names, loss):
    plugin = OnlineDPO(OnlineDPO.Options(beta=0.3, loss=loss))
    made = plugin.make_rows(groups)
    kept = [Group(group.group_id, group.task, [row for row in made if row.group_id == group.group_id]) for group in groups]
    batch = make_experience([group for group in kept if group.trajectories], {}, step=1, max_new_tokens=0, temperature=1.0)
    order = [names.index((row.group_id, row.sample)) for row in batch.trajectories]
    width = batch.loss_mask.shape[1]
    reference = table(names, tables, 1)[order][:, :width]
    batch.logprobs["reference"] = reference.masked_fill(~batch.loss_mask, float("nan"))
    rows = Rows(batch, batch.loss_mask, None, reference)
    reduced = rows.ours(lambda logprobs: plugin.compute_loss(Outputs(logprobs=logprobs), batch))
    return lambda logprobs: reduced(logprobs[order][:, :width])


LENGTHS = [(5, 3), (2, 6), (4, 4)]


@pytest.mark.parametrize(("here", "there"), [("sigmoid", "sigmoid"), ("ipo_sum", "ipo")])
def test_online_dpo_is_trls_where_no_rewards_are_equal(trainer, same, here, there):
    rewards = [(1.0, -0.5), (0.0, 0.25), (3.0, 2.0)]
    groups, tables = sampled(rewards, LENGTHS)
    names = [(f"group-{number}", sample) for sample in (0, 1) for number in range(3)]
    logprobs = table(names, tables, 0)
    same(ours(groups, tables, names, here), theirs(trainer, names, tables, rewards, there), logprobs)


def test_pairs_of_ties_are_left_out_here_and_trl_takes_the_first_answer_as_the_better(trainer, same, gradient):
    rewards = [(1.0, 1.0), (0.0, 0.25), (3.0, 2.0)]
    groups, tables = sampled(rewards, LENGTHS)
    names = [(f"group-{number}", sample) for sample in (0, 1) for number in range(3)]
    logprobs = table(names, tables, 0)
    assert gradient(theirs(trainer, names, tables, rewards, "sigmoid"), logprobs)[0].abs().max() > 0.01
    without = [name for name in names if name[0] != "group-0"]
    fewer = table(without, tables, 0)
    one, two = ours(groups, tables, without, "sigmoid"), theirs(trainer, without, tables, rewards[1:], "sigmoid")
    same(one, two, fewer)
