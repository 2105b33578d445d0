"""The smallest algorithm, which backends and runtimes under contract train with; and a tiny model for it to train."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rlhf_authoring.models import write_tiny_model
from rlhf_authoring.tensors import make_batch
from rlhf_host import Advantages, Batch, Experience, LossTerm, Needs, Outputs, RoleNeed, __version__, hookimpl
from rlhf_host.installed import HOST
from rlhf_host.internals import Loaded, PluginManager, describe
from rlhf_host.models import quiet_transformers
from rlhf_host.settings import RoleConfig

NEEDS = Needs(data="prompts", roles=(RoleNeed("actor", trainable=True, source=None),))
NAME = "contract_reinforce"


class Reinforce:
    """``-A·log π`` per token, with the reward for an advantage."""

    def __init__(self, options: Any = None):
        pass

    @hookimpl
    def needs(self) -> Needs:
        return NEEDS

    @hookimpl
    def compute_advantages(self, experience: Experience) -> Advantages:
        return Advantages(experience.rewards.unsqueeze(-1) * experience.action_mask)

    @hookimpl
    def compute_loss(self, role: str, outputs: Outputs, batch: Batch) -> Iterator[LossTerm]:
        assert outputs.logprobs is not None
        assert batch.advantages is not None
        yield LossTerm("policy", -batch.advantages * outputs.logprobs)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """``Reinforce`` as an installed algorithm, here and in processes that are started meanwhile."""
    with tempfile.TemporaryDirectory(prefix="rlhf-contract-") as site:
        about = Path(site, "contract_reinforce-1.dist-info")
        about.mkdir()
        (about / "METADATA").write_text(f"Name: contract-reinforce\nVersion: 1\nRequires-Dist: {HOST}=={__version__}\n")
        (about / "entry_points.txt").write_text(f"[rlhf.algos]\n{NAME} = {__name__}:Reinforce\n")
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PYTHONPATH=path), mock.patch.object(sys, "path", [site, *sys.path]):
            importlib.invalidate_caches()
            yield


def manager_of(**plugins: Any) -> PluginManager:
    """Plugins given as objects, each under its kind."""
    return PluginManager([Loaded(kind, kind, describe(kind, kind, plugin), plugin) for kind, plugin in plugins.items()])


@functools.cache
def _model() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="rlhf-contract-")
    with quiet_transformers():
        write_tiny_model(Path(folder.name), hidden=128)
    return folder


def actor(**settings: Any) -> RoleConfig:
    """The settings of a role with a tiny model that changes visibly in one step."""
    return RoleConfig(**{"model": _model().name, "device": "cpu", "lr": 1e-3, "adam_eps": 1e-4, **settings})


def batch(seed: int = 0) -> Batch:
    """Eight rows of 1 to 12 tokens, ready for an update."""
    rows = make_batch([9, 4, 7, 1, 12, 5, 6, 2], groups=[0, 0, 0, 1, 1, 2, 2, 2], vocabulary=40, seed=seed)
    rows.advantages = torch.randn(rows.action_mask.shape, generator=torch.Generator().manual_seed(seed + 1))
    return rows.batch()
