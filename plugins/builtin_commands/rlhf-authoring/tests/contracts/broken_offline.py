"""Algorithms that train on a data set, with one rule broken each."""

from .breaking import breaks

PAIRS = "algorithm of pairs"
TERM = "values.repeat(2)[rows.argsort()]"
ROWS = "return [row for group in groups for row in group.trajectories]"

TABLE = [
    breaks(
        "items_of_units_are_well_formed",
        PAIRS,
        'Metric("gap", gap.detach())',
        'Metric("gap", gap.detach() + float("inf"))',
        "loss_of_one_unit_is_finite",
        "loss_of_units_is_finite_at_extreme_gaps",
        "loss_of_units_is_finite_when_masked_out",
    ),
    breaks("loss_of_units_is_pure", PAIRS, TERM, f"{TERM} * (1 + self.seen)"),
    breaks(
        "loss_of_units_is_the_same_however_split",
        PAIRS,
        TERM,
        f"{TERM} * len(batch)",
        "units_in_a_batch_twice_change_nothing",
    ),
    breaks(
        "loss_of_units_is_the_same_in_any_order",
        PAIRS,
        "chosen, rejected = places(1), places(0)",
        "chosen, rejected = torch.arange(len(batch)).view(-1, 2).T",
        "loss_has_the_sign_of_the_label",
    ),
    breaks("units_in_a_batch_twice_change_nothing", PAIRS, TERM, f'{TERM} / batch.own["rows"]'),
    breaks("loss_of_one_unit_is_finite", PAIRS, TERM, f'{TERM} / min(1, batch.own["rows"] - 2)'),
    breaks(
        "loss_of_units_ignores_masked_garbage",
        PAIRS,
        "torch.where(mask, outputs.logprobs - reference, 0.0)",
        "(outputs.logprobs - reference) * mask",
    ),
    breaks("loss_of_units_ignores_masked_garbage", PAIRS, '"reference", reference, mask', '"reference", reference'),
    breaks("loss_of_units_ignores_a_missing_margin", PAIRS, "columns else 0.0", "columns else 1.0"),
    breaks("loss_of_units_is_finite_at_extreme_gaps", PAIRS, TERM, TERM.replace("values", "(values + 0 * (-10 * gap).exp())")),
    breaks("loss_of_units_is_finite_when_masked_out", PAIRS, "ratios.sum(-1)", "ratios.sum(-1) / mask.sum(-1)"),
    breaks("loss_has_the_sign_of_the_label", PAIRS, "gap = 0.1 *", "gap = -0.1 *"),
    breaks("sigmoid_loss_moves_with_the_reference", PAIRS, "logprobs - reference", "logprobs - 0.5 * reference"),
    breaks(
        "made_rows_are_of_the_data",
        PAIRS,
        ROWS,
        "import dataclasses\n"
        "        return [dataclasses.replace(row, segments=row.segments[:2]) for group in groups for row in group.trajectories]",
    ),
]
