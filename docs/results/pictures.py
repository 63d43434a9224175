"""Takes pictures of the pages: ``python docs/results/pictures.py``."""

import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent

# Width and height in CSS pixels of a picture's two forms: for a page, and for a telephone.
FORMS = {"": (760, 860), "-narrow": (400, 800)}
PAGES = {
    "check": HERE / "check.html",
    "attention": HERE / "attention.html",
    "speed": HERE / "speed.html",
    "certificate": HERE.parent / "certificates/minilm-flax.html",
}


def main() -> None:
    """Write both pictures of each page in 64 colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--force-device-scale-factor=2", "--virtual-time-budget=3000"]
    with tempfile.TemporaryDirectory() as folder:
        for (name, page), (form, (width, height)) in itertools.product(PAGES.items(), FORMS.items()):
            # A window has a least width of 500 pixels, so the page stands in a frame.
            frame, shot = Path(folder) / "frame.html", Path(folder) / "shot.png"
            frame.write_text(
                f'<body style="margin:0"><iframe src="{page.as_uri()}" '
                f'style="border:0;width:{width}px;height:{height}px"></iframe>'
            )
            subprocess.run(
                [
                    browser,
                    *options,
                    f"--screenshot={shot}",
                    f"--window-size={width},{height}",
                    frame.as_uri(),
                ],
                check=True,
                capture_output=True,
            )
            picture = Image.open(shot).crop((0, 0, 2 * width, 2 * height))
            picture.convert("RGB").quantize(64).save(HERE / f"{name}{form}.png", optimize=True)


if __name__ == "__main__":
    main()
