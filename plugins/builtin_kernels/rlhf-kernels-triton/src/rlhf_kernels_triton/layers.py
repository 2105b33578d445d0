"""Parts of a model that get kernels, found by their structure and by the results of their own code on made-up numbers, never on the
model's weights, which may be elsewhere, in pieces or fake.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from rlhf_kernels.parts import epsilon_of, is_gated_mlp, is_norm, takes_one, wave
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from rlhf_kernels_triton import ops

Norm = tuple[float, float, bool, bool]
"""Epsilon, what is added to the weight, True if it rounds before the weight, True if the result has the wider type of both."""

NORMS = ((0.0, True), (1.0, False), (0.0, False))
"""What is added to a norm's weight, and True if it rounds before the weight, as in Llama, Gemma and OLMo 2."""
WIDEST = 2**14
"""Widest row that one program of a norm holds."""
LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ROTARY = "apply_rotary_pos_emb"
KINDS = (torch.float32, torch.bfloat16, torch.float16)


def has_parts(model: nn.Module) -> bool:
    """Returns True if a part looks like one that gets a kernel. Computes nothing."""
    return any(_looks_like_norm(part) or _looks_gated(part) or _looks_turning(part) for part in model.modules())


def fuse_layers(twin: nn.Module) -> nn.Module:
    """Gives kernels to the parts of a twin that compute exactly that. The twin's modules belong to nothing else. Returns the
    twin.
    """
    norms, gated = set(), set()
    with _on_made_up_numbers():
        for part in twin.modules():
            if _looks_like_norm(part) and (settings := _norm_of(part)) is not None:
                part.forward = MethodType(_norm_forward(settings), part)
                norms.add(part)
            elif _looks_gated(part) and _is_swiglu(part):
                part.forward = MethodType(_mlp_forward, part)
                gated.add(part)
            elif _looks_turning(part) and (turning := _turning(_unwrapped(type(part).forward))) is not None:
                part.forward = MethodType(turning, part)
        for part in twin.modules():
            if _looks_like_layer(part, norms) and (defaults := _defaults_of(part)) is not None:
                linear_first = all(hasattr(part.self_attn, name) for name in PROJECTIONS), part.mlp in gated
                part.forward = MethodType(_layer_forward(defaults, *linear_first), part)
    return twin


@contextlib.contextmanager
def _on_made_up_numbers() -> Iterator[None]:
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _is_own(part: nn.Module) -> bool:
    return "forward" not in vars(part) and isinstance(type(part).forward, FunctionType)


def _looks_like_norm(part: nn.Module) -> bool:
    return _is_own(part) and is_norm(part)


def _looks_gated(part: nn.Module) -> bool:
    return _is_own(part) and is_gated_mlp(part) and takes_one(part)


def _with(part: nn.Module, **changes: Any) -> Any:
    """Returns a shallow copy of a module with other values of some attributes."""
    other = copy.copy(part)
    vars(other).update(changes)
    return other


def _compute_type(x: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Returns the type that linear layers compute in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else otherwise


class _Step(nn.Module):
    """In place of a part of a module: a function, and the keywords that came with its last input."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        self.options = options
        return self.function(hidden_states)


# --- norms --------------------------------------------------------------------------------------


def _norm_of(part: Any) -> Norm | None:
    """Returns the settings under which the kernel rounds as this norm does; None: there are none."""
    epsilon, width = epsilon_of(part), getattr(part.weight, "ds_shape", part.weight.shape)[0]
    assert epsilon is not None

    def own(x: Tensor, weight: Tensor) -> Any:
        return type(part).forward(_with(part, _parameters={"weight": nn.Parameter(weight, requires_grad=False)}), x)

    x, weight = wave(16, width).flip(0).mul(3), wave(width)
    try:
        exact, low, mixed = own(x, weight), own(x.half(), weight.half()), own(x.half(), weight)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    for offset, early in NORMS:
        if torch.allclose(exact, _norm_formula(x, weight, epsilon, offset, early), rtol=1e-5, atol=1e-6):
            differing = (low != _norm_formula(x.half(), weight.half(), epsilon, offset, early)).float().mean()
            if float(differing) <= 0.05:
                return epsilon, offset, early, mixed.dtype == torch.float32
    return None


def _norm_formula(x: Tensor, weight: Tensor, epsilon: float, offset: float, early: bool) -> Tensor:
    value = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    value = value.to(x.dtype).float() if early else value
    return (value * (weight.float() + offset)).to(x.dtype)


def _norm_forward(settings: Norm) -> Callable[..., Any]:
    epsilon, offset, early, promotes = settings

    def forward(self: Any, hidden_states: Tensor, branch: Tensor | None = None, narrow: bool = False) -> Any:
        """``branch`` is added first, and the sum is returned too. ``narrow``: only linear layers read the result."""
        x, weight = hidden_states, self.weight
        if not x.numel() or x.shape[-1] > WIDEST or {x.dtype, weight.dtype} - {*KINDS}:
            total = x if branch is None else x + branch
            normed = type(self).forward(self, total)
            return normed if branch is None else (normed, total)
        kept = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
        dtype = torch.promote_types(kept, weight.dtype) if promotes else kept
        dtype = _compute_type(x, dtype) if narrow else dtype
        normed, total, _ = ops.rms_norm(x, branch, weight, epsilon, offset, early, dtype)
        return normed if branch is None else (normed, total)

    return forward


# --- MLPs ---------------------------------------------------------------------------------------


def _is_swiglu(part: Any) -> bool:
    weights = wave(6, 4), wave(6, 4).roll(1), wave(4, 6).roll(2)
    gate, up, down = (_Step(partial(F.linear, weight=weight)) for weight in weights)
    modules = {"gate_proj": gate, "up_proj": up, "down_proj": down, "act_fn": part.act_fn}
    x, values = wave(3, 4).mul(4), torch.linspace(-6, 6, 97)
    try:
        own, opened = type(part).forward(_with(part, _modules=modules), x), part.act_fn(values)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    return torch.allclose(own, down(F.silu(gate(x)) * up(x))) and torch.allclose(opened, F.silu(values), rtol=1e-5, atol=1e-6)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    fits = gate.numel() and gate.shape == up.shape and not {gate.dtype, up.dtype} - {*KINDS}
    result: Tensor = self.down_proj(ops.swiglu(gate, up) if fits else self.act_fn(gate) * up)
    return result


# --- rotary embedding ---------------------------------------------------------------------------


def _looks_turning(part: nn.Module) -> bool:
    """Returns True for an attention whose code calls ``apply_rotary_pos_emb``."""
    forward = _unwrapped(type(part).forward)
    known = _is_own(part) and not hasattr(forward, "__wrapped__") and ROTARY in forward.__code__.co_names
    return known and isinstance(forward.__globals__.get(ROTARY), FunctionType)


def _unwrapped(forward: Any) -> Any:
    """Returns the function behind one of transformers that only gives arguments their new names, which layers use already."""
    renames = getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation"
    return forward.__wrapped__ if renames else forward


@cache
def _turning(forward: FunctionType) -> FunctionType | None:
    """Returns the same code in its own surroundings but for the rotary function, which is the kernel; None if that turns
    otherwise.
    """
    plain = forward.__globals__[ROTARY]
    q, k, cos, sin = wave(2, 3, 5, 8), wave(2, 1, 5, 8).mul(2), wave(2, 5, 8).roll(1), wave(2, 5, 8).roll(2)
    try:
        own, expected = plain(q, k, cos, sin), [_rotary_formula(x, cos, sin) for x in (q, k)]
        if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(own, expected, strict=True)):
            return None
        promotes = plain(q.half(), k.half(), cos, sin)[0].dtype == cos.dtype  # as tables in 32 bits make it, or rounded back
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    # Without the module's name, under which torch.compile would look the function up where it is the plain one.
    around = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    around[ROTARY] = _rotary(plain, promotes)
    other = FunctionType(forward.__code__, around, forward.__name__, forward.__defaults__, forward.__closure__)
    other.__kwdefaults__ = forward.__kwdefaults__
    return other


def _rotary_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def _rotary(plain: Callable[..., Any], promotes: bool) -> Callable[..., Any]:
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        if args or options or not _fits(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **options)
        turned = torch.promote_types(q.dtype, cos.dtype) if promotes else q.dtype
        return ops.rotary(q, k, cos, sin, False, _compute_type(q, turned))

    return apply_rotary_pos_emb


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or cos.shape != sin.shape or q.dtype != k.dtype or not q.numel():
        return False
    same = (len(q), q.shape[2:]) == (len(k), k.shape[2:]) and cos.shape[1:] == q.shape[2:] and len(cos) in (1, len(q))
    return same and q.shape[-1] % 2 == 0 and not {q.dtype, cos.dtype, sin.dtype} - {*KINDS} and not cos.requires_grad


# --- layers -------------------------------------------------------------------------------------


def _looks_like_layer(part: Any, norms: set[nn.Module]) -> bool:
    if {name for name, _ in part.named_children()} != {*LAYER} or not _is_own(part):
        return False
    return part.input_layernorm in norms and part.post_attention_layernorm in norms


def _defaults_of(part: Any) -> dict[str, Any] | None:
    """Returns the keywords that a layer passes on to its attention by default, if it is ``x + attention(norm(x))``, and of that
    ``x + mlp(norm(x))``; None if not.
    """
    forward = type(part).forward
    parameters = [one for one in inspect.signature(forward).parameters.values() if one.kind is not one.VAR_KEYWORD][2:]
    defaults = {one.name: one.default for one in parameters}
    if any(one.default is one.empty or one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    first, attend, second, feed = (lambda x: x * 3 + 1), torch.sin, (lambda x: x * x), torch.cos
    x = wave(1, 3, 4).double()
    between = x + attend(first(x))
    given: dict[str, Any] = dict.fromkeys((*defaults, "shared_rows"))
    for training in (True, False):  # a layer that is computed again is in training mode
        steps = {
            name: _Step(function)
            for name, function in zip(LAYER, (lambda x: (attend(x), None), feed, first, second), strict=True)
        }
        given = {name: object() for name in given}
        try:
            own = forward(_with(part, _modules=steps, training=training), x, **given)
        except Exception:
            return None
        passed = steps["self_attn"].options == given and not any(steps[name].options for name in LAYER[1:])
        if not passed or not isinstance(own, Tensor) or not torch.equal(own, between + feed(second(between))):
            return None
    return defaults


def _layer_forward(defaults: dict[str, Any], narrow_attention: bool, narrow_mlp: bool) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """The residual is added and its sum normed in one kernel."""
        if args:
            return type(self).forward(self, hidden_states, *args, **options)
        normed = self.input_layernorm(hidden_states, None, narrow_attention)
        attended = self.self_attn(hidden_states=normed, **{**defaults, **options})[0]
        normed, hidden_states = self.post_attention_layernorm(hidden_states, attended, narrow_mlp)
        return hidden_states + self.mlp(normed)

    return forward
