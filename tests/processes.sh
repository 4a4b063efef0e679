#!/usr/bin/env bash
# Ranks that are processes, on devices: `tests/processes.sh BINARY [BACKEND [RANKS [STAGE...]]]`. BINARY is the example gpt2_1_5b,
# BACKEND cuda (the default) or vulkan, RANKS 2, stages 0 to 3. The processes have torchrun's variables; nothing starts them but
# this. Shown: losses beside ranks that are threads on the processor, bytes between ranks, and that ranks which gather together
# (over NCCL where each has a GPU of its own) have the losses of ranks that do not. Exit codes: 0; 1 when something differs or
# fails; 2 for bad arguments. ZERO_OPTIONS has more options for all of them, such as `--shard-size 2`. ZERO_HOSTIDS=1 gives each rank a
# NCCL_HOSTID of its own, so that NCCL takes ranks that share a GPU (for tests: NCCL does not support it).
set -uo pipefail
binary=${1:?tests/processes.sh BINARY [BACKEND [RANKS [STAGE...]]]} backend=${2:-cuda} ranks=${3:-2}
[[ -x $binary ]] || { echo "error: $binary cannot be executed: build the example gpt2_1_5b" >&2; exit 2; }
[[ $backend =~ ^(cuda|vulkan|cpu)$ && $ranks =~ ^[1-9][0-9]*$ ]] || { echo "error: expected cuda or vulkan, and a number of ranks" >&2; exit 2; }
shift $(($# < 3 ? $# : 3))
stages=("${@:-0 1 2 3}")
read -ra stages <<<"${stages[*]}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# start NAME OPTIONS...: the ranks, to their end.
start() {
  local name=$1 port=$((20000 + RANDOM % 20000)) rank pids=() failed=0
  shift
  for ((rank = 0; rank < ranks; rank++)); do
    env ${ZERO_HOSTIDS:+NCCL_HOSTID=rank-$rank} RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      "$binary" "$@" --out "$work/$name" >"$work/$name.$rank" 2>&1 &
    pids+=($!)
  done
  for rank in "${!pids[@]}"; do
    wait "${pids[$rank]}" || failed=1
  done
  if ((failed)); then
    echo "FAILED: $name ($*)"
    tail -n 20 "$work/$name".* "$work/$name"/logs/* 2>/dev/null
    exit 1
  fi
}

for stage in "${stages[@]}"; do
  arguments=(--model tiny --steps 4 --seq 32 --stage "$stage" --json ${ZERO_OPTIONS:-})
  "$binary" "${arguments[@]}" --ranks "$ranks" --out "$work/threads-$stage" >/dev/null || exit 1
  for gathers in one-sided collective; do
    # Stage 0 gathers nothing.
    [[ $stage-$gathers = 0-collective ]] || start "$gathers-$stage" "${arguments[@]}" --backend "$backend" --gathers "$gathers"
  done
done
python3 - "$work" "$ranks" "${stages[@]}" <<'PYTHON'
import json, sys
work, ranks, stages = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
read = lambda name: [json.loads(line) for line in open(f"{work}/{name}/metrics.jsonl")]
for stage in stages:
    threads, processes = read(f"threads-{stage}"), read(f"one-sided-{stage}")
    worst = lambda steps: max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(threads, steps, strict=True))
    assert worst(processes) < 1e-4, f"stage {stage}: losses differ by {worst(processes)}"
    for a, b in zip(threads, processes):
        bytes_of = lambda step: [rank["wire_bytes"] for rank in step["ranks"]]
        assert bytes_of(a) == bytes_of(b), f"stage {stage}: bytes between ranks: {bytes_of(a)}, {bytes_of(b)}"
    told = f"losses within {worst(processes):.1e} of threads on the processor, the same bytes"
    if stage != "0":
        together = read(f"collective-{stage}")
        assert worst(together) < 1e-4, f"stage {stage}, gathering together: losses differ by {worst(together)}"
        told += f"; gathering together within {worst(together):.1e}"
    if processes[0]["device_bytes_in_use"] is not None:
        assert all(step["device_bytes_in_use"] > 0 for step in processes)
    print(f"ok: stage {stage}, {ranks} processes: {told}")
PYTHON
