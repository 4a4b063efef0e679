#!/usr/bin/env bash
# Trains on x86-64 processors without AVX-512, and without AVX, in emulation (Debian: qemu-user): `zero-train-cli/tests/old_processors.sh
# BINARY DATA [AARCH64]`. Losses are those of this processor to fp32 rounding, in bf16 to the rounding of 16 bit. AARCH64 is the same binary for
# Arm, run too (Debian: gcc-aarch64-linux-gnu): `rustup target add aarch64-unknown-linux-gnu` and
# `CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc cargo build -p zero-train-cli --bin zero --target aarch64-unknown-linux-gnu`.
set -euo pipefail
usage='old_processors.sh BINARY DATA [AARCH64]'
zero=${1:?$usage} data=${2:?$usage} arm=${3:-}
processors=(Haswell Nehalem ${arm:+Arm})
on() { # PROCESSOR: the command of a binary for it
  case $1 in
    Arm) echo "qemu-aarch64 -L /usr/aarch64-linux-gnu $arm" ;;
    *) echo "qemu-x86_64 -cpu $1 $zero" ;;
  esac
}
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
  for processor in "${processors[@]}"; do
    # shellcheck disable=SC2046
    train "$processor" "$dtype" $(on "$processor")
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
