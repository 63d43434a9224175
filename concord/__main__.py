"""``python -m concord``, and what ``concord`` starts."""

from typing import NoReturn

from concord.exit_codes import end


def main() -> NoReturn:
    """Run the command line. From its first moment on, signals end it in an orderly way."""
    end(_command, last=True)


def _command() -> object:
    from concord.cli import run  # which takes a while

    return run()


if __name__ == "__main__":
    main()
