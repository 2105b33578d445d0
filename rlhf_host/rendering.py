"""Conversations as text and tokens, for packages that read data: how chat templates write them, what they leave out, and how the
tokens of prompts are made. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.data.chat import Prompts as Prompts
    from rlhf_host.data.chat import conversation as conversation
    from rlhf_host.data.chat import encode as encode
    from rlhf_host.data.chat import trim as trim
    from rlhf_host.data.contents import has_pictures as has_pictures
    from rlhf_host.data.contents import text_of as text_of
    from rlhf_host.data.processor import Processor as Processor
    from rlhf_host.data.processor import refuse_unseen as refuse_unseen
    from rlhf_host.data.rendered import in_common as in_common
    from rlhf_host.data.rendered import is_transcript as is_transcript
    from rlhf_host.data.rendered import special_tokens as special_tokens
    from rlhf_host.data.template_writer import TemplateWriter as TemplateWriter
    from rlhf_host.data.template_writer import Tools as Tools
    from rlhf_host.data.template_writer import reasoning_of as reasoning_of
    from rlhf_host.data.template_writer import refuse_cuts as refuse_cuts
    from rlhf_host.data.templates import for_chat as for_chat
    from rlhf_host.data.templates import uses_chat_template as uses_chat_template

__getattr__, __dir__, __all__ = lazily(__name__)
