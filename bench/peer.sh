#!/usr/bin/env bash
# Compares ours with its peers (torch, torch DDP, DeepSpeed, FSDP2) on the same work on two CPUs, in alternating runs (A B A B ...).
# Prints tables of tokens/s and peak memory, ratios with their minimums and goals, and the cost of more ranks.
#   bench/peer.sh [--venv DIR] [--no-build] [OPTIONS]         all rows (hours); --list prints the rows, --help all options
#   bench/peer.sh --model A --only 'torch$' --rounds 1        a quick look
#   bench/peer.sh --before BINARY                            ours beside an earlier build of it; needs no peers
#   bench/peer.sh --table FILE                                prints the tables of earlier results again
# The peers are installed once (4 GB) from bench/peer/requirements.lock into DIR, default $ZERO_PEERS_VENV or
# ~/.cache/zero-peers. An existing virtual environment that has them is used unchanged. Results are stored as one JSON line
# per run in target/peer/results.jsonl (--out). Exit codes: 0, 1 if a run failed, 2 for bad arguments or missing tools.
#
# All have the same work: GPT-2 of the same size with tied embeddings, dropout 0; fp32; AdamW with the same settings; rows
# of 256 random tokens (1,024 where stated), all positions through the head; batch per rank, ranks, compute threads per rank; the two CPUs.
# - torch: sdpa attention, fused AdamW, the stated number of OMP and MKL threads; DDP with gradients as views of its buckets.
# - DeepSpeed: DeepSpeedCPUAdam, its default bucket sizes. It builds its shared-memory op, but only inference uses that:
#   training reduces and gathers through gloo.
# - Rows with state on a disk (in the temporary folder) offload all state. DeepSpeed's asynchronous I/O needs libaio-dev and is compiled
#   in its first run, which takes minutes. Its `ratio` applies only to host memory, where all ranks compute here anyway; in that
#   comparison ours keeps half of the state on the disk.
# - FSDP2: one shard group per block and one for the rest; at stage 2 parameters stay gathered from forward to backward.
# - Ranks of peers are processes that communicate through gloo over loopback; ours are threads of one process. The comparison
#   includes this difference in design.
# Speed: the median step after the warm-up. A peer's step is the slowest rank's forward, backward and update. Ours is the
# time between two lines of metrics.jsonl, by the kernel's timestamps of these writes. It includes all work and waiting of a rank,
# also creating the batch and writing the line. (`tokens_per_second` of our --json is rank 0's own timer, without waiting for
# other ranks after the update, as the median without the first step; the results contain it too.)
# Memory: the sum over ranks of the peak RSS minus the RSS of the process after all imports; ours is the peak of
# the one process minus its RSS just after exec. Shared pages count in each process that touches them.
# Foreign CPU: the fraction of the two CPUs' time that other processes used during the run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${ZERO_PEERS_VENV:-$HOME/.cache/zero-peers} build=1 install=1 args=()
while (($#)); do
  case $1 in
    --venv) venv=${2:?--venv requires a folder}; shift ;;
    --venv=*) venv=${1#*=} ;;
    --no-build) build=0 ;;
    --table) exec python3 bench/peer/table.py "${2:?--table requires a file}" ;;
    --table=*) exec python3 bench/peer/table.py "${1#*=}" ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; echo; exec python3 bench/peer/run.py --help ;;
    --list) args+=("$1"); build=0 install=0 ;;
    --before | --before=*) args+=("$1"); install=0 ;;
    *) args+=("$1") ;;
  esac
  shift
done
build() { ((build == 0)) || cargo build --release --quiet -p zero-examples --example gpt2_1_5b; }
((install)) || { build; exec python3 bench/peer/run.py "${args[@]}"; }

stamp=$venv/.zero-peers # holds the list that was installed; empty while installing
have() {
  "$venv/bin/python" -c 'from importlib.metadata import version as v; v("torch"), v("transformers"), v("deepspeed")' 2>/dev/null
}
if [[ -e $stamp ]] && ! cmp -s "$stamp" bench/peer/requirements.lock || [[ ! -e $venv ]]; then
  echo "installing the peers into $venv" >&2
  python3 -m venv "$venv"
  : >"$stamp"
  "$venv/bin/pip" install --quiet --no-deps -r bench/peer/requirements.lock >&2
  cp bench/peer/requirements.lock "$stamp"
elif ! have; then
  echo "error: $venv lacks torch, transformers or deepspeed, and was not created by this command: pass another folder" >&2
  exit 2
fi
build
PATH=$(cd "$venv/bin" && pwd):$PATH # ninja is there
export PATH
exec python bench/peer/run.py "${args[@]}"
