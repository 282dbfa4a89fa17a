"""Files outside the package that commands copy: the manifests, the Compose file, and the example of the demo.

They exist once, at the top level of the source. `setup.py` copies them into the wheel, so that an installed hetpipe has
them without the source; an editable installation reads the originals.
"""

from __future__ import annotations

from pathlib import Path

from hetpipe.errors import UserError

_PACKAGE = Path(__file__).resolve().parent

#: Folder in a wheel; absent from the source.
_COPIES = _PACKAGE / "bundled_files"

#: Paths in the source that `setup.py` copies; no others are available.
BUNDLED = ("k8s", "docker-compose.yml", "deploy/compose", "examples/digits")


def bundled_root() -> Path:
    """The folder of the `BUNDLED` files, in the wheel or else in the source.

    Raises:
        UserError: the installation has neither.
    """
    for root in (_COPIES, _PACKAGE.parent):
        if all((root / path).exists() for path in BUNDLED):
            return root
    raise UserError(
        f"this installation of hetpipe lacks {', '.join(BUNDLED)}: neither in {_COPIES} nor in {_PACKAGE.parent}; "
        "install it from a wheel, or from a complete copy of the source"
    )
