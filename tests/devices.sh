#!/usr/bin/env bash
# The GPT-2 command on devices: `tests/devices.sh GPT2_1_5B [full]`, a build with the features cuda and vulkan. What it says
# where there is none; with `full` also a run on a Vulkan device beside one on the processor (Mesa's lavapipe serves; minutes,
# while kernels are compiled).
set -euo pipefail
binary=${1:?usage: tests/devices.sh GPT2_1_5B [full]}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $1" >&2; exit 1; }

# Bad input: exit code 2 and one message that says what is missing.
refused() {
  local what=$1 words=$2 code=0
  shift 2
  "$@" >"$work/out" 2>"$work/err" || code=$?
  [ "$code" = 2 ] || fail "$what: exit code $code: $(cat "$work/err")"
  grep -q "$words" "$work/err" || fail "$what: $(cat "$work/err")"
  if [ "$(wc -l <"$work/err")" != 1 ] || grep -q panicked "$work/err"; then fail "$what: more than one message: $(cat "$work/err")"; fi
  echo "ok: $what: $(cat "$work/err")"
}
if ! ldconfig -p | grep -q 'libcuda\.so'; then
  refused 'no CUDA driver' 'no NVIDIA driver was found' "$binary" --backend cuda --model tiny --steps 1
fi
refused 'no Vulkan driver' 'no device with a Vulkan driver was found' \
  env VK_ICD_FILENAMES=/nonexistent VK_DRIVER_FILES=/nonexistent "$binary" --backend vulkan --model tiny --steps 1

[ "${2:-}" = full ] || exit 0

# The same losses as on the processor, and memory that does not grow.
arguments=(--model tiny --steps 6 --seq 32 --ranks 2 --stage 3 --json)
"$binary" "${arguments[@]}" --out "$work/cpu" >/dev/null
echo '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "memory_breakdown": true}' >"$work/ds.json"
"$binary" "${arguments[@]}" --backend vulkan --config "$work/ds.json" --out "$work/vulkan" >/dev/null 2>"$work/err"
awk '/^total peak/ { seen = $NF > 0 } END { exit !seen }' "$work/err" || fail "no memory of the device: $(cat "$work/err")"
python3 - "$work" <<'PYTHON'
import json, sys
read = lambda name: [json.loads(line) for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
cpu, vulkan = read("cpu"), read("vulkan")
worst = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(cpu, vulkan, strict=True))
assert worst < 1e-4, f"losses differ by {worst}"
assert all(step["device_bytes_in_use"] > 0 for step in vulkan) and cpu[0]["device_bytes_in_use"] is None
for a, b in zip(cpu, vulkan):
    assert [rank["wire_bytes"] for rank in a["ranks"]] == [rank["wire_bytes"] for rank in b["ranks"]], "bytes between ranks"
print(f"ok: 6 steps of 2 ranks at stage 3 on a Vulkan device: losses within {worst:.1e} of the processor's, the same bytes")
PYTHON
