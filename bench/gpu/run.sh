#!/usr/bin/env bash
# Everything of this folder on one GPU, in four calls of less than 10 minutes, the cheapest that can fail first.
#   bench/gpu/run.sh [--call A|B|C|D] OUT BIN_DIR
# BIN_DIR has gpt2_1_5b and nccl_check, rows-1024.safetensors if the rows are to be GPT-2's tokens, and caches.tgz if a call has been
# made before (README.md).
#   A  the machine; a few steps of both sides; nccl_check and copies; warm-up: every kernel of B is compiled and tuned
#   B  ours against PyTorch (SDPA, fused AdamW; torch.compile per block) in pairs: GPT-2 124M, 350M and 1.5B, bf16
#   C  parity at every stage; memory at every stage
#   D  kernels of one layer of 1.5B by time (ncu); ours at stage 3 with 2 ranks
# Without --call, all of them. OUT gets a call's tables as callX.log while they are made, its runs as lines of .jsonl files, and
# after each step what was compiled and tuned, as caches.tgz: put it into BIN_DIR for the next call. LIMIT (default 560) is a call's
# seconds: a step is cut short rather than the call overrun, and what is left out is said. MODELS ("gpt2 gpt2-medium gpt2-xl"),
# BATCH (8) and BACKEND (cuda) can be set. Exit codes: 0; 1 when a step failed or was left out; 2 for bad arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
call=all positional=()
while (($#)); do
  case $1 in
    --call) call=${2:-}; shift ;;
    --call=*) call=${1#*=} ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "error: there is no option $1: bench/gpu/run.sh --help" >&2; exit 2 ;;
    *) positional+=("$1") ;;
  esac
  shift || break
done
[[ $call =~ ^([A-D]|all)$ ]] || { echo "error: --call $call: expected A, B, C or D" >&2; exit 2; }
((${#positional[@]} == 2)) || { echo "error: expected OUT and BIN_DIR: bench/gpu/run.sh --help" >&2; exit 2; }
mkdir -p "${positional[0]}" || exit 2
out=$(realpath "${positional[0]}") bin=$(realpath "${positional[1]}")
ours=$bin/gpt2_1_5b
[[ -x $ours ]] || { echo "error: $ours is not there or cannot be executed (README.md says what to carry)" >&2; exit 2; }
limit=${LIMIT:-560} models=${MODELS:-gpt2 gpt2-medium gpt2-xl} batch=${BATCH:-8} backend=${BACKEND:-cuda}
device=$([[ $backend = cpu ]] && echo cpu || echo cuda)
# shellcheck source=bench/gpu/env.sh
. "$here/env.sh"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# A folder whose cubecl.toml keeps tuning results and compiled kernels from process to process, and from call to call. It is this
# binary's: CubeCL finds a kernel by its name and types, not by its source.
work=${ZERO_GPU_WORK:-$here/../../target/gpu}/$(sha256sum "$ours" | cut -c1-16)
mkdir -p "$work" || exit 2
work=$(realpath "$work")
[[ -d $work/kernels || ! -f $bin/caches.tgz ]] || tar -xzf "$bin/caches.tgz" -C "$(dirname "$work")" || exit 2
printf '[autotune]\ncache = { file = "%s/autotune" }\n\n[compilation]\ncache = { file = "%s/kernels" }\n' "$work" "$work" >"$work/cubecl.toml"
export CUBECL_CONFIG=$work/cubecl.toml
cd "$work" || exit 2

rows=$bin/rows-1024.safetensors
if [[ ! -f $rows ]]; then
  rows=$work/rows-1024.safetensors
  [[ -f $rows ]] || "$PYTHON" "$here/make_rows.py" --seq 1024 "$rows" || exit 2
  echo "note: $bin has no rows-1024.safetensors: rows are bytes of the text, not GPT-2's tokens"
fi

failed=0 summary=()

# step NAME SECONDS COMMAND...: at most so long, and not beyond the call's end.
step() {
  local name=$1 seconds=$2 left code begin=$SECONDS
  shift 2
  left=$((deadline - SECONDS))
  if ((left < 15)); then
    summary+=("left out  $name: $left s were left")
    failed=1
    return
  fi
  ((seconds > left)) && seconds=$left
  printf '\n=== %s (at most %d s)\n' "$name" "$seconds"
  timeout -k 5 "$seconds" "$@"
  code=$?
  local word=ok
  if ((code == 124 || code == 137)); then
    word="too long"
  elif ((code)); then
    word="FAILED ($code)"
  fi
  ((code)) && failed=1
  summary+=("$(printf '%-12s %4d s  %s' "$word" $((SECONDS - begin)) "$name")")
  printf -- '--- %s: %s, %d s; %d s of the call are left\n' "$name" "$word" $((SECONDS - begin)) $((deadline - SECONDS))
  tar -czf "$out/caches.tmp" -C "$(dirname "$work")" --exclude '*.safetensors' "$(basename "$work")" && mv "$out/caches.tmp" "$out/caches.tgz"
}

# What a step may still spend, less the end that its tables need.
budget() { # SECONDS
  local left=$((deadline - SECONDS - 20))
  echo $(($1 < left ? $1 : left > 1 ? left : 1))
}

call_A() {
  step "environment" 60 bash -c '. "$1"; gpu_environment' _ "$here/env.sh"
  step "ours: five steps of tiny" 150 "$ours" --backend "$backend" --model tiny --ranks 1 --stage 0 --steps 5 --offload none
  "$PYTHON" "$here/make_rows.py" --seq 128 "$work/rows-128.safetensors" >/dev/null
  step "PyTorch: five steps of tiny" 90 "$PYTHON" "$here/torch_gpt2.py" --device "$device" --model tiny --data "$work/rows-128.safetensors" \
    --batch 2 --steps 5 --warmup 2
  if [[ -x $bin/nccl_check ]]; then
    step "nccl" 120 "$here/nccl.sh" "$bin/nccl_check"
  else
    summary+=("left out  nccl: $bin has no nccl_check")
    failed=1
  fi
  local model
  for model in $models; do
    step "warm-up of $model" 240 "$ours" --backend "$backend" --model "$model" --data "$rows" --ranks 1 --stage 0 --batch "$batch" \
      --dtype bf16 --steps 3 --offload none
  done
}

compare() { # NAME SECONDS FILE MODEL OPTIONS...: the options are compare.py's
  local name=$1 seconds=$2 file=$3 model=$4
  shift 4
  step "$name" "$seconds" "$PYTHON" "$here/compare.py" --ours "$ours" --backend "$backend" --data "$rows" --model "$model" \
    --batch "$batch" --budget "$(budget $((seconds - 15)))" --out "$out/$file" "$@"
}

call_B() {
  local model
  for model in $models; do
    compare "ours / PyTorch, $model, bf16" "$([[ $model = gpt2-xl ]] && echo 260 || echo 145)" "compare-$model.jsonl" "$model" \
      --variants autocast,master,autocast+blocks --rounds 2
  done
}

call_C() {
  step "parity" 290 "$PYTHON" "$here/parity.py" --ours "$ours" --backend "$backend" --budget "$(budget 275)" --out "$out/parity.jsonl"
  step "memory" 260 "$PYTHON" "$here/memory.py" --ours "$ours" --backend "$backend" --budget "$(budget 245)" --out "$out/memory.jsonl"
}

call_D() {
  LAYERS=1 step "profile of one layer" 300 "$here/profile.sh" "$ours" "$out" "$rows"
  compare "ours at stage 3, 2 ranks on the GPU / PyTorch" 240 stage3.jsonl "${models##* }" --variants autocast --rounds 1 --stage 3 --ranks 2
}

run_call() {
  local begin=$SECONDS
  deadline=$((SECONDS + limit)) summary=() failed=0
  "call_$1"
  printf '\n=== call %s: %d s\n' "$1" $((SECONDS - begin))
  printf '%s\n' "${summary[@]}"
  return $failed
}

calls=("$call")
[[ $call = all ]] && calls=(A B C D)
end=0
for one in "${calls[@]}"; do
  run_call "$one" 2>&1 | tee "$out/call$one.log"
  ((PIPESTATUS[0] == 0)) || end=1
done
exit $end
