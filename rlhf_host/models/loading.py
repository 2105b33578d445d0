"""Models and tokenizers from a directory, the hub, a GGUF file, or the built-in ``quickstart``."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from rlhf_host.config.schema import RoleConfig
from rlhf_host.data.processor import PROCESSOR_FILES
from rlhf_host.errors import UserError, first_line
from rlhf_host.models import adapter_files, adapters, quantized
from rlhf_host.models.carried import SINGLE, add_carried, carry
from rlhf_host.models.classes import model_class
from rlhf_host.models.dtypes import master_of, retype, weight_dtypes, written_type
from rlhf_host.models.heads import scalar_head
from rlhf_host.models.locations import INDEX, ModelLocation, find_model, hub_answers, with_base
from rlhf_host.models.preparation import no_head, prepare, refuse_settings, wide_head
from rlhf_host.once import once
from rlhf_host.runs.models import step_model


def load_model(role: RoleConfig, *, head: Literal["lm", "scalar"] = "lm", trainable: bool = False) -> PreTrainedModel:
    """Loads the role's model on its device, in eval mode, without dropout.

    ``head="scalar"`` is transformers' sequence classification model with one label. Reward models of this kind load as they
    are; on a plain language model, a trainable role gets a new head of zeros. Trainable weights are float32. The output of
    ``save_pretrained`` can be loaded again, for GGUF too (dequantized).

    A trainable role may train a part of the weights (``role.freeze``, ``role.train_only``), or a LoRA adapter
    (``role.adapter``, ``role.lora``). With an adapter, the model's own weights are frozen, and may be of any type, or in 4 bits
    (``role.quantize``, or if the adapter was trained on such weights). In a frozen role, an adapter is merged into the weights.

    Raises:
        UserError: no such model, incomplete or pickled weights, or an unusable dtype, device, attention kernel or adapter.
    """
    role = with_base(role)
    source, device = find_model(role.model), choose_device(role.device)
    refuse_settings(role, source, trainable=trainable)
    load = _load_gguf if source.gguf else _load_safetensors
    with quiet_transformers(), as_user_error(f"cannot load the model {role.model!r}"):
        brings_head = role.adapter is not None and adapter_files.is_scalar(role.adapter)
        model = load(source, role, head, trainable, new_head=trainable or brings_head)
    with quiet_transformers():
        return prepare(model, role, source, device, trainable=trainable)


def weight_files(role: RoleConfig) -> list[Path]:
    """Returns the weight files of the role, without its adapter."""
    source = find_model(role.model)
    if source.gguf:
        return [Path(source.path, source.gguf)]
    directory = Path(source.path) if source.local else model_directory(role.base)
    assert directory is not None
    return sorted(directory.glob("*.safetensors"))


def save_model(model: PreTrainedModel, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
    """Writes the model in Hugging Face format, or its adapter in peft's format if it has one; ``weights`` as of ``copy_model``."""
    copy_model(model, directory, weights)()


def copy_model(model: PreTrainedModel, directory: str | Path, weights: dict[str, Tensor] | None = None) -> Callable[[], None]:
    """Copies the model, or its adapter if it has one, to host memory. Returns a function that writes the copy like
    ``save_model``, on any thread, even while the model is trained.

    Args:
        weights: copies by name, if the model's own are not whole.
    """
    if not adapters.has_adapters(model):
        copies = host_copy(model.state_dict(keep_vars=True)) if weights is None else weights
        dtype = next(str(written_type(each)) for each in model.parameters() if each.is_floating_point())

        def write() -> None:
            with without_bars():
                model.save_pretrained(directory, state_dict=copies)
            model.config.dtype = dtype.removeprefix("torch.")  # not that of weights that are rounded to compute with
            model.config.save_pretrained(directory)
            add_carried(model, Path(directory))

        return write
    config: Any = model.peft_config[adapters.TRAINED]
    base = RoleConfig(model=config.base_model_name_or_path, revision=config.revision)
    return partial(adapter_files.save_adapter, model, directory, weight_files(base), host_copy(adapters.adapter_weights(model)))


def host_copy(state: Any) -> Any:
    """Returns a copy of nested dicts, lists and tuples with their tensors in host memory, masters in place of weights that are
    rounded from them. A tensor that appears twice is one tensor in the copy.

    Raises ``TypeError`` for a tensor that is no plain one, as a ``DTensor``: it has no address to know it by.
    """
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter):
                raise TypeError(f"host_copy got a {type(value).__name__}: copy its local tensor")
            dtype, value = written_type(value), master_of(value)
            key = value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
            if key not in copies:
                copies[key] = value.detach().to("cpu", dtype, copy=True)
            return copies[key]
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

    return copied(state)


def context_length(model: Any) -> int:
    """Returns the longest row of tokens that the model has positions for."""
    return _positions(model.config)


def _positions(config: PreTrainedConfig) -> int:
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return length if length > 0 else 2**31


def load_tokenizer(role: RoleConfig) -> PreTrainedTokenizerBase:
    """Loads the role's tokenizer, from ``tokenizer`` or else from beside its adapter or model. If it has no padding token, eos
    pads.
    """
    name = role.tokenizer or (role.adapter if _has_tokenizer(role.adapter) else step_model(role.model))
    if adapter_files.is_adapter(name) and _has_tokenizer(name):
        source = ModelLocation(str(Path(str(name)).expanduser()), local=True)
    else:
        source = find_model(name, weights=False)
    options = options_of(source, role) | ({"gguf_file": source.gguf} if source.gguf else {})
    if role.tokenizer:
        del options["revision"]  # is the model's
    with quiet_transformers(), as_user_error(f"cannot load the tokenizer of {role.tokenizer or role.model!r}"):
        tokenizer = AutoTokenizer.from_pretrained(source.path, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Writes a tokenizer, and the processor for pictures that has its files beside those that it was loaded from."""
    tokenizer.save_pretrained(str(directory))
    for name in PROCESSOR_FILES:
        found = cached_file(
            tokenizer.name_or_path,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is not None and not Path(directory, name).exists():
            shutil.copyfile(found, Path(directory, name))


def _has_tokenizer(path: str | None) -> bool:
    return path is not None and (Path(path).expanduser() / "tokenizer_config.json").is_file()


def model_directory(role: RoleConfig) -> Path | None:
    """Returns the directory of the role's model, downloaded if it is on the hub; None for a GGUF file, or if an adapter or 4
    bits change the model.
    """
    role = with_base(role)
    if role.adapter is not None or role.quantize is not None:
        return None
    source = find_model(role.model)
    if source.local:
        return None if source.gguf else Path(source.path)
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken"]
    with quiet_transformers(), as_user_error(f"cannot fetch the model {role.model!r}"):
        offline = not hub_answers()
        return Path(snapshot_download(source.path, revision=role.revision, allow_patterns=files, local_files_only=offline))


def choose_device(name: str) -> torch.device:
    """Returns the device; ``auto`` is the first CUDA device, else the CPU."""
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


def require_scalar_head(model: PreTrainedModel) -> torch.nn.Linear:
    if (head := scalar_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no scalar head: give a causal model with one (ForSequenceClassification)")
    return head


def head_of(directory: Path) -> Literal["lm", "scalar"]:
    """Returns ``scalar`` for reward and value models, ``lm`` for others and for anything that is not a local model directory."""
    if adapter_files.is_adapter(directory):
        return "scalar" if adapter_files.is_scalar(directory) else "lm"
    config = directory / "config.json"
    if not config.is_file():
        return "lm"
    try:
        names = json.loads(config.read_text("utf-8")).get("architectures") or [""]
    except (ValueError, AttributeError) as error:
        other = "take another model of the run, as with --checkpoint last"
        raise UserError(f"{config} is damaged: it is no configuration of a model; {other}") from error
    return "scalar" if names[0].endswith("ForSequenceClassification") else "lm"


def sizes(role: RoleConfig) -> tuple[int | None, int | None]:
    """Returns the number of tokens that the role's model knows, and its longest row, read from its configuration alone; None
    for GGUF.
    """
    source = find_model(role.model, weights=False)
    if source.gguf:
        return None, None
    with quiet_transformers(), as_user_error(f"cannot load the model {role.model!r}"):
        config = configuration(source, role)
    return getattr(config.get_text_config(), "vocab_size", None), _positions(config)


def stop_tokens(role: RoleConfig) -> list[int]:
    """Returns the tokens that end a turn, from the generation configuration beside the role's model; none if there is no such
    file.
    """
    source = find_model(role.model, weights=False)
    options = options_of(source, role)
    with quiet_transformers():
        try:
            ids = GenerationConfig.from_pretrained(source.path, **options).eos_token_id
        except OSError:
            return []
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def options_of(source: ModelLocation, role: RoleConfig) -> dict[str, Any]:
    return {
        "revision": None if source.local else role.revision,
        "trust_remote_code": role.trust_remote_code,
        "local_files_only": source.local or not hub_answers(),
    }


def _load_safetensors(source: ModelLocation, role: RoleConfig, head: str, trainable: bool, new_head: bool) -> PreTrainedModel:
    options, config = options_of(source, role), configuration(source, role, head)
    if role.quantize:
        options |= quantized.settings(choose_device(role.device))
    read, kept = weight_dtypes(role, trainable, config.dtype, rounded_base(role))
    model, info = model_class(head, config).from_pretrained(
        source.path,
        config=config,
        dtype=read,
        attn_implementation=attention_of(role, config),
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=head == "scalar",  # reported with what is missing below, in words of our own
        **options,
    )
    different = {str(key): shape for key, shape, _ in info["mismatched_keys"]}
    if head == "scalar" and "score.weight" in different:
        raise wide_head(role, different["score.weight"][0])
    if head == "scalar":
        require_scalar_head(model)
    missing = sorted(info["missing_keys"]) + sorted(different)
    if head == "scalar" and "score.weight" in missing:
        _new_head(model, role, new_head)
        missing.remove("score.weight")
    if missing:
        raise UserError(f"the model {role.model!r} is incomplete: no {missing[0]} (and {len(missing) - 1} more) in its weights")
    carry(model, files_of(source, role), partial(_language_model, source, role) if head == "scalar" else None)
    untie(model)
    if kept != read:
        retype(model, kept)
    if role.quantize:
        quantized.prepare(model)
    return model


def _language_model(source: ModelLocation, role: RoleConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return new_model(source, role, "lm", configuration(source, role), "auto")


def files_of(source: ModelLocation, role: RoleConfig) -> list[Path]:
    """Returns the files of a model's weights, as its index names them."""
    chosen = {key: value for key, value in options_of(source, role).items() if key != "trust_remote_code"}
    find: Any = partial(cached_file, source.path, _raise_exceptions_for_missing_entries=False, **chosen)
    index = find(INDEX)
    names = [SINGLE] if index is None else json.loads(Path(index).read_text("utf-8"))["weight_map"].values()
    return [Path(file) for name in dict.fromkeys(names) if (file := find(name) or (index and Path(source.path, name)))]


def untie(model: PreTrainedModel) -> None:
    """Writes into the configuration that the head is not the embedding where that is so: programs would tie the two."""
    head: Any = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def configuration(source: ModelLocation, role: RoleConfig, head: str = "lm") -> Any:
    """Returns the configuration of the role's model, with one label for a scalar head. A command reads it once."""
    options = options_of(source, role) | ({"gguf_file": source.gguf} if source.gguf else {})
    options |= {"num_labels": 1} if head == "scalar" else {}
    config = copy.deepcopy(_configuration(source.path, **options))
    if head == "scalar":
        config.token_classification_bias = (
            False  # so that what is saved loads as a token classifier too: all scores, none missing
        )
    return config


@once
def _configuration(path: str, **options: Any) -> Any:
    return AutoConfig.from_pretrained(path, **options)


def new_model(source: ModelLocation, role: RoleConfig, head: str, config: PreTrainedConfig, dtype: Any) -> PreTrainedModel:
    """Returns a model of this configuration, with random weights; of the type that it says where ``dtype`` is ``auto``."""
    made = model_class(head, config)
    options: dict[str, Any] = {"attn_implementation": attention_of(role, config)} | (
        {} if dtype == "auto" else {"dtype": dtype}
    )
    if (from_config := getattr(made, "from_config", None)) is not None:
        model: PreTrainedModel = from_config(config, trust_remote_code=role.trust_remote_code, **options)
    else:
        model = made._from_config(config, **options)
    model.config.name_or_path = source.path
    return model


def _load_gguf(source: ModelLocation, role: RoleConfig, head: str, trainable: bool, new_head: bool) -> PreTrainedModel:
    quantized = AutoModelForCausalLM.from_pretrained(
        source.path, gguf_file=source.gguf, dtype=torch.float32, local_files_only=True
    )
    config = quantized.config
    del config.quantization_config  # while it is there, save_pretrained refuses
    if head == "scalar":
        config.num_labels = 1
    model = new_model(source, role, head, config, torch.float32)
    model.load_state_dict(quantized.state_dict(), strict=head == "lm")
    if head == "scalar":
        _new_head(model, role, new_head)
    else:
        model.generation_config = quantized.generation_config
    for dtype in weight_dtypes(role, trainable, torch.float32, rounded_base(role)):
        retype(model, dtype)
    return model


def rounded_base(role: RoleConfig) -> torch.dtype | None:
    return None if role.adapter is None else adapter_files.rounded_base(role.adapter)


def attention_of(role: RoleConfig, config: PreTrainedConfig) -> str | None:
    """Returns the role's setting, else eager if the model caps its attention scores (which sdpa ignores), else transformers'
    choice.
    """
    if role.attn_implementation != "auto":
        return role.attn_implementation
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def _new_head(model: PreTrainedModel, role: RoleConfig, wanted: bool) -> None:
    if not wanted:
        raise no_head(role)
    torch.nn.init.zeros_(require_scalar_head(model).weight)
    pad_scores(model, role)


def pad_scores(model: PreTrainedModel, role: RoleConfig) -> None:
    """Gives a model with a new head a padding token: transformers reads scores before padding, and refuses batches where nothing
    pads.
    """
    text: Any = model.config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = load_tokenizer(role).pad_token_id


@contextlib.contextmanager
def as_user_error(problem: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{problem}: {first_line(error)}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off progress bars and load reports: anything that matters in them is an error here."""
    if not torch.cuda.is_available():
        # Saving imports DeepSpeed where it is installed, which otherwise warns that it finds no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with without_bars(), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        yield


_bars = threading.Lock()
_without_bars: list[tuple[int, bool]] = []
"""Verbosity and bars from before the first ``without_bars``, for each that is active."""


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Does the part of ``quiet_transformers`` that several threads may use at once: standard error stays."""
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
