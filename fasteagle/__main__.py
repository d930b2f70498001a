"""Entry point of `python -m fasteagle`."""

from fasteagle.cli.main import main

main(prog_name="fasteagle")
