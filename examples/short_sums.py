"""Write short sums as chat questions, with separate training and held-out rows. A 135M model can solve some of them.

python examples/short_sums.py DIRECTORY
"""

import json
import random
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
pairs = [(a, b) for a in range(2, 30) for b in range(2, 30)]
random.Random(5).shuffle(pairs)
for name, part in (("eval", pairs[:200]), ("train", pairs[200:])):
    rows = [{"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in part]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
