"""Commands for finished and running runs: list, show and compare them, a page for the browser, models for other programs."""
