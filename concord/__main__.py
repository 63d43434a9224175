"""``python -m concord``, and the entry point of ``concord``."""

from typing import NoReturn

from concord.exit_codes import end


def main() -> NoReturn:
    """Run the command line, handling signals from the start."""
    end(_command, last=True)


def _command() -> object:
    from concord.cli import run  # slow, and a signal may arrive meanwhile

    return run()


if __name__ == "__main__":
    main()
