"""Tasks: where they come from, how prompts are rendered, in which order they are drawn."""
