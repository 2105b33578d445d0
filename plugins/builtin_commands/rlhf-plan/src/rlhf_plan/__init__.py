"""The plan of a run's memory: ``rlhf plan``, and what ``rlhf train --dry-run`` says of it."""
