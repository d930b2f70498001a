"""Drafters propose the tokens that the target verifies; the policy chooses their trees."""
