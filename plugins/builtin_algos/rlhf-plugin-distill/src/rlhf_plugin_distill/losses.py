"""Losses of one or several teachers over a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_host import LOSS, Batch, Distribution, Extra, LossTerm, Metric, Outputs
from rlhf_plugin_distill.divergence import token_divergence
from rlhf_plugin_distill.options import OnPolicyDistillOptions, Options
from rlhf_plugin_distill.other_vocabulary import Spans, likeliest_loss, measures, one_of_both, whole_loss

TAUGHT = "taught"
"""Name of the mask of the tokens, or first tokens of pieces of text, that some teacher teaches, where rows have one each."""


def distillation(
    outputs: Outputs, batch: Batch, options: Options | OnPolicyDistillOptions, weight: float = 1.0, temperature: float = 1.0
) -> Iterator[LossTerm | Metric]:
    """Yields the loss of every teacher, and its metrics.

    The loss is a mean over what the teacher teaches: tokens, or pieces of text that both tokenizers have. Where a column names a
    row's teacher, it is a mean over the rows of all teachers.
    """
    for name, own in options.teachers.items():
        prefix, mask = f"{name}/" if options.several else "", Extra(f"{name}/{TAUGHT}") if options.several else LOSS
        places = batch.own[mask.name] if isinstance(mask, Extra) else batch.loss_mask
        if options.own_tokens:
            values, parts = text_divergence(name, outputs, batch, options, temperature)
        else:
            values, parts = token_divergence(outputs.others[name], places, options, temperature), {}
        whole = Extra(TAUGHT) if options.teacher_key is not None else mask
        yield LossTerm(f"{prefix}divergence", values, mask=whole, coefficient=weight * own)
        yield Metric(f"{prefix}divergence", values.detach(), places)
        for part, measured in parts.items():
            yield Metric(f"{prefix}{part}", measured.detach(), places)
        if options.own_tokens:
            spans = batch.own[f"{name}/spans"]
            counts = torch.where(places, spans[..., 0], 0).double()
            yield Metric(f"{prefix}aligned", counts, batch.own[f"{name}/read"])
            yield Metric(f"{prefix}same_tokens", one_of_both(spans).double(), places)


def text_divergence(
    name: str, outputs: Outputs, batch: Batch, options: Options | OnPolicyDistillOptions, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns ``[B, T]``: the loss of each piece of text at the student's first token of it, 0 elsewhere, and its parts
    ``shared`` and ``others`` likewise.
    """
    seen, spans = batch.rows[name], Spans.of(batch.own[f"{name}/spans"])
    shared = batch.own[f"{name}/shared"].amax((0, 1))  # in a batch of one row it is sliced with it; rows beside have zeros
    both = outputs.others[name] if not options.top_k else _likeliest(outputs, batch)
    student = both.own if temperature == 1 else (both.own / temperature).log_softmax(-1)
    sizes = student.shape[-1], batch.own[f"{name}/vocabulary"]
    mine = measures(student, _of_tokens(student, batch), (spans.rows, spans.begin, spans.count), options.merge)
    theirs = spans.rows, spans.other_begin, spans.other_count
    if options.top_k:
        likeliest = seen.distributions[name]
        logs, others = measures(likeliest.logprobs, seen.logprobs[name], theirs, options.merge)
        at = spans.other_begin + (spans.other_count - 1 if options.merge == "last" else 0)
        ids = likeliest.ids[spans.rows, at]
        shared = shared[shared[:, 1] < sizes[0]]
        weights = _weights(options, len(shared), sizes[1])
        all_tokens = max(int(sizes[1]), ids.shape[-1])  # a model may have more than its tokenizer
        loss, *parts = likeliest_loss((logs, ids, others), mine, shared, all_tokens, options.beta, weights)
    else:
        teacher = both.logprobs if temperature == 1 else (both.logprobs / temperature).log_softmax(-1)
        logs, _ = measures(teacher, _of_tokens(teacher, seen), theirs, options.merge)
        shared = shared[(shared[:, 0] < teacher.shape[-1]) & (shared[:, 1] < sizes[0])]
        loss, *parts = whole_loss(logs, mine[0], shared, options.beta, _weights(options, len(shared), sizes[1]))

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(batch.completion_mask.shape).index_put((spans.rows, spans.begin), values)

    return placed(loss), dict(zip(("shared", "others"), map(placed, parts), strict=True))


def _weights(options: Options | OnPolicyDistillOptions, shared: int, vocabulary: float) -> tuple[float, float]:
    """Returns the weights of the shared tokens and of the others: by default shares of the teacher's vocabulary."""
    if options.across == "uld":
        return 0.0, 1.0
    if options.shared_weight is not None and options.others_weight is not None:
        return options.shared_weight, options.others_weight
    share = shared / vocabulary
    return share, 1.0 - share


def _likeliest(outputs: Outputs, batch: Batch) -> Distribution:
    """Returns the student's whole distribution; the teacher's is not here."""
    assert outputs.logits is not None
    own = (outputs.logits / batch.temperature).log_softmax(-1)
    return Distribution(own, torch.where(batch.completion_mask.unsqueeze(-1), own, 0.0))


def _of_tokens(logs: Tensor, rows: Batch) -> Tensor:
    """Returns ``[B, T]``: the log-probabilities of the rows' own tokens, 0 at padding."""
    own = logs.gather(-1, rows.completion_ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(rows.completion_mask, own, 0.0)
