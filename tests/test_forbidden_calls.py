"""No file of the product can be made to run what comes over the network, or to trust the wall clock.

The gate reads syntax trees: what a name stands for is followed through imports, so an alias hides nothing. It is tried
on bad sources first; a gate that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hetpipe", "services", "benchmarks", "examples", "k8s", "scripts")

#: What may not be named, with what is behind it, and why.
FORBIDDEN: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "pickle",
            "cPickle",
            "_pickle",
            "marshal",
            "shelve",
            "dill",
            "cloudpickle",
            "jsonpickle",
            "joblib",
            "pickletools",
        ),
        "unpickling runs code",
    ),
    **dict.fromkeys(
        ("torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.hub", "torch.serialization"),
        "files of weights are safetensors; the rest unpickles or fetches code",
    ),
    **dict.fromkeys(
        (
            "torch.distributed.rpc",
            *(
                f"torch.distributed.{name}"
                for name in (
                    "all_gather_object",
                    "gather_object",
                    "broadcast_object_list",
                    "scatter_object_list",
                    "send_object_list",
                    "recv_object_list",
                )
            ),
        ),
        "it unpickles what peers send",
    ),
    **dict.fromkeys(
        ("multiprocessing", "torch.multiprocessing", "concurrent.futures.ProcessPoolExecutor"),
        "its queues, pipes and arguments are pickled; processes are started by `hetpipe.forking`",
    ),
    **dict.fromkeys(
        (
            *(f"yaml.{name}" for name in ("full_load", "full_load_all", "unsafe_load", "unsafe_load_all")),
            *(f"yaml.{name}" for name in ("Loader", "FullLoader", "UnsafeLoader", "CLoader", "CFullLoader")),
            "yaml.CUnsafeLoader",
        ),
        "YAML is read by `safe_load`; other loaders make objects",
    ),
    **dict.fromkeys(("eval", "exec", "compile", "builtins.eval", "builtins.exec"), "it runs text"),
    **dict.fromkeys(("__import__", "importlib.import_module", "importlib.util", "runpy"), "it imports what text names"),
    **dict.fromkeys(
        (
            "os.system",
            "os.popen",
            "asyncio.create_subprocess_shell",
            "subprocess.getoutput",
            "subprocess.getstatusoutput",
        ),
        "it starts a shell",
    ),
    **dict.fromkeys(("time.time", "time.time_ns"), "the wall clock jumps; protocols use `Clock.monotonic`"),
}

#: Where a name is right all the same: (path or folder, name) → why.
ALLOWED: Mapping[tuple[str, str], str] = {
    ("hetpipe/clock.py", "time.time"): "the one module that reads time",
    ("hetpipe/pipeline/callables.py", "importlib.import_module"): "imports user code, in children of agents only",
    ("hetpipe/__init__.py", "importlib.import_module"): "imports its own modules on first use, from a fixed list",
    ("hetpipe/cli/app.py", "importlib.import_module"): "imports the modules of commands, from its own table",
    ("hetpipe/loggers/kinds.py", "importlib.util"): "looks for the packages of its own table, imports none",
    ("hetpipe/launch.py", "importlib.import_module"): "runs its own programs, from a fixed list",
    (
        "hetpipe/pipeline/reading.py",
        "multiprocessing",
    ): "torch's DataLoader: pipes and sockets to workers forked by the same process, none of them on a network",
    ("benchmarks/graphs.py", "importlib.import_module"): "imports two packages of models, from a fixed list",
    ("benchmarks", "multiprocessing"): "each benchmark talks to children it has just started, over pipes of its own",
}

_YAML_LOADS = {"yaml.load", "yaml.load_all"}
_SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}

#: Names of the table, and keywords, that a source without them does not say.
_BARE = re.compile(
    rf"(?<!\.)\b({'|'.join(name for name in FORBIDDEN if '.' not in name)})\b"
    r"|\b(shell|allow_pickle)\b|grpc\.max_|max_message"
)


def _dotted() -> dict[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """First part of the other names → a line that imports it, and what may stand behind it."""
    behind: dict[str, set[str]] = {}
    for name in {*FORBIDDEN, *_YAML_LOADS}:
        if "." in name:
            behind.setdefault(name.partition(".")[0], set()).add(name.rpartition(".")[2])
    return {
        top: (re.compile(rf"\b(?:import|from)\b.*\b{top}\b"), re.compile(rf"\b({'|'.join(last)})\b"))
        for top, last in behind.items()
    }


_DOTTED = _dotted()


def _is_suspect(source: str) -> bool:
    """Whether a source may say something forbidden; reading the tree of another one would only take time."""
    if _BARE.search(source) is not None:
        return True
    return any(
        top in source and imports.search(source) and last.search(source) for top, (imports, last) in _DOTTED.items()
    )


def problems(source: str, path: str) -> Iterator[str]:
    """Everything in a source that is forbidden there, as `PATH:LINE what: why`."""
    if not _is_suspect(source):
        return
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for said in _said(node, names):
            name = _forbidden_part(said)
            if name is not None and not _allowed(path, name):
                yield f"{path}:{line} {said}: {FORBIDDEN[name]}"
        if isinstance(node, ast.Call):
            yield from (f"{path}:{line} {problem}" for problem in _bad_call(node, names))
        if isinstance(node, ast.Tuple | ast.Dict):
            yield from (f"{path}:{line} {key}: no message may be of any size" for key in _unlimited(node))


def _imported(tree: ast.AST) -> dict[str, str]:
    """Local name → what it stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _said(node: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    """The full names that a node says."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        name = _full_name(node, names)
        if name is not None and name.partition(".")[0] in _TOPS:
            yield name


_TOPS = {name.partition(".")[0] for name in FORBIDDEN}


def _full_name(node: ast.expr, names: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        left = _full_name(node.value, names)
        return None if left is None else f"{left}.{node.attr}"
    return None


def _forbidden_part(said: str) -> str | None:
    """The entry of the table that a full name falls under."""
    parts = said.split(".")
    return next((name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in FORBIDDEN), None)


def _allowed(path: str, name: str) -> bool:
    return any(name == allowed and (path == place or path.startswith(f"{place}/")) for place, allowed in ALLOWED)


def _bad_call(call: ast.Call, names: Mapping[str, str]) -> Iterator[str]:
    name = _full_name(call.func, names)
    if name in _YAML_LOADS:
        loaders = [keyword.value for keyword in call.keywords if keyword.arg == "Loader"] + call.args[1:2]
        if not loaders or _full_name(loaders[0], names) not in _SAFE_LOADERS:
            yield f"{name}: YAML is read by `safe_load`; other loaders make objects"
    for keyword in call.keywords:
        value = keyword.value
        is_off = isinstance(value, ast.Constant) and value.value in {False, None}
        if keyword.arg == "shell" and not is_off and (name or "").startswith("subprocess."):
            yield "shell=True: it starts a shell"
        if keyword.arg == "allow_pickle" and not is_off:
            yield "allow_pickle=True: unpickling runs code"
        if keyword.arg is not None and keyword.arg.startswith("max_message") and _is_minus_one(value):
            yield f"{keyword.arg}=-1: no message may be of any size"


def _unlimited(node: ast.Tuple | ast.Dict) -> Iterator[str]:
    """Limits of gRPC that are set to none: `(NAME, -1)` or `{NAME: -1}`."""
    pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else [tuple(node.elts)]
    for pair in pairs:
        if len(pair) == 2 and isinstance(pair[0], ast.Constant) and pair[1] is not None and _is_minus_one(pair[1]):
            key = pair[0].value
            if isinstance(key, str) and key.startswith("grpc.max_"):
                yield f"{key} = -1"


def _is_minus_one(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 1
    )


BAD = [
    "import pickle",
    "import cloudpickle as harmless",
    "from pickle import loads",
    "import os\nimport shelve",
    "def f():\n    from marshal import loads as read\n    return read",
    "import torch\ntorch.load('w.pt')",
    "import torch\ntorch.load('w.pt', weights_only=True)",
    "import torch as t\nread = t.load",
    "from torch import load",
    "from torch import hub\nhub.load('a', 'b')",
    "import torch.distributed as dist\ndist.broadcast_object_list([])",
    "from torch import distributed\ndistributed.all_gather_object([], 1)",
    "from torch.distributed import rpc",
    "import multiprocessing",
    "from concurrent.futures import ProcessPoolExecutor",
    "from torch.multiprocessing import spawn",
    "import yaml\nyaml.load(text)",
    "import yaml\nyaml.load(text, Loader=yaml.Loader)",
    "import yaml\nyaml.load(text, Loader=loader)",
    "import yaml\nclass L(yaml.FullLoader): pass",
    "from yaml import unsafe_load as safe_load",
    "import yaml\nyaml.full_load(text)",
    "eval('1')",
    "exec('x = 1')",
    "run = eval",
    "import builtins\nbuiltins.exec('1')",
    "import os\nos.system('ls')",
    "from os import popen",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "import subprocess\nsubprocess.run('ls', shell=flag)",
    "import numpy as np\nnp.load('a', allow_pickle=True)",
    "import time\ntime.time()",
    "from time import time\ntime()",
    "import importlib\nimportlib.import_module(name)",
    "__import__(name)",
    "import runpy",
    "options = [('grpc.max_receive_message_length', -1)]",
    "options = {'grpc.max_send_message_length': -1}",
    "message_options(max_message_bytes=-1)",
]

GOOD = [
    "from concurrent.futures import ThreadPoolExecutor",
    "model.eval()\nmodel.load('x')\nself.time.time()",
    "import yaml\nyaml.safe_load(text)\nyaml.load(text, Loader=yaml.CSafeLoader)\nclass L(yaml.SafeLoader): pass",
    "import re\nre.compile('x')",
    "import time\ntime.monotonic()\ntime.sleep(1)",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "from importlib import resources\nfrom importlib.resources import files\nimport importlib.metadata",
    "import torch\ntorch.nn.functional.relu(x)\ntorch.distributed.send(x, 1)",
    "options = [('grpc.max_receive_message_length', 4096), ('grpc.so_reuseport', 0)]\npoint = (1, -1)",
    "text = 'import pickle; eval(1)'",
]


@pytest.mark.parametrize("source", BAD)
def test_the_gate_sees_what_is_forbidden(source: str) -> None:
    assert list(problems(source, "hetpipe/x.py"))


@pytest.mark.parametrize("source", GOOD)
def test_the_gate_lets_the_rest_through(source: str) -> None:
    assert list(problems(source, "hetpipe/x.py")) == []


def test_an_exemption_is_for_its_place_alone() -> None:
    assert list(problems("import multiprocessing", "benchmarks/x.py")) == []
    assert list(problems("import multiprocessing", "benchmarks_of/x.py"))
    assert list(problems("import pickle", "benchmarks/x.py"))


def sources() -> dict[str, str]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_the_product_says_nothing_forbidden() -> None:
    read = sources()
    assert len(read) > 300
    assert [problem for path, source in read.items() for problem in problems(source, path)] == []


def test_every_exemption_is_needed() -> None:
    read = sources()
    for place, name in ALLOWED:
        places = [source for path, source in read.items() if path == place or path.startswith(f"{place}/")]
        said = {part for source in places for part in _parts_said(source)}
        assert name in said, (place, name)


def _parts_said(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        yield from filter(None, map(_forbidden_part, _said(node, names)))
