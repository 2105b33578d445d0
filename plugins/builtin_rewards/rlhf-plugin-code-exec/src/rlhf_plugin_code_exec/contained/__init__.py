"""What runs inside of cells, beside a solution or its tests: with the standard library alone, as light as it can be."""
