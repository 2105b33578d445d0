"""Plugins that messages of the host recommend: plugins say in their metadata on what, so the host knows none.

An entry point of the group ``GROUP.recommended``, where ``GROUP`` is that of the plugin's kind, is called like the topic, and its
value is the plugin's name: ``mismatch = "tis"`` under ``rlhf.extensions.recommended``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from rlhf_host.plugins.catalogue import listed
from rlhf_host.plugins.discovery import discover

Topic: TypeAlias = Literal["prompts", "answers", "entropy", "mismatch", "truncated", "remote", "generates", "foreign"]
"""An algorithm or a reward to begin with, for prompts or for answers; an extension against a policy that hardly explores, a
sampler that differs from the trainer, or answers that are cut off; a runtime of several processes, or with engines for roles that
generate; a command whose package explains names of other projects."""


def recommended(kind: str, topic: Topic) -> str:
    """The name of an installed plugin, else of a listed one, else ``NAME``."""
    installed = (info.name for info in discover() if info.kind == kind and topic in info.recommended)
    offered = (plugin["name"] for plugin in listed(kind) if topic in plugin.get("recommended", ()))
    return next(installed, None) or next(offered, "NAME")
