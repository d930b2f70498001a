"""Measuring speed and quality, and predicting speed from bytes and FLOPs."""
