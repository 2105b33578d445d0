"""A run goes on although the model that it began with is gone, where its checkpoint has all weights, and says who needs it else."""

import shutil

import pytest

import rlhf_host
from rlhf_host import UserError

RUN = {
    "algo": "rloo",
    "rewards": "math_verifier",
    "data": "arithmetic",
    "model": "base",
    "run_dir": "run",
    "steps": 2,
    "n": 2,
    "batch_size": 2,
    "max_new_tokens": 4,
    "lr": 1e-3,
}


@pytest.fixture
def begun(tiny_model, tmp_path, monkeypatch):
    """Trains two steps on a copy of a model, which is then gone."""
    monkeypatch.chdir(tmp_path)

    def begin(**settings):
        shutil.copytree(tiny_model, "base")
        rlhf_host.train(**RUN, **settings)
        shutil.move("base", "kept")

    return begin


def test_all_that_a_run_needs_is_in_its_checkpoint(begun):
    begun()
    rlhf_host.train(resume="run", steps=4, dry_run=True)
    resumed = rlhf_host.train(resume="run", steps=4)
    shutil.move("kept", "base")
    whole = rlhf_host.train(**{**RUN, "steps": 4, "run_dir": "whole"})
    assert [row["grad_norm"] for row in resumed.metrics] == [row["grad_norm"] for row in whole.metrics]
    assert resumed.config.roles["actor"].model == "base"


@pytest.mark.parametrize(
    ("settings", "role"),
    [({"extensions": "kl", "kl.coef": 0.1}, "reference"), ({"actor.lora.rank": 2}, "actor")],
)
def test_a_role_that_needs_the_model_itself_is_named(begun, settings, role):
    begun(**settings)
    for dry_run in (True, False):
        with pytest.raises(
            UserError, match=rf"no model 'base'.*\(the role {role} needs it, and run/checkpoints/step-000002 has"
        ):
            rlhf_host.train(resume="run", steps=4, dry_run=dry_run)
