"""Drafters, which propose the tokens that the target verifies, and the policy of their trees."""
