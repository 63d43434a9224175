"""``python -m concord``."""

from concord.cli import main

if __name__ == "__main__":
    main()
