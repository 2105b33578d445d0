"""Refuses names and texts that would make a broken project; ``rlhf plugins new`` checks the same before it comes here."""

import keyword
import re
import sys
import unicodedata

NAME, CLASS = {{ cookiecutter.name | tojson }}, {{ cookiecutter.__class | tojson }}
TEXTS = {{ {"description": cookiecutter.description, "author": cookiecutter.author} | tojson }}


def problem():
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", NAME) or len(NAME) > 50:
        return f"{NAME!r} cannot be a plugin's name: use lower-case letters and digits, words joined by '-'"
    if any(keyword.iskeyword(word) for word in (NAME.replace("-", "_"), CLASS)):
        return f"{NAME!r} is a word of Python itself"
    if NAME.replace("_", "-").startswith("rlhf-"):
        return f"the distribution's name begins with 'rlhf-plugin-' by itself: leave that out of {NAME!r}"
    for what, text in TEXTS.items():
        # A character beyond the basic plane arrives as a pair of surrogates, which belong together.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if any(unicodedata.category(char) == "Cc" and not char.isspace() for char in whole):
            return f"the {what} holds a control character"
    if not TEXTS["description"].strip():
        return "the description is empty: say in one line what the plugin is"
    return ""


if message := problem():
    sys.exit(f"Error: {message}")
