#!/usr/bin/env python3
"""Compares training with Burn 0.22 and with Burn 0.21: the same model, rows and AdamW, in alternating runs (old new old new ...).

  cargo build --release --bins --examples && (cd zero-param && cargo build --release --features train,models --bins --examples)
  bench/fronts.py [--job lora] [--model mini] [--work 1:0:4 2:3:4] [--rounds 3] [--dtype bf16]

Jobs: `gpt2` trains all weights of a GPT-2 on rows of 256 random tokens, `lora` adapters of rank 8 in it (both need numpy for the
weights, which are created once, in --dir); `bing_bert` is that example with bert-base and rows of 128 tokens; `own_model` is that example;
`readme` is the README's program (always fp32, 2 ranks, stage 3 and 16 rows).
--work is ranks:stage:rows, with the rows per step of all ranks; ranks are threads that share two CPUs. Speed is the median step after
the first two, measured from outside: the time from one step's line to the next, which includes all waiting. Memory is the peak RSS of
the process. The losses of both must agree within 1e-6.
"""
import argparse, array, json, os, random, re, select, statistics, subprocess, sys, tempfile, time
from pathlib import Path

from random_gpt2 import SIZES, weights

SEQ, VOCABULARY, WARMUP = 256, 50257, 2
ROOT = Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--job", choices=["gpt2", "lora", "bing_bert", "own_model", "readme"], default="gpt2")
parser.add_argument("--model", choices=SIZES, default="mini")
parser.add_argument("--work", nargs="+", metavar="RANKS:STAGE:ROWS")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--dir", type=Path, default=ROOT / "target/fronts")
args = parser.parse_args()
args.work = args.work or (["2:3:16"] if args.job == "readme" else ["1:0:4", "2:0:4", "2:3:4"])
args.job != "readme" or (args.work, args.dtype) == (["2:3:16"], "fp32") or parser.error("--job readme is always --work 2:3:16 in fp32")
ours = args.job in ("bing_bert", "own_model", "readme")
folder = args.dir / args.model
examples, new_front = ROOT / "target/release/examples", ROOT / "zero-param/target/release"
PROGRAMS = {"old": [examples / (args.job if ours else "gpt2_1_5b")], "new": [new_front / "zero-022", "train"]}
ROW, OPTIONS = SEQ, ["--weights", folder, "--data", folder / "batches.safetensors", "--decay-except", "nothing", "--shuffle", "false"]
if args.job == "lora":
    OPTIONS += ["--lora-r", 8]
if args.job == "bing_bert":
    text, tokenizer = ROOT / "examples/data/tinyshakespeare.txt", args.dir / "wordpiece"
    ROW, OPTIONS = 128, ["--seq", 128, "--model", "bert-base", "--data", text, "--tokenizer", tokenizer]
    PROGRAMS["new"] += ["--task", "bert-pretraining"]
    PROGRAMS["tokenizer"] = [ROOT / "target/release/zero", "tokenizer", tokenizer, "--data", text]
if args.job == "own_model":
    # The versions draw different initial weights, so both go on from a checkpoint.
    ROW, OPTIONS, PROGRAMS["new"] = 1, ["--resume", args.dir / "own_model/step-00000001"], [new_front / "examples/own_model"]
if args.job == "readme":
    ROW, PROGRAMS["new"] = 1, [new_front / "examples/readme"]
for program, *_ in PROGRAMS.values():
    program.is_file() or sys.exit(f"error: {program} does not exist: build it with the command from --help")
if not ours:
    weights(folder)
if args.job == "bing_bert" and not (tokenizer / "tokenizer_config.json").is_file():
    subprocess.run(PROGRAMS["tokenizer"], check=True, stdout=subprocess.DEVNULL)
if args.job == "own_model" and not OPTIONS[1].is_dir():
    subprocess.run([*PROGRAMS["old"], "--steps", "1", "--save", OPTIONS[1].parent], check=True, stdout=subprocess.DEVNULL)


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


def losses(front, ranks, stage, batch):
    if args.job == "readme":
        at, memory, told = run([*PROGRAMS[front], args.steps], lambda child: child.stdout)
        return at, memory, list(map(float, told))
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
            *PROGRAMS[front], *OPTIONS, "--batch", batch // ranks, "--steps", args.steps, "--ranks", ranks, "--threads", 2 // ranks,
            "--stage", stage, "--dtype", args.dtype, "--lr", "1e-3", "--out", out, "--json"], lines)
    return at, memory, [json.loads(line)["loss"] for line in told]


def measure(front, work):
    at, memory, told = losses(front, *work)
    steps = [after - before for before, after in zip(at, at[1:])][WARMUP - 1:]
    return work[2] * ROW / statistics.median(steps), memory, told


if not ours:
    rows()
unit = "rows" if ROW == 1 else "tokens"
print(f"| work | 0.22, {unit}/s | 0.21, {unit}/s | ratio | least and greatest pair | 0.22, MiB | 0.21, MiB | ratio | losses apart |")
print("|---|---|---|---|---|---|---|---|---|")
for text in args.work:
    work = tuple(map(int, re.fullmatch(r"(\d+):(\d+):(\d+)", text).groups()))
    pairs = [(measure("old", work), measure("new", work)) for _ in range(args.rounds)]
    apart = max(abs(a - b) / b for o, n in pairs for a, b in zip(n[2], o[2], strict=True))
    apart < 1e-6 or sys.exit(f"error: the losses of {text} are {apart:.1e} apart")
    speeds = sorted(n[0] / o[0] for o, n in pairs)
    of = lambda which, what: statistics.median(pair[which][what] for pair in pairs)
    print(f"| {args.job if ours else ' '.join([args.job, args.model])}, {work[0]} rank(s), stage {work[1]}, {work[2]} rows | {of(1, 0):.0f} | {of(0, 0):.0f} | {statistics.median(speeds):.3f} "
          f"| {speeds[0]:.3f} – {speeds[-1]:.3f} | {of(1, 1):,.0f} | {of(0, 1):,.0f} | {of(1, 1) / of(0, 1):.3f} | {apart:.1e} |", flush=True)
