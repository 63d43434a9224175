"""``python -m concord``, and the entry point of ``concord``."""

from typing import NoReturn

from concord.exit_codes import end


def main() -> NoReturn:
    """Run the command line; signals end it in an orderly way from the first moment."""
    end(_command, last=True)


def _command() -> object:
    from concord.cli import run  # takes a while, in which a signal may come

    return run()


if __name__ == "__main__":
    main()
