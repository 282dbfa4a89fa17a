"""A page of HTML that needs nothing else, and says so to the browser: its own scripts, no other resource. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape


def page(
    title: str, subtitle: str, *, style: str, content: Iterable[str], made_by: str, scripts: Sequence[str] = ()
) -> str:
    """The whole document.

    Args:
        title: heads the page; any text.
        subtitle: any text.
        style: the style sheet.
        content: elements, in order; names in them are escaped already.
        made_by: the command, for the footer; any text.
        scripts: run in order once all elements are there. No other script runs, so none that a name smuggles in.
    """
    # Else a browser would end the element, or not see its end.
    assert not any("</script" in script.lower() or "<!--" in script for script in scripts)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_allowed(scripts)}">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
            f'<h1>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p>',
            *content,
            f"<footer>Made by {escape(made_by)}.</footer></main>",
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _allowed(scripts: Sequence[str]) -> str:
    """The policy of the page: styles of its own, and exactly these scripts."""
    sources = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    scripted = f"; script-src {' '.join(sources)}" if sources else ""
    return f"default-src 'none'; style-src 'unsafe-inline'{scripted}"
