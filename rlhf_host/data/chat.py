"""Prompts as tokens: chat templates and templates of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_host.config.schema import DataConfig
from rlhf_host.data.contents import has_pictures, text_of
from rlhf_host.data.rendered import Rendered
from rlhf_host.data.row_context import NOTHING, RowContext
from rlhf_host.data.template_writer import WITHOUT_TOOLS, TemplateWriter, refuse_cuts
from rlhf_host.data.templates import check_template, for_chat, uses_chat_template
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Message, Task

NO_TEMPLATE = (
    "pictures are placed by a chat template, and there is none: use a tokenizer that has one, and leave data.template unset"
)
"""Problem of pictures in plain text."""


def render_prompt(
    prompt: str | Sequence[Message], tokenizer: Any, system_prompt: str | None = None, template: str | None = None
) -> list[int]:
    """Returns one prompt's token ids, ready for the model to continue. See ``render_prompts``."""
    return render_prompts([prompt], tokenizer, system_prompt, template)[0]


def render_prompts(
    prompts: Sequence[str | Sequence[Message]], tokenizer: Any, system_prompt: str | None = None, template: str | None = None
) -> list[list[int]]:
    """Returns the token ids of each prompt. See ``Prompts``."""
    rendering = Prompts(tokenizer, system_prompt, template)
    return encode_prompts([rendering.text(prompt) for prompt in prompts], tokenizer, chat=rendering.chat)


class Prompts:
    """Renders prompts for one tokenizer.

    A ``template`` of ``None`` means the tokenizer's chat template if it has one, else plain text; ``none`` means plain text;
    anything else is a text in which ``{prompt}`` is replaced (other braces stay as they are). A system prompt becomes the first
    message, or the first paragraph of plain text; a prompt with its own system message keeps that one.

    A chat template writes the beginning-of-sequence token itself, so its text is tokenised without special tokens: otherwise
    there would be two of them. Plain text gets what the tokenizer adds, except an end-of-sequence token.

    Raises ``UserError`` for a template without ``{prompt}``.
    """

    def __init__(self, tokenizer: Any, system_prompt: str | None = None, template: str | None = None):
        check_template(template)
        self._system_prompt, self._template = system_prompt, template
        self.chat = uses_chat_template(tokenizer, template)
        self.writer = TemplateWriter(tokenizer)
        self.rendered = Rendered(self.writer)

    def text(self, prompt: str | Sequence[Message], beside: RowContext = NOTHING, *, as_it_is: bool = False) -> str:
        """Returns a prompt as the text that ``encode_prompts`` takes.

        Raises ``UserError`` for a conversation without a chat template, for messages that the template refuses or leaves out,
        and for prompts that are already rendered.

        Args:
            beside: the row's own system message, tools and values for the template.
            as_it_is: the prompt contains its turns already, so no chat template is used.
        """
        system = beside.system or self._system_prompt
        texts = [prompt] if isinstance(prompt, str) else [text_of(message.get("content")) for message in prompt]
        if self.chat and not as_it_is:
            for text in texts:
                self.rendered.refuse(text, "the prompt")
            messages = conversation(prompt, system)
            writer = self.writer.told(beside.template_kwargs)
            written = writer.write(messages, opens=True, tools=beside.tools)
            writer.refuse_losses(messages, beside.tools, opens=True)
            refuse_cuts(messages, written, answers=False)
            return written
        if not isinstance(prompt, str) and any(has_pictures(message.get("content")) for message in prompt):
            raise UserError(NO_TEMPLATE)
        if beside.tools:
            raise UserError(f"plain text has no tools: {WITHOUT_TOOLS}")
        if beside.template_kwargs:
            raise UserError(
                "values for a chat template (chat_template_kwargs), and there is none: leave them unread (data.ignore)"
            )
        led = system or (not isinstance(prompt, str) and any(message["role"] == "system" for message in prompt))
        if led and (opening := next(filter(None, map(self.rendered.opening_in, texts)), None)):
            raise UserError(f"the prompt is rendered already (it has {opening!r}), so no system message can be put before it")
        return _plain(prompt, system, self._template if not as_it_is or self._template is not None else "none")


def task_renderer(tokenizer: Any, data: DataConfig) -> Callable[[Task], list[int]]:
    """Returns a function that renders a task's prompt as ``load_tasks`` does. It is made when the first one is rendered."""
    made: list[Prompts] = []

    def render(task: Task) -> list[int]:
        if not made:
            made.append(Prompts(for_chat(tokenizer, data), data.system_prompt, data.template))
        text = made[0].text(task.prompt, RowContext(None, task.tools, task.template_kwargs))
        return encode_prompts([text], tokenizer, chat=made[0].chat)[0]

    return render


def encode_prompts(texts: Sequence[str], tokenizer: Any, *, chat: bool) -> list[list[int]]:
    """Returns the token ids of rendered prompts; ``chat`` is True if a chat template wrote them."""
    encoded = encode(texts, tokenizer, special=not chat)
    return encoded if chat else [trim(text, ids, tokenizer) for text, ids in zip(texts, encoded, strict=True)]


def trim(text: str, ids: list[int], tokenizer: Any) -> list[int]:
    """Returns the tokens of a prompt without the end, and the second beginning, that the tokenizer added."""
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]  # the text itself began with it
    return ids


def conversation(prompt: str | Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Returns a text as a user's message, after the system prompt, unless the messages have their own."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _plain(prompt: str | Sequence[Message], system_prompt: str | None, template: str | None) -> str:
    if not isinstance(prompt, str):
        others = [message for message in prompt if message["role"] != "system"]
        if len(others) > 1:
            raise UserError(
                "a prompt is a conversation of several turns, which needs a chat template: "
                "leave data.template unset and use a tokenizer that has one"
            )
        if odd := [message["role"] for message in others if message["role"] != "user"]:
            raise UserError(f"a prompt has a message of the role {odd[0]!r}, which needs a chat template")
        texts = [(message["role"], text_of(message.get("content"))) for message in prompt]
        system_prompt = "\n\n".join(text for role, text in texts if role == "system") or system_prompt
        prompt = "".join(text for role, text in texts if role != "system")
    text = prompt if template is None or template == "none" else template.replace("{prompt}", prompt)
    return f"{system_prompt}\n\n{text}" if system_prompt else text


def encode(texts: Sequence[str], tokenizer: Any, *, special: bool) -> list[list[int]]:
    """Returns the token ids of each text; ``special``: with the tokens that the tokenizer adds by itself."""
    if not texts:
        return []
    try:
        encoded = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)
    except TypeError as error:  # what fast tokenizers say of half a character
        raise UserError("the tokenizer cannot read a text: does it have half a character (a lone surrogate)?") from error
    return [list(ids) for ids in encoded["input_ids"]]
