#!/usr/bin/env bash
# Runs zero-core's example nccl_check on one GPU: the checks with world size 1, and all ways in which a start can fail.
# Each failure must end in time, with the expected exit code and message.
#   bench/gpu/nccl.sh BINARY [MIB]         MIB: size for the rates, default 256
# Exit codes of the example: 0 success, 1 a check failed, 2 the setup must be changed, 75 another rank is late.
# Exit codes: 0; 1 when a case ended differently; 2 for bad arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if (($# < 1)) || [[ $1 = -h || $1 = --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  exit 2
fi
binary=$1 size=${2:-256}
[[ -x $binary ]] || { echo "error: $binary cannot be executed: build it (bench/gpu/README.md)" >&2; exit 2; }
[[ $size =~ ^[1-9][0-9]*$ ]] || { echo "error: $size: expected a number of MiB" >&2; exit 2; }
binary=$(realpath "$binary")
# shellcheck source=bench/gpu/env.sh
. "$here/env.sh"
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT
port=$((20000 + $$ % 20000)) failed=0 cases=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# judge NAME EXPECTED WORDS CODE SECONDS: a line about a case whose output, in $output, must have the words.
judge() {
  local word=ok
  cases=$((cases + 1))
  if [[ $2 != "$4" ]] || ! grep -qE -- "$3" "$output"; then
    word=FAILED failed=$((failed + 1))
  fi
  printf '%-6s %-52s exit code %s (expected %s, with "%s"), %s s\n' "$word" "$1" "$4" "$2" "$3" "$5"
  sed 's/^/         /' "$output"
}

# expect NAME EXPECTED WORDS SECONDS COMMAND...
expect() {
  local name=$1 code=$2 words=$3 seconds=$4 begin=$SECONDS
  shift 4
  timeout -k 5 "$seconds" "$@" >"$output" 2>&1
  judge "$name" "$code" "$words" $? $((SECONDS - begin))
}

expect "one rank, no environment" 0 "abort at the deadline" 120 "$binary" "$size"
expect "one rank, as torchrun sets it" 0 "abort at the deadline" 120 env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$binary" 8
expect "an argument that is not a number" 2 "expected a number" 20 "$binary" many
expect "RANK is not a number" 2 "RANK: expected" 20 env RANK=x WORLD_SIZE=2 "$binary"
expect "RANK without WORLD_SIZE" 2 "WORLD_SIZE: expected" 20 env RANK=0 "$binary"
expect "RANK not below WORLD_SIZE" 2 "RANK: expected" 20 env RANK=3 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$binary"
expect "no MASTER_ADDR" 2 "MASTER_ADDR: expected" 20 env RANK=0 WORLD_SIZE=2 "$binary"
expect "MASTER_PORT is not a port" 2 "MASTER_PORT: expected" 20 env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 "$binary"
expect "no visible device" 2 "device|CUDA_VISIBLE_DEVICES|GPU" 60 env CUDA_VISIBLE_DEVICES= "$binary" 8
# Of several GPUs a process has the one of its place; the only one that it sees is its own, whatever its place.
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if ((gpus > 1)); then
  expect "a device that does not exist" 2 "no GPU $gpus" 60 env RANK=0 WORLD_SIZE=1 LOCAL_RANK="$gpus" "$binary" 8
else
  expect "the only device, with another LOCAL_RANK" 0 "abort at the deadline" 60 env RANK=0 WORLD_SIZE=1 LOCAL_RANK=7 "$binary" 8
fi
expect "rank 0 of 2, rank 1 does not start" 75 rank 60 env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 1)) "$binary" 8 5
expect "rank 1 of 2, nobody listens" 75 rank 60 env RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 2)) "$binary" 8 5

# Two ranks that both choose the one GPU, which NCCL does not take.
begin=$SECONDS other=$(mktemp)
env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 3)) timeout -k 5 60 "$binary" 8 20 >"$other" 2>&1 &
second=$!
env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 3)) timeout -k 5 60 "$binary" 8 20 >"$output" 2>&1
judge "two ranks on one GPU, rank 0" 2 "both use the GPU" $? $((SECONDS - begin))
wait "$second"
code=$?
cp "$other" "$output"
rm -f "$other"
judge "two ranks on one GPU, rank 1" 2 "both use the GPU" "$code" $((SECONDS - begin))

if ldconfig -p 2>/dev/null | grep -q libnccl; then
  echo "–      no libnccl: skipped, because the loader's cache has one"
else
  # The driver's folders stay, those with NCCL go.
  without=""
  for folder in ${LD_LIBRARY_PATH//:/ }; do
    compgen -G "$folder/libnccl.so*" >/dev/null || without=${without:+$without:}$folder
  done
  expect "no libnccl" 2 "libnccl cannot be used" 60 env LD_LIBRARY_PATH="$without" "$binary" 8
fi
echo "$((cases - failed)) of $cases cases ended as expected"
exit $((failed > 0))
