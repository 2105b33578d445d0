"""A hook of MkDocs (``mkdocs.yml``): code in running text and tables."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """GitHub wants ``|`` escaped in tables, also in code; here the escape would be seen. And browsers break flags at hyphens."""
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_words(code[1])}</code>", html)


def _words(text: str) -> str:
    words = text.replace(r"\|", "|").split(" ")
    return " ".join(f'<span class="name">{word}</span>' if "-" in word and len(word) < 40 else word for word in words)
