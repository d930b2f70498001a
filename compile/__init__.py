"""Compiled and native backends of the model, which does not depend on them."""
