"""Command line of `fasteagle`."""
