"""Checks of kernels: a twin computes what its model does, around the same parameters, and leaves the model alone."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AttentionMaskInterface

from rlhf_authoring.contracts import kernel_cases
from rlhf_authoring.contracts.common import differ
from rlhf_authoring.contracts.kernel_cases import CLOSE, DEVICE, Case, Purpose, change_weights, hidden_states, served
from rlhf_authoring.contracts.subject import Subject, Unusable, check, expect
from rlhf_host import functional
from rlhf_host.internals import PlainKernels, evaluation
from rlhf_host.protocols import Use

PURPOSES: tuple[Purpose, Purpose] = ("train", "sample")


@check()
def unsuited_computes_nothing(subject: Subject) -> None:
    """``unsuited`` gives ``None`` or a few words, the same each time, and computes nothing: it is asked before every trial."""
    plugin = subject.build()
    for name, make in (subject.models or kernel_cases.tiny_models()).items():
        for purpose in PURPOSES:
            use, model = Use(purpose=purpose, device=DEVICE, dtype=torch.float32, autocast=None), kernel_cases.make_model(make)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                answer = plugin.unsuited(model, use)
            computed = ", ".join(sorted({event.name for event in profiled.events()}))
            expect(not computed, f"{name}: unsuited computes {computed}; look at parts alone")
            words = isinstance(answer, str) and 0 < len(answer) <= 100 and "\n" not in answer
            expect(answer is None or words, f"{name}: unsuited gives {answer!r}; give None, or a reason in a few words")
            expect(plugin.unsuited(model, use) == answer, f"{name}: unsuited gives another answer the second time")


@check()
def the_model_is_left_alone(subject: Subject) -> None:
    """Model, configuration, classes, and torch's and transformers' functions and registries stay as they were: others use them."""
    before: dict[str, Any] = {}
    install_generation_tagging_init()  # as torch does itself, once in a process that compiles anything

    def prepare(model: Any) -> None:
        nonlocal before
        model.get_input_embeddings().weight.requires_grad_(False)
        before = _snapshot(model)

    refusals = []
    for purpose in PURPOSES:
        try:
            for case in served(subject, purpose, prepare=prepare):
                if purpose == "train":
                    case.hidden(case.twin).float().sum().backward()
                else:
                    _decode(case, case.twin)
                case.model.zero_grad()
                now = _snapshot(case.model)
                changed = [name for name in {**before, **now} if differ(before.get(name), now.get(name))]
                expect(not changed, f"{case.name}: the twin changes {', '.join(changed[:3])}; change what is the twin's own")
        except Unusable as unusable:
            refusals.append(unusable)
    if len(refusals) == len(PURPOSES):
        raise refusals[0]


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """Name → what is there: attributes of modules, contents of tensors and configurations, classes, functions, registries."""
    held: dict[str, Any] = {}
    modules = {f"model.{name}" if name else "model": module for name, module in model.named_modules()}
    for name, module in modules.items():
        held[f"the class of {name}"] = type(module)
        held |= {f"{name}.{key}": copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        if "config" in vars(module):
            held[f"{name}.config"] = copy.deepcopy(vars(module.config))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        held |= {f"the values of {name}": tensor.clone(), f"requires_grad of {name}": tensor.requires_grad}
    owners: dict[str, Any] = {"torch.nn.functional": F}
    for cls in {cls for module in modules.values() for cls in type(module).__mro__[:-1]}:
        owners |= {cls.__name__: cls, cls.__module__: sys.modules[cls.__module__]}
    for owner, home in owners.items():
        held |= {f"{owner}.{key}": value for key, value in vars(home).items() if callable(value)}
    for registry in (AttentionInterface, AttentionMaskInterface):
        held[f"transformers.{registry.__name__}"] = dict(registry._global_mapping)
    settings = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    return held | {"torch's default type, threads or gradient mode": settings, "torch's random state": torch.get_rng_state()}


@check()
def twins_hold_the_models_tensors(subject: Subject) -> None:
    """A twin has exactly the model's ``Parameter`` objects and persistent buffers: an optimizer's steps are seen in both."""
    for case in served(subject, "train"):
        modules = (case.model, case.twin)
        own, twins = ({id(one): name for name, one in module.state_dict(keep_vars=True).items()} for module in modules)
        missing = sorted(own[number] for number in own.keys() - twins.keys())
        added = sorted(twins[number] for number in twins.keys() - own.keys())
        expect(not missing, f"{case.name}: the twin does not use the model's own {', '.join(missing[:3])}")
        expect(not added, f"{case.name}: {', '.join(added[:3])} of the twin are not the model's")


@check()
def changes_of_the_weights_are_seen(subject: Subject) -> None:
    """A twin computes with new weights at once when the model's change in place."""
    for case in served(subject, "train"):
        with torch.no_grad():
            case.hidden(case.twin)
            change_weights(case.model)
            case.compare(hidden_states, "after a change of the weights")


@check()
def values_are_the_models(subject: Subject) -> None:
    """A twin's values are the model's, closely: of short and of long rows, in every layout that the model takes."""
    for case in served(subject, "train", every_precision=True):
        for laid_out in case.layouts():
            with torch.no_grad():
                laid_out.compare(hidden_states, "values")


@check()
def gradients_are_the_models(subject: Subject) -> None:
    """A pass of a twin leaves on the model's parameters the gradients that autograd finds through the model, and none on those
    that are frozen."""

    def freeze(model: nn.Module) -> None:
        for number, weight in enumerate(model.parameters()):
            weight.requires_grad_(number % 2 == 1)

    def gradients(case: Case, module: Any) -> dict[str, Tensor]:
        case.model.zero_grad(set_to_none=True)
        hidden = case.hidden(module).float()
        (hidden * torch.arange(hidden.numel(), device=hidden.device).view_as(hidden).sin()).sum().backward()
        return {name: weight.grad for name, weight in case.model.named_parameters() if weight.grad is not None}

    for prepare in (nn.Module.eval, freeze):
        for case in served(subject, "train", every_precision=True, prepare=prepare):
            for laid_out in case.layouts():
                laid_out.compare(gradients, "gradients")


@check()
def keywords_are_the_models(subject: Subject) -> None:
    """A twin takes every keyword that the model takes, and gives the same for it: masks, positions, embeddings, caches."""
    ids = torch.tensor([[0, 0, 5, 9, 3, 8], [4, 7, 6, 2, 11, 3]], device=DEVICE)
    keywords: dict[str, Callable[[Any], Any]] = {
        "attention_mask": lambda call: (ids > 0).long(),
        "position_ids": lambda call: ids.flip(1),
        "inputs_embeds": lambda call: call.args[0].get_input_embeddings()(ids),
        "cache": lambda call: call(input_ids=ids, use_cache=True).cache,  # of transformers 5.24 and newer
        "past_key_values": lambda call: call(input_ids=ids, use_cache=True).past_key_values,
        "logits_to_keep": lambda call: 1,
        "outputhidden_states": lambda call: True,
    }

    def outputs(case: Case, module: Any, keyword: str) -> dict[str, Tensor]:
        call = partial(case.call, module)
        inputs = {} if keyword == "inputs_embeds" else {"input_ids": ids}
        out = call(**inputs, **{keyword: keywords[keyword](call)})
        states = zip(("first states", "last states"), out.hidden_states or (), strict=False)
        return {"logits": out.logits[:, -1:], **dict(states)}

    for case in served(subject, "train"):
        for keyword in keywords:
            compute = partial(outputs, keyword=keyword)
            with torch.no_grad():
                try:
                    compute(case, copy.deepcopy(case.model))
                except Exception:
                    continue  # the model does not take it either
                case.compare(compute, f"called with {keyword}")


@contextlib.contextmanager
def _checkpointing(module: Any) -> Iterator[None]:
    """Gradient checkpointing, where the module has it."""
    if getattr(module, "supports_gradient_checkpointing", False):
        # The older names are transformers' before 5.24.
        getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)({"use_reentrant": False})
        with evaluation(module):
            yield
        getattr(module, "activation_checkpointing_disable", module.gradient_checkpointing_disable)()
    else:
        yield


WAYS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "the first time": contextlib.nullcontext,
    "the second time": contextlib.nullcontext,
    "without gradients": lambda module: torch.no_grad(),
    "in inference mode": lambda module: torch.inference_mode(),
    "with gradient checkpointing": _checkpointing,
}


@check()
def passes_repeat_themselves(subject: Subject) -> None:
    """The same inputs give the same bits, with and without gradients and gradient checkpointing, wherever the model's own do:
    ratios of log-probabilities computed twice are 1."""

    def values_and_gradients(case: Case, module: Any, way: str) -> dict[str, Tensor]:
        with WAYS[way](module):
            hidden = case.hidden(module)
            if not hidden.requires_grad:
                return {"values": hidden}
            gradients = torch.autograd.grad(hidden.float().square().sum(), list(case.model.parameters()), allow_unused=True)
        return {"values": hidden, "gradients": torch.cat([one.flatten() for one in gradients if one is not None])}

    for case in (laid_out for suited in served(subject, "train") for laid_out in suited.layouts()):
        own, twins = ({way: values_and_gradients(case, one, way) for way in WAYS} for one in (case.model, case.twin))
        for way in WAYS:
            for what, value in twins[way].items():
                once, own_once = twins["the first time"][what], own["the first time"][what]
                repeats = torch.equal(value, once) or not torch.equal(own[way][what], own_once)
                expect(repeats, f"{case.name}: the same inputs give other {what} {way}")


@check()
def even_passes_keep_names_and_order(subject: Subject) -> None:
    """For ``even_passes`` a twin has the model's ``named_parameters``, and their gradients come in one order, whatever the layout:
    ranks exchange them as they come, by name."""
    for case in served(subject, "train", even_passes=True):
        own, twins = (list(module.named_parameters()) for module in (case.model, case.twin))
        same = [name for name, _ in twins] == [name for name, _ in own]
        expect(same, f"{case.name}: the twin's parameters have other names or another order")
        expect(all(a is b for (_, a), (_, b) in zip(own, twins, strict=True)), f"{case.name}: a name means another parameter")
        own_orders, orders = (
            [_order_of_gradients(one, module) for one in case.layouts()] for module in (case.model, case.twin)
        )
        even = orders[0] == orders[-1] or own_orders[0] != own_orders[-1]
        expect(even, f"{case.name}: the order in which gradients come depends on the layout")


def _order_of_gradients(case: Case, module: Any) -> list[str]:
    order: list[str] = []
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, weight in case.model.named_parameters()
    ]
    case.hidden(module).float().sum().backward()
    for hook in hooks:
        hook.remove()
    return order


@check()
def adapters_are_switched_in_both(subject: Subject) -> None:
    """A twin of a model with adapters computes without them once they are switched off in both, and with them again."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    def adapt(model: Any) -> None:
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))

    for case in served(subject, "train", prepare=adapt):
        for on in (True, False, True):
            for part in (*case.model.modules(), *case.twin.modules()):
                if isinstance(part, BaseTunerLayer):
                    part.enable_adapters(on)
            with torch.no_grad():
                case.compare(hidden_states, f"adapters {'on' if on else 'off'}")


@check()
def decoders_sample_from_the_model(subject: Subject) -> None:
    """A decoder's logits are those of the model's full pass over each row, closely: of prompts that rows share, of rows that leave,
    of long completions."""
    for case in served(subject, "sample", every_precision=True):
        for leaving in (False, True):
            case.compare(partial(_decode, leaving=leaving), "rows that leave" if leaving else "all rows")


@check()
def decoders_follow_refresh(subject: Subject) -> None:
    """After ``refresh`` a decoder samples from the model's weights as they are now, also from the next step of a batch on."""
    for case in served(subject, "sample"):
        with torch.inference_mode():
            first, last = case.twin.prefill([[3, 1, 4]]), torch.full((2,), 5, device=DEVICE)
            case.twin.start(torch.zeros_like(last), 4)
            case.twin.step(last)
            case.model.get_output_embeddings().weight.data.zero_()
            case.twin.refresh()
            uniform = case.twin.step(last)
        gap = kernel_cases.distance(uniform, torch.zeros_like(uniform), float(first.norm()))
        expect(gap <= CLOSE, f"{case.name}: the old head is in use")
        change_weights(case.model)
        case.twin.refresh()
        case.compare(partial(_decode, leaving=False), "after a change of the weights")


@check()
def decoders_begin_anew(subject: Subject) -> None:
    """A batch gives the same bits whatever was decoded before it, to its end or not: a resumed run has not decoded it."""
    for case in served(subject, "sample"):
        alone = _decode(case, case.twin)
        with torch.inference_mode():
            tokens = torch.tensor([1, 2, 3], device=DEVICE)
            case.twin.prefill([[8] * 8])
            case.twin.start(torch.zeros_like(tokens), 100)
            case.twin.step(tokens)
        expect(not differ(_decode(case, case.twin), alone), f"{case.name}: a batch gives other bits after another one")


@check()
def differing_kernels_are_not_chosen(subject: Subject) -> None:
    """``choose`` gives the plain path where no candidate computes the same as the model."""
    model, log = kernel_cases.make_model(kernel_cases.tiny_models()["llama"]), logging.getLogger("rlhf_host.kernels")
    train, sample = (Use(purpose=each, device=DEVICE, dtype=torch.float32, autocast=None) for each in PURPOSES)
    kernels = subject.build().choose([("doubling", _Doubling())], PlainKernels())
    before, log.disabled = log.disabled, True
    try:
        twin, decoder = kernels.module(model, train), kernels.decoder(model, sample, 64)
    finally:
        log.disabled = before
    expect(twin is model, "choose takes a twin whose values are twice the model's; compare it first, as rlhf_kernels does")
    wrong = isinstance(decoder, _DoublingDecoder)
    expect(not wrong, "choose takes a decoder whose logits are twice the model's; compare it first, as rlhf_kernels does")


class _Doubling:
    """Kernels that compute something else."""

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        return None

    def twin(self, model: Any, use: Use) -> Any:
        if use.purpose == "sample":
            return _DoublingDecoder(PlainKernels().decoder(model, use, 64))
        twin: Any = functional.twin(model)
        twin.get_input_embeddings().register_forward_hook(lambda module, args, out: 2 * out)
        return twin


class _DoublingDecoder:
    ragged = True

    def __init__(self, decoder: Any):
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def prefill(self, prompts: Any) -> Tensor:
        logits: Tensor = self._decoder.prefill(prompts)
        return 2 * logits


@torch.inference_mode()
def _decode(case: Case, module: Any, leaving: bool = True) -> dict[str, Tensor]:
    """Logits of every row and each of its tokens, from a decoder step by step or from a module in one pass per row."""
    prompts, owners = [[3, 1, 4], [2, 7, 1, 8, 2, 8], [9], [7] * 70], [0, 0, 0, 1, 2, 2, 3]
    if not case.twin.ragged:
        prompts, owners = [[3, 1, 4], [2, 7, 1]], [0, 0, 0, 1]
    lengths = [20, 4, 9, 20, 15, 9, 9][: len(owners)] if leaving else [5] * len(owners)
    completions = [[(5 * place + 3 * row) % 29 + 1 for place in range(length)] for row, length in enumerate(lengths)]
    logits: dict[str, Tensor] = {}
    if isinstance(module, nn.Module):
        for row, (owner, completion) in enumerate(zip(owners, completions, strict=True)):
            ids = torch.tensor([[*prompts[owner], *completion]], device=DEVICE)
            whole = case.call(module, input_ids=ids, use_cache=False).logits[0].float()
            logits[f"logits of row {row}"] = whole[len(prompts[owner]) - 1 :]
        return logits
    with case.autocast():
        first = module.prefill(prompts)
        shape = (len(prompts), case.model.config.get_text_config().vocab_size)
        expect(first.shape == shape, f"{case.name}: prefill gives logits {tuple(first.shape)}, not {shape}")
        steps = [[first[owner].float()] for owner in owners]
        module.start(torch.tensor(owners, device=DEVICE), max(lengths))
        alive = list(range(len(owners)))
        for place in range(max(lengths)):
            going = [row for row in alive if place < lengths[row]]
            if going != alive:
                module.keep(torch.tensor([alive.index(row) for row in going], device=DEVICE))
                alive = going
            answer = module.step(torch.tensor([completions[row][place] for row in alive], device=DEVICE))
            for row, one in zip(alive, answer.float(), strict=True):
                steps[row].append(one)
    return {f"logits of row {row}": torch.stack(one) for row, one in enumerate(steps)}
