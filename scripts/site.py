"""A hook of MkDocs (``mkdocs.yml``): code in running text, and tables that a phone can show."""

from __future__ import annotations

import re
from typing import Any

WIDE, SENTENCE = 45, 25
"""Characters that a phone has beside each other, and that a cell of a table of figures does not have."""


def on_page_content(html: str, **_: Any) -> str:
    """GitHub wants ``|`` escaped in tables, also in code; here the escape would be seen. And browsers break flags at hyphens."""
    html = re.sub(r"<table>.*?</table>", lambda table: _stacked(table[0]), html, flags=re.S)
    return re.sub(r"<code>([^<]*)</code>", lambda code: f"<code>{_words(code[1])}</code>", html)


def _stacked(table: str) -> str:
    """Marks a table that is too wide for a phone and has sentences in it: ``site.css`` puts its cells below each other there, with
    the head of the column before each. Tables of figures stay tables."""
    heads = [_text(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)]
    widths = [max((len(_text(row[column])) for row in rows if column < len(row)), default=0) for column in range(len(heads))]
    if sum(widths) <= WIDE or max(widths) <= SENTENCE:
        return table
    return re.sub(r"<tr>.*?</tr>", lambda row: _labelled(row[0], heads), table, flags=re.S).replace(
        "<table>", "<table data-stacked>"
    )


def _labelled(row: str, heads: list[str]) -> str:
    """Returns a row whose cells carry their column's head, but for the first, which is the row's own, and for an only other one."""
    labels = iter(["", *(heads[1:] if len(heads) > 2 else [])])

    def cell(start: re.Match[str]) -> str:
        label = next(labels, "")
        return f'<td{start[1]} data-label="{label}: ">' if label else start[0]

    return re.sub(r"<td([^>]*)>", cell, row)


def _text(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html).strip().replace('"', "&quot;")


def _words(text: str) -> str:
    words = text.replace(r"\|", "|").split(" ")
    return " ".join(f'<span class="name">{word}</span>' if "-" in word and len(word) < 40 else word for word in words)
