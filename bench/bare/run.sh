#!/usr/bin/env bash
# The decorator's cost: GPT-2 steps on one rank of Zero<Flex> and on bare Flex, in turn (A B A B ...), and the ratio of
# the medians of their tokens per second.
#   bench/bare/run.sh [PRESET BATCH SEQ STEPS [ROUNDS]]      default: gpt2 1 128 6 5
set -euo pipefail
cd "$(dirname "$0")"
rounds=${5:-5}
args=("${1:-gpt2}" "${2:-1}" "${3:-128}" "${4:-6}")
cargo build --release --quiet
cargo build --release --quiet --manifest-path ../../Cargo.toml -p zero-examples --example gpt2_steps
bare=() zero=()
for ((round = 0; round < rounds; round++)); do
  line=$(./target/release/zero-bench-bare "${args[@]}"); echo "$line"; bare+=("$(awk '{print $2}' <<<"$line")")
  line=$(../../target/release/examples/gpt2_steps "${args[@]}"); echo "$line"; zero+=("$(awk '{print $2}' <<<"$line")")
done
median() { printf '%s\n' "$@" | sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }
b=$(median "${bare[@]}"); z=$(median "${zero[@]}")
awk -v b="$b" -v z="$z" 'BEGIN {printf "median: bare %.2f, zero %.2f tokens/s, zero / bare %.3f\n", b, z, z / b}'
