"""Models whose weights stay in their files until a backend reads them, block by block, to keep a part of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from rlhf_host.config.schema import RoleConfig
from rlhf_host.distributed.split.small_models import small_model
from rlhf_host.errors import UserError
from rlhf_host.models.carried import carry, names_in, targets
from rlhf_host.models.dtypes import retype, weight_dtypes
from rlhf_host.models.heads import blocks_of
from rlhf_host.models.loading import (
    as_user_error,
    choose_device,
    configuration,
    files_of,
    new_model,
    options_of,
    pad_scores,
    quiet_transformers,
    rounded_base,
    without_bars,
)
from rlhf_host.models.locations import ModelLocation, find_model, with_base
from rlhf_host.models.preparation import no_head, prepare, refuse_settings
from rlhf_host.phases import slow_phase
from rlhf_host.protocols import Buckets, ShardedModel

SCORE = "score.weight"


def load_sharded(role: RoleConfig, *, head: Literal["lm", "scalar"] = "lm", trainable: bool = True) -> ShardedModel | None:
    """Loads a role's model without its weights; None for one that can only be loaded whole: from a GGUF file, in 4 bits or from
    quantized files, with an adapter that is merged, from files without the usual names, or of a family that cannot be made
    without its values or with fewer layers.

    Raises:
        UserError: as ``load_model``, except for what is wrong with the weights.
    """
    role = with_base(role)
    source, device = find_model(role.model), choose_device(role.device)
    refuse_settings(role, source, trainable=trainable)
    plain = role.model_copy(update={"adapter": None})
    if role.adapter is not None and not trainable:
        return None
    if source.gguf or role.quantize or not (files := files_of(source, plain)):
        return None
    with quiet_transformers():
        try:
            config = configuration(source, role, head)
            if getattr(config, "quantization_config", None) is not None:  # scales are beside the weights
                return None
            read, kept = weight_dtypes(role, trainable, config.dtype, rounded_base(role))
            reader = _Reader(role, files, head, partial(_on_meta, source, role, head, config, read))
            probe = small_model(reader.shell, config, lambda small: new_model(source, role, head, small, read))
        except Exception:  # some cannot be made without values; what is wrong with others is said when they are loaded whole
            return None
    if probe is None or reader.doubled:
        return None
    if reader.headless and not trainable:
        raise no_head(role)
    with quiet_transformers():
        model = _on_meta(source, role, head, config, read)
        carry(model, files, partial(_on_meta, source, role, "lm", config, read) if head == "scalar" else None)
        reader.fill_buffers(model)
        plain_names = {name: weight for name, weight in model.named_parameters()}
        fitted = [
            prepare(_in_dtype(kept, each), role, source, device, trainable=trainable, probe=each is probe)
            for each in (probe, model)
        ]
        if reader.headless:
            pad_scores(model, role)
    names = {weight: name for name, weight in fitted[1].named_parameters()}
    return ShardedModel(
        fitted[1], fitted[0], partial(reader.read, {name: names[weight] for name, weight in plain_names.items()})
    )


def _in_dtype(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    if next(model.parameters()).dtype != dtype:
        retype(model, dtype)
    return model


def _on_meta(
    source: ModelLocation, role: RoleConfig, head: str, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Returns a model whose parameters are on ``meta``, and whose buffers are real."""
    with parameters_on_meta():
        model = new_model(source, role, head, config, dtype)
    for pattern, wide in model._get_dtype_plan(dtype).items():
        for name, weight in model.named_parameters():
            if pattern in name:
                weight.data = weight.data.to(wide)
    if model.can_generate():
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(source.path, **options_of(source, role))
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Moves every parameter to ``meta`` when its module gets it; buffers, such as rotary frequencies, are computed."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and value.device.type != "meta":
            value = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        register(self, name, value)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class _Reader:
    """Reads weights into a model on ``meta``, a block at a time, as transformers does: renamed, joined, split and cast."""

    role: RoleConfig
    files: list[Path]
    head: str
    make: Callable[[], PreTrainedModel]
    """Makes the model on ``meta``."""
    shell: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.shell = self.make()
        self._conversions: list[Any] = get_model_conversion_mapping(self.shell)
        self._first: dict[str, str] = {}
        """Name of a parameter → its first name."""
        firsts: dict[nn.Parameter, str] = {}
        for name, weight in self.shell.named_parameters(remove_duplicate=False):
            self._first[name] = firsts.setdefault(weight, name)

    @cached_property
    def _targets(self) -> dict[str, tuple[Any, str]]:
        """Key in the files → file, and the name of the weight or buffer that it becomes, or a part of it."""
        keys = names_in(self.files)
        return {key: (keys[key], name) for key, name in targets(self.shell, keys).items()}

    @property
    def doubled(self) -> bool:
        """True if the files have a tied weight under two names: only one of them could be read."""
        found = {name for _, name in self._targets.values() if name in self._first}
        return len({self._first[name] for name in found}) < len(found)

    @property
    def headless(self) -> bool:
        """True if the model has a new scalar head, of zeros."""
        return self.head == "scalar" and SCORE not in {name for _, name in self._targets.values()}

    def fill_buffers(self, model: PreTrainedModel) -> None:
        """Reads the buffers that files hold."""
        buffers = dict(self.shell.named_buffers())
        self._load([key for key, (_, name) in self._targets.items() if name in buffers])
        for name, buffer in self.shell.named_buffers():
            model.get_buffer(name).copy_(buffer)

    def read(self, names: dict[str, str]) -> Buckets:
        """Yields buckets, of weights called as in ``names``: name in the files' model → name in the fitted one."""
        groups: dict[str, list[str]] = {}
        blocks = blocks_of(self.shell)
        for key, (_, name) in self._targets.items():
            if name in self._first:
                block = max((each for each in blocks if name.startswith(f"{each}.")), key=len, default=name.rpartition(".")[0])
                groups.setdefault(block, []).append(key)
        missing = set(names)
        for keys in groups.values():
            with slow_phase(f"Reading the weights of {self.role.model}, of which {len(missing)} are left"), self._checked():
                self._load(keys)
                bucket = {self._first[name]: weight.detach() for name, weight in self._taken()}
            missing -= bucket.keys()
            yield [(names[name], weight) for name, weight in bucket.items()]
            del bucket  # before the next block is read
        if self.headless:
            missing.remove(SCORE)
            yield [(names[SCORE], torch.zeros(self.shell.get_parameter(SCORE).shape))]
        if missing:
            raise UserError(
                f"the model {self.role.model!r} is incomplete: no {min(missing)} (and {len(missing) - 1} more) in its weights"
            )

    def _load(self, keys: list[str]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        dtype = next(self.shell.parameters()).dtype
        settings = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=self.shell._get_dtype_plan(dtype),
            weight_mapping=self._conversions,
            ignore_mismatched_sizes=True,
        )
        state = {key: self._targets[key][0].get_slice(key) for key in keys}
        info, _ = convert_and_load_state_dict_in_model(
            model=self.shell, state_dict=state, load_config=settings, disk_offload_index=None
        )
        for name, shape, own in info.mismatched_keys:
            raise UserError(f"the model {self.role.model!r} has {name} of {list(shape)}, not of {list(own)}")
        for problem in (*info.conversion_errors.values(), *info.error_msgs):
            raise UserError(f"the model {self.role.model!r} cannot be read: {problem}")

    def _taken(self) -> Iterator[tuple[str, Tensor]]:
        """Takes what is read out of the shell."""
        for place, module in self.shell.named_modules():
            for own, weight in module._parameters.items():
                if weight is not None and weight.device.type != "meta":
                    module._parameters[own] = nn.Parameter(weight.to("meta"), requires_grad=False)
                    yield f"{place}.{own}" if place else own, weight

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        with without_bars(), as_user_error(f"cannot load the model {self.role.model!r}"):
            yield
