"""Counts of what a GPU is asked to do by a training pass, an optimizer's step and a step of decoding: the host's own code, counted.

Settings become roles as in a run (``Roles``), with the kernels, layouts and precision that the host chooses for CUDA, on a
``CountingGpu`` and with a model of full size that has no weights (``meta_model``). Comparisons at the start of a run need numbers:
here they find every kernel and layout correct, so kernels are used where a run would use those that pass.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from counting_gpu import CountingGpu, Launch, Wait
from rlhf_authoring.tensors import make_batch

from rlhf_host.config.flags import parse
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import merge_needs, resolve
from rlhf_host.errors import UserError
from rlhf_host.models.meta_model import meta_model
from rlhf_host.plugins import libraries
from rlhf_host.plugins.specs import PluginSpec
from rlhf_host.protocols import EngineStart, Kernels, RuntimeStart
from rlhf_host.records.episodes import Sampling
from rlhf_host.runtimes.building import Roles
from rlhf_host.runtimes.compute import Inline
from rlhf_host.training.assemble import runtime_start
from rlhf_host.training.update import Accumulation


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of Qwen2's architecture."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int = 151_936
    tied: bool = True

    def configuration(self, layers: int) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    "1.5b": Shape(1536, 8960, 28, 12, 2),
    "3b": Shape(2048, 11008, 36, 16, 2),
    "7b": Shape(3584, 18944, 28, 28, 4, 152_064, tied=False),
    "32b": Shape(5120, 27648, 64, 40, 8, 152_064, tied=False),
}
"""Sizes of Qwen2.5."""
ROWS, PROMPT, COMPLETION = 8, 256, 1792
"""Size of a micro-batch, as in ``mfu-3b`` of ``scripts/gpu_accept.py``."""
DECODED, SAMPLES, CONTEXT, STEPS = 128, 8, 512, 8
"""Rows that decode, how many of them have one prompt, tokens before those that are counted, and steps over which they are."""
USUAL = (
    *("--algo", "rloo", "--reward", "math_verifier", "--train.shared-prefix", "off"),
    *("--train.max-tokens-per-microbatch", str(ROWS * (PROMPT + COMPLETION)), "--actor.gradient-checkpointing", "true"),
    *("--train.keep-logits", "off"),  # auto asks a GPU for its memory
)


class Work(NamedTuple):
    """Launches and waits that the device was asked for."""

    launches: Counter[Launch]
    reads: Counter[Wait]
    writes: Counter[Wait]

    @classmethod
    def of(cls, gpu: CountingGpu) -> Work:
        """Takes what was counted since the last time."""
        work = cls(gpu.launches, gpu.reads, gpu.writes)
        gpu.forget()
        return work


class Update(NamedTuple):
    """An optimizer's update, in parts."""

    training: Work
    """The second of two micro-batches, which adds to gradients."""
    after: Work
    """The optimizer's step, and what is read for metrics."""


def count_update(shape: Shape, flags: Sequence[str] = (), layers: int | None = None, *, updates: int = 1) -> Update:
    """Counts an update of two micro-batches under ``USUAL`` and more flags.

    Args:
        layers: default: those of the shape.
        updates: number of updates, of which the last one is counted; the first makes the optimizer's state.
    """
    parts: list[Work] = []
    inner = Accumulation._pass

    def watched(*arguments: Any) -> None:
        gpu.forget()
        inner(*arguments)
        parts.append(Work.of(gpu))

    with CountingGpu() as gpu, _roles(gpu, shape, flags, layers) as (roles, _), patch.object(Accumulation, "_pass", watched):
        with gpu.trusting():
            roles.worker.roles["actor"].passes.prepare(PROMPT + COMPLETION)
        for _ in range(updates):
            refused = roles.worker.update(_rows(shape, 2 * ROWS).batch()).refused
            if refused is not None:
                raise RuntimeError(refused)
            after = Work.of(gpu)
        _refuse_unused(roles)
    assert len(parts) == 2 * updates
    return Update(parts[-1], after)


def count_decoding(shape: Shape, flags: Sequence[str] = (), layers: int | None = None) -> Work:
    """Counts ``STEPS`` steps of ``DECODED`` rows: what a wave with as many more tokens adds."""
    with CountingGpu() as gpu, _roles(gpu, shape, flags, layers) as (roles, engine):
        with _graphs_at_once():
            few, more = (_wave(gpu, roles, engine, tokens) for tokens in (STEPS, 2 * STEPS))
        _refuse_unused(roles)
    return Work(*(_without(own, other) for own, other in zip(more, few, strict=True)))


def _graphs_at_once() -> Any:
    """Computes at once, inside the block, what ``rlhf-kernels-graphs`` would record and play: the same launches."""
    try:
        capture = importlib.import_module("rlhf_kernels_graphs.capture")
    except ImportError:
        return nullcontext()
    return patch.dict(capture.CAPTURES, cuda=lambda work: work)


def _without(counts: Counter[Any], others: Counter[Any]) -> Counter[Any]:
    """Returns the differences of counts, negative ones too."""
    left = Counter(counts)
    left.subtract(others)
    return Counter({what: count for what, count in left.items() if count})


def _wave(gpu: CountingGpu, roles: Roles, engine: Any, tokens: int) -> Work:
    """Counts everything from prompts to the last of ``tokens`` new tokens."""
    start = EngineStart(
        model=roles.models["actor"], tokenizer=None, version=0, compute=Inline(), kernels=_Trusted(gpu, roles.kernels)
    )
    started = engine.build().start(start)
    prompts = [[*range(3 + row // SAMPLES, 3 + row // SAMPLES + CONTEXT)] for row in range(DECODED)]

    async def all_of_them() -> None:
        started.expect(DECODED)
        requests = (started.generate(ids, Sampling(tokens), (0, row)) for row, ids in enumerate(prompts))
        answers = await asyncio.gather(*requests)
        assert {len(answer.token_ids) for answer in answers} == {tokens}
        await started.close()

    gpu.forget()
    asyncio.run(all_of_them())
    return Work.of(gpu)


class _Trusted:
    """The run's kernels, which compare without being counted."""

    def __init__(self, gpu: CountingGpu, kernels: Kernels):
        self._gpu, self._kernels = gpu, kernels

    def __getattr__(self, name: str) -> Any:
        def trusted(*arguments: Any, **more: Any) -> Any:
            with self._gpu.trusting():
                return getattr(self._kernels, name)(*arguments, **more)

        return trusted


@contextmanager
def _roles(gpu: CountingGpu, shape: Shape, flags: Sequence[str], layers: int | None) -> Iterator[tuple[Roles, PluginSpec]]:
    """Loads the roles of a run with these settings on the device."""
    start = _start(tuple(flags))
    assert start.engine is not None
    with tempfile.TemporaryDirectory(prefix="counted-") as directory:
        Path(directory, "config.json").write_text(json.dumps(shape.configuration(layers or shape.layers)))
        start = replace(start, roles={"actor": start.roles["actor"].model_copy(update={"model": directory})})
        load = patch("rlhf_host.models.loading.load_model", lambda role, **how: _without_weights(gpu, role, how))
        with load, _with_triton(), gpu.trusting():
            roles = Roles(start)
        yield roles, start.engine


@cache
def _start(flags: tuple[str, ...]) -> RuntimeStart:
    with _with_triton():
        resolved = resolve(read_config((), parse([*USUAL, "--actor.model", "quickstart", *flags])).config)
        manager = resolved.plugins()
        return runtime_start(resolved.config, manager, merge_needs(manager), None, 1000, {})


def _with_triton() -> Any:
    """Kernels find Triton inside the block, as beside every torch for CUDA. None of them is run."""
    missing = libraries.missing_library
    return patch.object(
        libraries, "missing_library", lambda info, names: missing(info, [name for name in names if name != "triton"])
    )


def _refuse_unused(roles: Roles) -> None:
    """Raises ``UserError`` if kernels were asked for, and none are used."""
    reports = getattr(roles.kernels, "reports", [])
    if reports and not any(" are used " in line for line in reports):
        raise UserError(reports[-1])


def _without_weights(gpu: CountingGpu, role: Any, how: dict[str, Any]) -> Any:
    model = meta_model(role, head=how.get("head", "lm"), trainable=how.get("trainable", False), weights=False)
    assert model is not None
    gpu.place(model)
    return model


def _rows(shape: Shape, count: int) -> Any:
    """Returns rows of equal lengths, each with its own prompt."""
    rows = make_batch([COMPLETION] * count, groups=[*range(count)], vocabulary=shape.vocabulary)
    generator = torch.Generator().manual_seed(1)
    rows.prompt_ids = torch.randint(shape.vocabulary, (count, PROMPT), generator=generator).tolist()
    rows.advantages = torch.randn(rows.action_mask.shape, generator=generator)
    return rows
