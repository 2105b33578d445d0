"""Models and tokenizers from a directory, the hub, a GGUF file, or the built-in ``quickstart``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import logging as transformers_logging

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models import adapter_files, adapters, quantized
from rlhf_host.models.freezing import freeze
from rlhf_host.models.heads import scalar_head
from rlhf_host.models.places import Source, find_model, hub_answers, with_base

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(role: RoleConfig, *, head: Literal["lm", "scalar"] = "lm", trainable: bool = False) -> PreTrainedModel:
    """The role's model on its device, in eval mode, dropout removed.

    ``head="scalar"`` is transformers' sequence classification model with one label: such reward models load as they are, and on
    a plain language model a trainable role gets a new head of zeros. Trainable weights are float32. What ``save_pretrained``
    writes loads again, for GGUF too (dequantized).

    A trainable role may train a part of the weights (``role.freeze``, ``role.train_only``), or a LoRA adapter (``role.adapter``,
    ``role.lora``): then the model's own weights are frozen, and may be of any type, or in 4 bits (``role.quantize``, or where the
    adapter was trained over such). In a frozen role, an adapter is merged into the weights.

    Raises:
        UserError: no such model, incomplete or pickled weights, or an unusable dtype, device, attention kernel or adapter.
    """
    role = with_base(role)
    source = find_model(role.model)
    device = choose_device(role.device)
    adapts = trainable and bool(role.adapter or role.lora.rank)
    if role.quantize and source.gguf:
        raise UserError(f"the weights of GGUF files are quantized in their own way: leave quantize out for {role.model!r}")
    if trainable and not adapts and role.dtype not in ("auto", "float32"):
        raise UserError(
            f"dtype {role.dtype} for the trainable model {role.model!r}: trainable weights are kept in float32, because 16 bits"
            " swallow small updates; leave dtype at auto and set train.autocast to bfloat16"
        )
    load = _load_gguf if source.gguf else _load_safetensors
    with quiet_transformers(), _as_user_error(f"cannot load the model {role.model!r}"):
        brings_head = role.adapter is not None and adapter_files.is_scalar(role.adapter)
        model = load(source, role, head, trainable, new_head=trainable or brings_head)
    remove_dropout(model)
    if role.gradient_checkpointing and trainable:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"{type(model).__name__} does not support gradient checkpointing: set gradient_checkpointing to false"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.requires_grad_(trainable and not adapts)
    if trainable and (role.freeze or role.train_only):
        freeze(model, role.freeze, role.train_only)
    placed: PreTrainedModel = model.eval().to(device)  # type: ignore[arg-type]
    with quiet_transformers():
        if role.adapter is not None:
            adapter_files.load_adapter(placed, role.adapter)
            if not trainable:
                adapters.fold(placed)
        elif adapts:
            adapters.attach(placed, role.lora, source.name, None if source.local else role.revision)
    if trainable:
        _align(placed)
    return placed


def weight_files(role: RoleConfig) -> list[Path]:
    """The files of the role's weights, without its adapter."""
    source = find_model(role.model)
    if source.gguf:
        return [Path(source.path, source.gguf)]
    plain = role.model_copy(update={"adapter": None, "quantize": None})
    directory = Path(source.path) if source.local else model_directory(plain)
    assert directory is not None
    return sorted(directory.glob("*.safetensors"))


def save_model(model: PreTrainedModel, directory: str | Path) -> None:
    """Write the model in Hugging Face format, or its adapter in peft's where it has one."""
    copy_model(model, directory)()


def copy_model(model: PreTrainedModel, directory: str | Path, weights: dict[str, Tensor] | None = None) -> Callable[[], None]:
    """Copy the model, or its adapter where it has one, to host memory. The result writes it as ``save_model``, on any thread, also
    while the model is trained.

    Args:
        weights: copies by name, where the model's own are not whole.
    """
    if not adapters.has_adapters(model):
        copies = host_copy(model.state_dict()) if weights is None else weights

        def write() -> None:
            with without_bars():
                model.save_pretrained(directory, state_dict=copies)

        return write
    config: Any = model.peft_config[adapters.TRAINED]
    base = RoleConfig(model=config.base_model_name_or_path, revision=config.revision)
    return functools.partial(
        adapter_files.save_adapter, model, directory, weight_files(base), host_copy(adapters.adapter_weights(model))
    )


def host_copy(state: Any) -> Any:
    """A copy of nested dicts, lists and tuples with their tensors in host memory. Tensors that are one are one in the copy."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            return copies[key]
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

    return copied(state)


def context_length(model: Any) -> int:
    """Longest row of tokens that the model has positions for."""
    return _positions(model.config)


def _positions(config: PreTrainedConfig) -> int:
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return length if length > 0 else 2**31


def load_tokenizer(role: RoleConfig) -> PreTrainedTokenizerBase:
    """The role's tokenizer, from ``tokenizer`` or else from beside its adapter or model. Where no token pads, eos does."""
    name = role.tokenizer or (role.adapter if _has_tokenizer(role.adapter) else role.model)
    if adapter_files.is_adapter(name) and _has_tokenizer(name):
        source = Source(str(Path(str(name)).expanduser()), local=True)
    else:
        source = find_model(name, weights=False)
    options = _options(source, role) | ({"gguf_file": source.gguf} if source.gguf else {})
    if role.tokenizer:
        del options["revision"]  # is the model's
    with quiet_transformers(), _as_user_error(f"cannot load the tokenizer of {role.tokenizer or role.model!r}"):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _has_tokenizer(path: str | None) -> bool:
    return path is not None and (Path(path).expanduser() / "tokenizer_config.json").is_file()


def model_directory(role: RoleConfig) -> Path | None:
    """The role's model as a directory, fetched from the hub where it is one of the hub's; ``None`` for a GGUF file or where an
    adapter or 4 bits change the model."""
    role = with_base(role)
    if role.adapter is not None or role.quantize is not None:
        return None
    source = find_model(role.model)
    if source.local:
        return None if source.gguf else Path(source.path)
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
    with quiet_transformers(), _as_user_error(f"cannot fetch the model {role.model!r}"):
        offline = not hub_answers()
        return Path(snapshot_download(source.path, revision=role.revision, allow_patterns=files, local_files_only=offline))


def choose_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device {name!r} cannot be used here ({first_line(error)}): use auto, cpu, cuda, cuda:N or mps"
        ) from error
    return device


def remove_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to 0: with dropout π of two passes differ. The config keeps its own values for saving."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)


def _require_scalar_head(model: PreTrainedModel) -> torch.nn.Linear:
    if (head := scalar_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no scalar head: give a causal model with one (ForSequenceClassification)")
    return head


def sizes(role: RoleConfig) -> tuple[int | None, int | None]:
    """How many tokens the role's model knows, and its longest row, read from its configuration alone; ``None`` for GGUF."""
    source = find_model(role.model)
    if source.gguf:
        return None, None
    with quiet_transformers(), _as_user_error(f"cannot load the model {role.model!r}"):
        config = AutoConfig.from_pretrained(source.path, **_options(source, role))
    return getattr(config.get_text_config(), "vocab_size", None), _positions(config)


def stop_tokens(role: RoleConfig) -> list[int]:
    """Tokens that end a turn, by the generation configuration beside the role's model; none where there is no such file."""
    source = find_model(role.model)
    options = _options(source, role)
    with quiet_transformers():
        try:
            ids = GenerationConfig.from_pretrained(source.path, **options).eos_token_id
        except OSError:
            return []
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _options(source: Source, role: RoleConfig) -> dict[str, Any]:
    return {
        "revision": None if source.local else role.revision,
        "trust_remote_code": role.trust_remote_code,
        "local_files_only": source.local or not hub_answers(),
    }


def _load_safetensors(source: Source, role: RoleConfig, head: str, trainable: bool, new_head: bool) -> PreTrainedModel:
    options = _options(source, role)
    config = AutoConfig.from_pretrained(source.path, **options, **({"num_labels": 1} if head == "scalar" else {}))
    if head == "scalar":
        config.token_classification_bias = (
            False  # so that what is saved loads as a token classifier too: all scores, none missing
        )
    if role.quantize:
        options |= quantized.settings(choose_device(role.device))
    model, info = _model_class(head, config).from_pretrained(
        source.path,
        config=config,
        dtype=_dtype(role, trainable),
        attn_implementation=_attention(role, config),
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=head == "scalar",  # reported with what is missing below, in words of our own
        **options,
    )
    different = {str(key): shape for key, shape, _ in info["mismatched_keys"]}
    if head == "scalar" and "score.weight" in different:
        count = different["score.weight"][0]
        raise UserError(
            f"the model {role.model!r} has a head with {count} outputs, and a scalar head has one: give a model with num_labels 1,"
            " or the language model"
        )
    missing = sorted(info["missing_keys"]) + sorted(different)
    if head == "scalar" and "score.weight" in missing:
        _new_head(model, role, new_head)
        missing.remove("score.weight")
    if missing:
        raise UserError(f"the model {role.model!r} is incomplete: no {missing[0]} (and {len(missing) - 1} more) in its weights")
    if head == "scalar":
        _require_scalar_head(model)
    if role.quantize:
        quantized.prepare(model)
    return model


def _load_gguf(source: Source, role: RoleConfig, head: str, trainable: bool, new_head: bool) -> PreTrainedModel:
    quantized = AutoModelForCausalLM.from_pretrained(
        source.path, gguf_file=source.gguf, dtype=torch.float32, local_files_only=True
    )
    config = quantized.config
    del config.quantization_config  # while it is there, save_pretrained refuses
    if head == "scalar":
        config.num_labels = 1
    dtype = _dtype(role, trainable)
    model_class = _model_class(head, config)
    from_config = getattr(model_class, "from_config", None) or model_class._from_config
    model = from_config(config, attn_implementation=_attention(role, config))
    model.load_state_dict(quantized.state_dict(), strict=head == "lm")
    if head == "scalar":
        _new_head(model, role, new_head)
    else:
        model.generation_config = quantized.generation_config
    return model.to(torch.float32 if dtype == "auto" else dtype)


def _attention(role: RoleConfig, config: PreTrainedConfig) -> str | None:
    """What the role says; else eager where the model caps its attention scores, which sdpa leaves out, or transformers' choice."""
    if role.attn_implementation != "auto":
        return role.attn_implementation
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def _model_class(head: str, config: PreTrainedConfig) -> Any:
    if head == "lm":
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification
    return _scalar_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


@functools.cache
def _scalar_class(causal: Any) -> Any:
    """The sequence classification model that transformers has for most language models, for those it has none for."""
    base = next(parent for parent in causal.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = base.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
    named = {"base_model_prefix": causal.base_model_prefix, "config_class": causal.config_class, "__module__": __name__}
    return type(name, (GenericForSequenceClassification, base), named)


def _new_head(model: PreTrainedModel, role: RoleConfig, wanted: bool) -> None:
    if not wanted:
        raise UserError(
            f"the model {role.model!r} has no scalar head, and a frozen role cannot learn one: give a reward or value model"
        )
    torch.nn.init.zeros_(_require_scalar_head(model).weight)
    text: Any = model.config.get_text_config()
    if text.pad_token_id is None:  # transformers reads scores before padding, and refuses batches where nothing pads
        text.pad_token_id = load_tokenizer(role).pad_token_id


def _align(model: PreTrainedModel) -> None:
    """Move weights that lie at odd addresses: kernels round by alignment, and files, so checkpoints too, differ in theirs."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def _dtype(role: RoleConfig, trainable: bool) -> Any:
    if role.dtype == "auto":
        return torch.float32 if trainable else "auto"
    return DTYPES[role.dtype]


@contextlib.contextmanager
def _as_user_error(problem: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{problem}: {first_line(error)}") from error


def first_line(error: object) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or load reports: what they say and matters is an error here."""
    if not torch.cuda.is_available():
        # Saving imports DeepSpeed where it is installed, which otherwise warns that it finds no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with without_bars(), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        yield


_bars = threading.Lock()
_without_bars: list[tuple[int, bool]] = []
"""For each that is inside ``without_bars``: the verbosity and bars of before the first."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """The part of ``quiet_transformers`` that several threads may use at once: standard error stays."""
    with _bars:
        before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        _without_bars.append(_without_bars[0] if _without_bars else before)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _bars:
            verbosity, bars = _without_bars.pop()
            if not _without_bars:
                transformers_logging.set_verbosity(verbosity)
                if bars:
                    transformers_logging.enable_progress_bar()
