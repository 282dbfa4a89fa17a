"""Functions and classes in a job given from Python, as references that the processes of a run can import.

A run imports user code in its own processes, so `model=build` becomes `model: module:build`, and the folder of `module`
the first one to import from. A function of the running script is imported from the script's file under the name of that
file, never as `__main__`; one of a notebook from a module of the definitions in its cells that it needs.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import packages_distributions
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from hetpipe.errors import JobError, UserError

#: Name of the module made of a notebook's cells.
CELLS = "notebook_cells"

_MAIN = "__main__"

#: Sections whose other keys are the arguments of a class, and the module whose classes they call by bare names.
_CLASSES: Mapping[str, str] = {"optimizer": "torch.optim", "lr_schedule": "torch.optim.lr_scheduler"}

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_IMPORTABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)
_NOT_IN_JOB_NAMES = re.compile(r"[^\w.-]", re.ASCII)
_JOB_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The running program."""

    modules: Mapping[str, ModuleType] = field(default_factory=lambda: sys.modules)
    cells: Sequence[str] = ()
    """Sources of the cells executed so far, in order; empty unless it is a notebook."""

    @classmethod
    def current(cls) -> Program:
        """This process."""
        ipython = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        return cls() if shell is None else cls(cells=tuple(shell.user_ns.get("In", ())))

    @property
    def job_name(self) -> str:
        """The name of a job that has none: that of the script or module that runs, or `notebook`; empty if unknown."""
        if self.cells:
            return "notebook"
        main = self.modules.get(_MAIN)
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None and spec.name not in (_MAIN, None):  # python -m package.module
            name = spec.name.removesuffix(f".{_MAIN}").rpartition(".")[2]
        else:
            name = Path(file).stem if file is not None and file.endswith(".py") else ""
        return _NOT_IN_JOB_NAMES.sub("_", name).lstrip("._-")[:_JOB_NAME_CHARACTERS]


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A job and overrides without Python objects."""

    job: dict[str, Any]
    overrides: dict[str, Any]
    import_path: Path | None
    """The folder of the objects' modules; None if there are none, or all are installed packages."""
    cells: str | None
    """Source of the module `CELLS`; None if no object is of a notebook."""


def own_code(job: Mapping[str, Any], overrides: Mapping[str, Any], program: Program) -> OwnCode:
    """Replace functions, classes and `functools.partial` objects in a job and its overrides.

    `data=function` is short for `data={"train": function}`, `metrics=[function]` for `{its name: function}`, and
    `optimizer=partial(torch.optim.SGD, lr=0.1)` for `{"name": "SGD", "lr": 0.1}`.

    Raises:
        JobError: an object cannot be imported by another process; with its key and the fix. Lists all of them.
        UserError: the objects' modules are in more than one folder.
    """
    found = _References(program)
    of_job, of_overrides = ({k: found.in_section(k, value) for k, value in each.items()} for each in (job, overrides))
    if found.problems:
        raise JobError(found.problems)
    return OwnCode(of_job, of_overrides, found.import_path(), found.cells())


def write_cells(source: str, folder: Path, *, beside: Path) -> Path:
    """Write the module `CELLS` into `folder`, made if necessary.

    Args:
        source: of the module.
        folder: becomes the first one to import from.
        beside: the notebook's folder, whose modules the cells may import.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = f'"""Definitions of a notebook."""\n\nimport sys\n\nsys.path.insert(1, {str(beside)!r})\n\n'
    (folder / f"{CELLS}.py").write_text(head + source, encoding="utf-8")
    return folder


class _References:
    """Collects what the references need."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.problems: list[str] = []
        #: Folder → a key that needs it.
        self._folders: dict[Path, str] = {}
        self._of_cells: list[str] = []

    # -- the job's values --------------------------------------------------------------------------------------------

    def in_section(self, key: str, value: Any) -> Any:
        """The value of a top-level key, possibly dotted."""
        if key in _CLASSES:
            return self._with_class(key, value)
        if key == "data" and _is_object(value):
            return {"train": self._replaced("data.train", value)}
        if key == "metrics" and isinstance(value, list | tuple) and any(map(_is_object, value)):
            return {_name_of(entry): self._replaced(f"metrics.{_name_of(entry)}", entry) for entry in value}
        return self._replaced(key, value)

    def _replaced(self, path: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._replaced(f"{path}.{name}", entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self._replaced(f"{path}[{index}]", entry) for index, entry in enumerate(value)]
        if isinstance(value, partial):
            return {"call": self._reference(path, value.func), "args": self._arguments(path, value)}
        if _is_object(value):
            return self._reference(path, value)
        if callable(value):
            self.problems.append(
                f"{path}: is an object of type {type(value).__name__}, which other processes cannot import; give the "
                "function that makes it" + ("" if path == "model" else ", or one that does the same")
            )
        return value

    def _with_class(self, key: str, value: Any) -> Any:
        """A section that names a class and has its arguments beside the name."""
        if isinstance(value, partial):
            value = {"name": value.func, **self._arguments(key, value)}
        elif _is_object(value):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return self._replaced(key, value)
        home = _CLASSES[key]
        return {
            name: self._class_name(f"{key}.name", entry, home)
            if name == "name" and _is_object(entry)
            else self._replaced(f"{key}.{name}", entry)
            for name, entry in value.items()
        }

    def _class_name(self, path: str, given: Any, home: str) -> str:
        module = self._program.modules.get(home)
        name = _name_of(given)
        return name if getattr(module, name, None) is given else self._reference(path, given)

    def _arguments(self, path: str, given: partial[Any]) -> dict[str, Any]:
        arguments = dict(given.keywords)
        if given.args:
            try:
                signature = inspect.signature(given.func)
                bound = signature.bind_partial(*given.args).arguments
                is_named = all(signature.parameters[name].kind in _BY_NAME for name in bound)
            except (TypeError, ValueError):
                is_named = False
            if not is_named:
                self.problems.append(f"{path}: give the arguments of {_name_of(given.func)} by their names")
                return arguments
            arguments = {**bound, **arguments}
        return {name: self._replaced(f"{path}.{name}", value) for name, value in arguments.items()}

    @cached_property
    def _installed(self) -> frozenset[str]:
        """Names of modules at the top level that any process can import; reads what all packages contain."""
        return frozenset({*sys.stdlib_module_names, __name__.partition(".")[0], *packages_distributions()})

    # -- objects -----------------------------------------------------------------------------------------------------

    def _reference(self, path: str, given: Any) -> str:
        """`module:callable` of a function, a class, or a method of a class."""
        owner = given.__self__ if isinstance(given, MethodType) else None
        if owner is not None and not isinstance(owner, type):
            return self._refuse(path, f"is a method of an object of type {type(owner).__name__}", "give a function")
        of = given if owner is None else owner
        module, name = getattr(of, "__module__", None), of.__qualname__
        if owner is not None:
            name += f".{given.__name__}"
        if "<lambda>" in name:
            return self._refuse(path, "is a lambda", "define it with `def` at the top of its module")
        if "<locals>" in name:
            inner = name.replace(".<locals>", "")
            return self._refuse(
                path,
                f"{inner} is defined inside a function",
                "define it at the top of its module, and give what it needs with functools.partial",
            )
        if module == _MAIN:
            return self._of_main(path, name)
        if not isinstance(module, str) or not _finds(self._program.modules.get(module), name, given):
            return self._refuse(
                path, f"{name} is not found under that name in {module}", "name it as text, `module:callable`"
            )
        self._need(path, self._program.modules[module])
        return f"{module}:{name}"

    def _of_main(self, path: str, name: str) -> str:
        main = self._program.modules[_MAIN]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name not in (_MAIN, None):  # python -m package.module
            self._need(path, main, name=spec.name)
            return f"{spec.name}:{name}"
        if self._program.cells:
            self._of_cells.append(name.partition(".")[0])
            return f"{CELLS}:{name}"
        file = getattr(main, "__file__", None)
        if file is None or not Path(file).is_file():
            return self._refuse(
                path, f"{name} is defined in a program without a file", "put it into a module and import it from there"
            )
        script = Path(file).resolve()
        if not _IMPORTABLE.fullmatch(script.stem):
            return self._refuse(
                path,
                f"{name} is defined in {script.name}, which cannot be imported under that name",
                f"rename the script, for example to {_NOT_IN_NAMES.sub('_', script.stem)}.py",
            )
        self._folders.setdefault(script.parent, path)
        return f"{script.stem}:{name}"

    def _refuse(self, path: str, what: str, fix: str) -> str:
        self.problems.append(f"{path}: {what}, which other processes cannot import; {fix}")
        return ""

    def _need(self, path: str, module: ModuleType, *, name: str | None = None) -> None:
        """Import `module` from the folder it comes from, unless it is installed."""
        full, file = name or module.__name__, getattr(module, "__file__", None)
        if file is None or full.partition(".")[0] in self._installed:
            return
        depth = full.count(".") + (1 if Path(file).name == "__init__.py" else 0)
        self._folders.setdefault(Path(file).resolve().parents[depth], path)

    # -- what was found ----------------------------------------------------------------------------------------------

    def import_path(self) -> Path | None:
        """The one folder to import from."""
        if len(self._folders) > 1:
            places = ", ".join(f"{folder} (`{path}`)" for folder, path in self._folders.items())
            raise UserError(
                f"the job's functions come from several folders, and a run imports from one: {places}; put them "
                "into one, or install one of them as a package"
            )
        return next(iter(self._folders), None)

    def cells(self) -> str | None:
        """The definitions that the objects of a notebook need."""
        return needed_definitions(self._program.cells, self._of_cells) if self._of_cells else None


def _is_object(value: object) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type | partial)


def _name_of(given: Any) -> str:
    return str(getattr(given.func if isinstance(given, partial) else given, "__name__", "it"))


def _finds(module: ModuleType | None, name: str, given: object) -> bool:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None and found == given


# -- notebooks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Definition:
    position: int
    """Of its statement among those of all cells."""
    source: str
    needs: frozenset[str]


def needed_definitions(cells: Sequence[str], names: Iterable[str]) -> str:
    """The source of a module with `names`, as the cells define them last, and all that these definitions use.

    Of each name the last binding at the top level counts, as it would in the notebook. Statements that bind no needed
    name, for example the call that starts the run, are left out, as are cells that are no Python.

    Args:
        cells: sources, in the order of execution.
        names: top-level names.
    """
    definitions: dict[str, list[_Definition]] = {}
    chosen: dict[int, str] = {}
    for position, statement in enumerate(_statements(cells)):
        entry = _Definition(position, ast.unparse(statement), frozenset(_loaded(statement)))
        bound = set(_bound(statement))
        if "*" in bound:
            chosen[position] = entry.source
        for name in bound:
            changes = isinstance(statement, ast.AugAssign)
            definitions[name] = [*(definitions.get(name, []) if changes else ()), entry]
    ahead, seen = list(names), set(dir(builtins))
    while ahead:
        name = ahead.pop()
        if name in seen:
            continue
        seen.add(name)
        for definition in definitions.get(name, ()):
            chosen[definition.position] = definition.source
            ahead += definition.needs
    return "\n\n".join(chosen[position] for position in sorted(chosen)) + "\n"


def _statements(cells: Iterable[str]) -> Iterator[ast.stmt]:
    for cell in cells:
        try:
            yield from ast.parse(cell).body
        except SyntaxError:
            continue


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _loaded(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement, or a function in it, reads."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
