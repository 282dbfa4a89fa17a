"""A page of HTML that needs nothing else, and says so to the browser: no script, no other resource. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def page(title: str, subtitle: str, *, style: str, content: Iterable[str], made_by: str) -> str:
    """The whole document.

    Args:
        title: heads the page; any text.
        subtitle: any text.
        style: the style sheet.
        content: elements, in order; names in them are escaped already.
        made_by: the command, for the footer; any text.
    """
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p>',
            *content,
            f"<footer>Made by {escape(made_by)}.</footer></main></body></html>\n",
        ]
    )
