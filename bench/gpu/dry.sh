#!/usr/bin/env bash
# Checks the work for a GPU on a machine without one: NVIDIA's compiler compiles it for an H100, and a driver that executes
# nothing (dry/driver.c) checks and counts it. The compiler is downloaded from PyPI once, into the target directory.
#   bench/gpu/dry.sh kernels [--accept]  compiles all our kernels, and compares their resources with dry/kernels.txt
#   bench/gpu/dry.sh steps [CASE...]     trains GPT-2 (tiny; xl-1: one layer of 1.5B, also -dropout; 124m; 350m; xl) or qwen2.5-0.5b,
#                                        counts the GPU operations of a step, and compares them with bounds (dry/steps.py). STUB=: compiles Burn's products too.
#                                        --start: also times the first step, with and without cached kernels. PROGRAM=FILE: uses this build
#   bench/gpu/dry.sh run COMMAND...      runs any program with this driver; for DRY_OUT and other settings see dry/driver.c
# --accept stores the results instead of comparing. Exit codes: 0; 1 when something differs or failed; 2 for bad arguments.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
work=$target/dry
devices=(--profile devices --workspace --features
  zero-core/nccl,zero-train-cli/cuda,zero-train-cli/vulkan,zero-tests/cuda,zero-tests/vulkan,zero-examples/cuda,zero-examples/vulkan)

# Of CUDA 13.0: what a newer one makes, drivers of the series 580 refuse.
wheels=(nvidia-cuda-{nvrtc==13.0.88,runtime==13.0.96,cccl==13.0.85,crt==13.0.88,nvcc==13.0.88})
prepare() {
  local stamp=$work/wheels
  if [[ $(cat "$stamp" 2>/dev/null) != "${wheels[*]}" ]]; then
    rm -rf "$work/venv"
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "${wheels[@]}"
    echo "${wheels[*]}" >"$stamp"
  fi
  CUDA_PATH=$(echo "$work"/venv/lib/python3*/site-packages/nvidia/cu13)
  chmod +x "$CUDA_PATH/bin/ptxas"
  # Under this name alone: NVRTC looks for libcuda.so.1, and asks it for what no software has.
  library driver.c libcuda.so
  library nvrtc.c libnvrtc.so
}
library() {
  local to=$work/lib/$2
  if [[ ! $to -nt $here/dry/$1 ]]; then
    mkdir -p "$work/lib" "$work/ptx"
    cc -O1 -Wall -Wextra -Werror -shared -fPIC -pthread -o "$to.$$" "$here/dry/$1" -ldl
    mv "$to.$$" "$to"
  fi
}

run() {
  prepare
  export CUDA_PATH LD_LIBRARY_PATH=$work/lib:$CUDA_PATH/lib DRY_PTX=${DRY_PTX:-$work/ptx} RUST_MIN_STACK=67108864
  # Kernels without a body, or that are broken, must not be found by other runs of the program.
  export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$work/cache/${DRY_STUB:-}${DRY_BREAK:-}}
  [[ -z ${DRY_OUT:-} ]] || cd "$DRY_OUT"
  exec "$@"
}

kernels() {
  [[ $# = 0 || $* = --accept ]] || usage
  prepare
  # Built without the compiler's environment: CUDA's crates would be built anew with it.
  cargo test "${devices[@]}" --lib --no-run --quiet
  rm -rf "$work/kernels"
  # One thread compiles for a device: two processes use two cores.
  local jobs=() job tests some=(cube::optim::compiled cube::pack::compiled)
  for tests in "${some[*]}" "::compiled ${some[*]/#/--skip }"; do
    job=$work/kernels/${#jobs[@]}
    mkdir -p "$job"
    # shellcheck disable=SC2086
    DRY_OUT=$job CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$here/dry.sh run" \
      cargo test "${devices[@]}" --lib --quiet -- --ignored $tests >"$job.log" 2>&1 &
    jobs+=($!)
  done
  for job in "${!jobs[@]}"; do
    wait "${jobs[$job]}" || { head -c 20000 "$work/kernels/$job.log"; echo "cannot compile a kernel: see above, or $work/kernels/$job.log"; exit 1; }
  done
  python3 "$here/dry/kernels.py" --ptxas "$CUDA_PATH/bin/ptxas" --table "$here/dry/kernels.txt" "$@" "$work"/kernels/?/
}

# Burn's products, of which tuning compiles hundreds, get no body unless STUB is empty.
steps() {
  prepare
  local program=${PROGRAM:-$target/devices/examples/gpt2_1_5b} told code=0
  [[ -n ${PROGRAM:-} ]] || cargo build "${devices[@]}" --example gpt2_1_5b --quiet
  told=$(DRY_DEVICES=0 "$here/dry.sh" run "$program" --backend cuda --model tiny --steps 1 2>&1) || code=$?
  if [[ $code != 2 || $told != *'the NVIDIA driver shows no GPU'* ]]; then
    echo "a driver without a GPU: expected exit code 2 and a message about the missing GPU, got $code: $told"
    exit 1
  fi
  # What others have taken of the memory is not known before: a tensor that has no room ends the run.
  code=0
  told=$(DRY_TAKEN=84900000000 DRY_STUB=matmul_ "$here/dry.sh" run "$program" --backend cuda --model tiny --steps 1 --out "$work/steps/none" 2>&1) || code=$?
  if [[ $code != 2 || $told != *'the device is out of memory ('*' MiB more were requested'* ]]; then
    echo "a device without free memory: expected exit code 2 and a remedy, got $code: $told"
    exit 1
  fi
  code=0
  told=$(DRY_VERSION=12080 "$here/dry.sh" run "$program" --backend cuda --model tiny --steps 1 2>&1) || code=$?
  if [[ $code != 2 || $told != *'the NVIDIA driver supports at most 12.8'* ]]; then
    echo "a compiler newer than the driver: expected exit code 2 and both versions, got $code: $told"
    exit 1
  fi
  # A kernel that the compiler refuses, and one that the driver does: one message, and nothing is trained on.
  local variable
  for variable in DRY_BREAK DRY_REFUSE; do
    code=0
    told=$(env $variable=gelu_kernel DRY_STUB=matmul_ "$here/dry.sh" run "$program" --backend cuda --model tiny --steps 3 --no-kernel-cache --out "$work/steps/none" 2>&1 >/dev/null) || code=$?
    if [[ $code != 1 || $(grep -c 'could not be compiled for the device' <<<"$told") != 1 || $(wc -l <<<"$told") -gt 2 ]]; then
      echo "a kernel that does not compile ($variable): expected exit code 1 and one message that names it, got $code: $told"
      exit 1
    fi
  done
  # Two threads over two GPUs: refused, and what to do instead.
  code=0
  told=$(DRY_DEVICES=2 "$here/dry.sh" run "$program" --backend cuda --model tiny --ranks 2 --steps 1 --out "$work/steps/none" 2>&1) || code=$?
  if [[ $code != 2 || $told != *'2 ranks that are threads of one process cannot use 2 NVIDIA GPUs: start one process for each GPU'* ]]; then
    echo "threads on several GPUs: expected exit code 2 and a remedy, got $code: $told"
    exit 1
  fi
  DRY_STUB=${STUB-matmul_} python3 "$here/dry/steps.py" --run "$here/dry.sh run" --program "$program" --work "$work/steps" "$@"
}

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -n -1 >&2; exit 2; }
case ${1:-} in
kernels | steps | run) "$@" ;;
*) usage ;;
esac
