"""Pages that commands write: sound, and nothing is loaded or run."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "link", "img", "input"}
LOADS = {"src", "href", "xlink:href", "srcset", "action", "data"}
LOADING = {"script", "link", "img", "iframe", "object", "embed", "use", "image"}


class Page(HTMLParser):
    """Reads a page or a drawing. Raises AssertionError if tags are not closed in order, or if it loads something.

    Attributes:
        tags, texts: in their order.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, "tags that nothing closes"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in LOADING, tag
        for name, value in attrs:
            assert name not in LOADS, f"{tag} loads {value}"
            assert not name.startswith("on"), f"{tag} runs {value}"
        self.tags.append(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
