#!/usr/bin/env bash
# Checks that memory does not grow with the size of the data: `bench/data_stream.sh [GB]` (default 10) writes GB of random token ids to
# .data-stream in the current folder, trains GPT-2 tiny on it, shuffled, and prints the peak memory of the process and that of the same
# run on a small file. Exits with 1 if the difference is 1 GiB or more.
set -euo pipefail
gb=${1:-10}
work=.data-stream
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
python3 - "$gb" "$work" <<'PY'
import json, os, struct, sys
gb, work = float(sys.argv[1]), sys.argv[2]
# Ids below 50257, in a part that is repeated.
part = b"".join(struct.pack("<H", value % 50257) for value in memoryview(os.urandom(2 << 20)).cast("H")) * 16
for name, parts in (("large", int(gb * 1e9 / len(part))), ("small", 1)):
    size = parts * len(part)
    header = json.dumps({"input_ids": {"dtype": "U16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with open(f"{work}/{name}.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(parts):
            file.write(part)
PY
[ -n "${ZERO:-}" ] || cargo build --release --quiet --bin zero
zero=${ZERO:-${CARGO_TARGET_DIR:-target}/release/zero}
for name in small large; do
  begin=$(date +%s)
  "$zero" train --model tiny --data "$work/$name.safetensors" --shuffle --batch 8 --steps 50 --ranks 2 --json \
    --out "$work/$name" >"$work/$name.json" 2>"$work/$name.log" || { cat "$work/$name.log"; exit 1; }
  echo "$name: $(du -h --apparent-size "$work/$name.safetensors" | cut -f1), $(($(date +%s) - begin)) s in total"
done
python3 - "$work" <<'PY'
import json, sys
peak = {name: json.load(open(f"{sys.argv[1]}/{name}.json"))["peak_rss_bytes"] for name in ("small", "large")}
for name, value in peak.items():
    print(f"{name}: peak memory of the process {value / 2**20:.0f} MiB")
sys.exit(peak["large"] - peak["small"] >= 1 << 30)
PY
