"""Parallelism of one row under accelerate: which processes compute parts of the same rows, and the batch that the others make."""

from __future__ import annotations

from rlhf_translate.options import PROCESSES, Convert, Given, Option, Outcome, Table, Unknown, count, lost, same, to
from rlhf_translate.shared import FSDP

_SIZES = ("sp_size", "cp_size", "tp_size")
"""Numbers of processes that share rows: sequence, context and tensor parallelism."""
_PLACES = ("parallelism_config_", "parallelism_config.parallelism_config_")
"""Beginnings of the names on the command line and in a file."""
_NOT_SAMPLED = "TRL refuses it with grpo and rloo"


def _size(given: Given, name: str) -> int:
    """Returns one of these numbers: the command line's, if ``accelerate launch`` reads it, else the file's."""
    on_line, in_file = (f"{place}{name}" for place in _PLACES)
    if _reads_line(given) and on_line in given:
        return count(given.many(on_line))
    return count(given.many(in_file))


def _reads_line(given: Given) -> bool:
    in_file = any(given.wrote(f"{_PLACES[1]}{name}") for name in (*_SIZES, "dp_shard_size", "dp_replicate_size"))
    return in_file or given.wrote("use_parallelism_config")


def of_one_row(given: Given) -> int:
    """Returns the number of processes that share each row (``Trainer.get_total_train_batch_size``)."""
    if given.method in ("grpo", "rloo"):
        return 1
    tensors = count(given.many("tensor_parallel.autotp_size"))
    return _size(given, "sp_size") * _size(given, "cp_size") * max(_size(given, "tp_size"), tensors)


def data_ranks(given: Given) -> int:
    """Returns the number of processes, or groups of them, that have rows of their own."""
    processes, each = count(given.many(PROCESSES)), of_one_row(given)
    if processes % each:
        names = [f"{place}{name}" for place in _PLACES for name in _SIZES]
        share = next((given[name] for name in names if name in given and given.number(name) > 1), given[PROCESSES])
        raise Unknown(share, f"{processes} processes cannot share rows by {each}")
    return processes // each


def _sequence(option: Option, given: Given) -> Outcome:
    if option.is_off or option.number == 1:
        return same("off, as it is here")
    if given.method in ("grpo", "rloo"):
        return lost(_NOT_SAMPLED)
    if not _reads_line(given):
        return same("accelerate launch ignores it without --use_parallelism_config")
    parts = _size(given, "sp_size") * _size(given, "cp_size")
    return to({"runtime.name": "ray", "actor.sequence_parallel": parts}, f"{parts} processes share each row: they are no batch")


def _tensors(option: Option, given: Given) -> Outcome:
    if option.is_off or option.number == 1:
        return same("off, as it is here")
    if option.name.endswith("autotp_size"):
        settings = {"runtime.name": "ray", "backend.name": "deepspeed", "backend.autotp_size": option.value}
        return to(settings, f"{option.value} processes share each row: they are no batch")
    return lost("the weights of a layer are whole in a pass here; --backend deepspeed --backend.autotp-size splits them")


def _replicas(option: Option, given: Given) -> Outcome:
    if option.is_off or option.number == 1:
        return same("off, as it is here")
    return to({"runtime.name": "ray", **FSDP, "backend.shard": _size(given, "dp_shard_size")}, "copies of the split weights")


def _only_with(names: tuple[str, ...], remark: str) -> Convert:
    def convert(option: Option, given: Given) -> Outcome:
        used = any(_size(given, name) > 1 for name in names)
        return same(remark if used else "no rows are shared")

    return convert


_OPTIONS: Table = {
    **{name: _sequence for name in ("sp_size", "cp_size")},
    "tp_size": _tensors,
    "dp_replicate_size": _replicas,
    "dp_shard_size": lambda option, given: same("all ranks split one copy, as they do here"),
    **{
        name: _only_with(("sp_size", "cp_size"), "heads are dealt to the processes of a row here: the same numbers")
        for name in ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_attn_implementation")
    },
    **{
        name: _only_with(("sp_size",), "rows are packed by tokens, of any length")
        for name in ("sp_seq_length", "sp_seq_length_is_variable")
    },
}

TABLE: Table = {
    "use_parallelism_config": lambda option, given: same("parallelism_config_... says what is on"),
    "tensor_parallel.autotp_size": _tensors,
    **{f"{place}{name}": convert for name, convert in _OPTIONS.items() for place in _PLACES},
}
