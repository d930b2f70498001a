"""`python -m fasteagle`."""

from fasteagle.cli import main

main(prog_name="fasteagle")
