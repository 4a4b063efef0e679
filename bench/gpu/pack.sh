#!/usr/bin/env bash
# On a machine without a GPU: builds everything that bench/gpu/queue.sh runs, compiles its kernels, and packs target/gpu-bin.tar.xz.
#   bench/gpu/pack.sh [--quick]
# The archive has release programs (gpt2_1_5b, zero, nccl_check), test programs (t_*), fixtures, rows of tokens, the CPU's losses for
# parity.py, and kernels.tgz: the PTX of all kernels of these runs, compiled by NVIDIA's compiler with the dry driver (dry.sh).
# --quick packs only gpt2_1_5b with the kernels of the smallest preset, to try the scripts. Exit codes: 0; 1 when a step failed or the archive
# is too large for a slot; 2 for bad arguments.
set -euo pipefail
case ${1:-} in
'') quick= ;;
--quick) quick=1 ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -n -1 >&2; exit 2 ;;
esac
cd "$(dirname "$0")/../.."
# The CUDA of the machine that runs it; the build needs none.
export CUDARC_CUDA_VERSION=13000 CARGO_INCREMENTAL=0
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
# A slot takes 64 MiB, of which the checkout is a part.
most=$(((63 << 20) - $({ git ls-files -z -co --exclude-standard | xargs -0 stat -c %s 2>/dev/null || true; } | awk '{ sum += $1 } END { printf "%d", sum }')))
bin=$target/gpu-bin warm=$target/gpu-warm archive=$target/gpu-bin.tar.xz
rm -rf "$bin" "$warm" "$archive"
mkdir -p "$bin" "$warm"
say() { printf '== %s (%s s)\n' "$1" "$SECONDS"; }

say "programs"
# One set of packages and features for all, so that every crate is compiled once.
packages=(-p zero-examples -p zero-train-cli -p zero-core -p zero-ops -p zero-tests -p zero-burn)
packages+=(--features zero-examples/cuda,zero-train-cli/cuda,zero-core/nccl,zero-ops/cuda,zero-tests/cuda,zero-burn/cuda)
if [[ -n $quick ]]; then
  cargo build --release --quiet "${packages[@]}" --example gpt2_1_5b
else
  cargo build --release --quiet "${packages[@]}" --example gpt2_1_5b --example nccl_check --bin zero
  cp "$target/release/zero" "$target/release/examples/nccl_check" "$bin"
  say "test programs"
  names=(cube_operations cube_optim devices laws_device)
  cargo test --release --quiet --no-run "${packages[@]}" --lib "${names[@]/#/--test=}" --message-format=json | python3 -c '
import json, shutil, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("reason") == "compiler-artifact" and message["profile"]["test"] and message["target"]["name"] in sys.argv[2:]:
        shutil.copy(message["executable"], sys.argv[1] + "/t_" + message["target"]["name"])' "$bin" zero_ops "${names[@]}"
  for name in zero_ops "${names[@]}"; do [[ -x $bin/t_$name ]] || { echo "error: the test program $name was not built" >&2; exit 1; }; done
fi
cp "$target/release/examples/gpt2_1_5b" "$bin"
strip "$bin"/*
mkdir "$bin/fixtures"
cp -r tests/fixtures/gpt2_tiny "$bin/fixtures"
rows=$bin/rows-1024.safetensors
python3 bench/gpu/make_rows.py --bpe "$(ls "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/tiktoken-rs-*/assets/r50k_base.tiktoken | head -n 1)" "$rows"

say "losses of the CPU"
# parity.py's own runs, so that no slot waits for a processor. It ends with 1 where a device's runs are missing: here all are.
python3 bench/gpu/parity.py --ours "$bin/gpt2_1_5b" --backend cpu --dtypes fp32 ${quick:+--model tiny --steps 2} --out "$bin/cpu.jsonl"

say "kernels"
# With the options that the queue's runs have: other groups of parameters are other kernels.
train() {
  XDG_CACHE_HOME=$warm DRY_OUT=$warm nice bench/gpu/dry.sh run "$bin/gpt2_1_5b" --backend cuda --ranks 1 --stage 0 --steps 2 --offload none "$@" \
    >/dev/null
}
train --model tiny
if [[ -z $quick ]]; then
  train --model tiny --dtype bf16
  for dtype in fp32 bf16 fp16; do train --model mini --seq 128 --batch 2 --dtype "$dtype"; done
  for model in gpt2 gpt2-medium gpt2-xl; do
    train --model "$model" --data "$rows" --batch 8 --dtype bf16 --lr 1e-4 --decay-except nothing
  done
  train --model gpt2 --data "$rows" --batch 64 --dtype bf16 --lr 1e-4 --decay-except nothing
  train --model gpt2 --data "$rows" --batch 8 --dtype bf16 --lr 1e-4 --decay-except nothing --checkpoint-activations
fi
tar -C "$warm" -czf "$bin/kernels.tgz" zero

say "archive"
# The programs share most of their code.
tar -C "$bin" -c . | xz -T2 -6 --lzma2=preset=6,dict=192MiB >"$archive"
tar -tvJf "$archive" | awk '{ printf "%10.1f MiB  %s\n", $3 / 1048576, $6 }' | sort -rn | head -n 30
bytes=$(stat -c %s "$archive")
printf 'target/gpu-bin.tar.xz: %.1f MiB, built in %s s\n' "$(awk "BEGIN { print $bytes / 1048576 }")" "$SECONDS"
((bytes <= most)) || { echo "error: the archive may have $((most >> 20)) MiB: leave out t_laws_device for this slot" >&2; exit 1; }
