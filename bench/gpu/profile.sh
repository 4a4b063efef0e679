#!/usr/bin/env bash
# Profiles a few steps of ours on a GPU. Writes kernels by time, and the three slowest relative to the GPU's speed of light, to OUT/kernels.txt.
#   bench/gpu/profile.sh BINARY OUT [ROWS.safetensors]
# The model has GPT-2 1.5B's width, heads and vocabulary but LAYERS blocks (default 4), so that ncu, which runs each kernel
# several times, finishes complete steps in a minute or two: shapes are those of the full model, but the head's share of the time is not.
# Environment variables: LAYERS, WIDTH and HEADS (1600, 25), BATCH (8), STEPS (3), STAGE (0), DTYPE (bf16), MAX launches that ncu profiles (6000), LIMIT
# seconds per attempt (240), TOOLS in the order in which they are tried ("ncu nsys cubecl").
# ncu gives times and speed of light. If it may not read the counters, nsys and then CubeCL's own timer give times only.
# Clocks do not change (--clock-control none). Exit codes: 0; 1 when no tool gave results; 2 for bad arguments.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if (($# < 2)); then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  exit 2
fi
binary=$1 out=$2 rows=${3:-}
layers=${LAYERS:-4} width=${WIDTH:-1600} heads=${HEADS:-25} batch=${BATCH:-8} steps=${STEPS:-3} stage=${STAGE:-0} dtype=${DTYPE:-bf16} most=${MAX:-6000} limit=${LIMIT:-240}
backend=${BACKEND:-cuda}
[[ -x $binary ]] || { echo "error: $binary cannot be executed: build it (bench/gpu/README.md)" >&2; exit 2; }
[[ -z $rows || -f $rows ]] || { echo "error: $rows does not exist: create it with bench/gpu/make_rows.py" >&2; exit 2; }
for number in "$layers" "$width" "$heads" "$batch" "$steps" "$most" "$limit"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "error: '$number': expected LAYERS, WIDTH, HEADS, BATCH, STEPS, MAX and LIMIT to be whole numbers of at least 1" >&2; exit 2; }
done
# shellcheck source=bench/gpu/env.sh
. "$here/env.sh"
mkdir -p "$out" || exit 2
out=$(realpath "$out") binary=$(realpath "$binary")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/model"
cat >"$work/model/config.json" <<JSON
{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": $width, "n_layer": $layers, "n_head": $heads,
 "activation_function": "gelu_new", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "layer_norm_epsilon": 1e-5}
JSON
command=("$binary" --backend "$backend" --model "$work/model" --ranks 1 --stage "$stage" --batch "$batch" --dtype "$dtype" --offload none --json)
if [[ -n $rows ]]; then
  command+=(--data "$(realpath "$rows")")
else
  command+=(--seq 1024)
fi

{
  echo "width $width, $heads heads, $layers blocks, batch $batch, stage $stage, $dtype, --backend $backend"
  gpu_environment
} >"$out/kernels.txt"
# Once without a profiler: tunes and compiles what the next runs find in the cache, and is the time to compare with.
if ! timeout -k 5 "$limit" "${command[@]}" --steps 8 --out "$work/plain" >"$work/plain.json" 2>"$work/plain.err"; then
  echo "error: the run without a profiler failed: $(tail -n 3 "$work/plain.err")" | tee -a "$out/kernels.txt" >&2
  exit 1
fi
step_ms=$("${PYTHON:-python3}" - "$work/plain/metrics.jsonl" <<'PYTHON'
import json, statistics, sys
print(statistics.median([json.loads(line)["step_ms"] for line in open(sys.argv[1])][3:]))
PYTHON
)

metrics=gpu__time_duration.sum,sm__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active

# with_ncu OPTIONS...: a profile into ncu.csv, and its tables.
with_ncu() {
  timeout -k 5 "$limit" "$ncu" --target-processes all --clock-control none --cache-control none --csv --print-units base \
    --launch-count "$most" --kill yes --log-file "$work/ncu.csv" "$@" "${command[@]}" --steps "$steps" >"$work/ncu.out" 2>&1
  local code=$?
  cp "$work/ncu.csv" "$out/ncu.csv" 2>/dev/null
  "$PYTHON" "$here/kernels.py" --ncu "$work/ncu.csv" --steps "$steps" --step-ms "$step_ms" >"$work/tables" 2>"$work/tables.err" && return
  echo "ncu ($ncu), exit code $code: $(grep -hE '==(ERROR|WARNING)==' "$work/ncu.csv" "$work/ncu.out" 2>/dev/null | tail -n 3)" \
    "$(tail -n 1 "$work/tables.err")"
  grep -qhE 'ERR_NVGPUCTRPERM' "$work/ncu.csv" "$work/ncu.out" 2>/dev/null &&
    echo "ncu may not read the performance counters: run as root, or set the driver option NVreg_RestrictProfilingToAdminUsers=0"
  return 1
}

try_ncu() {
  ncu=$(gpu_profiler ncu)
  [[ -n $ncu ]] || { echo "ncu is missing: looked in PATH, CUDA_PATH, /usr/local/cuda* and /opt/nvidia"; return 1; }
  with_ncu --page raw --metrics "$metrics" || with_ncu --page details --section SpeedOfLight --section Occupancy
}

try_nsys() {
  local nsys
  nsys=$(gpu_profiler nsys)
  [[ -n $nsys ]] || { echo "nsys is missing: looked in PATH, CUDA_PATH, /usr/local/cuda* and /opt/nvidia"; return 1; }
  timeout -k 5 "$limit" "$nsys" profile -t cuda -s none --cpuctxsw=none -f true -o "$work/nsys" "${command[@]}" --steps "$steps" >"$work/nsys.out" 2>&1
  timeout -k 5 120 "$nsys" stats --report cuda_gpu_kern_sum --format csv "$work/nsys.nsys-rep" >"$work/nsys.csv" 2>>"$work/nsys.out"
  "$PYTHON" "$here/kernels.py" --nsys "$work/nsys.csv" --steps "$steps" --step-ms "$step_ms" >"$work/tables" 2>/dev/null && return
  echo "nsys ($nsys) gave no results: $(tail -n 2 "$work/nsys.out")"
  return 1
}

# CubeCL reads cubecl.toml in the current folder. It waits for every kernel, so its times are of kernels run one by one.
try_cubecl() {
  mkdir -p "$work/cubecl"
  {
    [[ -f cubecl.toml ]] && cat cubecl.toml
    printf '[profiling.logger]\nlevel = "medium"\nfile = "%s"\nappend = false\n' "$work/cubecl/log"
  } >"$work/cubecl/cubecl.toml"
  (cd "$work/cubecl" && timeout -k 5 "$limit" "${command[@]}" --steps "$steps" >"$work/cubecl.out" 2>&1)
  "$PYTHON" "$here/kernels.py" --cubecl "$work/cubecl/log" --steps "$steps" >"$work/tables" 2>/dev/null && return
  echo "CubeCL's log has no times: $(tail -n 2 "$work/cubecl.out")"
  return 1
}

for tool in ${TOOLS:-ncu nsys cubecl}; do
  [[ $tool =~ ^(ncu|nsys|cubecl)$ ]] || { echo "error: TOOLS has '$tool': expected some of: ncu nsys cubecl" >&2; exit 2; }
  if "try_$tool" >"$work/why"; then
    { cat "$work/why"; echo "by $tool:"; cat "$work/tables"; } >>"$out/kernels.txt"
    cat "$out/kernels.txt"
    exit 0
  fi
  tee -a "$out/kernels.txt" <"$work/why"
done
echo "error: no profiler gave kernel times; see $out/kernels.txt for the reasons" >&2
exit 1
