"""Entry point of `fasteagle` and of `python -m fasteagle`."""

import sys


def run() -> None:
    """Run the command; Ctrl-C while it is imported ends it in one line, as click ends it later."""
    try:
        from fasteagle.cli.main import main  # here, where Ctrl-C is expected
    except KeyboardInterrupt:
        sys.exit("\nAborted!")
    main(prog_name="fasteagle")


if __name__ == "__main__":
    run()
