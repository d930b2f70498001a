"""Drafters that only the benchmark has; the core knows none of them."""
