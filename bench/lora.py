#!/usr/bin/env python3
"""Compares LoRA with full fine-tuning, and with PEFT on DeepSpeed ZeRO-3 with offload, on two CPUs, in alternating runs.

  bench/lora.py --venv DIR --zero target/release/zero [--model gpt2] [--quantize nf4] [--rounds 3] [--only ours]

DIR is a virtual environment with torch, transformers, peft and deepspeed. Weights are random and are created once, in --dir. All train
GPT-2 of the same size on the same random rows of SEQ tokens: one row per rank, 2 ranks with one thread each, stage 3, fp32, AdamW, LoRA
of rank 8 on c_attn. The peer offloads parameters and optimizer state to host memory, where they are on a CPU anyway.
Speed is the median step after the first two: ours by its own timer, the peer's by its slowest rank. Memory is the sum over
processes of the peak RSS over the RSS with everything imported (ours: just after the start).
"""
import argparse, array, json, os, random, statistics, subprocess, sys, tempfile, time
from pathlib import Path

from random_gpt2 import SIZES, weights

VOCABULARY = 50257

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--venv", type=Path, required=True)
parser.add_argument("--zero", type=Path, required=True)
parser.add_argument("--model", choices=SIZES, default="gpt2")
parser.add_argument("--dir", type=Path, default=Path("target/lora"))
parser.add_argument("--quantize", help="add a row: ours with the base quantized to this format")
parser.add_argument("--seq", type=int, default=128)
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--only", choices=["ours", "peer"])
parser.add_argument("--no-whole", action="store_true", help="skip full fine-tuning, which takes 16 bytes per parameter")
args = parser.parse_args()
if not args.zero.is_file():
    sys.exit(f"error: {args.zero} does not exist: build it with cargo build --release --bin zero")
folder, python, ranks, warmup = args.dir / args.model, args.venv / "bin/python", 2, 2
quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PATH": f"{args.venv / 'bin'}:{os.environ['PATH']}"}
weights(folder)


def rows(path):
    source = random.Random(0)
    count = ranks * (args.steps + 1)
    data = array.array("H", (source.randrange(VOCABULARY) for _ in range(count * args.seq))).tobytes()
    header = json.dumps({"input_ids": {"dtype": "U16", "shape": [count, args.seq], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def rss(pid):
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return [int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")]
    except (OSError, KeyError):
        return [0.0, 0.0]


def ours(options):
    with tempfile.TemporaryDirectory() as there:
        rows(Path(there) / "rows.safetensors")
        command = [args.zero, "train", "--weights", folder, "--data", f"{there}/rows.safetensors", "--seq", args.seq, "--batch", 1,
                   "--steps", args.steps, "--ranks", ranks, "--threads", 1, "--stage", 3, "--lr", "1e-4", "--out", there, "--json", *options]
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        idle, peak = rss(process.pid)[0], 0.0
        while process.poll() is None:
            peak = max(peak, rss(process.pid)[1])
            time.sleep(0.05)
        out, problem = process.communicate()
        if process.returncode:
            sys.exit(f"error: {problem}")
        summary = json.loads(out)
        steps = [json.loads(line)["step_ms"] for line in Path(f"{there}/metrics.jsonl").read_text().splitlines()]
        return statistics.median(steps[warmup:]), max(peak, summary["peak_rss_bytes"] / 2**20) - idle


def peer(_):
    layers, width, heads = SIZES[args.model]
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    command = [python, Path(__file__).parent / "peer/peer_bench.py", "--engine", "deepspeed", "--stage", 3, "--world", ranks, "--threads", 1,
               "--layers", layers, "--hidden", width, "--heads", heads, "--seq", args.seq, "--batch", 1, "--steps", args.steps,
               "--warmup", warmup, "--lora", 8, "--weights", folder, "--ds", json.dumps(offload)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=quiet)
    line = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"error": done.stderr}
    if "error" in line:
        sys.exit(f"error: {line['error']}")
    return line["step_ms"], sum(line["rss_delta_mib"])


lora = ["--lora-r", 8, "--lora-targets", "c_attn"]
works = {"ours, LoRA": (ours, lora)} | ({} if args.no_whole else {"ours, whole model": (ours, [])})
if args.quantize:
    works[f"ours, LoRA over {args.quantize}"] = (ours, [*lora, "--quantize", args.quantize])
if args.only != "ours":
    works["PEFT + DeepSpeed ZeRO-3, offload"] = (peer, None)
if args.only == "peer":
    works = {name: work for name, work in works.items() if work[0] is peer}
seen = {name: [] for name in works}
for number in range(args.rounds):
    for name, (run, options) in works.items():
        seen[name].append(run(options))
        print(f"[{number + 1}/{args.rounds}] {name}: {seen[name][-1][0]:.0f} ms a step, {seen[name][-1][1]:,.0f} MiB", file=sys.stderr, flush=True)
middle = {name: [statistics.median(values) for values in zip(*runs)] for name, runs in seen.items()}
first = middle.get("ours, LoRA") or next(iter(middle.values()))
print(f"{args.model}, fp32, {ranks} ranks of 1 thread, stage 3, 1 x {args.seq} tokens a rank, medians of {args.rounds} rounds in turn")
print("| | ms a step | tokens/s | ours LoRA / it | MiB | ours LoRA / it |\n|---|---|---|---|---|---|")
for name, (ms, mib) in middle.items():
    print(f"| {name} | {ms:.0f} | {ranks * args.seq / ms * 1e3:.1f} | {ms / first[0]:.2f} | {mib:,.0f} | {first[1] / mib:.2f} |")
