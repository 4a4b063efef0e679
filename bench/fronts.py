#!/usr/bin/env python3
"""Compares training with Burn 0.22 and with Burn 0.21: the same GPT-2, rows and AdamW, in alternating runs (old new old new ...).

  cargo build --release -p zero-examples --example gpt2_1_5b && (cd zero-param && cargo build --release --features models)
  bench/fronts.py [--model mini] [--work 1:0:4 2:3:4] [--rounds 3] [--dtype bf16]

Needs numpy for the weights, which are created once, in --dir. --work is ranks:stage:rows, with the rows per step of all
ranks. Rows have 256 random tokens; ranks are threads that share two CPUs. Speed is the median step after the first two, measured from
outside: the time from one step's line to the next, which includes all waiting. Memory is the peak RSS of the process.
The losses of both must agree within 1e-6.
"""
import argparse, array, json, os, random, re, select, statistics, subprocess, sys, tempfile, time
from pathlib import Path

from random_gpt2 import SIZES, weights

SEQ, VOCABULARY, WARMUP = 256, 50257, 2
ROOT = Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", choices=SIZES, default="mini")
parser.add_argument("--work", nargs="+", default=["1:0:4", "2:0:4", "2:3:4"], metavar="RANKS:STAGE:ROWS")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--dir", type=Path, default=ROOT / "target/fronts")
parser.add_argument("--old", type=Path, default=ROOT / "target/release/examples/gpt2_1_5b")
parser.add_argument("--new", type=Path, default=ROOT / "zero-param/target/release/zero-022")
args = parser.parse_args()
for program in (args.old, args.new):
    program.is_file() or sys.exit(f"error: {program} does not exist: build it with the command from --help")
folder = args.dir / args.model
weights(folder)


def rows():
    source, count = random.Random(0), 16
    data = array.array("q", (source.randrange(VOCABULARY) for _ in range(count * SEQ))).tobytes()
    header = json.dumps({"input_ids": {"dtype": "I64", "shape": [count, SEQ], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "batches.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)


def run(command, lines):
    """When the running process told each of its `lines`, its MiB, and the lines."""
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    told = [(time.monotonic(), line) for line in lines(child)]
    _, status, usage = os.wait4(child.pid, 0)
    status == 0 or sys.exit(f"error: {' '.join(map(str, command))} failed with {status}")
    return [at for at, _ in told], usage.ru_maxrss / 1024, [line for _, line in told]


def losses(program, ranks, stage, batch):
    with tempfile.TemporaryDirectory() as out:
        metrics = Path(out) / "metrics.jsonl"

        def lines(child):
            """Of a file that grows, until the process has closed its output."""
            seen = 0
            while True:
                ended = bool(select.select([child.stdout], [], [], 0.002)[0]) and not child.stdout.readline()
                for line in metrics.read_text().splitlines(keepends=True)[seen:] if metrics.exists() else []:
                    if line.endswith("\n"):
                        seen += 1
                        yield line
                if ended:
                    return

        at, memory, told = run([
            *program, "--weights", folder, "--data", folder / "batches.safetensors", "--batch", batch // ranks, "--steps", args.steps,
            "--ranks", ranks, "--threads", 2 // ranks, "--stage", stage, "--dtype", args.dtype, "--lr", "1e-3", "--decay-except", "nothing", "--shuffle", "false",
            "--out", out, "--json"], lines)
    return at, memory, [json.loads(line)["loss"] for line in told]


def measure(program, work):
    at, memory, told = losses([program] + (["train"] if program == args.new else []), *work)
    steps = [after - before for before, after in zip(at, at[1:])][WARMUP - 1:]
    return work[2] * SEQ / statistics.median(steps), memory, told


rows()
print("| work | 0.22, tokens/s | 0.21, tokens/s | ratio | least and greatest pair | 0.22, MiB | 0.21, MiB | ratio | losses apart |")
print("|---|---|---|---|---|---|---|---|---|")
for text in args.work:
    work = tuple(map(int, re.fullmatch(r"(\d+):(\d+):(\d+)", text).groups()))
    pairs = [(measure(args.old, work), measure(args.new, work)) for _ in range(args.rounds)]
    apart = max(abs(a - b) / b for o, n in pairs for a, b in zip(n[2], o[2], strict=True))
    apart < 1e-6 or sys.exit(f"error: the losses of {text} are {apart:.1e} apart")
    speeds = sorted(n[0] / o[0] for o, n in pairs)
    of = lambda which, what: statistics.median(pair[which][what] for pair in pairs)
    print(f"| {args.model}, {work[0]} rank(s), stage {work[1]}, {work[2]} rows | {of(1, 0):.0f} | {of(0, 0):.0f} | {statistics.median(speeds):.3f} "
          f"| {speeds[0]:.3f} – {speeds[-1]:.3f} | {of(1, 1):,.0f} | {of(0, 1):,.0f} | {of(1, 1) / of(0, 1):.3f} | {apart:.1e} |", flush=True)
