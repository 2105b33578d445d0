"""Variables that Slurm sets from the ``#SBATCH`` lines of a script about machines."""

from __future__ import annotations

import re

DIRECTIVE = re.compile(r"#SBATCH\s+(.+?)(?:\s+#.*)?$")

_VARIABLES = {
    ("--nodes", "-N"): ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    ("--gpus-per-node",): ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    ("--gres",): ("SLURM_GPUS_ON_NODE",),
    ("--ntasks", "-n"): ("SLURM_NTASKS", "SLURM_NPROCS"),
    ("--ntasks-per-node",): ("SLURM_NTASKS_PER_NODE",),
    ("--cpus-per-task", "-c"): ("SLURM_CPUS_PER_TASK",),
    ("--job-name", "-J"): ("SLURM_JOB_NAME",),
}


def variables_of(directive: str) -> dict[str, str]:
    """Returns the variables that are certain: a range of nodes, or only a type of device, gives no number."""
    name, value = (*re.split(r"[=\s]+", directive, maxsplit=1), "")[:2]
    for names, variables in _VARIABLES.items():
        if name in names:
            number = re.fullmatch(r"(?:gpu(?::[^:,]+)?:|[A-Za-z]\w*:)?(\d+)", value)
            text = value if name in ("--job-name", "-J") else number[1] if number else ""
            return dict.fromkeys(variables, text) if text else {}
    return {}
