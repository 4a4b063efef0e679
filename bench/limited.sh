#!/usr/bin/env bash
# Trains a GPT-2 with model state on a disk under a hard limit on the memory of the process (including page cache). Prints the loss and
# time of each step, and the peak memory.
#   bench/limited.sh [LIMIT_MIB [MODEL [STEPS [SWAP_DIR [OPTIONS...]]]]]       defaults: 6144 gpt2-xl 5 .
#   bench/limited.sh 3072 gpt2-xl 5 /mnt/fast --lr 2e-6      MODEL may be a folder with a config.json
#   bench/limited.sh 6144 gpt2-xl 1 /mnt/fast --seq 1024 --batch 8 --ranks 1 --memory 6GiB --lr 2e-6
#   PROGRAM='zero-param/target/release/zero-022 train' bench/limited.sh 3072 gpt2-xl 5      another program that is built already
#   bench/limited.sh 2048 tiled_linear 3 /mnt/fast            one linear layer of 4 GiB in 64 tiles (the example tiled_linear)
# The limit is set by a memory cgroup (version 1 or 2), which needs root. Exit codes: those of the run; 2 without a cgroup.
set -euo pipefail
cd "$(dirname "$0")/.."
limit=${1:-6144} model=${2:-gpt2-xl} steps=${3:-5} swap=${4:-.}
shift $(($# < 4 ? $# : 4))
example=gpt2_1_5b
[[ $model = tiled_linear ]] && example=tiled_linear
[[ -n ${PROGRAM:-} ]] || cargo build --release --quiet -p zero-examples --example $example

name=zero-limited-$$
if [[ -d /sys/fs/cgroup/memory ]]; then
  group=/sys/fs/cgroup/memory/$name most=memory.limit_in_bytes peak=memory.max_usage_in_bytes
else
  group=/sys/fs/cgroup/$name most=memory.max peak=memory.peak
fi
mkdir "$group" 2>/dev/null || { echo "error: cannot make the memory cgroup $group: run as root" >&2; exit 2; }
out=$(mktemp -d)
trap 'rm -rf "$out"; rmdir "$group" 2>/dev/null || true' EXIT
echo $((limit << 20)) >"$group/$most"
[[ $most = memory.max ]] && echo 0 >"$group/memory.swap.max" 2>/dev/null || true

# What is not given.
defaults=()
for default in '--seq 128' '--batch 1' '--ranks 2'; do
  read -ra words <<<"$default"
  [[ " $* " = *" ${words[0]} "* ]] || defaults+=("${words[@]}")
done

status=0
(
  echo $BASHPID >"$group/cgroup.procs"
  [[ $example = tiled_linear ]] && exec target/release/examples/tiled_linear 32768 64 "$steps" "$swap"
  # shellcheck disable=SC2086 # a program and its command
  exec ${PROGRAM:-target/release/examples/gpt2_1_5b} --model "$model" "${defaults[@]}" --stage 3 --steps "$steps" \
    --offload all --swap "$swap" --out "$out" --json "$@" >"$out/summary.json"
) || status=$?
python3 - "$out" "$limit" "$(cat "$group/$peak")" <<'PYTHON'
import json, sys
out, limit, peak = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    lines = open(f"{out}/metrics.jsonl").readlines()
except FileNotFoundError:
    lines = []  # the example prints its own, or the run was refused, and said why
for line in lines:
    step = json.loads(line)
    print(f"step {step['step']}: loss {step['loss']:.4f}, {step['step_ms'] / 1e3:.1f} s, "
          f"peak RSS {max(rank['peak_rss_bytes'] for rank in step['ranks']) >> 20} MiB")
print(f"limit {limit} MiB, peak memory of the cgroup {peak >> 20} MiB")
PYTHON
exit $status
