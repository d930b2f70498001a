"""The decode cycle, what runs it over a text, and what it counts; `generate` is built of these."""
