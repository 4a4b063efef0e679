#!/usr/bin/env bash
# Compares the stages on this machine: runs the example at stages 0 to 3 in turn (0 1 2 3 0 1 2 3 ...) and prints a table
# of the medians.
#   bench/stages.sh [MODEL SEQ BATCH STEPS RANKS ROUNDS]      default: gpt2 128 1 6 2 3
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-gpt2} seq=${2:-128} batch=${3:-1} steps=${4:-6} ranks=${5:-2} rounds=${6:-3}
cargo build --release --quiet -p zero-examples --example gpt2_1_5b
results=$(mktemp)
trap 'rm -f "$results"' EXIT
for ((round = 0; round < rounds; round++)); do
  for stage in 0 1 2 3; do
    ./target/release/examples/gpt2_1_5b --model "$model" --seq "$seq" --batch "$batch" --steps "$steps" \
      --ranks "$ranks" --stage "$stage" --json 2>/dev/null >>"$results"
  done
done
python3 - "$results" <<'PYTHON'
import json, statistics, sys
runs = [json.loads(line) for line in open(sys.argv[1])]
by = {s: [r for r in runs if r["stage"] == s] for s in range(4)}
speed = {s: statistics.median(r["tokens_per_second"] for r in by[s]) for s in by}
mib = lambda b: f"{b / 2**20:,.0f} MiB"
print("| stage | tokens/s | to stage 0 | model state per rank | of the formula | wire per rank and step | of the formula | peak memory, all ranks |")
print("|---|---|---|---|---|---|---|---|")
for s, rs in by.items():
    r = rs[-1]
    state, formula = sum(r["model_state_bytes"].values()), sum(r["model_state_bytes_formula"].values())
    wire = r["wire_bytes_per_step"] / max(1, r["wire_bytes_per_step_formula"])
    peak = statistics.median(x["peak_rss_bytes"] for x in rs)
    print(f"| {s} | {speed[s]:.1f} | {speed[s] / speed[0]:.2f} | {mib(state)} | {state / formula:.3f} | {mib(r['wire_bytes_per_step'])} | {wire:.3f} | {mib(peak)} |")
losses = {r["loss_last"] for r in runs}
print(f"\nfinal losses of all runs: {sorted(losses)}")
PYTHON
