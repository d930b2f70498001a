"""From a name, folder or file to a model that is ready to run."""
