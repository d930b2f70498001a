"""Weight formats and what they cost in bytes."""
