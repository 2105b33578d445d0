"""Pictures as tokens, and as the tensors that a model's tower takes: transformers' processor of a model directory."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_host.errors import UserError, first_line
from rlhf_host.records.pictures import MARK, Picture, pillow, positions_of

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that a model directory has beside its tokenizer's."""
_PROBE = (96, 64)  # pixels
_TEXTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_CHECKED = 3
"""Prompts whose tokens are compared with the processor's own."""


class Processor:
    """The processor of a model that sees.

    In the tokens of a text, a placeholder that the chat template wrote is replaced by the tokens that the processor writes for
    its picture. From then on these are tokens like all others. The first prompts are compared with what the processor makes of
    their whole texts.

    Args:
        processor: transformers' own.

    Raises ``UserError`` if its chat template has no place for pictures, or the processor does not expand what it writes there.
    """

    def __init__(self, processor: Any):
        self.processor, self.tokenizer = processor, processor.tokenizer
        self._lock = threading.Lock()  # the settings of a tokenizer must not change while another thread uses it
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}
        self._unchecked = _CHECKED
        self.text = self._learn()
        """Text that the chat template writes for a picture, and the processor expands."""
        self.placeholder: int = self.tokenizer.convert_tokens_to_ids(self.text)

    @classmethod
    def of(cls, tokenizer: Any) -> Processor:
        """Returns the processor that has its files beside those of a tokenizer. Raises ``UserError`` if there is none."""
        return _at(str(tokenizer.name_or_path))

    @staticmethod
    def files(tokenizer: Any) -> dict[str, str]:
        """Returns the texts of its files beside those of a tokenizer, by name; none for a model that does not see."""
        found = map(Path(str(tokenizer.name_or_path)).joinpath, PROCESSOR_FILES)
        return {file.name: file.read_text("utf-8") for file in found if file.is_file()}

    @classmethod
    def of_model(cls, tokenizer: Any) -> Processor | None:
        """Returns the same as ``beside``; None for a model that does not see, or whose pictures cannot be used here."""
        return _of_model(str(tokenizer.name_or_path))

    @classmethod
    def at(cls, directory: str) -> Processor:
        """Returns the processor of a model directory, or of a name on the hub. Raises ``UserError`` if there is none."""
        return _at(directory)

    def tokens(self, picture: Picture) -> tuple[int, ...]:
        """Returns the tokens that stand for a picture. They depend on its size alone."""
        return self._of_size(picture.width, picture.height)

    def _of_size(self, width: int, height: int) -> tuple[int, ...]:
        if (width, height) not in self._known:
            ids = self._call(self.text, [pillow().new("RGB", (width, height))])["input_ids"][0]
            self._known[width, height] = tuple(ids)
        return self._known[width, height]

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture], text: str | None = None) -> list[int]:
        """Returns tokens with each placeholder replaced by the tokens of its picture.

        Args:
            ids: tokens of a text that the chat template wrote.
            text: this text, if it may be compared with what the processor makes of it.

        Raises:
            UserError: there are more placeholders than pictures, or fewer, or the processor makes other tokens.
        """
        places = [place for place, token in enumerate(ids) if token == self.placeholder]
        if len(places) != len(pictures):
            raise UserError(
                f"{len(pictures)} pictures, and the text has {self.text!r} {len(places)} times: the chat template leaves some out,"
                " or a text contains it"
            )
        whole: list[int] = []
        begin = 0
        for place, picture in zip(places, pictures, strict=True):
            whole += [*ids[begin:place], *self.tokens(picture)]
            begin = place + 1
        whole += ids[begin:]
        if text is not None and pictures and self._unchecked:
            self._compare(whole, text, pictures)
            self._unchecked -= 1
        return whole

    def collapse(self, ids: Sequence[int], pictures: Sequence[Picture], begins: Sequence[int] = ()) -> list[int]:
        """Returns what ``expand`` was given. Raises ``UserError`` if the tokens of a picture are not there.

        Args:
            begins: as ``Pictured.begins``.
        """
        first, *others = self.around(ids, [(picture.width, picture.height) for picture in pictures], begins)
        return [*first, *(token for part in others for token in (self.placeholder, *part))]

    def around(self, ids: Sequence[int], sizes: Sequence[tuple[int, int]], begins: Sequence[int] = ()) -> list[Sequence[int]]:
        """Returns the tokens before, between and behind those of pictures with these widths and heights. Raises ``UserError``
        if the tokens of one are not there.
        """
        tokens = [self._of_size(*size) for size in sizes]
        places = positions_of(ids, tokens, begins or [0] * len(sizes))
        if (missing := len(places)) < len(sizes):
            raise UserError(f"the {len(tokens[missing])} tokens of picture {missing + 1} of {len(sizes)} are not in the prompt")
        ends = [0, *(place + len(own) for place, own in zip(places, tokens, strict=True))]
        return [ids[end:place] for end, place in zip(ends, [*places, len(ids)], strict=True)]

    def tensors(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Returns what the model's tower takes for these pictures, in order: ``pixel_values`` and what belongs to them."""
        made = self._call(self.text * len(pictures), [picture.load() for picture in pictures], return_tensors="pt")
        return {name: value for name, value in made.items() if name not in _TEXTS}

    def _call(self, text: str, images: list[Any], **options: Any) -> Any:
        with self._lock:
            try:
                return self.processor(text=[text], images=images, add_special_tokens=False, **options)
            except Exception as error:  # a processor is a program of its author's: it raises what it likes
                sizes = ", ".join("×".join(map(str, image.size)) for image in images[:4])
                raise UserError(
                    f"{type(self.processor).__name__} does not take {len(images)} pictures ({sizes} pixels): {first_line(error)}"
                ) from error

    def _compare(self, ids: list[int], text: str, pictures: Sequence[Picture]) -> None:
        theirs = list(self._call(text, [picture.load() for picture in pictures])["input_ids"][0])
        if ids != theirs:
            place = next((at for at, pair in enumerate(zip(ids, theirs, strict=False)) if pair[0] != pair[1]), len(theirs))
            raise UserError(
                f"{type(self.processor).__name__} makes {len(theirs)} tokens of a prompt with {len(pictures)} pictures, and its"
                f" parts make {len(ids)}; they differ from token {place} on, so this model's pictures cannot be used"
            )

    def _learn(self) -> str:
        image = pillow().new("RGB", _PROBE, (200, 100, 50))
        written = self._template([{"type": "image"}, {"type": "text", "text": "x"}])
        bare = self._template([{"type": "text", "text": "x"}])
        special = sorted(
            {*self.tokenizer.all_special_tokens, *map(str, self.tokenizer.get_added_vocab())}, key=len, reverse=True
        )
        found = [token for token in special if token and written.count(token) == bare.count(token) + 1]
        for token in sorted(found, key=written.find):
            alone = self.tokenizer(token, add_special_tokens=False)["input_ids"]
            if len(alone) != 1:
                continue
            try:
                ids = self._call(token, [image])["input_ids"][0]
            except UserError:
                continue
            if list(ids) != list(alone):
                return token
        raise UserError(
            f"the chat template writes {written!r} for a picture, of which {type(self.processor).__name__} expands no token: this"
            " model's pictures cannot be used"
        )

    def _template(self, content: list[dict[str, str]]) -> str:
        try:
            messages = [{"role": "user", "content": content}]
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            raise UserError(f"the chat template takes no pictures: {first_line(error)}") from error


def around_pictures(tokenizer: Any, token_ids: Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
    """Returns the tokens before, between and behind those of pictures with these widths and heights, by the processor beside the
    tokenizer. Raises ``UserError`` if there is none, or the tokens of a picture are not there.
    """
    return Processor.of(tokenizer).around(token_ids, sizes)


def refuse_unseen(tokenizer: Any, *ids: Sequence[int], text: str = "") -> None:
    """Raises ``UserError`` for a text without pictures that has the place of one, on a model that sees.

    Args:
        ids: its tokens, in parts.
        text: the text, where ``<image>`` means a picture.
    """
    if (processor := Processor.of_model(tokenizer)) is None:
        return
    has_placeholder = any(processor.placeholder in part for part in ids)
    found = processor.text if has_placeholder else MARK if MARK in text else None
    if found is not None:
        raise UserError(
            f"the text has {found!r}, and no picture for it: name the column of pictures image or images, or write this in"
            " another way"
        )


@functools.lru_cache(maxsize=8)
def _of_model(directory: str) -> Processor | None:
    if not any(Path(directory, name).is_file() for name in PROCESSOR_FILES):
        return None
    try:
        return _at(directory)
    except UserError:
        return None


@functools.lru_cache(maxsize=8)
def _at(directory: str) -> Processor:
    from transformers import AutoConfig, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    pillow()
    if (adapter := Path(directory, "adapter_config.json")).is_file():
        directory = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
    try:
        try:
            made = AutoProcessor.from_pretrained(directory)
        except ImportError:  # its part for videos needs torchvision
            config = AutoConfig.from_pretrained(directory)
            made = _without_videos(PROCESSOR_MAPPING[type(config)]).from_pretrained(directory)
    except Exception as error:
        raise UserError(f"{directory} has no processor for pictures that can be loaded: {first_line(error)}") from error
    if getattr(made, "image_processor", None) is None or getattr(made, "tokenizer", None) is None:
        raise UserError(f"{directory} has no processor for pictures (preprocessor_config.json): its model takes texts alone")
    return Processor(made)


def _without_videos(processor: Any) -> Any:
    """Returns the same class of processors without the part that reads videos."""

    def get_attributes(cls: Any) -> list[str]:
        return [name for name in processor.get_attributes() if name != "video_processor"]

    return type(processor.__name__, (processor,), {"get_attributes": classmethod(get_attributes), "__module__": __name__})
