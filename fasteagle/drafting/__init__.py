"""Drafters propose the tokens that the target verifies; the controller chooses their trees."""
