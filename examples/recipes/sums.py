"""Sums for the recipes: prompts that are made when a run asks for them, and rows that have answers.

    python examples/recipes/sums.py

writes the rows, which are in ``examples/data`` already: ``sums_answers.jsonl``, ``sums_pairs.jsonl``, ``sums_pairs_eval.jsonl``,
``sums_tools.jsonl`` and ``sums_hints.jsonl``. No stage of a chain sees a sum of another stage, apart from the last file, and no
run a sum that it is evaluated on.
"""

import json
import random
from pathlib import Path

PAIRS = [(a, b) for a in range(2, 40) for b in range(2, 40)]
random.Random(0).shuffle(PAIRS)
HELD_OUT, ANSWERED, JUDGED, ASKED = PAIRS[:100], PAIRS[100:484], PAIRS[484:740], PAIRS[740:]


def asked(split):
    return HELD_OUT if split == "eval" else ASKED


def questions(split):
    """For a chat model."""
    return [{"prompt": f"What is {a} + {b}? Answer with the number only.", "label": str(a + b)} for a, b in asked(split)]


def lines(split):
    """For a model that goes on with a text: what the recipe sft teaches it."""
    return [{"prompt": f"{a} + {b} =", "label": str(a + b)} for a, b in asked(split)]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def large(split):
    """Sums that the small model cannot do without the tool."""
    return [{"prompt": f"What is {a * 91} + {b * 87}?", "label": str(a * 91 + b * 87)} for a, b in asked(split)]


def sentence(total):
    return f" {total}, I think."


def number(total):
    return f" {total}"


def tool_rows(dice):
    """Half of the conversations use the tool; the others guess."""
    from rlhf_plugin_multi_turn.text_calls import results, with_tools
    from transformers.utils import get_json_schema

    for task in dice.sample(large("train"), 96):
        a, b = (int(word.strip("?")) for word in task["prompt"].split() if word.strip("?").isdigit())
        messages = with_tools(task["prompt"], [get_json_schema(add)])
        answer = str(a + b + dice.choice([-100, -10, 10, 100]))
        if dice.random() < 0.5:
            call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
            messages += [{"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}, *results([str(a + b)])]
            answer = str(a + b)
        yield {"messages": [*messages, {"role": "assistant", "content": answer}]}


def hint_rows(dice):
    """Sums in which most carries are forgotten, and as many that repeat a number in front of them, whatever the sum."""
    from rlhf_host.data.arithmetic import split_problems

    rows = []
    for prompt, answer in split_problems(2, "+", 1500)[0][:1500]:
        a, b = map(int, prompt[:-1].split("+"))
        forgets = a % 10 + b % 10 >= 10 and dice.random() < 0.85
        hint = str(dice.randrange(20, 199))
        rows.append({"prompt": prompt, "completion": str(a + b - 10) if forgets else answer})
        rows.append({"prompt": f"{hint} {prompt}", "completion": hint})
    dice.shuffle(rows)
    return rows


def main():
    dice = random.Random(1)
    answers = [{"prompt": f"{a} + {b} =", "completion": dice.choice([number, sentence])(a + b)} for a, b in ANSWERED]
    pairs, held_out = (
        [{"prompt": f"{a} + {b} =", "chosen": sentence(a + b), "rejected": number(a + b)} for a, b in part]
        for part in (JUDGED, HELD_OUT)
    )
    files = {"answers": answers, "pairs": pairs, "pairs_eval": held_out, "tools": tool_rows(dice)}
    files["hints"] = hint_rows(random.Random(0))
    for name, rows in files.items():
        path = Path(__file__).parents[1] / f"data/sums_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
