"""The picture of README.md's first screen: the tool draws it, and the one in the repository is of its size."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[3]


def test_the_first_screen_of_the_readme_is_drawn_and_begins_with_a_picture(tmp_path: Path) -> None:
    drawn = tmp_path / "readme.png"
    subprocess.run([sys.executable, ROOT / "tools" / "picture_readme.py", "--output", drawn], check=True)
    with Image.open(drawn) as picture, Image.open(ROOT / "docs" / "pictures" / "readme.png") as kept:
        assert picture.size == kept.size
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:15]
    assert any(line.startswith("![") for line in first_screen)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_picture_of_the_commands_shows_those_that_there_are(tmp_path: Path) -> None:
    drawn = tmp_path / "help.svg"
    subprocess.run([sys.executable, ROOT / "tools" / "picture_help.py", "--output", drawn], check=True)
    assert drawn.read_text(encoding="utf-8") == (ROOT / "docs" / "pictures" / "help.svg").read_text(encoding="utf-8")
