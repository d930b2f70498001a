"""From a conversation to text: requests, grammars, the cache of prefixes, tokens as text."""
