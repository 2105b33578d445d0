"""Draw ``docs/assets/learning-curve.svg``, the picture of the first pages, from a run of the quickstart.

    rlhf train --algo rloo --reward math_verifier --run-dir runs/curve
    python scripts/learning_curve.py runs/curve

Held-out pass@1 has its values written beside it; the reward of every step is the thin line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

CURVE = Path(__file__).resolve().parent.parent / "docs/assets/learning-curve.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 280, 44, 24, 44, 40
LEAST = 0.5
GREY, BLUE, ORANGE = "#7a828c", "#4f7fe0", "#d9730d"
"""Each can be read on white and on black: a code host shows the picture on both."""


def curve(rows: list[dict[str, float]]) -> str:
    """Returns held-out pass@1, with its values, over the reward of every step."""
    last = max(row["step"] for row in rows)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - RIGHT)
        y = TOP + (1 - value) / (1 - LEAST) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    def text(x: float, y: float, words: object, anchor: str = "middle", fill: str = GREY, more: str = "") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}"{more}>{words}</text>'

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">']
    tested = [(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    parts.append(text(LEFT, 18, "Held-out pass@1", "start", ORANGE, ' font-weight="bold"'))
    parts.append(text(WIDTH - RIGHT, 18, "reward of each step", "end", BLUE))
    for value in (0.5, 0.75, 1.0):
        x, y = place(0, value)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GREY}" stroke-opacity=".35"/>')
        parts.append(text(x - 8, y + 5, f"{value:g}", "end"))
    parts += [text(place(step, LEAST)[0], HEIGHT - BOTTOM + 20, step) for step in range(0, int(last) + 1, 50)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "steps of RLOO"))
    rewards = [place(row["step"], max(row["reward/mean"], LEAST)) for row in rows if "reward/mean" in row]
    for points, colour, width in ((rewards, BLUE, 1.2), ([place(*point) for point in tested], ORANGE, 3)):
        joined = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for index, (step, value) in enumerate(tested):
        x, y = place(step, value)
        anchor = "start" if not index else "end" if index == len(tested) - 1 else "middle"
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{ORANGE}"/>')
        parts.append(text(x, y + 26, f"{value:.3f}".lstrip("0"), anchor, ORANGE, ' font-size="18" font-weight="bold"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    lines = (parser.parse_args().run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    CURVE.write_text(curve([json.loads(line) for line in lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
