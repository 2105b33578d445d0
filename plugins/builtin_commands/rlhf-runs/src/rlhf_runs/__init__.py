"""Commands for runs that are over or go on: list, show and compare them, a page for the browser, models for other programs."""
