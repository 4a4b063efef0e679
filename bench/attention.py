#!/usr/bin/env python3
"""Forward and backward pass of causal attention on the CPU, compared with PyTorch's scaled_dot_product_attention, in alternating runs.

  bench/attention.py --python VENV/bin/python [--tokens 256,1024,4096] [--batch 4] [--threads 2] [--rounds 3] [--dtype fp32|bf16]

12 heads of 64, queries, keys and values (and their gradients) packed in one array, as in a GPT-2 block. Prints medians over rounds of each
run's median, and the ratio to the floor: the 7 products of both passes, without the masked half, at the rate of a large product
(`product_rate 1024 768 3072`), which each round measures too. --python must have torch.
"""
import argparse, statistics, subprocess
from pathlib import Path

PEER = """
import sys, time, statistics, torch, torch.nn.functional as F
tokens, batch, threads, rounds, bits = map(int, sys.argv[1:])
torch.set_num_threads(threads)
dtype = torch.bfloat16 if bits == 16 else torch.float32
qkv, times = (torch.rand(batch, tokens, 3 * 768) - 0.5).to(dtype).requires_grad_(), []
grad = torch.rand(batch, tokens, 768).to(dtype)
for round in range(rounds + 2):
    qkv.grad, begin = None, time.perf_counter()
    q, k, v = (x.view(batch, tokens, 12, 64).transpose(1, 2) for x in qkv.split(768, dim=2))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.transpose(1, 2).reshape(batch, tokens, 768).backward(grad)
    times.append((time.perf_counter() - begin) * 1e3)
print(statistics.median(times[2:]))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--python", required=True)
parser.add_argument("--tokens", default="256,1024,4096")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
args = parser.parse_args()

root = Path(__file__).resolve().parent.parent
examples = ["--example", "attention_rate", "--example", "product_rate"]
subprocess.run(["cargo", "build", "--release", "--quiet", "-p", "zero-kernels", *examples], cwd=root, check=True)
own, product = (root / "target/release/examples" / name for name in ("attention_rate", "product_rate"))


def floor(tokens):
    """Milliseconds of the products at the rate of a large one."""
    lines = subprocess.check_output([product, "1024", "768", "3072", str(args.threads), "5"], text=True).splitlines()
    rate = max(float(line.split()[2]) for line in lines if line.startswith(args.dtype))
    return 7 * tokens * (tokens + 1) * 64 * 12 * args.batch / rate / 1e6


print(f"| tokens, {args.batch} rows of them, {args.threads} thread(s), {args.dtype} | ours, ms | PyTorch, ms | PyTorch / ours | range of pairs | floor, ms | ours / floor |")
print("|---|---|---|---|---|---|---|")
for tokens in map(int, args.tokens.split(",")):
    words = list(map(str, [tokens, args.batch, args.threads, max(3, 9 * 1024 // tokens), 16 if args.dtype == "bf16" else 32]))
    measure = lambda command: float(subprocess.check_output(command + words))
    pairs = [(measure([own]), measure([args.python, "-c", PEER]), floor(tokens)) for _ in range(args.rounds)]
    ours, theirs, least = (statistics.median(times) for times in zip(*pairs))
    ratios = [b / a for a, b, _ in pairs]
    print(f"| {tokens} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} | {min(ratios):.2f} – {max(ratios):.2f} | {least:.1f} | {ours / least:.2f} |", flush=True)
