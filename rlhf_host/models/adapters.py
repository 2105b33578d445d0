"""LoRA adapters inside a model (arXiv:2106.09685): attached in place by peft, switched, and merged for other programs.

The model keeps its class, decoder and head. ``y = W x + s·B(A x)``, where the base ``W`` is frozen and ``s = alpha / rank``. Each
expert of a tensor ``W [E, out, in]`` has its own ``A`` and ``B``.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_host.config.schema import LoraOptions
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models import quantized
from rlhf_host.models.dtypes import NARROW, master_of, written_type
from rlhf_host.models.heads import decoder_of, scalar_head
from rlhf_host.plugins.libraries import require_library

TRAINED = "trained"
"""Name inside the model of the adapter that a role trains. Others are frozen copies."""
PREFIX = "base_model.model."
"""Prefix of all names in peft's files."""
ALL_LINEAR = "all-linear"
BASE = ".base_layer"
"""What peft adds to a layer's name, once for each adapted tensor of it."""
_NUMBER = re.compile(r"\b\d+\b")


def peft_library() -> Any:
    """Imports peft. Raises ``UserError`` if it is not installed."""
    require_library("peft", "LoRA adapters")
    import peft

    return peft


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def attach(model: Any, options: LoraOptions, base: str, revision: str | None = None) -> None:
    """Adds new adapters to the model, which computes as before until they are trained. Everything else is frozen, except a
    scalar head.

    Their first values are the same in every process and run.

    Args:
        base: path or hub name of the model, written into its files.

    Raises:
        UserError: peft is missing, or a target is neither a linear map nor one of experts.
    """
    modules, tensors = targets(model, options.targets), expert_tensors(model, options.targets)
    config = peft_library().LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha or 2 * options.rank,
        use_rslora=options.rslora,
        init_lora_weights=True if options.init == "default" else options.init,
        task_type="CAUSAL_LM" if scalar_head(model) is None else "SEQ_CLS",
        base_model_name_or_path=base,
        revision=revision,
    )
    inject(model, config, TRAINED, modules, tensors)


def inject(model: Any, config: Any, name: str, modules: Sequence[str], tensors: Sequence[str] = ()) -> None:
    """Adds an adapter at exactly these modules. It is trained if its name is ``TRAINED``, else frozen and not used.

    Args:
        config: ``peft.LoraConfig``.
        tensors: of experts, as in ``expert_tensors``.

    Raises:
        UserError: peft has no adapter for one of the modules, or its adapter is not a plain product.
    """
    peft = peft_library()
    configs = {**vars(model).pop("peft_config", {}), name: config}  # peft warns of an adapter that is there already
    # By the names of weights: peft would take targets that are called as experts once were for the experts of today.
    config.target_modules, config.target_parameters = {"by the names of weights"}, None
    names = {f"{module}.lora_A.weight": torch.empty(0) for module in modules}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _not_on_meta(model):
        warnings.simplefilter("ignore")  # of names that are not what the configuration says, and of Conv1D
        torch.manual_seed(0)
        try:
            if modules:
                peft.inject_adapter_in_model(config, model, adapter_name=name, state_dict=names)
            for tensor in tensors:
                _wrap(model, tensor, config, name)
        except ValueError as error:
            kind = type(model).__name__
            raise UserError(
                f"{kind} cannot have adapters at {', '.join(kinds(modules))}: {error} (--actor.lora.targets)"
            ) from error
    config.target_modules = _short(model, modules)
    config.target_parameters = kinds(tensors, 2) or None
    model.peft_config = configs
    model.requires_grad_(False)
    lora = peft.tuners.lora
    plain = {lora.Linear, lora.layer.ParamWrapper, *([lora.Linear4bit] if quantized.is_quantized(model) else [])}
    for place, layer in adapter_layers(model):
        if type(layer) not in plain:
            raise UserError(f"{type(model).__name__}: {place} is more than a linear map, and cannot have an adapter")
        layer._active_adapter, layer._disable_adapters = [TRAINED], False
        for own, part in _lora_modules(layer):
            part.requires_grad_(own == TRAINED)
            for weight in part.parameters():
                weight.data = weight.data.float() if weight.dtype in NARROW else weight.data
    if (head := scalar_head(model)) is not None:
        head.requires_grad_(True)
        head.weight.data = head.weight.data.float() if head.weight.dtype in NARROW else head.weight.data


def _wrap(model: nn.Module, tensor: str, config: Any, name: str) -> None:
    """Adds an adapter to a tensor of experts. peft nests those of one layer, in the order in which this has them."""
    wrapper: Any = peft_library().tuners.lora.layer.ParamWrapper
    place, _, own = tensor.rpartition(".")
    layer = outer = model.get_submodule(place)
    while isinstance(layer, wrapper):
        if layer.parameter_name == own:
            layer.update_layer(name, config.r, lora_alpha=config.lora_alpha, config=config)
            return
        layer = layer.base_layer
    parent, _, last = place.rpartition(".")
    new = wrapper(outer, name, own, config, r=config.r, lora_alpha=config.lora_alpha)
    setattr(model.get_submodule(parent), last, new)


@contextlib.contextmanager
def _not_on_meta(model: nn.Module) -> Iterator[None]:
    """Puts tensors without memory in CPU memory in the places of weights on ``meta``, inside the block: peft puts new adapters
    where the weights beside them are.
    """
    places = [(module, name, weight) for module in model.modules() for name, weight in module._parameters.items()]
    absent = [(module, name, weight) for module, name, weight in places if weight is not None and weight.is_meta]
    for module, name, weight in absent:
        module._parameters[name] = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in absent:
            module._parameters[name] = weight


def adapter_layers(model: nn.Module, *, every_name: bool = False) -> list[tuple[str, Any]]:
    """Returns every linear map or tensor of experts that has adapters, with its name in the model, as peft nests them. A shared
    map has its first name, or each of its names.
    """
    if not has_adapters(model):
        return []
    from peft.tuners.lora import LoraLayer

    modules = model.named_modules(remove_duplicate=not every_name)
    return [(name, module) for name, module in modules if isinstance(module, LoraLayer)]


def expert_adapters(model: nn.Module) -> list[str]:
    """Returns the names of adapted tensors of experts, as in ``adapter_layers``."""
    return [name for name, layer in adapter_layers(model) if hasattr(layer, "parameter_name")]


def _lora_modules(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    for parts in (layer.lora_A, layer.lora_B):
        yield from parts.items()


@contextlib.contextmanager
def using(name: str | None, *models: nn.Module) -> Iterator[None]:
    """Makes a model, and its twin, compute with the adapter ``name`` inside the block; with None it is the base, bit for bit.

    Only the adapter in use changes. peft's own switch would also change which weights are trained, behind the optimizer's back.
    """
    layers = [layer for model in models for _, layer in adapter_layers(model)]
    for layer in layers:
        layer._active_adapter, layer._disable_adapters = [name or TRAINED], name is None
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [TRAINED], False


def adapted_name(layer: Any) -> str:
    """Returns the weight of a layer that an adapter changes."""
    return getattr(layer, "parameter_name", "weight")


@torch.no_grad()
def merged(layer: Any, name: str = TRAINED) -> Tensor:
    """Returns ``W + s·BA`` of one layer, computed in at least float32, in the type of ``W``. The layer does not change."""
    base, experts = layer.get_base_layer(), hasattr(layer, "parameter_name")
    weight = getattr(base, adapted_name(layer)) if experts else quantized.plain_weight(base)
    wide, own = torch.promote_types(weight.dtype, torch.float32), written_type(weight)
    a, b = (master_of(part[name].weight).to(wide) for part in (layer.lora_A, layer.lora_B))
    transposed = layer.fan_in_fan_out
    if experts:  # a: [E·r, in], b: [out, r·E]
        a, b = a.unflatten(0, (layer.num_experts, -1)), b.unflatten(1, (-1, layer.num_experts)).permute(2, 0, 1)
        transposed = getattr(base, "is_transposed", False)
    change = (b @ a) * layer.scaling[name]
    return (weight.to(wide) + (change.mT if transposed else change)).to(own)


def merged_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the ``weights`` of the model's state dict without adapters: merged one by one, under the names of the base.
    Weights in 4 bits become as their products use them.
    """
    layers, narrow = dict(adapter_layers(model, every_name=True)), quantized.layers(model)
    adapted = {(name.replace(BASE, ""), adapted_name(layer)): layer for name, layer in layers.items()}
    parts = {weight for layer in layers.values() for _, part in _lora_modules(layer) for weight in part.parameters()}
    adapters = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight in parts}
    for name, tensor in weights:
        if name in adapters:
            continue
        owner, _, own = name.rpartition(f"{BASE}.")
        if owner in layers:
            layer = adapted.get((place := owner.replace(BASE, ""), own))
            yield f"{place}.{own}", tensor if layer is None else merged(layer)
        else:
            owner, _, own = name.rpartition(".")
            yield name, quantized.plain_weight(narrow[owner]) if owner in narrow and own == "weight" else tensor


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """Returns all trained weights, by their names in peft's files: ``A``, ``B``, and a scalar head."""
    weights = {}
    for name, layer in adapter_layers(model):
        weights[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A[TRAINED].weight
        weights[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B[TRAINED].weight
    if (head := scalar_head(model)) is not None:
        weights |= {f"{PREFIX}score.{name}": weight for name, weight in head.named_parameters()}
    return {name: master_of(weight).detach() for name, weight in weights.items()}


@torch.no_grad()
def engine_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields ``A`` and ``s·B`` by their names in peft's files, in float32 and all of the largest rank. With alpha equal to the
    rank, an engine needs no other settings.

    Raises:
        UserError: experts have adapters, which engines name otherwise.
    """
    layers = adapter_layers(model)
    if experts := expert_adapters(model):
        raise UserError(f"sync.adapter is adapter, and {experts[0]} has one of experts: leave --sync.adapter out")
    rank = max(layer.r[TRAINED] for _, layer in layers)
    for name, layer in layers:
        more = rank - layer.r[TRAINED]
        a, b = (master_of(part[TRAINED].weight).float() for part in (layer.lora_A, layer.lora_B))
        yield f"{PREFIX}{name}.lora_A.weight", F.pad(a, (0, 0, 0, more))
        yield f"{PREFIX}{name}.lora_B.weight", F.pad(b * layer.scaling[TRAINED], (0, more))


@torch.no_grad()
def fold(model: Any) -> None:
    """Merges the adapter into the weights, in place. The result is an ordinary model."""
    quantized.widen(model)
    for name, layer in reversed(adapter_layers(model)):  # the inner ones of nested layers first
        base = layer.get_base_layer()
        getattr(base, adapted_name(layer)).copy_(merged(layer))
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, base)
    del model.peft_config


def targets(model: Any, names: Sequence[str]) -> list[str]:
    """Returns the linear maps with these names, among those below the head that a pass over text calls as modules. In others
    (for images, in an encoder, or with a weight that a kernel reads) adapters would do nothing.

    Raises:
        UserError: a name matches none.
    """
    called = _called(model)
    single = [name for name in names if name != ALL_LINEAR and not expert_tensors(model, [name])]
    for name in single:
        if not any(f".{known}".endswith(f".{name}") for known in called):
            if dict(model.named_modules()).get(name, called) is model.get_output_embeddings():
                raise UserError(
                    f"lora.targets: {name} is the head, whose weight is used in pieces, without adapters: leave it out"
                    f" ({ALL_LINEAR} takes all other linear maps)"
                )
            has = [*kinds(called), *kinds(expert_tensors(model, ["experts"]), 2)]
            near = near_matches(name, has) or f"; it has {', '.join(has)}"
            raise UserError(f"lora.targets: {type(model).__name__} has no linear map {name!r}{near}")
    return [known for known in called if ALL_LINEAR in names or any(f".{known}".endswith(f".{name}") for name in single)]


def expert_tensors(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Returns the tensors of experts with these names, such as ``experts.down_proj``, and all of a layer's for ``experts``. Known
    are layers with transformers' interface for experts.
    """
    found = []
    for place, layer in model.named_modules():
        if hasattr(layer, "_is_expert_parallel"):
            place = place.replace(BASE, "")
            for own, weight in layer.named_parameters(recurse=False):
                whole = [f".{place}".endswith(f".{name}") for name in names]
                one = [f".{place}.{own}".endswith(f".{name}") and "." in name for name in names]
                if weight.ndim == 3 and any(whole + one):
                    found.append(f"{place}.{own}")
    return found


def kinds(modules: Iterable[str], parts: int = 1) -> list[str]:
    """Returns the last parts of their names."""
    return sorted({".".join(module.split(".")[-parts:]) for module in modules})


@torch.no_grad()
def _called(model: Any) -> list[str]:
    """Returns the names of linear maps that a probe calls. Experts share a kind, so those that the probe did not reach are
    included. A weight that several modules share is left out, because it could not be merged.
    """
    inside = set(decoder_of(model).modules())
    uses = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    linear = {
        name: module
        for name, module in model.named_modules()
        if module in inside and isinstance(module, nn.Linear | Conv1D) and uses[module.weight] == 1
    }
    if model.device.type == "meta":  # an outline has no pass: all that could be reached
        return list(linear)
    reached: set[str] = set()

    def note(name: str, module: Any, inputs: Any, output: Any) -> None:
        if type(module) in (nn.Linear, Conv1D) or _is_product(module, inputs[0], output):
            reached.add(_NUMBER.sub("*", name))

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in linear.items()]
    try:
        model(input_ids=torch.tensor([[1, 3, 2, 4, 1, 5]], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name in linear if _NUMBER.sub("*", name) in reached]


def _is_product(module: Any, x: Any, output: Any) -> bool:
    """Returns True if a subclass computes the same as ``nn.Linear``."""
    if not isinstance(output, Tensor) or x.shape[-1] != module.in_features:
        return False
    product = F.linear(x, quantized.plain_weight(module), module.bias)
    return output.shape == product.shape and bool(torch.allclose(output, product, rtol=1e-2, atol=1e-3))


def _short(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """Returns the last parts of these names, if these match no other modules."""
    short = kinds(modules)
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in short]
    return short if set(meant) == set(modules) else sorted(modules)
