#!/usr/bin/env bash
# On the machine with the GPU: runs one call of the queue, a group of tests and measurements.
#   bench/gpu/queue.sh CALL OUT        CALL: 1, 1b, 2, 2b, 3 or 3b (README.md describes them)
# Unpacks target/gpu-bin.tar.xz (pack.sh) to /tmp/zero-gpu (WORK). A step is killed at its limit and at the call's limit (LIMIT, in seconds).
# After each step OUT has the results so far: log.txt, summary.txt, runs.jsonl, parity.jsonl, memory.jsonl, ncu.csv and caches.tgz, at most
# 8 files. Changes no GPU settings. Exit codes: 0; 1 when a step failed, was killed or skipped; 2 for bad arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -n -1 >&2; exit 2; }
(($# == 2)) && [[ $1 =~ ^[123]b?$ ]] || usage
call=$1
mkdir -p "$2" || exit 2
out=$(realpath "$2") work=${WORK:-/tmp/zero-gpu}
bin=$work/bin
archive=${ARCHIVE:-$here/../../target/gpu-bin.tar.xz}
if [[ ! -e $bin/.unpacked ]]; then
  [[ -f $archive ]] || { echo "error: $archive does not exist: create it with bench/gpu/pack.sh" >&2; exit 2; }
  mkdir -p "$bin" && { tar -C "$bin" -xJf "$archive" || "${PYTHON:-python3}" -m tarfile -e "$archive" "$bin"; } && touch "$bin/.unpacked" || exit 2
  # If this fails, the programs compile the kernels.
  tar -C "$work" -xzf "$bin/kernels.tgz" || echo "$bin/kernels.tgz was not unpacked" >&2
fi
# shellcheck source=bench/gpu/env.sh
. "$here/env.sh"
# The product keeps PTX there (zero/kernels), the driver what it makes of it, and Burn's tuner its choices.
export XDG_CACHE_HOME=$work CUDA_CACHE_PATH=$work/nv CUDA_CACHE_MAXSIZE=4294967296
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TMPDIR=/tmp here bin out work
cd "$work" || exit 2
case $call in
*b) limit=${LIMIT:-170} ;;
*) limit=${LIMIT:-540} ;;
esac
deadline=$((SECONDS + limit)) failed=0
exec > >(tee -a "$out/log.txt") 2>&1
tee=$!

# step NAME SECONDS COMMAND...
step() {
  local name=$1 seconds=$2 left=$((deadline - SECONDS)) begin=$SECONDS code word
  shift 2
  if ((left < 10)); then
    printf 'left out            %s\n' "$name" >>"$out/summary.txt"
    failed=1
    return
  fi
  ((seconds > left)) && seconds=$left
  printf '\n=== %s (at most %s s)\n' "$name" "$seconds"
  timeout -k 3 "$seconds" "$@"
  code=$?
  case $code in
  0) word=ok ;;
  124 | 137) word='cut' failed=1 ;;
  *) word="failed ($code)" failed=1 ;;
  esac
  printf '%-12s %4d s  %s\n' "$word" $((SECONDS - begin)) "$name" >>"$out/summary.txt"
  # tar exits with 1 if a file changed while it was read.
  timeout 15 tar -czf "$out/caches.tmp" -C "$work" --exclude ./bin . 2>/dev/null
  if (($? <= 1)); then mv "$out/caches.tmp" "$out/caches.tgz"; else rm -f "$out/caches.tmp"; fi
}

# laws PROGRAM SECONDS JOBS [FILTER]: each test of a program is a process, so that many cores compile kernels; a line for each.
laws() {
  local program=$bin/$1 each=$2 jobs=$3 names
  [[ -x $program ]] || { echo "$program does not exist"; return 1; }
  names=$("$program" --list | sed -n 's/: test$//p' | grep -vE 'compiled$|^rank$' | grep -E "${4:-.}") || { echo "$1 lists no test"; return 1; }
  # In the foreground, so that the limit of a step ends them too.
  xargs <<<"$names" -P "$jobs" -I{} bash -c '
      begin=$SECONDS log=$(mktemp)
      timeout --foreground -k 2 "$2" "$1" --exact "$3" --nocapture >"$log" 2>&1
      code=$?
      echo "law $code $((SECONDS - begin)) s $(basename "$1") $3"
      [[ $code = 0 ]] || tail -n 12 "$log" | cut -c1-300
      rm -f "$log"
      exit $((code != 0))' _ "$program" "$each" {}
}
speed() { "$PYTHON" "$here/speed.py" --ours "$bin/gpt2_1_5b" --data "$bin/rows-1024.safetensors" --out "$out/runs.jsonl" "$@"; }
gpt() { "$bin/gpt2_1_5b" --backend cuda --offload none --ranks 1 --stage 0 "$@"; }
# both NAME COMMAND...: the losses of a command with --backend cpu and cuda, beside each other.
both() {
  local name=$1 backend
  shift
  for backend in cpu cuda; do "$@" --backend "$backend" --json --out "/tmp/$name-$backend" >/dev/null || return; done
  "$PYTHON" - "$name" <<'PYTHON'
import json, sys
# A loss that is not finite is null.
number = lambda loss: float("nan") if loss is None else loss
losses = lambda backend: [number(json.loads(line)["loss"]) for line in open(f"/tmp/{sys.argv[1]}-{backend}/metrics.jsonl")]
cpu, cuda = losses("cpu"), losses("cuda")
apart = [abs(a - b) / abs(a) for a, b in zip(cpu, cuda, strict=True)]
print(f"{sys.argv[1]}: {len(cpu)} losses, {', '.join(f'{x:.1e}' for x in apart)} from the CPU's: {cuda}")
sys.exit(not all(x <= 1e-4 for x in apart))
PYTHON
}
generate() { # The same greedy text by both.
  local backend
  "$bin/gpt2_1_5b" --backend cpu --model tiny --ranks 1 --stage 0 --steps 2 --save /tmp/generate --json >/dev/null || return
  for backend in cpu cuda; do
    "$bin/zero" generate /tmp/generate/step-* --prompt "The king" --max-new-tokens 16 --backend $backend --json >"/tmp/generate-$backend" || return
  done
  cat /tmp/generate-cuda
  cmp /tmp/generate-cpu /tmp/generate-cuda
}
profile() { # MODEL: the time of every launch of the last of 3 steps
  local ncu
  ncu=$(gpu_profiler ncu)
  [[ -n $ncu ]] || { echo "ncu not found"; return 1; }
  "$ncu" --target-processes all --clock-control none --cache-control none --csv --page raw --print-units base --metrics gpu__time_duration.sum \
    --log-file "$out/ncu.csv" "$bin/gpt2_1_5b" --backend cuda --model "$1" --data "$bin/rows-1024.safetensors" --ranks 1 --stage 0 --batch 8 \
    --dtype bf16 --lr 1e-4 --steps 3 --offload none --decay-except nothing >/dev/null 2>"$work/ncu.err" || tail -n 3 "$work/ncu.err"
  "$PYTHON" "$here/kernels.py" --ncu "$out/ncu.csv" --steps 3 --top 40 --step-ms "$(grep -h "\"who\": \"ours\", \"model\": \"$1\", \"batch\": 8, .*\"ms\"" \
    "$out/runs.jsonl" | tail -n 1 | grep -o '"ms": [0-9.]*' | grep -o '[0-9.]*$' || echo 0)"
}
environment() {
  gpu_environment
  nvidia-smi -q -d CLOCK,POWER | grep -E 'Graphics|Current Power Limit|SM ' | head
}
export -f laws speed gpt both generate profile environment gpu_environment gpu_library gpu_profiler
run() { step "$1" "$2" bash -c "$3"; }

case $call in
1) # Kernels: right, how fast, and where a step's time goes.
  run "environment" 40 environment
  run "tests of kernels" 100 'code=0; laws t_zero_ops 60 8 cube:: || code=1; laws t_cube_operations 60 8 || code=1; laws t_cube_optim 60 6 || code=1; exit $code'
  step "products compared with cuBLAS" 110 "$PYTHON" "$here/products.py" --include "${CUDA_PATH:-/usr/local/cuda}/include"
  run "124M" 160 'speed --model gpt2 --steps 40 --each 75 --runs ours,plain:master,plain:autocast,ours,plain:autocast:model,plain:master:model,transformers:master'
  run "kernels of 124M" 75 'profile gpt2'
  run "1.5B, ours" 70 'speed --model gpt2-xl --steps 16 --warmup 6 --each 65 --runs ours'
  run "124M, 64 rows, as public figures" 45 'speed --model gpt2 --batch 64 --steps 10 --warmup 4 --each 40 --runs ours'
  ;;
1b) # What the larger ones are compared with.
  run "1.5B" 110 'speed --model gpt2-xl --steps 12 --warmup 4 --each 70 --runs plain:master,plain:master:blocks,ours'
  run "350M" 60 'speed --model gpt2-medium --steps 24 --each 45 --runs ours,plain:master:blocks'
  ;;
2) # All laws; what stages take.
  run "laws of devices" 130 'laws t_devices 120 8'
  run "laws of the decorator" 170 'export CUBECL_AUTOTUNE_LEVEL=0 ZERO_DEADLINE=150; laws t_laws_device 160 12'
  step "parity" 90 "$PYTHON" "$here/parity.py" --ours "$bin/gpt2_1_5b" --backend cuda --jobs 6 --budget 80 --out "$out/parity.jsonl" \
    --cpu-from "$bin/cpu.jsonl"
  step "memory of stages" 90 "$PYTHON" "$here/memory.py" --ours "$bin/gpt2_1_5b" --model gpt2 --dtype bf16 --steps 15 --budget 80 \
    --out "$out/memory.jsonl"
  ;;
2b) # One layer of 1.5B by all counters.
  step "profile of one layer" 150 env LAYERS=1 LIMIT=70 "$here/profile.sh" "$bin/gpt2_1_5b" "$out" "$bin/rows-1024.safetensors"
  ;;
3) # Features on the device.
  run "LoRA" 60 'for r in 8 4; do both lora-$r "$bin/zero" train --weights "$bin/fixtures/gpt2_tiny" --data "$bin/fixtures/gpt2_tiny/batches.safetensors" --lora-r $r --ranks 1 --stage 0 --steps 6 --offload none || exit; done'
  run "generation" 90 generate
  run "fp16, heads of 64" 45 'gpt --model mini --seq 128 --batch 4 --dtype fp16 --steps 12 --json --out /tmp/fp16 >/dev/null && tail -n 2 /tmp/fp16/metrics.jsonl | cut -c1-200'
  run "moments in bf16" 30 'gpt --model mini --seq 128 --batch 2 --steps 8 --bf16-optimizer-states --json --out /tmp/moments >/dev/null && tail -n 1 /tmp/moments/metrics.jsonl | cut -c1-200'
  run "350M, optimizer state in host memory" 70 'speed --model gpt2-medium --steps 8 --warmup 3 --each 60 --runs ours --with "--stage 2 --offload optimizer --offload-to host"'
  run "124M, optimizer state on a disk" 50 'speed --model gpt2 --steps 8 --warmup 3 --each 45 --runs ours --with "--stage 2 --offload optimizer --offload-to disk --swap /tmp"'
  run "124M, activations checkpointed and offloaded" 50 'speed --model gpt2 --steps 12 --warmup 4 --each 45 --runs ours --with "--checkpoint-activations --offload-activations"'
  step "NCCL, one rank" 75 "$here/nccl.sh" "$bin/nccl_check" 64
  ;;
3b) # NCCL between two processes on one GPU. To NCCL each is a host, and sockets carry the bytes: for its order and layouts, not for speed.
  export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 NCCL_SOCKET_IFNAME=lo ZERO_HOSTIDS=1
  step "NCCL, two ranks on one GPU, stages 0 to 3" 160 "$here/../../tests/processes.sh" "$bin/gpt2_1_5b" cuda 2
  ;;
esac
printf '\n=== call %s: %s s\n' "$call" $((SECONDS - deadline + limit))
cat "$out/summary.txt"
exec >&- 2>&-
# Waits until the log is written, for at most 5 s: a process that still runs may keep it open.
timeout 5 tail --pid="$tee" -f /dev/null
exit $failed
