"""The page of an X-ray: one file, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from rlhf_host.sampling import plain
from rlhf_xray.measures import XRay
from rlhf_xray.table import by_reason, heading

SHOWN = 4
"""Number of algorithms that the answers begin with."""


def page(found: XRay, rows: int) -> str:
    """Returns the page, with so many answers: those with the strongest push."""
    parts = {name: files(__name__).joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    data = json.dumps(plain(contents(found, rows)), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(parts['page.js'])}",
            f"style-src {_hash(parts['page.css'])}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    values = {
        "policy": html.escape(policy),
        "title": html.escape(f"X-ray of {found.about['from']}"),
        "css": parts["page.css"],
        "js": parts["page.js"],
        "data": data,
    }
    text = parts["page.html"]
    return "".join(values.get(part, part) if odd % 2 else part for odd, part in enumerate(text.split("@@")))


def contents(found: XRay, rows: int) -> dict[str, Any]:
    """Returns what the page shows. A push is in thousandths of the algorithm's largest one."""
    strongest = [
        sum(sum(map(abs, each.push[row])) / each.largest for each in found.algorithms if each.largest)
        for row in range(len(found.answers))
    ]
    chosen = sorted(range(len(found.answers)), key=lambda row: -strongest[row])[:rows]
    facts = ("name", "length", "rows", "tokens", "half", "largest")
    return {
        "about": [*heading(found)],
        "alike": found.alike(),
        "left_out": [[", ".join(names), why] for why, names in by_reason(found.left_out.items())],
        "algorithms": [{name: getattr(each, name) for name in facts} for each in found.algorithms],
        "shown": sorted(found.spread(SHOWN)),
        "cosines": [[None if value != value else round(value, 4) for value in row] for row in found.cosines],
        "answers": [
            {
                "prompt": found.answers[row].prompt_text,
                "label": found.answers[row].task.ground_truth,
                "reward": found.answers[row].reward,
                "group": found.answers[row].group_id,
                "pieces": found.pieces[row],
                "logprobs": [round(value, 3) for value in found.logprobs[row]],
                "push": [
                    [round(1000 * value / each.largest) if each.largest else 0 for value in each.push[row]]
                    for each in found.algorithms
                ],
            }
            for row in sorted(chosen, key=lambda row: (found.answers[row].group_id, row))
        ],
        "left": len(found.answers) - len(chosen),
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
