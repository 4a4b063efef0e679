#!/usr/bin/env bash
# The decorator's cost: GPT-2 steps on one rank of Zero<Flex> and on bare Flex, in turn (A B A B ...), the ratios
# of tokens per second: by the median run, by pairs, and by the fastest forward, backward and update of all runs.
#   bench/bare/run.sh [PRESET BATCH SEQ STEPS [ROUNDS]]      default: gpt2 1 128 6 5
set -euo pipefail
cd "$(dirname "$0")"
rounds=${5:-5}
args=("${1:-gpt2}" "${2:-1}" "${3:-128}" "${4:-6}")
cargo build --release --quiet
cargo build --release --quiet --manifest-path ../../Cargo.toml -p zero-examples --example gpt2_steps
log=$(mktemp); trap 'rm -f "$log"' EXIT
for ((round = 0; round < rounds; round++)); do
  ./target/release/zero-bench-bare "${args[@]}" | tee -a "$log"
  ../../target/release/examples/gpt2_steps "${args[@]}" | tee -a "$log"
done
awk '
  {gsub(",", ""); n[$1]++; median[$1, n[$1]] = $2
   for (phase = 0; phase < 3; phase++) {t = $(6 + phase); if (!(($1, phase) in best) || t < best[$1, phase]) best[$1, phase] = t}}
  function middle(values, count,   i, j, t) {
    for (i = 2; i <= count; i++) for (j = i; j > 1 && values[j] < values[j - 1]; j--) {t = values[j]; values[j] = values[j - 1]; values[j - 1] = t}
    return values[int((count + 1) / 2)]
  }
  END {
    for (i = 1; i <= n["zero"]; i++) {b[i] = median["bare", i]; z[i] = median["zero", i]; p[i] = z[i] / b[i]}
    count = n["zero"]; mb = middle(b, count); mz = middle(z, count)
    printf "median run:     bare %.2f, zero %.2f tokens/s, zero / bare %.3f (median of pairs %.3f)\n", mb, mz, mz / mb, middle(p, count)
    for (phase = 0; phase < 3; phase++) {fb += best["bare", phase]; fz += best["zero", phase]}
    printf "fastest phases: bare %.0f + %.0f + %.0f ms, zero %.0f + %.0f + %.0f ms, zero / bare %.3f (tokens/s)\n", best["bare", 0], best["bare", 1], best["bare", 2], best["zero", 0], best["zero", 1], best["zero", 2], fb / fz
  }' "$log"
