"""Files beside the code that commands copy: the manifests, the Compose file, and the example of the demo.

They stand at the top level of the source, once. `setup.py` copies them into the wheel, so that an installed hetpipe has
them without the source; an editable one reads them where they stand.
"""

from __future__ import annotations

from pathlib import Path

from hetpipe.errors import UserError

_PACKAGE = Path(__file__).resolve().parent

#: Of a wheel; no such folder is in the source.
_COPIES = _PACKAGE / "bundled_files"

#: Paths in the source that `setup.py` copies; the only ones available.
BUNDLED = ("k8s", "docker-compose.yml", "deploy/compose", "examples/digits")


def bundled_root() -> Path:
    """The folder that `BUNDLED` are in: of the wheel, else of the source.

    Raises:
        UserError: they are not there, because this is neither.
    """
    for root in (_COPIES, _PACKAGE.parent):
        if all((root / path).exists() for path in BUNDLED):
            return root
    raise UserError(
        f"this installation of hetpipe lacks {', '.join(BUNDLED)}: neither in {_COPIES} nor in {_PACKAGE.parent}; "
        "install it from a wheel, or from a whole copy of the source"
    )
