#!/usr/bin/env bash
# Everything of this folder on one GPU, in three parts of less than 10 minutes, the cheapest that can fail first.
#   bench/gpu/run.sh [--part 1|2|3] OUT BIN_DIR
# BIN_DIR has gpt2_1_5b and nccl_check, and rows-1024.safetensors if the rows are to be GPT-2's tokens (README.md).
#   part 1  the machine; one step of both sides; nccl_check; parity at every stage; memory at every stage
#   part 2  ours against PyTorch, GPT-2 1.5B, bf16
#   part 3  kernels by time (ncu); against torch.compile; ours at stage 3
# Without --part, all of them. OUT gets at most 8 files a part, and a part's log as partN.log. LIMIT (default 560) is a part's
# seconds: a step is cut short rather than the part overrun, and what is left out is said. MODEL (gpt2-xl), BATCH (8) and
# BACKEND (cuda) can be set. Exit codes: 0; 1 when a step failed or was left out; 2 for bad arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
part=all positional=()
while (($#)); do
  case $1 in
    --part) part=${2:-}; shift ;;
    --part=*) part=${1#*=} ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "error: there is no option $1: bench/gpu/run.sh --help" >&2; exit 2 ;;
    *) positional+=("$1") ;;
  esac
  shift || break
done
[[ $part =~ ^(1|2|3|all)$ ]] || { echo "error: --part $part: expected 1, 2 or 3" >&2; exit 2; }
((${#positional[@]} == 2)) || { echo "error: expected OUT and BIN_DIR: bench/gpu/run.sh --help" >&2; exit 2; }
mkdir -p "${positional[0]}" || exit 2
out=$(realpath "${positional[0]}") bin=$(realpath "${positional[1]}")
ours=$bin/gpt2_1_5b
[[ -x $ours ]] || { echo "error: $ours is not there or cannot be executed (README.md says what to carry)" >&2; exit 2; }
limit=${LIMIT:-560} model=${MODEL:-gpt2-xl} batch=${BATCH:-8} backend=${BACKEND:-cuda}
device=$([[ $backend = cpu ]] && echo cpu || echo cuda)
# shellcheck source=bench/gpu/env.sh
. "$here/env.sh"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# A folder whose cubecl.toml keeps tuning results and compiled kernels from process to process, and from part to part.
work=${ZERO_GPU_WORK:-$here/../../target/gpu}
mkdir -p "$work" || exit 2
work=$(realpath "$work")
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

# step NAME SECONDS COMMAND...: at most so long, and not beyond the part's end.
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
  printf -- '--- %s: %s, %d s; %d s of the part are left\n' "$name" "$word" $((SECONDS - begin)) $((deadline - SECONDS))
}

# What a step may still spend, less the end that its tables need.
budget() { # SECONDS
  local left=$((deadline - SECONDS - 20))
  echo $(($1 < left ? $1 : left > 1 ? left : 1))
}

part_1() {
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
  step "parity" 260 "$PYTHON" "$here/parity.py" --ours "$ours" --backend "$backend" --budget "$(budget 245)" --out "$out/parity.jsonl"
  step "memory" 240 "$PYTHON" "$here/memory.py" --ours "$ours" --backend "$backend" --budget "$(budget 225)" --out "$out/memory.jsonl"
}

# The columns after the program are compare.py's options.
compare() { # NAME SECONDS FILE OPTIONS...
  local name=$1 seconds=$2 file=$3
  shift 3
  step "$name" "$seconds" "$PYTHON" "$here/compare.py" --ours "$ours" --backend "$backend" --data "$rows" --model "$model" \
    --batch "$batch" --budget "$(budget $((seconds - 15)))" --out "$out/$file" "$@"
}

part_2() {
  compare "ours / PyTorch, $model, bf16" 550 compare.jsonl --variants autocast,master --rounds 4
}

part_3() {
  step "profile" 260 "$here/profile.sh" "$ours" "$out" "$rows"
  compare "ours / torch.compile" 230 compiled.jsonl --variants autocast,autocast+compile --rounds 1
  compare "ours at stage 3, 2 ranks on the GPU / PyTorch" 120 stage3.jsonl --variants autocast --rounds 1 --stage 3 --ranks 2
}

run_part() {
  local begin=$SECONDS
  deadline=$((SECONDS + limit)) summary=() failed=0
  "part_$1"
  printf '\n=== part %s: %d s\n' "$1" $((SECONDS - begin))
  printf '%s\n' "${summary[@]}"
  return $failed
}

parts=("$part")
[[ $part = all ]] && parts=(1 2 3)
end=0
for one in "${parts[@]}"; do
  run_part "$one" 2>&1 | tee "$out/part$one.log"
  ((PIPESTATUS[0] == 0)) || end=1
done
exit $end
