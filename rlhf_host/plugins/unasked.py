"""Outputs of a pass that a plugin reads and no plugin's needs ask for: they are ``None``, and what fails with that says little."""

from __future__ import annotations

from rlhf_host.records.tensors import Outputs

ASKED = ("entropy", "values", "scores", "token_scores", "logits")


def unasked(error: BaseException) -> str:
    """Returns how to ask for the outputs that the failed code reads and that are ``None``; empty for other errors."""
    names: dict[str, None] = {}
    trace = error.__traceback__ if "NoneType" in str(error) else None
    while trace is not None:
        read = trace.tb_frame.f_code.co_names
        outputs = [value for value in trace.tb_frame.f_locals.values() if isinstance(value, Outputs)]
        names |= dict.fromkeys(name for each in outputs for name in ASKED if name in read and getattr(each, name) is None)
        trace = trace.tb_next
    asked = " and ".join(f"Output({name!r})" for name in names)
    return f"; no plugin asks for outputs.{', outputs.'.join(names)}: add {asked} to the outputs of its Needs" if names else ""
