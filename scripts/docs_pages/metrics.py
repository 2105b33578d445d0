"""The page of metrics, from the table of the package that shows runs."""

from __future__ import annotations

from itertools import groupby

from rlhf_runs.metrics import table as metrics

from docs_pages.markdown import code, table

HEAD = """# Metrics

`metrics.jsonl` in the run directory contains one JSON object per step. Trackers get the same numbers. Step 0 is the
evaluation before training. Names change only with the major version. Non-finite numbers are written as `null`. A test
compares this page with a run. Which metrics a run has depends on its settings. Words in capitals stand for names that
the run chooses.

The page of a run ([Runs](../runs.md)) has the same questions, units and sentences. What one plugin writes is on
[its page](plugins/index.md).
"""

TAIL = """## Names

Plugins add their own metrics, such as `math_verifier/timeout`. A hook's metric with one of these names is an error.
What agents, rewards and programs measure of rows may be named by data: a name that the run uses becomes `plugin/NAME`,
and a run has the first 200 names, of at most 200 printable characters; that others are left out is said once. Training
metrics of other trainable roles begin with the role's name: `critic/grad_norm`. With several data sources in an
evaluation, `eval/SOURCE/…` has the same per source.

## Operations per second

`tflops` and `mfu` count what the model needs, as in [PaLM](https://arxiv.org/abs/2204.02311), appendix B: per token
`6·N + 12·L·H·Q·T`.

- `N` are the weights of matrices. Embeddings that are looked up do not count; an output head counts for predicted
  tokens only. Of experts, those count that a token goes through. Frozen weights take 4 instead of 6, because they need
  no gradient: under LoRA, `4·N` of the base and `6·N` of the adapter.
- `L`, `H`, `Q` and `T` are layers, heads, their width, and the length of the row. The other half of causal attention is
  counted, as is usual.
- Tokens are those of prompts and completions in the updates' passes, without padding. A prompt that is computed once
  for its group counts once.
- What is computed twice (`gradient_checkpointing`, the head in the backward pass) counts once. Value heads, passes
  without gradient (old log-probabilities, references) and the optimizer do not count, but what happens during the
  updates is in their time.

With several trained roles it is the sum of all. Peaks of GPUs are those of NVIDIA's data sheets, without sparsity
(`rlhf_host/models/flops.py`). Other devices, and parts of a GPU, have no `mfu`. Where it is unknown how many experts a
token goes through, there is neither.
"""


def page() -> str:
    parts = [HEAD]
    for question, rows in groupby(metrics(), key=lambda row: row.question):
        cells = [(", ".join(map(code, row.names)), f"{row.help} {row.more}".strip(), row.unit) for row in rows]
        parts.append(f"## {question}\n\n{table(('name', 'meaning', 'unit'), cells)}\n")
    return "\n".join([*parts, TAIL])
