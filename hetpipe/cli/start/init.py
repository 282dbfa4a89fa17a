"""`hetpipe init`: a job file and the model it names, to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hetpipe.errors import UserError

#: What is written, and from which template.
TEMPLATES = ("job.yaml", "model.py")


def write_templates(folder: Path) -> list[Path]:
    """Write the templates into `folder`, which is made if need be; the files written.

    Raises:
        UserError: one of them is there already (then none is written), or the folder cannot be written to.
    """
    targets = [folder / name for name in TEMPLATES]
    taken = [str(target) for target in targets if target.exists()]
    if taken:
        raise UserError(f"{' and '.join(taken)} would be overwritten; name another folder: hetpipe init DIR")
    source = files("hetpipe.cli") / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target in targets:
            target.write_text((source / target.name).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; name another folder: hetpipe init DIR") from error
    return targets
