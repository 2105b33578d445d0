"""Keys, tokens and passwords in commands, which are not written into files."""

from __future__ import annotations

import re
from dataclasses import replace

from rlhf_translate.options import NONE, OFF, ON, Option

_SECRET = r"api_?key|access_?key|_key$|token$|secret|passw|passphrase|pass$|pwd$|credential|auth(?!or(?!iz))"
_KEY_OF_ROWS = (
    "answer|audio|best_metric|chosen|completion|context|data_source|enable_thinking|extra_info|group|ground_truth|image"
    "|images|index|input|label|mask|messages|metric|output|prompt|question|rejected|response|reward|reward_fn|reward_model"
    "|score|system|system_prompt|teacher|text|tools|turn|video|videos"
)
_HARMLESS = re.compile(
    rf"(?:{_KEY_OF_ROWS})_key|(?:\w+_)?(?:pad|eos|bos|placeholder|unk|sep|cls|mask|image|video|stop|end|per|special|dp|valid)_token"
)
_INSIDE = re.compile(r"""(?<![\w.-])([\w.-]++)[\\"']*+\s*+[:=]\s*+(?:(?:bearer|basic|token)\s+)?""", re.I)
"""Pattern of a name before its value, in JSON, a header or an address."""
_VALUE = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|[\[{\\"'].*|[^\s,;&}\])]*""", re.S)
_USER = re.compile(r"(?<=://)[^/\s\"'?#]*@")


def _is_secret(name: str) -> bool:
    name = name.strip("-").replace("-", "_").lower()
    last = name.rpartition(".")[2]
    return not _HARMLESS.fullmatch(last) and bool(re.search(_SECRET, last) or name.endswith("wandb.key"))


def without_secrets(text: str) -> str:
    """Returns a text without the keys, tokens and passwords in it."""
    text, at = _USER.sub("", text), 0
    while match := _INSIDE.search(text, at):
        at = match.end()
        if _is_secret(match[1]) and (value := _VALUE.match(text, at)) and value[0]:
            hidden = '"..."' if value[0].startswith('"') else "..."
            text, at = text[:at] + hidden + text[value.end() :], at + len(hidden)
    return text


def without_secret(option: Option) -> Option:
    """Removes keys, tokens and passwords, which are not written into files."""
    if re.match(r"[A-Za-z_]\w*=", option.name):  # a variable of the environment
        name, _, value = option.name.partition("=")
        return replace(option, name=f"{name}={'...' if _is_secret(name) else without_secrets(value)}")
    named = _is_secret(option.name) or option.name.lstrip("-") == "use_wandb"
    written = " ".join(option.values)
    if named and written.lower() not in (*ON, *OFF, *NONE):
        return replace(option, values=("...",), missing=())
    values, whole = tuple(map(without_secrets, option.values)), without_secrets(written)
    values = values if " ".join(values) == whole else (whole,)
    missing = tuple(map(without_secrets, option.missing))
    gone = values != option.values
    return replace(option, name=without_secrets(option.name), values=values, missing=missing, without_credentials=gone)
