"""Decode cycle, its runner and backend, prefill, and statistics, from which `generate` is built."""
