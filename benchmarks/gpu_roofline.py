"""Launches, bytes, reads of the device, milliseconds and MFU of training and decoding on GPUs, computed without one.

    python benchmarks/gpu_roofline.py                    # tables, some minutes; then the same as JSON
    python benchmarks/gpu_roofline.py --only 3b          # rows with this in their name, and the operations that take longest
    python benchmarks/gpu_roofline.py --write            # also benchmarks/gpu_roofline.json, and the tables of docs/performance.md

The host's own code runs at full size on a device that only counts (``counting_gpu.py``, ``counted_runs.py``): one micro-batch of
8 × 2048 tokens of Qwen2.5's shapes, an optimizer's step, and a step of decoding with 128 rows. Every launch takes the longest of
its FLOPs over the rate, its bytes over the bandwidth, and 4 µs. Models of one layer and of two are counted, and a whole one follows
from what the second layer adds.

Variants are settings. One whose settings or package are not here has a row that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from counted_runs import COMPLETION, DECODED, PROMPT, ROWS, SHAPES, STEPS, Shape, Work, count_decoding, count_update
from counting_gpu import Launch

from rlhf_host.errors import UserError, first_line

FIGURES = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[1] / "docs/performance.md"


@dataclass(frozen=True)
class Gpu:
    """Rates that a GPU reaches, which are below its datasheet's."""

    tbs: float
    """TB/s of memory."""
    tflops: float
    """TFLOP/s of products in 16 bits."""
    float32: float = 60.0
    """TFLOP/s of products in 32 bits, without TF32; the datasheet has 67."""
    attention: float = 400.0
    """TFLOP/s of fused attention; FlashAttention 2's paper and FlashAttention 3's have 350 to 550 for causal rows of 2k to 4k."""
    backward: float = 0.8
    """Its backward pass, over that."""
    launch_s: float = 4e-6
    """Shortest time from one kernel to the next in a full queue."""
    peak_tflops: float = 989.0
    """TFLOP/s of dense products in bfloat16 by the datasheet, which MFU is measured by."""

    def seconds(self, launch: Launch) -> float:
        rates = {
            "": 1.0,
            "float32": self.float32,
            "attention": self.attention,
            "attention backward": self.attention * self.backward,
        }
        compute = launch.flops / rates.get(launch.kind, self.tflops) / 1e12
        return max(compute, launch.bytes / self.tbs / 1e12, self.launch_s)


GPUS = {
    # Datasheet: 3.35 TB/s. 650 TFLOP/s and 2.9 TB/s were set before anything was measured; `mfu-3b` of docs/results.md, 27.6 %, is
    # the one measurement to compare with: for the code of then, without masters in 32 bits, these rates gave 28.9 %.
    "H100": Gpu(tbs=2.9, tflops=650.0),
    # Datasheet: 4.8 TB/s, of which the same share; a copy on the device reached 4.3, the head's products 694 TFLOP/s (`logits` of
    # docs/results.md).
    "H200": Gpu(tbs=4.15, tflops=650.0),
}
PER_STEP = 4
"""Micro-batches of an optimizer's step, as in ``mfu-3b``."""
PLAIN = ("--kernels", "none")


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    shape: str
    name: str
    flags: tuple[str, ...] = PLAIN
    depths: tuple[tuple[int, tuple[str, ...]], ...] = ((1, ()), (2, ()))
    """Layers of the two models that are counted, and more flags of each."""

    @property
    def key(self) -> str:
        return f"{self.shape}, {self.name}"


CHECKPOINTED = "--actor.gradient-checkpointing"
TRITON = ("--kernels", "triton")
NONE = (CHECKPOINTED, "false")
HALF = ((2, (CHECKPOINTED, "1")), (4, (CHECKPOINTED, "2")))
KEPT = ("--train.keep-logits", "on")
TRAINING = [
    Row("3b", "no kernels"),
    Row("3b", "no kernels, no layer checkpointed", (*PLAIN, *NONE)),
    Row("3b", "kernels triton", TRITON),
    Row("3b", "kernels triton, logits kept", (*TRITON, *KEPT)),
    Row("3b", "kernels triton, logits kept, half of the layers checkpointed", (*TRITON, *KEPT), HALF),
    Row("3b", "kernels triton, logits kept, no layer checkpointed", (*TRITON, *KEPT, *NONE)),
    Row("7b", "no kernels"),
    Row("7b", "kernels triton", TRITON),
    Row("32b", "no kernels"),
    Row("32b", "kernels triton", TRITON),
]
DECODING = [Row("1.5b", "no kernels"), Row("1.5b", "kernels graphs", ("--kernels", "graphs"))]


@dataclass(frozen=True)
class Amount:
    """Sums over launches, or over a share of them."""

    launches: float
    gb: float
    tflop: float
    ms: dict[str, float]

    @classmethod
    def of(cls, launches: Counter[Launch], share: float = 1.0) -> Amount:
        def total(of: Any) -> float:
            return share * sum(of(launch) * count for launch, count in launches.items())

        ms = {name: total(gpu.seconds) * 1e3 for name, gpu in GPUS.items()}
        return cls(total(lambda _: 1), total(lambda launch: launch.bytes) / 1e9, total(lambda launch: launch.flops) / 1e12, ms)

    def times(self, factor: float) -> Amount:
        ms = {name: factor * own for name, own in self.ms.items()}
        return Amount(factor * self.launches, factor * self.gb, factor * self.tflop, ms)

    def plus(self, other: Amount, times: float) -> Amount:
        other = other.times(times)
        ms = {name: own + other.ms[name] for name, own in self.ms.items()}
        return Amount(self.launches + other.launches, self.gb + other.gb, self.tflop + other.tflop, ms)


@dataclass(frozen=True)
class Figures:
    """Counts of a training pass, or of one step of decoding."""

    beside: Amount
    """Everything but the layers."""
    layer: Amount
    reads: float
    writes: float
    step: Amount | None = None
    """The optimizer's step of the whole model."""

    @classmethod
    def of(cls, depths: Sequence[int], works: Sequence[Work], share: float = 1.0) -> Figures:
        """Returns the figures of two models that have these numbers of layers."""
        few, many = (Amount.of(work.launches, share) for work in works)
        layer = many.plus(few, -1).times(1 / (depths[1] - depths[0]))
        reads, writes = (share * sum(waits.values()) for waits in works[1][1:])
        return cls(few.plus(layer, -depths[0]), layer, reads, writes)

    def whole(self, layers: int) -> Amount:
        return self.beside.plus(self.layer, layers)


def training(row: Row, *, updates: int = 1) -> Figures:
    """Counts a training pass; with ``updates`` of 2 also the optimizer's step. Raises ``UserError`` for what is not here."""
    shape, depths = SHAPES[row.shape], [layers for layers, _ in row.depths]
    counted = [count_update(shape, (*row.flags, *more), layers, updates=updates) for layers, more in row.depths]
    figures = Figures.of(depths, [update.training for update in counted])
    if updates == 1:
        return figures
    return replace(figures, step=Figures.of(depths, [update.after for update in counted]).whole(shape.layers))


def decoding(row: Row) -> Figures:
    """Counts a step of decoding."""
    counted = [count_decoding(SHAPES[row.shape], (*row.flags, *more), layers) for layers, more in row.depths]
    return Figures.of([layers for layers, _ in row.depths], counted, 1 / STEPS)


def model_tflop(shape: Shape) -> float:
    """Returns the TFLOP that the model needs for a micro-batch, recomputed ones aside: 6 per weight and token in the layers, and in
    the head at the tokens that are predicted; causal attention with two products of half a square, forward once and backward
    twice.
    """
    length, grouped = PROMPT + COMPLETION, shape.hidden // shape.heads * shape.groups
    layer = shape.hidden * (2 * shape.hidden + 2 * grouped + 3 * shape.intermediate + 3) + 2 * grouped
    head = shape.vocabulary * shape.hidden
    attention = 6 * shape.layers * shape.hidden * length**2
    return ROWS * (6 * (shape.layers * layer * length + head * COMPLETION) + attention) / 1e12


def measured(rows: Sequence[Row], count: Any) -> dict[str, Figures | None]:
    """Returns the figures of each row; None: its settings or its package are not here."""
    found: dict[str, Figures | None] = {}
    for row in rows:
        try:
            found[row.key] = count(row)
        except UserError as error:
            print(f"{row.key}: not here: {first_line(error)}", file=sys.stderr)
            found[row.key] = None
    return found


def tables(figures: Mapping[str, Any]) -> str:
    """Returns the tables of figures as ``--write`` keeps them."""
    names = list(GPUS)
    lines = [
        "Training, one micro-batch of 8 × 2048 tokens:",
        "",
        f"| | launches | GB | {' | '.join(f'{name}, ms' for name in names)} | {' | '.join(f'{name}, MFU' for name in names)} |",
        "|---" * (3 + 2 * len(names)) + "|",
    ]
    for row in TRAINING:
        if (own := figures["training"].get(row.key)) is None:
            lines.append(f"| {row.key} | not here" + " |" * (2 + 2 * len(names)))
            continue
        whole, step = whole_of(row, own), _amount(own["step"]).times(1 / PER_STEP)
        ms = [f"{whole.ms[name]:,.0f} + {step.ms[name]:,.0f}" for name in names]
        shares = [f"{mfu(row, own, name):.1%}".replace("%", " %") for name in names]
        shown = [f"{whole.launches:,.0f}", f"{whole.gb:,.0f}", *ms, *shares]
        lines.append(f"| {row.key} | {' | '.join(shown)} |")
    lines += [
        "",
        f"Decoding, one step of {DECODED} rows:",
        "",
        f"| | launches | GB | reads of the device | {' | '.join(f'{name}, ms' for name in names)} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for row in DECODING:
        if (own := figures["decoding"].get(row.key)) is None:
            lines.append(f"| {row.key} | not here" + " |" * (3 + len(names)))
            continue
        whole = whole_of(row, own)
        shown = [f"{whole.launches:,.0f}", f"{whole.gb:.1f}", f"{own['reads']:g}", *(f"{whole.ms[name]:.1f}" for name in names)]
        lines.append(f"| {row.key} | {' | '.join(shown)} |")
    return "\n".join(lines)


def whole_of(row: Row, kept: Mapping[str, Any]) -> Amount:
    """Returns what the whole model of a row asks for, of the figures that are kept of it."""
    return _amount(kept["beside"]).plus(_amount(kept["layer"]), SHAPES[row.shape].layers)


def mfu(row: Row, kept: Mapping[str, Any], gpu: str) -> float:
    """Returns the part of the GPU's peak that a micro-batch reaches with its share of the optimizer's step."""
    ms = whole_of(row, kept).ms[gpu] + _amount(kept["step"]).ms[gpu] / PER_STEP
    return model_tflop(SHAPES[row.shape]) / ms * 1e3 / GPUS[gpu].peak_tflops


def _amount(kept: Mapping[str, Any]) -> Amount:
    return Amount(**kept)


BEGIN, END = "<!-- Computed: python benchmarks/gpu_roofline.py --write -->\n", "<!-- computed -->\n"


def with_tables(page: str, figures: Mapping[str, Any]) -> str:
    """Returns a page with its tables replaced."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(figures)}\n\n{END}{rest.partition(END)[2]}"


def show_longest(row: Row, top: int) -> None:
    """Prints the operations that take longest on the first GPU, of models with few layers scaled up."""
    one, two = (count_update(SHAPES[row.shape], (*row.flags, *more), layers) for layers, more in row.depths)
    (few, _), (many, _) = row.depths
    named: dict[str, list[Counter[Launch]]] = {}
    for place, update in enumerate((one, two)):
        for launch, count in update.training.launches.items():
            named.setdefault(launch.name, [Counter(), Counter()])[place][launch] += count
    amounts = {}
    for name, (first, second) in named.items():
        own = Amount.of(first)
        layer = Amount.of(second).plus(own, -1).times(1 / (many - few))
        amounts[name] = own.plus(layer, SHAPES[row.shape].layers - few)
    gpu = next(iter(GPUS))
    for name, amount in sorted(amounts.items(), key=lambda item: -item[1].ms[gpu])[:top]:
        print(f"  {name:40} {amount.launches:7,.0f} launches {amount.gb:8.1f} GB {amount.ms[gpu]:7.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the figures, and put the tables into docs/performance.md")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows of training with this in their name, by operation")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="operations that --only shows")
    asked = parser.parse_args()
    if asked.only:
        for row in (row for row in TRAINING if asked.only in row.key):
            print(row.key)
            show_longest(row, asked.top)
        return
    found = {
        "training": measured(TRAINING, lambda row: training(row, updates=2)),
        "decoding": measured(DECODING, decoding),
    }
    figures = {part: {key: own and asdict(own) for key, own in rows.items()} for part, rows in found.items()}
    print(tables(figures))
    if asked.write:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
