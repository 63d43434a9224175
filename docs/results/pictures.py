"""Takes pictures of the pages in this folder for the README: ``python docs/results/pictures.py``."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
SIZE = (1280, 880)
PAGES = {
    "check": HERE / "check.html",
    "attention": HERE / "attention.html",
    "speed": HERE / "speed.html",
    "certificate": HERE.parent / "certificates/minilm-flax.html",
}


def main() -> None:
    """Write a picture of each page in 64 colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with tempfile.TemporaryDirectory() as folder:
        for name, page in PAGES.items():
            shot = Path(folder) / "shot.png"
            size = f"--window-size={SIZE[0]},{SIZE[1]}"
            subprocess.run(
                [browser, *options, f"--screenshot={shot}", size, page.as_uri()],
                check=True,
                capture_output=True,
            )
            Image.open(shot).convert("RGB").quantize(64).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
