#!/usr/bin/env bash
# Both fronts have the same losses on 1 to 4 ranks, threads and processes, at all stages: bit by bit within a front, within 1e-6 from
# one to the other. And a run goes on from one to the other, with the same bits of parameters and moments: across.sh ZERO GPT2, the
# binaries of `zero` (Burn 0.21) and of zero-param's example (Burn 0.22).
set -euo pipefail
zero=$(realpath "$1") gpt2=$(realpath "$2")
fixture=$(cd "$(dirname "$0")/../../tests/fixtures/gpt2_tiny" && pwd)
model=$fixture
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ranks_are=threads
of_0_21() { # The arguments of `zero`, whose `train` is a program as well.
  case $ranks_are in
  threads) "$zero" "$@" ;;
  processes) "$zero" launch --sockets --ranks "$ranks" -- "$@" ;;
  esac
}
of_0_22() {
  case $ranks_are in
  threads) "$gpt2" "$@" ;;
  processes) "$zero" launch --sockets --ranks "$ranks" -- "$gpt2" "$@" ;;
  esac
}
on_0_21() { # STEPS FOLDER [options]
  of_0_21 train --weights "$model" --data "$fixture/batches.safetensors" --steps "$1" --batch 2 --ranks "$ranks" --stage "$stage" \
    --shuffle false --decay-except nothing --save "$work/$2" --save-every 3 --out "$work/$2-out" "${@:3}" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
  python3 -c 'import json, sys; [print(json.loads(line)["loss"]) for line in open(sys.argv[1])]' "$work/$2-out/metrics.jsonl"
}
on_0_22() { # STEPS FOLDER [options]
  of_0_22 --folder "$model" --stage "$stage" --ranks "$ranks" --batch $((2 * ranks)) --steps "$1" --save "$work/$2" \
    --persistence-threshold 0 "${@:3}" 2>"$work/log" || { cat "$work/log" >&2; exit 1; } # All but vectors are cut.
}
same() { # FILE FILE
  python3 - "$@" <<'PYTHON'
import sys
a, b = ([float(line) for line in open(file)] for file in sys.argv[1:])
assert len(a) == len(b) and a, (a, b)
worst = max(abs(x - y) / y for x, y in zip(a, b))
assert worst < 1e-6, (worst, a, b)
print(f"  {len(a)} losses, largest relative difference {worst:.1e}")
PYTHON
}

for ranks in 1 2 3 4; do
  echo "$ranks rank(s), all stages"
  for ranks_are in threads processes; do
    [ "$ranks $ranks_are" != '1 processes' ] || continue # That is alone too.
    for stage in 0 1 2 3; do
      name=$ranks-$ranks_are-$stage
      on_0_21 6 "$name-old" >"$work/$name-old.losses"
      on_0_22 6 "$name-new" >"$work/$name-new.losses"
      for front in old new; do
        diff "$work/$ranks-threads-0-$front.losses" "$work/$name-$front.losses" ||
          { echo "$ranks $ranks_are at stage $stage: other bits than threads at stage 0 ($front)"; exit 1; }
      done
    done
  done
  same "$work/$ranks-threads-0-new.losses" "$work/$ranks-threads-0-old.losses"
done
ranks_are=threads ranks=2 stage=3

goes_on() { # NAME OPTIONS-OF-0.21 OPTIONS-OF-0.22
  local name=$1 saved=$work/$1-old/step-00000003 old new
  read -ra old <<<"$2"
  read -ra new <<<"$3"
  on_0_21 6 "$name-old" "${old[@]}" >"$work/old.losses"
  tail -n 3 "$work/old.losses" >"$work/expected"
  echo "$name: from 0.21 to 0.22 and back, without an update: every bit is the same"
  on_0_22 3 "$name-copy" --resume "$saved" "${new[@]}"
  "$zero" diff "$saved" "$work/$name-copy/step-00000003" --json >"$work/diff" || { cat "$work/diff"; exit 1; }
  echo "$name: three steps more, on 0.22 and back on 0.21"
  on_0_22 6 "$name-new" --resume "$saved" "${new[@]}" >"$work/new.losses"
  same "$work/new.losses" "$work/expected"
  on_0_21 6 "$name-back" --resume "$work/$name-copy/step-00000003" "${old[@]}" >"$work/back.losses"
  same "$work/back.losses" "$work/expected"
}
goes_on AdamW '' ''
cat >"$work/lamb.json" <<'JSON'
{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}, "gradient_clipping": 0,
 "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}}}
JSON
goes_on LAMB "--config $work/lamb.json" '--optimizer lamb'
# Masks are the same: they follow from seed, rank and draw.
model=$work/dropping
cp -r "$fixture" "$model"
sed -i 's/_pdrop": 0.0/_pdrop": 0.1/' "$model/config.json"
goes_on dropout '' ''
