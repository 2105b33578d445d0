"""Tasks: their sources, the rendering of prompts, and the order in which they are drawn."""
