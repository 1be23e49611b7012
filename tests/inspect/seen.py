"""What is in an HTML page or a PNG."""

import io
from html.parser import HTMLParser

import numpy as np
from matplotlib.image import imread

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


class Elements(HTMLParser):
    """All elements with their attributes, the data of the viewer, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(html)
        self.tags = [tag for tag, _ in self.elements]
        self.text = "".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = "data" if dict(attrs).get("id") == "v-data" else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.words.append(data)

    def every(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.elements if attrs.get(name)]


def pixels(png: bytes) -> np.ndarray:
    """[height, width, 3], 0 .. 255."""
    return np.rint(255 * imread(io.BytesIO(png), format="png")[..., :3]).astype(int)


def count(image: np.ndarray, colour: str) -> int:
    """The number of pixels of a colour "#rrggbb", to two steps."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(image - wanted).max(-1) <= 2).sum())
