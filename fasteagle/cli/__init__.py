"""The `fasteagle` command."""
