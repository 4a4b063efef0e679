#!/usr/bin/env bash
# Checks that two builds of the GPT-2 program train bit-identically: losses and norms of every step, over ranks, stages, precisions,
# engines and tiers. For changes that must not change results: `bench/bits.sh OLD NEW [MODEL...]`; exits with 1 if a run differs.
# RANKS='1 2', ENGINES=threads and DTYPES=fp32 in the environment select a subset.
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2")
shift 2
models=("${@:-tiny}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# run BINARY NAME ENGINE RANKS OPTIONS...: losses and norms, as bits are printed.
run() {
  local binary=$1 out=$work/$2 engine=$3 ranks=$4
  shift 4
  rm -rf "$out"
  mkdir -p "$out/swap"
  local options=(--ranks "$ranks" --out "$out" --swap "$out/swap" --threads 1 --json "$@")
  if [ "$engine" = threads ]; then
    "$binary" "${options[@]}" >"$out/log" 2>&1 || return 1
  else
    local port=$((20000 + RANDOM % 20000)) pids=() rank
    for ((rank = 0; rank < ranks; rank++)); do
      RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        "$binary" "${options[@]}" >"$out/log.$rank" 2>&1 &
      pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || return 1; done
  fi
  python3 -c '
import json, sys
for line in open(sys.argv[1]):
    step = json.loads(line)
    print(step["loss"], step.get("grad_norm"))' "$out/metrics.jsonl"
}

runs=0 odd=0
for model in "${models[@]}"; do
  for engine in ${ENGINES:-threads processes}; do
    for ranks in ${RANKS:-1 2 3 4}; do
      [ "$engine$ranks" = processes1 ] && continue
      for stage in 0 1 2 3; do
        for dtype in ${DTYPES:-fp32 bf16}; do
          tiers=(none)
          [ "$stage" -gt 0 ] && [ "$ranks" -gt 1 ] && tiers+=(optimizer)
          [ "$stage" = 3 ] && tiers+=(all)
          for tier in "${tiers[@]}"; do
            case="$model, $ranks $engine, stage $stage, $dtype, on disk: $tier"
            args=(--model "$model" --steps 3 --seq 32 --clip 1 --stage "$stage" --dtype "$dtype" --offload "$tier")
            a=$(run "$old" old "$engine" "$ranks" "${args[@]}") || { echo "$case: OLD failed"; cat "$work"/old/log*; exit 2; }
            b=$(run "$new" new "$engine" "$ranks" "${args[@]}") || { echo "$case: NEW failed"; cat "$work"/new/log*; exit 2; }
            runs=$((runs + 1))
            if [ "$a" != "$b" ] || [ -z "$a" ]; then
              odd=$((odd + 1))
              printf '%s: DIFFERENT\n%s\n%s\n' "$case" "$a" "$b"
            fi
          done
        done
      done
    done
  done
  echo "$model: $runs runs so far, $odd different"
done
[ "$odd" = 0 ]
