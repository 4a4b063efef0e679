#!/usr/bin/env bash
# Kernels, and GPT-2 with several ranks, on Mesa's software device (Debian: mesa-vulkan-drivers): `tests/software_device.sh`.
# Further: `tests/software_device.sh laws [NAME...]`, the decorator's laws, which take longest (in two processes); `tests/software_device.sh processes`, ranks
# that are processes, at all stages or at those that follow (ZERO_RANKS many; ZERO_OPTIONS has more options of theirs);
# `tests/software_device.sh param`, the front for Burn 0.22. The time goes into compiling kernels.
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
  zero-core/nccl,zero-train-cli/cuda,zero-train-cli/vulkan,zero-tests/cuda,zero-tests/vulkan,zero-examples/cuda,zero-examples/vulkan)
case ${1:-} in
'')
  cargo test "${build[@]}" --no-run --lib --test cube_operations --test cube_optim --test devices
  # One thread sends all work to a device: two processes use two cores.
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  cargo test "${build[@]}" --test devices -- --nocapture >"$log" 2>&1 &
  devices=$!
  kernels=0
  { cargo test "${build[@]}" --test cube_operations --test cube_optim && cargo test "${build[@]}" --lib -- cube:: devices::; } || kernels=$?
  wait "$devices" || { cat "$log"; exit 1; }
  cat "$log"
  exit "$kernels"
  ;;
processes)
  cargo build "${build[@]}" --example gpt2_1_5b
  tests/processes.sh target/devices/examples/gpt2_1_5b vulkan "${ZERO_RANKS:-2}" "${@:2}"
  ;;
laws)
  # A process keeps the kernels that it has compiled, and compiles on one core.
  laws() { cargo test "${build[@]}" --test laws_device -- --test-threads 1 "$@"; }
  names=("${@:2}")
  [ $# -gt 1 ] || mapfile -t names < <(laws --list | sed -n 's/: test$//p')
  [ ${#names[@]} -gt 1 ] || names+=(none)
  half=$((${#names[@]} / 2)) log=$(mktemp) first=0 second=0
  trap 'rm -f "$log"' EXIT
  laws --exact "${names[@]:half}" >"$log" 2>&1 &
  laws --exact "${names[@]:0:half}" || first=$?
  wait $! || second=$?
  cat "$log"
  exit $((first | second))
  ;;
param)
  cd zero-param
  build=(--features wgpu,models)
  cargo test "${build[@]}" --test device -- --test-threads 1 --nocapture
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
  for backend in cpu vulkan; do
    cargo run --quiet "${build[@]}" --bin zero-022 -- train --weights ../tests/fixtures/gpt2_tiny --data ../tests/fixtures/gpt2_tiny/batches.safetensors \
      --backend $backend --ranks 2 --stage 3 --batch 2 --steps 4 --out "$out/$backend"
  done
  python3 - "$out"/{cpu,vulkan}/metrics.jsonl <<'PYTHON'
import json, sys
host, device = ([json.loads(line)["loss"] for line in open(file)] for file in sys.argv[1:])
worst = max(abs(a - b) / abs(a) for a, b in zip(host, device, strict=True))
print(f"the trainer: {len(host)} losses on the device within {worst:.1e} of the host's")
assert len(host) == 4 and worst < 1e-4, (host, device)
PYTHON
  ;;
*) echo 'usage: tests/software_device.sh [laws [NAME...]|param|processes [STAGE...]]' >&2; exit 2 ;;
esac
