#!/usr/bin/env python3
"""Compares the losses on a device with those of the CPU backend, at every stage, with 1 rank and with 2 ranks that share the device.

    bench/gpu/parity.py --ours target/release/examples/gpt2_1_5b --backend cuda
    bench/gpu/parity.py --ours target/debug/examples/gpt2_1_5b --backend vulkan --model tiny --dtypes fp32

Initial weights are drawn on the host, and rows have the same order, so both train the same model on the same tokens.
- fp32: the loss of each of 20 steps must be within 1e-4 (relative) of the CPU's at the same stage and world size (--fp32-bound).
- bf16: the loss of each step must be within 1 % of the CPU's fp32 loss (--bf16-bound).
Prints a table, and then the curves of the worst run of each type. Exit codes: 0 when all hold; 1 when a run is out of bounds,
failed or was skipped; 2 for bad arguments.
"""

import argparse
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor

import common
from common import BACKENDS, PRESETS, BadInput, Record, at_least, listed, markdown


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="FILE", help="the built example gpt2_1_5b")
    parser.add_argument("--backend", choices=BACKENDS, default="cuda", help="default: cuda")
    parser.add_argument("--model", choices=PRESETS, default="mini", help="default: mini")
    parser.add_argument("--stages", type=listed(range(4), int), default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--ranks", type=listed(range(1, 9), int), default=[1, 2], metavar="1,2")
    parser.add_argument("--dtypes", type=listed(["fp32", "bf16"]), default=["fp32", "bf16"], metavar="fp32,bf16")
    parser.add_argument("--steps", type=at_least(2), default=20, help="default: 20")
    parser.add_argument("--batch", type=at_least(1), default=2, help="rows per rank (default: 2)")
    parser.add_argument("--accumulation", type=at_least(1), default=1)
    parser.add_argument("--seq", type=at_least(2), default=128, help="default: 128")
    parser.add_argument("--data", metavar="FILE", help="default: the program's own text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fp32-bound", type=float, default=1e-4, help="largest relative difference (default: 1e-4)")
    parser.add_argument("--bf16-bound", type=float, default=1e-2, help="default: 1e-2")
    parser.add_argument("--timeout", type=at_least(1), default=180, metavar="SECONDS", help="limit of one run (default: 180)")
    parser.add_argument("--budget", type=at_least(1), metavar="SECONDS", help="total limit; runs that do not start in time fail")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="number of concurrent runs on the one device (default: 1)")
    parser.add_argument("--out", metavar="FILE", help="write every run as a JSON line")
    parser.add_argument("--cpu-from", metavar="FILE", help="take the CPU's losses from the --out of a run with the same options, where there are "
                        "some, in place of running them")
    args = parser.parse_args()
    if args.seq > PRESETS[args.model][3]:
        raise BadInput(f"--seq {args.seq} is more than {args.model}'s {PRESETS[args.model][3]} positions")
    return args


class Runs:
    """Losses of runs, each made once."""

    def __init__(self, args, binary, record):
        self.args, self.binary, self.record = args, binary, record
        self.begin, self.known = time.monotonic(), {}
        self.pool = ThreadPoolExecutor(args.jobs)
        for line in common.json_lines(args.cpu_from) if args.cpu_from else []:
            if line.get("options") == self._options(line["backend"], line["dtype"], line["stage"], line["ranks"]) and line["backend"] == "cpu":
                known = Future()
                known.set_result((line["losses"], None))
                self.known[tuple(line[key] for key in ("backend", "dtype", "stage", "ranks"))] = known

    def _options(self, backend, dtype, stage, ranks):
        args = self.args
        options = ["--backend", backend, "--model", args.model, "--stage", stage, "--ranks", ranks, "--batch", args.batch,
                   "--accumulation", args.accumulation, "--seq", args.seq, "--steps", args.steps, "--dtype", dtype, "--lr",
                   args.lr, "--seed", 0, "--offload", "none"]
        return options + (["--data", args.data] if args.data else [])

    def ask(self, backend, dtype, stage, ranks):
        """A future of (losses, None), or of (None, why there are none)."""
        key = (backend, dtype, stage, ranks)
        if key not in self.known:
            self.known[key] = self.pool.submit(self._make, *key)
        return self.known[key]

    def _make(self, backend, dtype, stage, ranks):
        args = self.args
        if args.budget and time.monotonic() - self.begin > args.budget:
            return None, f"not run: --budget {args.budget} s is spent"
        options = self._options(backend, dtype, stage, ranks)
        result = common.ours(self.binary, options, common.time_left(args, self.begin))
        line = {"backend": backend, "dtype": dtype, "stage": stage, "ranks": ranks}
        if "error" in result:
            self.record.write({**line, "error": result["error"], "command": result["command"]})
            return None, result["error"]
        # A loss that is not finite is null.
        losses = [math.nan if step["loss"] is None else step["loss"] for step in result["steps"]]
        self.record.write({**line, "options": options, "wall_s": result["wall_s"], "losses": losses})
        if len(losses) != args.steps:
            return None, f"{len(losses)} steps in metrics.jsonl, {args.steps} expected"
        return losses, None


def differences(losses, reference):
    """Relative difference of each step; not-a-number counts as infinite."""
    found = [abs(a - b) / abs(b) if b else math.inf for a, b in zip(losses, reference)]
    return [math.inf if math.isnan(value) else value for value in found]


def main():
    args = parse_arguments()
    runs = Runs(args, common.program(args.ours), Record(args.out))
    bounds = {"fp32": args.fp32_bound, "bf16": args.bf16_bound}
    machine = common.machine()
    print(f"--backend {args.backend} against --backend cpu: {args.model}, {args.steps} steps, {args.batch} rows of {args.seq} per "
          f"rank, lr {args.lr}\nGPU: {machine['gpu']}\nours {common.commit()} (binary {common.digest(args.ours)})\n")
    rows, worst, failed = [], {}, 0
    cases = [(dtype, ranks, stage) for dtype in args.dtypes for ranks in args.ranks for stage in args.stages]
    asked = [(runs.ask("cpu", "fp32", stage, ranks), runs.ask(args.backend, dtype, stage, ranks))
             for dtype, ranks, stage in cases]
    for (dtype, ranks, stage), (of_cpu, of_device) in zip(cases, asked):
        case = f"{dtype}, stage {stage}, {ranks} rank{'s' if ranks > 1 else ''}"
        (reference, why), (losses, of_its_own) = of_cpu.result(), of_device.result()
        why = of_its_own or why and f"the CPU's run: {why}"
        if why:
            failed += 1
            rows.append([case, "–", "–", "–", f"{bounds[dtype]:g}", f"✗ {why}"])
            print(f"{case}: ✗ {why}", flush=True)
            continue
        found = differences(losses, reference)
        most = max(found)
        holds = most <= bounds[dtype]
        failed += not holds
        rows.append([case, f"{losses[0]:.6f} ({found[0]:.1e})", f"{losses[-1]:.6f} ({found[-1]:.1e})",
                     f"{most:.1e} in step {found.index(most) + 1}", f"{bounds[dtype]:g}", "✓" if holds else "✗"])
        print(f"{case}: {most:.1e} {'✓' if holds else '✗'}", flush=True)
        if dtype not in worst or most > worst[dtype][0]:
            worst[dtype] = (most, case, losses, reference, found)
    print()
    markdown(["run", "first loss (difference)", "last loss", "largest relative difference", "bound", "holds"], rows)
    for _, case, losses, reference, found in worst.values():
        print(f"{case}, the largest difference of its type:")
        shown = sorted({0, 1, 2, 4, 9, 14, args.steps - 1, found.index(max(found))} & set(range(args.steps)))
        markdown(["step", args.backend, "cpu, fp32", "difference"],
                 [[i + 1, f"{losses[i]:.6f}", f"{reference[i]:.6f}", f"{found[i]:.1e}"] for i in shown])
    print(f"{len(rows) - failed} of {len(rows)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    common.run(main)
