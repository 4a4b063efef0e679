#!/usr/bin/env python3
"""Compares activation checkpointing with PyTorch's on the same model, in alternating runs: its cost in time and its saving in memory.

  bench/checkpointing.py --venv DIR --zero target/release/zero [--model gpt2] [--seq 1024] [--batch 4] [--rounds 3] [--only ours]

DIR is a virtual environment with torch and transformers. Both train GPT-2 without dropout, fp32, AdamW, in one process with two
threads on the same random rows. Offloaded inputs go to the disk of TMPDIR. Time is the median step after the first; memory is the process's peak RSS.
The peer is transformers' GPT2LMHeadModel with gradient_checkpointing_enable(use_reentrant=False) and PyTorch's fused attention (sdpa).
"""
import argparse, json, os, random, statistics, subprocess, tempfile
from pathlib import Path

from random_gpt2 import SIZES

PEER = """
import json, resource, sys, time, torch
from transformers import GPT2Config, GPT2LMHeadModel
layers, width, heads, seq, batch, steps, every = map(int, sys.argv[1:8])
torch.set_num_threads(2)
torch.manual_seed(0)
off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=seq, **off, attn_implementation="sdpa"))
model.train()
if every:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
times = []
for _ in range(steps):
    ids = torch.randint(0, 50257, (batch, seq))
    begin = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - begin)
print(json.dumps({"times": times, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--venv", type=Path, required=True)
parser.add_argument("--zero", type=Path, required=True)
parser.add_argument("--model", choices=SIZES, default="gpt2")
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--only", choices=["ours", "peer"])
args = parser.parse_args()


def ours(blocks, *more):
    with tempfile.TemporaryDirectory() as there:
        text = Path(there) / "text.txt"
        source = random.Random(0)
        text.write_text(" ".join(source.choice("the of and to in is was he for it".split()) for _ in range(3 * args.steps * args.seq * args.batch)))
        command = [args.zero, "train", "--model", args.model, "--data", text, "--seq", args.seq, "--batch", args.batch, "--steps", args.steps,
                   "--ranks", 1, "--stage", 0, "--threads", 2, "--out", there, "--json",
                   "--swap", there, "--checkpoint-activations", blocks, *more]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        steps = [json.loads(line) for line in (Path(there) / "metrics.jsonl").read_text().splitlines()]
        return [step["step_ms"] / 1e3 for step in steps], json.loads(done.stdout)["peak_rss_bytes"]


def peer(every):
    command = [args.venv / "bin/python", "-c", PEER, *SIZES[args.model], args.seq, args.batch, args.steps, every]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    told = json.loads(done.stdout)
    return told["times"], told["peak"]


layers = SIZES[args.model][0]
rows = {"ours, none": lambda: ours(0), f"ours, {layers // 2} blocks": lambda: ours(layers // 2), "ours, every block": lambda: ours("all"),
        "ours, offloaded to a disk": lambda: ours("all", "--offload-activations"),
        "PyTorch, none": lambda: peer(0), "PyTorch, every block": lambda: peer(1)}
rows = {name: run for name, run in rows.items() if not args.only or name.startswith("ours") == (args.only == "ours")}
seen = {name: [] for name in rows}
for _ in range(args.rounds):
    for name, run in rows.items():
        times, peak = run()
        seen[name].append((statistics.median(times[1:]), peak))
print("| | a step | of its own without | peak memory | of its own without |\n|---|---|---|---|---|")
for name, runs in seen.items():
    second, peak = (statistics.median(values) for values in zip(*runs))
    if name.endswith("none"):
        base = second, peak
    print(f"| {name} | {second:.2f} s | {second / base[0]:.2f} | {peak / 2**20:,.0f} MiB | {peak / base[1]:.2f} |")
