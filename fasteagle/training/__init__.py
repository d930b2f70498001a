"""Training and calibrating draft heads."""
