#!/usr/bin/env bash
# Kernels, and GPT-2 with several ranks, on Mesa's software device (Debian: mesa-vulkan-drivers): `tests/software_device.sh`.
# Further: `tests/software_device.sh laws`, the decorator's laws, which take longest; `tests/software_device.sh processes`, ranks
# that are processes (Debian: openmpi-bin libopenmpi-dev libclang-dev). The time goes into compiling kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
drivers=(/usr/share/vulkan/icd.d/lvp_icd.*.json)
[ -e "${drivers[0]}" ] || { echo 'no software device: apt-get install mesa-vulkan-drivers' >&2; exit 2; }
export VK_ICD_FILENAMES=${drivers[0]}
# Mesa asks for it, and complains.
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}
# Without optimisation, what CubeCL's thread does takes more stack than a thread has by default.
export RUST_MIN_STACK=67108864
# The features of all that is built with this profile, so that nothing is compiled twice.
build=(--profile devices --workspace --features
  zero-core/nccl,zero-tests/cuda,zero-tests/vulkan,zero-examples/cuda,zero-examples/vulkan)
case ${1:-} in
'')
  cargo test "${build[@]}" --no-run --lib --test cube_operations --test cube_optim --test devices
  # One thread sends all work to a device: two processes use two cores.
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  cargo test "${build[@]}" --test devices -- --nocapture >"$log" 2>&1 &
  devices=$!
  kernels=0
  { cargo test "${build[@]}" --test cube_operations --test cube_optim && cargo test "${build[@]}" --lib -- cube::; } || kernels=$?
  wait "$devices" || { cat "$log"; exit 1; }
  cat "$log"
  exit "$kernels"
  ;;
processes)
  cargo build "${build[@]}" --features zero-tests/mpi,zero-examples/mpi --example gpt2_1_5b
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  binary=$PWD/target/devices/examples/gpt2_1_5b
  for stage in 0 1 2 3; do
    arguments=(--model tiny --steps 4 --seq 32 --stage "$stage" --json)
    "$binary" "${arguments[@]}" --ranks 2 --out "$work/threads-$stage" >/dev/null
    for gathers in one-sided collective; do
      mpirun --allow-run-as-root --oversubscribe -x VK_ICD_FILENAMES -x RUST_MIN_STACK -n 2 \
        "$binary" "${arguments[@]}" --backend vulkan --gathers "$gathers" --out "$work/$gathers-$stage" >/dev/null
    done
  done
  python3 - "$work" <<'PYTHON'
import json, sys
read = lambda name: [json.loads(line) for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
for stage in range(4):
    threads, processes, together = (read(f"{how}-{stage}") for how in ("threads", "one-sided", "collective"))
    worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(threads, processes, strict=True))
    assert worst < 1e-4, f"stage {stage}: losses differ by {worst}"
    for a, b in zip(threads, processes):
        bytes_of = lambda step: [rank["wire_bytes"] for rank in step["ranks"]]
        assert bytes_of(a) == bytes_of(b), f"stage {stage}: bytes between ranks: {bytes_of(a)}, {bytes_of(b)}"
    assert all(step["device_bytes_in_use"] > 0 for step in processes)
    losses = lambda steps: [step["loss"] for step in steps]
    assert losses(together) == losses(processes), f"stage {stage}: losses differ when ranks gather together"
    print(f"ok: stage {stage}, 2 processes on a software device: losses within {worst:.1e} of threads on the processor, the same bytes; gathering together: the same losses")
PYTHON
  ;;
laws) cargo test "${build[@]}" --test laws_vulkan -- --test-threads 1 ;;
*) echo 'usage: tests/software_device.sh [laws|processes]' >&2; exit 2 ;;
esac
