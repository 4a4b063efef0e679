#!/usr/bin/env bash
# Measures all-gather and reduce-scatter of 100 MB between two ranks: the threads engine, the MPI engine (Open MPI's mpirun), MPI's own
# collectives and gloo, in alternating runs. Also prints a plain copy of the same size, and the ratios to gloo and to MPI's own.
#   bench/collectives.sh [PYTHON [TURNS]]      a Python with torch (default python3); 5 turns
# GB/s count the full tensor once. Exit codes: 0; 1 if a run failed; 2 without torch or mpirun.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3} turns=${2:-5}
"$python" -c 'import torch.distributed' 2>/dev/null || { echo "error: $python has no torch: pass a Python that has it" >&2; exit 2; }
command -v mpirun >/dev/null || { echo 'error: mpirun is missing: apt-get install openmpi-bin' >&2; exit 2; }
cargo build --release --quiet -p zero-core --features mpi --example process_rates
results=$(mktemp) own=$(mktemp)
trap 'rm -f "$results" "$own"' EXIT
mpicc -O2 bench/mpi_own.c -o "$own"
for ((turn = 0; turn < turns; turn++)); do
  "$python" bench/peer/gloo.py >>"$results"
  mpirun --allow-run-as-root -n 2 --bind-to none target/release/examples/process_rates 100 15 >>"$results"
  mpirun --allow-run-as-root -n 2 --bind-to none "$own" 100000000 15 >>"$results"
done
python3 - "$results" <<'PYTHON'
import json, re, statistics, sys
rates = {}
for line in open(sys.argv[1]):
    if line.startswith("{"):
        for name, rate in json.loads(line).items():
            rates.setdefault(("gloo", name), []).append(rate)
    elif found := re.match(r"(mpi|threads|own) (all_gather|reduce_scatter)\s+([\d.]+) GB/s", line):
        rates.setdefault(found.groups()[:2], []).append(float(found[3]))
    elif found := re.match(r"memcpy, one thread\s+([\d.]+) GB/s", line):
        rates.setdefault(("memcpy", ""), []).append(float(found[1]))
show = lambda key: f"{statistics.median(rates[key]):.2f} ({min(rates[key]):.2f} – {max(rates[key]):.2f})"
print("| 100 MB between 2 ranks, GB/s | all-gather | reduce-scatter |\n|---|---|---|")
names = ["all_gather", "reduce_scatter"]
for engine in ["threads", "mpi", "own", "gloo"]:
    print(f"| {engine} | " + " | ".join(show((engine, name)) for name in names) + " |")
for engine, floor, other in [("threads", 5, "gloo"), ("mpi", 2, "gloo"), ("mpi", 1, "own")]:
    ratios = [
        statistics.median(a / b for a, b in zip(rates[engine, name], rates[other, name])) for name in names
    ]
    print(f"| {engine} / {other} (at least {floor}) | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
print(f"| memcpy by one thread | {show(('memcpy', ''))} | |")
PYTHON
