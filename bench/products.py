#!/usr/bin/env python3
"""Compares the matrix products of a linear layer on the CPU with PyTorch's, in alternating runs: result, gradients of x and of the weight.

  bench/products.py --python VENV/bin/python [--layers 256x768x2304,...] [--threads 2] [--rounds 3]

fp32 and bf16, x of N x K and the weight of K x M, stored as in a GPT-2 layer. GFLOP/s are medians over rounds of each
run's median. --python must have torch.
"""
import argparse, statistics, subprocess
from pathlib import Path

PEER = """
import sys, time, statistics, torch
n, k, m, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
for name, dtype in [("fp32", torch.float32), ("bf16", torch.bfloat16)]:
    x, w, g = (torch.rand(shape).sub(0.5).to(dtype) for shape in [(n, k), (k, m), (n, m)])
    for what, work in [("y", lambda: x @ w), ("dx", lambda: g @ w.T), ("dw", lambda: x.T @ g)]:
        times = []
        for round in range(23):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        print(name, what, 2e-9 * n * k * m / statistics.median(times[2:]))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--python", required=True)
parser.add_argument("--layers", default="1024x384x1536,256x768x2304,256x3072x768,256x768x50257,1024x1024x1024")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()

root = Path(__file__).resolve().parent.parent
subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "zero-kernels", "--example", "product_rate"], cwd=root, check=True)
own = root / "target/release/examples/product_rate"
print(f"| product, {args.threads} thread(s) | type | ours, GFLOP/s | PyTorch, GFLOP/s | ours / PyTorch | least and greatest pair |")
print("|---|---|---|---|---|---|")
for layer in args.layers.split(","):
    words = layer.split("x") + [str(args.threads)]
    runs = []
    for _ in range(args.rounds):
        read = lambda command: [line.split() for line in subprocess.check_output(command + words, text=True).splitlines()]
        runs.append((read([own]), read([args.python, "-c", PEER])))
    for row, (dtype, what, _) in enumerate(runs[0][0]):
        pairs = [(float(ours[row][2]), float(theirs[row][2])) for ours, theirs in runs]
        ours, theirs = (statistics.median(rates) for rates in zip(*pairs))
        ratios = [a / b for a, b in pairs]
        print(f"| {layer} {what} | {dtype} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} | {min(ratios):.2f} – {max(ratios):.2f} |", flush=True)
