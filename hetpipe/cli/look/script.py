"""`hetpipe script`: what a run has decided, in the form in which a job states it (plan-versions.md §6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hetpipe.cli.options import Json, RunDir, RunsDir
from hetpipe.decide.elastic.repeating import unrepeatable
from hetpipe.decide.elastic.script import script_of
from hetpipe.errors import UserError
from hetpipe.job.model import Job
from hetpipe.runs.outcome import ExitStatus, Output
from hetpipe.runs.run_folder import RUNS, find_run
from hetpipe.runs.shell import Shell
from hetpipe.server.decisions_file import decisions_of_run, pasts_of_run
from hetpipe.values.decisions import DECISIONS_FILE, DecisionLine, MemberDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show what a run has decided, as a script for a job. With it a deterministic run repeats the bits.

    A run that no script repeats is refused, with the reason: a virtual worker died, or was restarted with another cut.
    """

    run_dir: RunDir = None
    runs_dir: RunsDir = RUNS
    as_json: Json = False


def run(options: Options, output: Output, _shell: Shell) -> ExitStatus:
    """Print the script of the job, and what the run has decided besides."""
    folder = find_run(options.run_dir, runs_dir=options.runs_dir)
    job = folder.read_job()
    decisions = decisions_of_run(folder.path)
    lines = (*job.elastic.script, *script_of(decisions))
    pasts = pasts_of_run(folder.path)
    if why := unrepeatable(lines, pasts, compresses=job.freeze.compress, recuts=job.elastic.recut):
        raise UserError(
            f"{folder.path}: no script repeats this run: {why}; {folder.path / DECISIONS_FILE} has what it has decided"
        )
    script = [line.model_dump(mode="json", exclude_none=True) for line in lines]
    at_start: dict[str, Any] = {} if job.elastic.active is None else {"active": list(job.elastic.active)}
    at_start |= {"recut": True} if job.elastic.recut else {}
    output.answer({**at_start, "script": script}, *_text(job, script, decisions, is_known=bool(pasts)))
    return ExitStatus.OK


def _text(
    job: Job, script: Sequence[dict[str, Any]], decisions: Sequence[DecisionLine], *, is_known: bool
) -> Iterator[str]:
    """The section of the job file, and what else the job needs."""
    if not script and job.elastic.active is None:
        yield "# the run has decided nothing so far, and its job has no script"
        return
    yield from _comments(job, decisions, is_known=is_known)
    yield "elastic:"
    if job.elastic.active is not None:
        yield f"  active: {_flow(list(job.elastic.active))}"
    if job.elastic.recut:
        yield "  recut: true"
    if script:
        yield "  script:"
    for line in script:
        yield f"    - {_flow(line)}"


def _comments(job: Job, decisions: Sequence[DecisionLine], *, is_known: bool) -> Iterator[str]:
    """What else the job needs, and what is not known."""
    if not is_known:
        yield "# whether virtual workers died, which no script repeats, is not known: the run has no history"
    if job.has_shards and not job.sync.deterministic:
        yield "# the bits are repeated by a job with sync.deterministic only"
    if job.freeze.alpha is not None:
        yield "# without freeze.alpha, freeze.every and freeze.waves of the job: the script has what norms decided"
    if job.freeze.recuts:
        yield "# without freeze.recut and freeze.compress of the job: the script has the cuts, and who trains"
    own = [line.minibatches_per_wave for line in decisions if isinstance(line, MemberDecision)]
    if per_wave := [number for number in own if number is not None]:
        yield f"# with {', '.join(map(str, per_wave))} as further numbers of sync.minibatches_per_wave of the job"


def _flow(value: object) -> str:
    """YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20).rstrip()
