#!/usr/bin/env bash
# Creates the token rows if they do not exist, and runs compare.py with the given options (see compare.py --help):
#   bench/gpu/compare.sh target/release/examples/gpt2_1_5b [SEQ] [OPTIONS...]         SEQ: tokens per row, default 1024
# Rows have GPT-2's tokens if the crate tiktoken-rs is on the machine (it is where ours was built), else bytes. They are stored in
# ROWS (default target/gpu/rows-SEQ.safetensors). PYTHON is a Python with PyTorch (default python3).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if (($# == 0)) || [[ $1 = -h || $1 = --help ]]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  exit $(($# == 0 ? 2 : 0))
fi
ours=$1 seq=1024
shift
if (($#)) && [[ $1 =~ ^[0-9]+$ ]]; then
  seq=$1
  shift
fi
rows=${ROWS:-$here/../../target/gpu/rows-$seq.safetensors} python=${PYTHON:-python3}
if [[ ! -e $rows ]]; then
  table=("${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/tiktoken-rs-*/assets/r50k_base.tiktoken)
  bpe=()
  [[ -e ${table[0]} ]] && bpe=(--bpe "${table[0]}")
  python3 "$here/make_rows.py" --seq "$seq" "${bpe[@]}" "$rows"
fi
exec "$python" "$here/compare.py" --ours "$ours" --data "$rows" "$@"
