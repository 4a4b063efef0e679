#!/usr/bin/env python3
"""Compares the setting that `zero tune` finds with the best of all settings of a grid, each measured in several rounds.

  bench/tune.py [--zero target/release/zero] [--model mini] [--seq 128] [--rows 16] [--steps 5] [--rounds 3]

The grid has 24 settings on two CPUs: 1 and 2 ranks, stages 0 to 3, and the three largest micro-batches. Prints the settings by their
median seconds per step, and the ratio best / found. Each round first searches and then measures all settings, in an order of its own.
"""
import argparse, json, random, statistics, subprocess, sys, tempfile, time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zero", type=Path, default=Path("target/release/zero"))
parser.add_argument("--model", default="mini")
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
root = Path(__file__).parent.parent
task = ["--model", args.model, "--seq", args.seq, "--data", root / "examples/data/tinyshakespeare.txt", "--lr", "1e-4"]


def run(*command):
    done = subprocess.run(list(map(str, (args.zero, *command))), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {done.stderr}")
    return done.stdout


def seconds(ranks, stage, batch):
    """Median seconds between the progress lines of steps, as `zero tune` measures."""
    command = ["train", *task, "--ranks", ranks, "--stage", stage, "--batch", batch, "--accumulation", args.rows // ranks // batch,
               "--steps", args.steps, "--log-every", 1, "--json"]
    child = subprocess.Popen(list(map(str, (args.zero, *command))), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    times = [time.monotonic() for line in child.stderr if line.startswith("step ")]
    if child.wait():
        sys.exit(f"error: {command} ended with {child.returncode}")
    return statistics.median(b - a for a, b in zip(times, times[1:]))


batches = {ranks: sorted((b for b in range(1, args.rows // ranks + 1) if args.rows // ranks % b == 0), reverse=True)[:3] for ranks in (1, 2)}
grid = [(ranks, stage, batch) for ranks in (1, 2) for stage in range(4) for batch in batches[ranks]]
found, measured = [], {setting: [] for setting in grid}
for number in range(args.rounds):
    begin = time.monotonic()
    best = json.loads(run("tune", *task, "--train-batch-size", args.rows, "--json"))
    searched, runs = time.monotonic() - begin, len(best["trials"])
    best = best["best"]
    found.append((best["ranks"], best["stage"], best["batch"]))
    # It may be none of the grid.
    measured.setdefault(found[-1], [])
    order = random.Random(number).sample(list(measured), len(measured))
    for setting in order:
        measured[setting].append(seconds(*setting))
    print(f"round {number + 1}: found ranks {found[-1][0]}, stage {found[-1][1]}, batch {found[-1][2]} with {runs} trials in {searched:.0f} s", flush=True)
medians = {setting: statistics.median(values) for setting, values in measured.items()}
for setting, value in sorted(medians.items(), key=lambda item: item[1]):
    print("ranks {} stage {} batch {:>3}".format(*setting), f"{value:8.3f} s", "found" if setting in found else "")
least = min(medians.values())
ratios = [least / medians[setting] for setting in found]
print(f"best / found: median {statistics.median(ratios):.3f}, least {min(ratios):.3f}")
