"""Models and tokenizers from a directory, the hub, a GGUF file, or the built-in ``quickstart``."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import torch
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
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models.heads import scalar_head
from rlhf_host.models.quickstart import quickstart_model_dir

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is: ``path`` is a directory or a hub name, ``gguf`` a file in that directory."""

    path: str
    local: bool
    gguf: str | None = None


def load_model(role: RoleConfig, *, head: Literal["lm", "scalar"] = "lm", trainable: bool = False) -> PreTrainedModel:
    """The role's model on its device, in eval mode, dropout removed.

    ``head="scalar"`` is transformers' sequence classification model with one label: such reward models load as they are, and on
    a plain language model a trainable role gets a new head of zeros. Trainable weights are float32. What ``save_pretrained``
    writes loads again, for GGUF too (dequantized).

    Raises:
        UserError: no such model, incomplete or pickled weights, or an unusable dtype, device or attention kernel.
    """
    source = find_model(role.model)
    device = choose_device(role.device)
    if trainable and role.dtype not in ("auto", "float32"):
        raise UserError(
            f"dtype {role.dtype} for the trainable model {role.model!r}: trainable weights are kept in float32, because 16 bits"
            " swallow small updates; leave dtype at auto and set train.autocast to bfloat16"
        )
    with quiet_transformers(), _as_user_error(f"cannot load the model {role.model!r}"):
        model = _load_gguf(source, role, head, trainable) if source.gguf else _load_safetensors(source, role, head, trainable)
    remove_dropout(model)
    if role.gradient_checkpointing and trainable:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"{type(model).__name__} does not support gradient checkpointing: set gradient_checkpointing to false"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.requires_grad_(trainable)
    placed: PreTrainedModel = model.eval().to(device)  # type: ignore[arg-type]
    if trainable:
        _align(placed)
    return placed


def context_length(model: Any) -> int:
    """Longest row of tokens that the model has positions for."""
    return _positions(model.config)


def _positions(config: PreTrainedConfig) -> int:
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return length if length > 0 else 2**31


def load_tokenizer(role: RoleConfig) -> PreTrainedTokenizerBase:
    """The role's tokenizer, from ``tokenizer`` or else from beside the model. Where no token pads, eos does."""
    source = find_model(role.tokenizer or role.model, weights=False)
    options = _options(source, role) | ({"gguf_file": source.gguf} if source.gguf else {})
    if role.tokenizer:
        del options["revision"]  # is the model's
    with quiet_transformers(), _as_user_error(f"cannot load the tokenizer of {role.tokenizer or role.model!r}"):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def find_model(name: str | None, *, weights: bool = True) -> Source:
    """Tell a directory, a GGUF file and a hub name apart, and refuse what is none of them before anything is loaded."""
    if not name:
        raise UserError("no model is set: give a model directory, a hub name, a GGUF file, or 'quickstart' (--actor.model)")
    if name == "quickstart":
        return Source(str(quickstart_model_dir()), local=True)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{name} is a file, but not a GGUF file: give the model's directory")
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"{name} needs the package gguf: pip install 'rlhf-host[gguf]'")
        return Source(str(path.parent), local=True, gguf=path.name)
    if path.is_dir():
        _check_directory(path, weights)
        return Source(str(path), local=True)
    siblings = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    match = near_matches(str(path), siblings)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise UserError(f"no model at {name}{match or ': no such file or directory'}")
    if not _cached(name) and (match or not _hub_answers()):
        hub = "" if match else "; as a hub name it is not in the local cache, and the hub cannot be reached from here"
        raise UserError(f"no model {name!r}: no such directory{match}{hub}")
    return Source(name, local=False)


def model_directory(role: RoleConfig) -> Path | None:
    """The role's model as a directory, fetched from the hub where it is one of the hub's; ``None`` for a GGUF file."""
    source = find_model(role.model)
    if source.local:
        return None if source.gguf else Path(source.path)
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
    with quiet_transformers(), _as_user_error(f"cannot fetch the model {role.model!r}"):
        offline = not _hub_answers()
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
        "local_files_only": source.local or not _hub_answers(),
    }


def _load_safetensors(source: Source, role: RoleConfig, head: str, trainable: bool) -> PreTrainedModel:
    options = _options(source, role)
    config = AutoConfig.from_pretrained(source.path, **options, **({"num_labels": 1} if head == "scalar" else {}))
    if head == "scalar":
        config.token_classification_bias = (
            False  # so that what is saved loads as a token classifier too: all scores, none missing
        )
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
    missing = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
    if head == "scalar" and "score.weight" in missing:
        _new_head(model, role, trainable)
        missing.remove("score.weight")
    if missing:
        raise UserError(f"the model {role.model!r} is incomplete: no {missing[0]} (and {len(missing) - 1} more) in its weights")
    if head == "scalar":
        _require_scalar_head(model)
    return model


def _load_gguf(source: Source, role: RoleConfig, head: str, trainable: bool) -> PreTrainedModel:
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
        _new_head(model, role, trainable)
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


def _new_head(model: PreTrainedModel, role: RoleConfig, trainable: bool) -> None:
    if not trainable:
        raise UserError(
            f"the model {role.model!r} has no scalar head, and a frozen role cannot learn one: give a reward or value model"
        )
    torch.nn.init.zeros_(_require_scalar_head(model).weight)


def _align(model: PreTrainedModel) -> None:
    """Move weights that lie at odd addresses: kernels round by alignment, and files, so checkpoints too, differ in theirs."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def _dtype(role: RoleConfig, trainable: bool) -> Any:
    if role.dtype == "auto":
        return torch.float32 if trainable else "auto"
    return DTYPES[role.dtype]


def _check_directory(path: Path, weights: bool) -> None:
    files = {entry.name for entry in path.iterdir()}
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if "config.json" not in files:
        hint = f"give the GGUF file itself: {path / gguf[0]}" if gguf else "a model directory is what save_pretrained writes"
        raise UserError(f"{path} has no config.json: {hint}")
    if weights and not any(name.endswith(".safetensors") for name in files):
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
        problem = "only pickled weights, which can run code when loaded: convert them to" if pickled else "no weights: it needs"
        raise UserError(f"{path} has {problem} .safetensors files")


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"no model {name!r}: no such directory, and not a hub name") from error


def _hub_answers() -> bool:
    """Whether the hub's name resolves. Without this, transformers retries for most of a minute before it gives up."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if "https" in urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


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
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
