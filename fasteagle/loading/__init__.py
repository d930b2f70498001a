"""Load a model from a name, folder or file, ready to run."""
