"""The masked reductions: sums and counts, moments, extremes, norms, logarithms of sums."""
