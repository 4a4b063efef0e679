#!/usr/bin/env python3
"""Compares the step time of Muon, by both Newton-Schulz variants, with that of AdamW, in turn: GPT-2 124M on random tokens,
2 ranks of one thread, stage 3, bf16 or fp32.

  bench/muon.py [--zero target/release/zero] [--seq 1024] [--batch 4] [--dtype fp32] [--rounds 3]

--batch counts rows per rank. Prints tokens per step, seconds of a step and of its update, and the ratio of the steps (the mean without the first).
"""
import argparse, json, statistics, subprocess, sys, tempfile
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zero", type=Path, default=Path("target/release/zero"))
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
root = Path(__file__).parent.parent


def run(optimizer):
    with tempfile.TemporaryDirectory() as out:
        config = {"train_micro_batch_size_per_gpu": args.batch, "zero_optimization": {"stage": 3}, "bf16": {"enabled": args.dtype == "bf16"},
                  "gradient_clipping": 1.0, "optimizer": optimizer}
        Path(out, "ds.json").write_text(json.dumps(config))
        command = [args.zero, "train", "--config", f"{out}/ds.json", "--model", "gpt2", "--data", root / "examples/data/tinyshakespeare.txt", "--seq", args.seq,
                   "--ranks", 2, "--threads", 1, "--steps", args.steps, "--out", out, "--json"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: {done.stderr}")
        steps = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()][1:]
        return [statistics.mean(step[key] for step in steps) / 1e3 for key in ("step_ms", "update_ms")]


muons = {method: {"muon_lr": 1e-3, "adam_lr": 1e-4, "ns_method": method} for method in ("gram", "standard")}
ratios = {method: [] for method in muons}
for round in range(args.rounds):
    adam = run({"type": "AdamW", "params": {"lr": 1e-4}})
    print(f"{2 * args.batch * args.seq} tokens: AdamW {adam[0]:.2f} s, update {adam[1]:.2f}", end="", flush=True)
    # In the other order every second round.
    for method, params in list(muons.items())[:: 1 - 2 * (round % 2)]:
        muon = run({"type": "Muon", "params": params})
        ratios[method].append(muon[0] / adam[0])
        print(f"; {method} {muon[0]:.2f} s, update {muon[1]:.2f}: {ratios[method][-1]:.3f}", end="", flush=True)
    print()
print("medians:", ", ".join(f"{method} {statistics.median(of):.3f}" for method, of in ratios.items()))
