"""Environment variables that are read at load time, and those set by hetpipe. Pure.

A forked process has loaded its libraries before it receives its environment. It is therefore only forked if that makes
no difference: if every variable read at load time by the interpreter or a library has the same value.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

#: One thread per stage process, so that stages share the CPUs evenly.
SINGLE_THREADED: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: Environment of every service, in a container or not: one thread for linear algebra, so that processes share the CPUs
#: evenly; and no current folder on the module search path, so that a user's `random.py` does not shadow Python's.
SERVICE_ENVIRONMENT: Mapping[str, str] = {**SINGLE_THREADED, "PYTHONSAFEPATH": "1"}

#: Variables that the C library, the interpreter, torch, its math libraries and gRPC read at load time.
READ_WHILE_LOADING = (
    *("PYTHON*", "LD_*", "MALLOC_*", "GLIBC_TUNABLES", "LANG", "LANGUAGE", "LC_*", "COVERAGE_*", "COV_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "GOTO_*", "BLIS_*", "DNNL_*", "ONEDNN_*", "NUMEXPR_*"),
    *("TORCH*", "PYTORCH_*", "ATEN_*", "NPY_*", "NUMPY_*", "GRPC_*"),
)

#: Further variables of a fork server: those needed to find and import its modules, and hetpipe's own.
_NEEDED = ("PATH", "HOME", "TMPDIR", "XDG_*", "VIRTUAL_ENV", "CONDA_PREFIX", "HETPIPE_*")


def server_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The initial environment of a fork server: only the variables read at load time.

    It is visible in `/proc/PID/environ` of every forked process.

    >>> server_environment({"PYTHONHASHSEED": "0", "SECRET": "x", "PATH": "/bin"})
    {'PYTHONHASHSEED': '0', 'PATH': '/bin'}
    """
    return {name: value for name, value in own.items() if _matches(name, (*READ_WHILE_LOADING, *_NEEDED))}


def differences(start: Mapping[str, str], now: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the variables in which a forked process would differ from one started with `wanted`.

    Args:
        start: the fork server's environment when it started.
        now: its environment after its imports, some of which set variables.
        wanted: the environment requested for the process.

    >>> differences({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "WANDB_MODE": "off"})
    ()
    >>> differences({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}, {"TORCH_LOGS": "all"})
    ('OMP_NUM_THREADS', 'TORCH_LOGS')
    """
    names = {name for name in (*start, *wanted) if _matches(name, READ_WHILE_LOADING)}
    return tuple(sorted(name for name in names if wanted.get(name) not in {start.get(name), now.get(name)}))


def forked_environment(start: Mapping[str, str], now: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The environment of a forked process: the requested one, and variables set by the imports.

    Arguments as for `differences`.

    >>> forked_environment({"HOME": "/root"}, {"HOME": "/root", "GRPC_VERBOSITY": "ERROR"}, {"HOME": "/h"})
    {'GRPC_VERBOSITY': 'ERROR', 'HOME': '/h'}
    """
    added = {name: value for name, value in now.items() if name not in start and _matches(name, READ_WHILE_LOADING)}
    return {**added, **wanted}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
