"""Write the standard cases' files, or check them for drift."""

import argparse
import sys

from concord.spec.cases import standard_cases
from concord.spec.cases.case_files import FOLDER, drift, write_case


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m concord.spec.cases", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a file differs from what would be written",
    )
    if parser.parse_args().check:
        problems = drift()
        print("\n".join(problems) or f"{len(standard_cases())} cases: no drift")
        return 1 if problems else 0
    for stale in [*FOLDER.glob("*.json"), *FOLDER.glob("*.safetensors")]:
        stale.unlink()
    for case in standard_cases():
        write_case(case)
    print(f"{len(standard_cases())} cases written to {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
