#!/usr/bin/env bash
# Trains on x86-64 processors without AVX-512, and without AVX, in emulation (Debian: qemu-user): `zero-train/tests/old_processors.sh
# BINARY DATA`. Losses are those of this processor to fp32 rounding, in bf16 to the rounding of 16 bit.
set -euo pipefail
zero=${1:?old_processors.sh BINARY DATA} data=${2:?old_processors.sh BINARY DATA}
command -v qemu-x86_64 >/dev/null || { echo 'no emulation: apt-get install qemu-user' >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
train() { # NAME DTYPE COMMAND...
  local name=$1 dtype=$2
  shift 2
  "$@" train --model tiny --steps 3 --seq 16 --batch 1 --ranks 2 --stage 3 --seed 5 --dtype "$dtype" --data "$data" --out "$work/$name-$dtype" \
    >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
for dtype in fp32 bf16; do
  train here "$dtype" "$zero"
  for processor in Haswell Nehalem; do
    train $processor "$dtype" qemu-x86_64 -cpu $processor "$zero"
    python3 - "$work/here-$dtype" "$work/$processor-$dtype" "$processor, $dtype" <<'PYTHON'
import json, sys
read = lambda name: [json.loads(line)["loss"] for line in open(f"{name}/metrics.jsonl")]
here, there = read(sys.argv[1]), read(sys.argv[2])
worst = max(abs(a - b) / a for a, b in zip(here, there, strict=True))
assert len(here) == 3 and worst < (1e-5 if "fp32" in sys.argv[3] else 2e-3), f"{sys.argv[3]}: {here}, {there}"
print(f"ok: {sys.argv[3]}: losses within {worst:.1e}")
PYTHON
  done
done
