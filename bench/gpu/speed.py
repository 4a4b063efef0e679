#!/usr/bin/env python3
"""Runs ours and PyTorch once each, in the given order, and prints a line as soon as a run ends: for short time slots.

    bench/gpu/speed.py --ours BIN --data ROWS --model gpt2 --runs ours,plain:master,plain:master:model,transformers:autocast,ours

A PyTorch run is IMPL:PRECISION[:COMPILE] of torch_gpt2.py (plain or transformers; master or autocast; model or blocks). compare.py runs
pairs over several rounds and prints tables.
Ours has two times: between lines of metrics.jsonl (`ms`), and by its own timer (`own_ms`). `gap_ms` is the difference: the part of a
step that its own timer misses. Exit codes: 0; 1 when a run failed; 2 for bad arguments.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import common
from common import BACKENDS, MIB, PRESETS, BadInput, Record, at_least

TORCH = Path(__file__).resolve().parent / "torch_gpt2.py"
PARTS = ({"plain", "transformers"}, {"master", "autocast"}, {"model", "blocks"})


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="FILE", help="the built example gpt2_1_5b")
    parser.add_argument("--data", required=True, metavar="FILE", help="token rows for both (make_rows.py)")
    parser.add_argument("--backend", choices=BACKENDS, default="cuda", help="backend of ours (default: cuda)")
    parser.add_argument("--model", choices=PRESETS, default="gpt2", help="default: gpt2")
    parser.add_argument("--runs", default="ours", help="runs, separated by commas (default: ours)")
    parser.add_argument("--batch", type=at_least(1), default=8, help="rows per step (default: 8)")
    parser.add_argument("--steps", type=at_least(4), default=30, help="default: 30")
    parser.add_argument("--warmup", type=at_least(1), default=8, help="exclude this many first steps (default: 8)")
    parser.add_argument("--each", type=at_least(5), default=90, metavar="SECONDS", help="limit of one run (default: 90)")
    parser.add_argument("--peak-tflops", type=float, default=common.PEAK_TFLOPS, help=f"peak of the GPU, for MFU (default: {common.PEAK_TFLOPS})")
    parser.add_argument("--with", dest="more", default="", metavar="OPTIONS", help="more options of ours, separated by spaces")
    parser.add_argument("--out", metavar="FILE", help="append a JSON line for each run")
    args = parser.parse_args()
    args.runs = args.runs.split(",")
    for who in args.runs:
        parts = who.split(":")
        if who != "ours" and not (2 <= len(parts) <= 3 and all(part in known for part, known in zip(parts, PARTS))):
            raise BadInput(f"--runs {who}: expected ours, or IMPL:PRECISION[:COMPILE] such as plain:master:model")
    if args.warmup + 2 > args.steps:
        raise BadInput(f"--warmup {args.warmup} leaves too few of {args.steps} steps: at least 2 must count")
    return args


def ours(args):
    """A line of one run of ours."""
    more = args.more.split()
    defaults = {"--ranks": 1, "--stage": 0, "--dtype": "bf16", "--lr": 1e-4, "--decay-except": "nothing", "--offload": "none"}
    options = ["--backend", args.backend, "--model", args.model, "--data", args.data, "--batch", args.batch, "--steps", args.steps, *more]
    options += [part for name, value in defaults.items() if name not in more for part in (name, value)]
    result = common.ours(common.program(args.ours), options, args.each)
    if "error" in result:
        return result
    steps, (between, by) = result["steps"], common.between(result, args.warmup)
    own = statistics.median(step["step_ms"] for step in steps[args.warmup:])
    taken = max((common.device_bytes(step, "reserved") or 0 for step in steps), default=0)
    all_s = sum(step["step_ms"] for step in steps) / 1e3
    return {"ms": between, "taken": taken, "by": by, "own_ms": round(own, 3), "gap_ms": round(between - own, 3),
            "first_step_s": round(steps[0]["step_ms"] / 1e3, 1), "before_first_s": round(result["wall_s"] - all_s, 1),
            "loss": [steps[0]["loss"], steps[-1]["loss"]]}


def pytorch(args, who):
    """A line of one run of PyTorch."""
    impl, precision, *compiled = who.split(":")
    device = "cpu" if args.backend == "cpu" else "cuda"
    command = [sys.executable, TORCH, "--model", args.model, "--data", args.data, "--device", device, "--batch", args.batch, "--steps", args.steps,
               "--warmup", args.warmup, "--impl", impl, *(["--master"] if precision == "master" else []),
               *(["--compile", compiled[0]] if compiled else [])]
    env = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    code, stdout, stderr, seconds = common.watched(command, args.each, env=env)
    line = common.last_json(stdout)
    if code is None:
        return {"error": f"ended after {seconds:.0f} s: {common.last_words(stderr)}"}
    if code != 0 or not isinstance(line, dict):
        return {"error": f"{common.last_words(stderr or stdout)} (exit code {code})"}
    return {"ms": line["step_ms_median"], "taken": line["device_bytes_taken"], "wall_s": round(seconds, 1),
            "loss": [line["losses"][0], line["losses"][-1]]}


def main():
    args = parse_arguments()
    _, _, seq = common.read_rows(args.data)
    record, failed = Record(args.out, append=True), False
    for who in args.runs:
        result = ours(args) if who == "ours" else pytorch(args, who)
        line = {"who": who, "model": args.model, "batch": args.batch, "with": args.more}
        if "error" in result:
            failed = True
            line["error"] = result["error"]
        else:
            ms, taken = result.pop("ms"), result.pop("taken")
            speed = args.batch * seq / ms * 1e3
            mfu_6n = speed * 6 * common.parameters(args.model) / (args.peak_tflops * 1e12)
            line.update(ms=round(ms, 3), tokens_per_s=round(speed), taken_mib=taken and round(taken / MIB),
                        mfu_6n_12ltd=round(100 * common.mfu(speed, args.model, seq, args.peak_tflops), 1), mfu_6n=round(100 * mfu_6n, 1), **result)
        print(json.dumps(line), flush=True)
        record.write({**line, "at": time.time()})
    return failed


if __name__ == "__main__":
    common.run(main)
