"""Models whose weights, and lines of rows, that several processes split: ranks, reading, gathering, writing and parking."""
