"""A good plugin with one rule broken."""

from __future__ import annotations

from dataclasses import dataclass, field

from .good_plugins import GOOD


@dataclass(frozen=True)
class Breaks:
    """A good plugin with ``old`` replaced by ``new`` breaks the rule ``check``, and with it those in ``also``."""

    check: str
    plugin: tuple[str, str]
    old: str
    new: str
    also: frozenset[str] = frozenset()
    settings: dict = field(default_factory=dict)


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, pad_token_id=0, **sizes))


def breaks(check, plugin, old, new, *also, **settings):
    if plugin == "kernels":
        settings = {"models": {"llama": small_llama}}
    return Breaks(check, GOOD[plugin], old, new, frozenset(also), settings)


def broken_source(case):
    source = case.plugin[1]
    assert case.old in source, f"{case.check}: the table's old text is not in the plugin"
    source = source.replace(case.old, case.new)
    if "self.luck" in source:
        source = source.replace(
            "self.options = options", "self.options = options\n        import random\n        self.luck = random.random()"
        )
    return source.replace("class Base:", "CACHE = []\n\n\nclass Base:") if "CACHE" in source else source
