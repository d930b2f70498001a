"""Answers to conversations: requests, grammars, the prefix cache, and tokens as text."""
