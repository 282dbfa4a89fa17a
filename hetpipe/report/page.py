"""Pages and pictures from the templates in `report/templates`, self-contained: nothing is loaded from elsewhere.

Templates have the markup, style sheets the appearance, and the other modules of this package the values. Values are
text, and escaped by the template; only rendered templates and shipped files (`Markup`) are markup. An undefined
variable in a template is an error. Pure, except for reading the files of the package.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hetpipe.report.text import percent, rate
from hetpipe.values.quantities import bytes_text, time_text

_PACKAGE, _FOLDER = "hetpipe.report", "templates"


def render(template: str, **values: object) -> Markup:
    """Render one template, such as `plan.html.j2`.

    Raises:
        UndefinedError: of jinja2: the template uses a name that is not among `values`.
    """
    return Markup(_environment().get_template(template).render(**values))  # noqa: S704 - templates escape by themselves


def render_page(
    template: str,
    *,
    title: str,
    subtitle: str,
    styles: Sequence[Markup],
    scripts: Sequence[Markup] = (),
    connects: bool = False,
    **values: object,
) -> str:
    """Render a whole document: a template that extends `page.html.j2`.

    Args:
        template: its file.
        title: heading of the page; any text.
        subtitle: any text.
        styles: style sheets, in order.
        scripts: run in order once all elements exist. No other script runs, in particular none injected by a name.
        connects: whether they may ask the server of the page, and no other.
        values: for the template.
    """
    # Otherwise a browser would end the element early, or miss its end.
    assert not any("</style" in style.lower() for style in styles)
    assert not any("</script" in script.lower() or "<!--" in script for script in scripts)
    page = render(
        template,
        title=title,
        subtitle=subtitle,
        policy=_allowed(scripts, connects=connects),
        style=Markup().join(styles),
        scripts=scripts,
        **values,
    )
    return str(page)  # it is not embedded in another one


@cache
def resource(name: str) -> Markup:
    """The text of a style sheet or script in `report/templates`."""
    return shipped(f"report/{_FOLDER}/{name}")


@cache
def shipped(path: str) -> Markup:
    """The text of a file of this package, by its path in `hetpipe`; shipped files are trusted markup."""
    return Markup(files("hetpipe").joinpath(path).read_text(encoding="utf-8"))  # noqa: S704 - shipped text only


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE, _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bytes": bytes_text, "percent": percent, "rate": rate, "time": time_text}
    # Data of scripts: compact, strictly valid JSON in the given order.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def _allowed(scripts: Sequence[Markup], *, connects: bool) -> Markup:
    """The Content-Security-Policy of a page: styles of its own, exactly these scripts, and its own server if any."""
    sources = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    scripted = f"; script-src {' '.join(sources)}" if sources else ""
    connected = "; connect-src 'self'" if connects else ""
    return Markup(f"default-src 'none'; style-src 'unsafe-inline'{scripted}{connected}")  # noqa: S704 - digests and nothing else
