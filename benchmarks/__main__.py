"""`make bench`: every figure of docs/benchmarks.md, measured side by side in one run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import (
    allocation,
    balance,
    compression,
    data,
    frozen_cache,
    frozen_norms,
    gpu,
    headline,
    headline_ratios,
    host_memory,
    link,
    memory_policies,
    memory_runs,
    memory_search,
    models,
    moves,
    paper,
    partitions,
    pipeline,
    planner,
    policies,
    prediction,
    protocol,
    records,
    recovery_shard,
    simulator,
    start,
    thousand,
    transformer,
    wire,
)
from benchmarks.sizes import SMOKE, is_smoke, sized
from hetpipe.clock import SYSTEM_CLOCK

ROUNDS = sized(5, 1)


#: Title → figures, as printed.
_said: dict[str, Any] = {}


def _say(title: str, figures: Mapping[str, Any] | Sequence[Any]) -> None:
    _said[title.strip()] = figures
    sys.stdout.write(f"\n{title}\n{json.dumps(figures, indent=1, ensure_ascii=False)}\n")
    sys.stdout.flush()


def _pipeline(rounds: int) -> Mapping[str, Any]:
    rates = pipeline.measure(rounds)
    _say("(a) pipeline runtime, samples per second", {n: round(statistics.median(r), 2) for n, r in rates.items()})
    ratios = pipeline.ratios(rates)
    _say("    ratios (of each round, then the median)", ratios)
    return ratios


def _wire(rounds: int) -> Mapping[str, Any]:
    ratios = {}
    one, four = wire.measure(rounds, 1), wire.measure(rounds, 4)
    for streams, found in ((1, one), (4, four)):
        speeds = {name: round(wire.TOTAL_BYTES / statistics.median(s) / 1e9, 2) for name, s in found.items()}
        _say(f"(b) 256 MiB to and from one shard, {streams} stream(s), GB/s", speeds)
        for raw, sockets in ((one, 1), (found, streams)):
            ratios[f"{streams} streams / {sockets} raw sockets"] = wire.ratios(found, raw)
    _say("    relative to raw sockets", ratios)
    minimal = {f"{n} streams / minimal program": wire.of_minimal(found) for n, found in ((1, one), (4, four))}
    _say("    over shared memory, relative to a minimal program of the same passes", minimal)
    bare = {
        f"{n} streams / bare gRPC{passes}": wire.of_bare(found, passes)
        for n, found in ((1, one), (4, four))
        for passes in ("", wire.PASSES)
    }
    _say("    over gRPC, relative to a bare stream", bare)
    return {**ratios, **minimal, **bare}


def _protocol(rounds: int) -> Mapping[str, Any]:
    runs = [protocol.measure() for _ in range(rounds)]
    fractions = ("of ideal", "plain loops, of ideal", "of plain loops")
    title = "(c) protocol overhead, 4 virtual workers × 4 stages of 50 ms"
    _say(f"{title}, each run", {name: [run[name] for run in runs] for name in fractions})
    medians = {name: statistics.median(run[name] for run in runs) for name in fractions}
    _say("    medians", medians)
    _say("(d) peak resident MiB per process, largest of its role", runs[-1]["peak resident MiB"])
    return medians


def _simulator(_: int) -> Mapping[str, Any]:
    title = f"simulator, {simulator.NUM_STAGES} stages × {simulator.NUM_WAVES} waves, twice the job each time"
    found = simulator.measure()
    _say(title, found)
    _say("simulator, parameters spread over all shards", simulator.spread())
    _say(f"scale models, {simulator.SCALED_WAVES} waves, seconds of processor", simulator.scale_models())
    speeds = [figures["events per second"] for figures in found.values()]
    return {"events/s of the largest / of the smallest": round(speeds[-1] / speeds[0], 3)}


def _allocation(_: int) -> Mapping[str, Any]:
    compared = ("of the bound", "gain over NP, ED, HD")
    ratios = {}
    for name, profile in allocation.profiles().items():
        found = allocation.measure(profile)
        _say(f"(f) `auto`, {name}, four times the cluster each time", found)
        _say(f"(f) NP, {name}, waves of one N and in proportion", allocation.waves(profile))
        ratios[name] = {size: {of: figures[of] for of in compared} for size, figures in found.items()}
    return ratios


def _planner(rounds: int) -> Mapping[str, Any]:
    for title, figures in planner.measure(rounds):
        _say(title, figures)
    return {}


def _prediction(_: int) -> Mapping[str, Any]:
    ratios = {}
    exchange = prediction.exchange_seconds()
    _say("a round trip to the shards, besides its bytes' time on links", {"milliseconds": round(1000 * exchange, 1)})
    for case in prediction.CASES:
        figures = prediction.figures(prediction.measure(case, exchange))
        _say(f"predicted and measured, {case.name}", figures)
        ratios[case.name] = {"predicted / measured": figures["predicted / measured"]}
    return ratios


def _policies(rounds: int) -> Mapping[str, Any]:
    rates = policies.measure(rounds)
    _say("(i) weight policies, samples per second", rates.table())
    ratios = rates.ratios()
    _say("    ratios (of each round, then the median)", ratios)
    _say("    seconds of forward and backward per minibatch, stage by stage", rates.stage_seconds)
    _say("    memory, stage by stage", policies.memory())
    return ratios


def _link(rounds: int) -> Mapping[str, Any]:
    rates = link.measure(rounds)
    _say("(j) frames between two stages, GB/s", link.table(rates))
    ratios = link.ratios(rates)
    _say("    relative to one raw socket", ratios)
    to_bare = link.to_bare(rates)
    _say("    gRPC relative to a bare stream", to_bare)
    to_gloo = link.to_gloo(rates)
    _say("    shared memory relative to gloo", to_gloo)
    _say("    microseconds from sending to receiving 64 KiB", link.measure_one_way(rounds))
    demo = link.demo(rounds)
    _say("    the demo, samples per second", demo)
    between = {name: demo[name] for name in ("grpc / gloo", "shared memory / gloo")}
    bare = {f"{size}, of bare gRPC": found for size, found in to_bare.items()}
    return {**ratios, **bare, "shared memory / gloo": to_gloo, "the demo": between}


def _recovery_shard(rounds: int) -> Mapping[str, Any]:
    found = recovery_shard.measure(rounds)
    _say("a shard of 256 MiB, seconds", {name: round(seconds, 3) for name, seconds in found.items()})
    return {}


def _start(rounds: int) -> Mapping[str, Any]:
    found = start.measure(rounds)
    _say("(l) from the command to the first minibatch of the demo's job, seconds", found)
    return {}


def _models(_: int) -> Mapping[str, Any]:
    _say("(m) GPT-2 is", {"of": "benchmarks/models.py" if models.gpt2_of_transformers() is None else "transformers"})
    ratios = {}
    for name, figures in models.measure().items():
        _say(f"    one stage beside a plain loop, {name}", figures)
        ratios[name] = {kind: figures[f"hetpipe / plain loop, {kind}"] for kind in ("wall", "processor")}
    return ratios


def _gpu(_: int) -> Mapping[str, Any]:
    _say("(q) the GPU is", {"of": gpu.name_of_gpu()})
    ratios = {}
    for case, figures in gpu.measure():
        _say(f"    one stage beside a plain loop, {case}", figures)
        ratios[case] = {"wall": figures["hetpipe / plain loop, wall"]}
    return ratios


def _data(rounds: int) -> Mapping[str, Any]:
    rates = data.measure(rounds)
    _say("(o) slow data, samples per second", {name: round(statistics.median(r), 1) for name, r in rates.items()})
    each = [round(ratio, 3) for ratio in data.ratios(rates)]
    _say("    hetpipe / plain DataLoader loop, each round", each)
    return {"hetpipe / plain DataLoader loop": statistics.median(each)}


def _host_memory(_: int) -> Mapping[str, Any]:
    ratios = {}
    for case in host_memory.CASES:
        figures = host_memory.measure(case)
        _say(f"(n) host memory of a node, {case.name}", figures)
        ratios[case.name] = {name: figures[name] for name in figures if name.startswith("predicted / measured")}
    return ratios


def _memory_policies(_: int) -> Mapping[str, Any]:
    found = memory_policies.measure()
    _say(
        "(r) memory policies, processor seconds per round",
        {n: round(statistics.median(s), 4) for n, s in found.items()},
    )
    ratios = memory_policies.ratios(found)
    _say("    ratios (of each round, then the median)", {name: round(ratio, 3) for name, ratio in ratios.items()})
    return ratios


def _memory_search(_: int) -> Mapping[str, Any]:
    title = f"(s) cuts and memory policies of {memory_search.NUM_LAYERS} layers in {memory_search.NUM_STAGES} stages"
    _say(title, memory_search.measure())
    _say("    beside Algorithm 2 of vPipe, 20 layers in 3 stages", memory_search.against_vpipe())
    _say("    policies of hard stages of 16 layers", memory_search.of_hard_stages())
    return {}


def _memory_runs(_: int) -> Mapping[str, Any]:
    for name, figures in memory_runs.measure():
        _say(f"(s) plans with memory policies, run: {name} on 4 emulated devices, ms per minibatch", figures)
    return {}


def _partitions(_: int) -> Mapping[str, Any]:
    _say("(u) cuts and policies beside vPipe's Algorithms 1 to 3, random graphs", partitions.of_random_graphs())
    for name, figures in partitions.of_models():
        _say(f"    {name} in {partitions.NUM_STAGES} stages, ms of the slowest by forecast", figures)
    return {}


def _moves(_: int) -> Mapping[str, Any]:
    figures = moves.measure()
    _say("(t) layers with 64 MiB of state move between stages of 50 ms", figures)
    return {"barrier with a move / new processes": figures["move / new processes"]}


def _balance(_: int) -> Mapping[str, Any]:
    figures = balance.measure()
    _say("(aa) back in balance, minibatches per second of all virtual workers", figures)
    name = "measured / ideal, at the end"
    return {f"{what}: {name}": found[name] for what, found in figures.items() if found[name] is not None}


def _frozen_cache(rounds: int) -> Mapping[str, Any]:
    figures = frozen_cache.measure(rounds)
    _say("(v) frozen layers, cached where it pays", figures)
    return {name: found["ratio"] for name, found in figures.items()}


def _frozen_norms(rounds: int) -> Mapping[str, Any]:
    figures = frozen_norms.measure(rounds)
    _say("(v) norms that decide, and never freeze a layer", figures)
    return {name: found["ratio"] for name, found in figures.items()}


def _headline(_: int) -> Mapping[str, Any]:
    ratios = {}
    _say("(w) the paper's cluster, emulated", {"times slower": paper.SECONDS, "minibatches": paper.NUM_MINIBATCHES})
    for model in headline.MODELS:
        found = {}
        for name, one in headline.measure(model):
            found[name] = one
            sys.stderr.write(f"{model}, {name}: {one.measured:.0f} samples/s, {one.simulated:.0f} simulated\n")
        _say(f"    {model}, samples per second, seconds and shares of time", headline.table(found))
        _said[f"{model}, seconds and loss"] = headline.curves(found)  # long: for pictures
        nodes = headline.whimpy_nodes(model)
        _say(f"    {model}, simulated samples per second, node by node", nodes)
        _say(f"    {model}, beside the paper", headline.verdict(model, found, nodes))
        ratios[model] = {name: {"simulated / measured": one.simulated_of_measured} for name, one in found.items()}
    return ratios


def _headline_ratios(rounds: int) -> Mapping[str, Any]:
    figures = headline_ratios.measure(rounds)
    _say("(w) the paper's cluster with D = 0, ratios of each round", figures)
    return {
        model: {name: statistics.median(ratios) for name, ratios in found.items()} for model, found in figures.items()
    }


def _thousand(rounds: int) -> Mapping[str, Any]:
    _say(f"(x) {thousand.NUM_SHARDS} shards, {thousand.NUM_WAVES} waves, stages on one clock shard", thousand.measure())
    _say("    beside a coordinator with members", thousand.beside_coordinator())
    _say("    members of one coordinator", thousand.members())
    found = [thousand.calls() for _ in range(rounds)]
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    _say("    calls per second for the clocks of a job", medians)
    return {"hetpipe / bare grpc.aio": medians["hetpipe / bare grpc.aio"]}


def _transformer(rounds: int) -> Mapping[str, Any]:
    figures = transformer.measure(rounds)
    _say("    accuracy of the pre-training", figures.pop("pre-training"))
    _say("(y) PipeTransformer's steps, beside the job without, seed by seed", figures)
    sys.stdout.write(f"\n{transformer.tables(figures)}\n")
    return {f"{name} / without": found["ratio"] for name, found in figures.items() if "ratio" in found}


def _compression(rounds: int) -> Mapping[str, Any]:
    figures = compression.measure(rounds)
    _say("(z) pushes rounded to bfloat16, digits, seed by seed", figures)
    return {"bytes pushed, rounded / exact": figures["bytes pushed, rounded / exact"]}


#: Each measures, in so many rounds where it has rounds, prints, and returns its ratios, nested by name; none where its
#: figures are seconds alone.
PARTS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "pipeline": _pipeline,
    "wire": _wire,
    "protocol": _protocol,
    "simulator": _simulator,
    "allocation": _allocation,
    "planner": _planner,
    "prediction": _prediction,
    "policies": _policies,
    "link": _link,
    "recovery-shard": _recovery_shard,
    "start": _start,
    "models": _models,
    "data": _data,
    "host-memory": _host_memory,
    "memory-policies": _memory_policies,
    "memory-search": _memory_search,
    "memory-runs": _memory_runs,
    "partitions": _partitions,
    "moves": _moves,
    "balance": _balance,
    "frozen-cache": _frozen_cache,
    "frozen-norms": _frozen_norms,
    "headline": _headline,
    "headline-ratios": _headline_ratios,
    "thousand": _thousand,
    "transformer": _transformer,
    "compression": _compression,
    "gpu": _gpu,
}


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(PARTS)}; all without one.")] = None,
    *,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often contenders are measured in turn; one shows that all of it runs.")
    ] = ROUNDS,
    smoke: Annotated[bool, typer.Option("--smoke", help="Only see that it works: seconds, and no figures.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the ratios in benchmarks/ratios.jsonl and docs/benchmarks.md.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all that is printed to this file.")] = None,
) -> None:
    """Measure every figure of docs/benchmarks.md, or some parts, and print medians and ratios."""
    if record and (smoke or is_smoke()):
        raise typer.BadParameter("--record: a smoke run finds no figures that are worth keeping")
    if smoke and not is_smoke():
        # Anew, so that every module of this process and of those that it starts has the sizes of a smoke run.
        os.environ[SMOKE] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])  # noqa: S606 - itself
    unknown = sorted(set(parts or ()) - set(PARTS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    sys.stdout.write(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, medians of {rounds}\n")
    for name in parts or PARTS:
        started = SYSTEM_CLOCK.monotonic()
        ratios = records.flat(PARTS[name](rounds))
        sys.stderr.write(f"{name}: {SYSTEM_CLOCK.monotonic() - started:.1f} s\n")
        if record and ratios:
            today = datetime.fromtimestamp(SYSTEM_CLOCK.wall(), UTC).date().isoformat()
            records.keep(records.record_of(name, ratios, rounds=rounds, date=today))
            records.PAGE.write_text(records.with_ratios(records.PAGE.read_text(), records.kept()))
        if json_path is not None:
            json_path.write_text(json.dumps(_said, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
