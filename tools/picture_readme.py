"""Draws the first screen of README.md as a picture, much as a web page of the repository shows it.

Owns: fonts, colours and the breaking of lines. Must not know: what the README says. It knows headings, paragraphs, lists,
code and pictures; at the first thing that it does not know it stops, as at the bottom of the screen.

    python tools/picture_readme.py [--output docs/pictures/readme.png]      # needs the extra bench (Pillow) and top (markdown-it)
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from markdown_it import MarkdownIt
from markdown_it.token import Token
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, MARGIN = 1012, 1180, 32
TEXT, LINK, GREY, LINE, SHADE = "#1f2328", "#0969da", "#59636e", "#d1d9e0", "#f6f8fa"
FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"
FACES = {"": "DejaVuSans", "strong": "DejaVuSans-Bold", "em": "DejaVuSans-Oblique", "code": "DejaVuSansMono"}
SIZES = {"h1": 30, "h2": 23, "h3": 19}


class Page:
    """The picture so far: ``y`` is where the next block begins."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        self._draw = ImageDraw.Draw(self.image)
        self.y = MARGIN

    def text(self, pieces: Sequence[tuple[str, str, str]], *, size: int = 15, left: int = MARGIN) -> None:
        """Write words (each with face and colour), broken at the right margin."""
        x, height = left, round(size * 1.6)
        for words, face, colour in pieces:
            font = ImageFont.truetype(FONTS / f"{FACES[face]}.ttf", size if face != "code" else round(size * 0.87))
            for word in re.findall(r"\S+|\s+", words):
                width = font.getlength(word)
                if x + width > WIDTH - MARGIN and not word.isspace():
                    x, self.y = left, self.y + height
                if word.isspace() and x == left:
                    continue
                if face == "code":
                    self._draw.rectangle((x - 1, self.y + 1, x + width + 1, self.y + height - 4), fill="#eff1f3")
                self._draw.text((x, self.y + height * 0.78), word, font=font, fill=colour, anchor="ls")
                x += width
        self.y += height

    def heading(self, text: str, tag: str) -> None:
        """Write a heading, with a line below the large ones."""
        self.text([(text, "strong", TEXT)], size=SIZES[tag])
        if tag != "h3":
            self._draw.line((MARGIN, self.y + 4, WIDTH - MARGIN, self.y + 4), fill=LINE)
        self.y += 18

    def code(self, text: str) -> None:
        """Write lines of code on a shaded ground."""
        lines, font = text.rstrip("\n").split("\n"), ImageFont.truetype(FONTS / "DejaVuSansMono.ttf", 13)
        bottom = self.y + 20 * len(lines) + 22
        self._draw.rounded_rectangle((MARGIN, self.y, WIDTH - MARGIN, bottom), 6, fill=SHADE)
        for number, line in enumerate(lines):
            self._draw.text((MARGIN + 14, self.y + 12 + 20 * number), line, font=font, fill=TEXT)
        self.y = bottom + 14

    def picture(self, path: Path) -> None:
        """Show a picture, as wide as it is or as the page allows."""
        picture = Image.open(path).convert("RGB")
        picture.thumbnail((WIDTH - 2 * MARGIN, HEIGHT))
        self.image.paste(picture, (MARGIN, self.y))
        self.y += picture.height + 10

    def bullet(self) -> None:
        """Begin an item of a list."""
        self._draw.ellipse((MARGIN + 10, self.y + 9, MARGIN + 15, self.y + 14), fill=TEXT)


def pieces_of(inline: Token) -> Iterator[tuple[str, str, str]]:
    """Yield the words of a paragraph with their face and colour."""
    face, colour = "", TEXT
    for token in inline.children or []:
        if token.type in {"strong_open", "em_open"}:
            face = token.tag
        elif token.type in {"strong_close", "em_close"}:
            face = ""
        elif token.type in {"link_open", "link_close"}:
            colour = LINK if token.nesting > 0 else TEXT
        elif token.type == "code_inline":
            yield token.content, "code", colour
        else:
            yield (" " if token.type == "softbreak" else token.content), face, colour


def draw(markdown: str, page: Page) -> None:
    """Draw blocks until the page is full or a block is of a kind that is not known."""
    depth, tag = 0, ""
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if page.y > HEIGHT or token.type == "table_open":
            return
        depth += token.nesting if token.type.startswith("bullet_list") else 0
        if token.type == "list_item_open":
            page.bullet()
        elif token.type == "heading_open":
            tag = token.tag
        elif token.type == "heading_close":
            tag = ""
        elif token.type == "fence":
            page.code(token.content)
        elif token.type == "inline" and tag:
            page.heading(token.content, tag)
        elif token.type == "inline" and token.children and token.children[0].type == "image":
            page.picture(ROOT / str(token.children[0].attrs["src"]))
        elif token.type == "inline":
            page.text(list(pieces_of(token)), left=MARGIN + 26 * depth)
            page.y += 4 if depth else 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw the first screen of README.md.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures" / "readme.png", metavar="FILE")
    page = Page()
    draw((ROOT / "README.md").read_text(encoding="utf-8"), page)
    page.image.quantize(128).save(parser.parse_args(arguments).output, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
