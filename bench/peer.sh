#!/usr/bin/env bash
# Ours and its peers (torch, torch DDP, DeepSpeed, FSDP2) on the same work on two CPUs, in turn (A B A B ...), as tables:
# tokens/s and peak memory, their ratios with the floors and goals, and the cost of more ranks.
#   bench/peer.sh [--venv DIR] [--no-build] [OPTIONS]         all rows: hours; --list shows them, --help all options
#   bench/peer.sh --model A --only 'torch$' --rounds 1        a quick look
#   bench/peer.sh --table FILE                                prints the tables of an earlier run's results again
# The peers are installed once (4 GB) from bench/peer/requirements.lock into DIR, default $ZERO_PEERS_VENV or
# ~/.cache/zero-peers; a virtual environment of your own that has them is used as it is. Results are kept, one JSON line
# a run, in target/peer/results.jsonl (--out). Exit codes: 0, 1 if a run failed, 2 for bad arguments or missing tools.
#
# What is the same for all: GPT-2 of the same size with tied embeddings, dropout 0; fp32; AdamW of the same settings; rows
# of 256 random tokens (1,024 where said), all positions through the head; batch per rank, ranks, compute threads per rank; the two CPUs.
# - torch: sdpa attention, fused AdamW, OMP and MKL threads as said; DDP with gradients as views of its buckets.
# - DeepSpeed: DeepSpeedCPUAdam, its default bucket sizes. It builds its shared-memory op, but only inference uses that:
#   training reduces and gathers through gloo.
# - With state on a disk (the temporary folder's; its asynchronous I/O wants libaio-dev and is compiled in its first run, for minutes) it is all of the state. Its `ratio`
#   is for the host's memory alone, where its ranks and ours compute here: beside it ours have half of the state on the disk.
# - FSDP2: one shard group a block and one for the rest; at stage 2 parameters stay whole from forward to backward.
# - Ranks of peers are processes that talk through gloo over loopback; ours are threads of one process. That is a
#   difference of design that the comparison is about.
# Speed: the median step after the warm-up. A peer's step is the slowest rank's forward, backward and update. Ours is the
# time between two lines of metrics.jsonl, by the kernel's stamps of these writes: everything that a rank does or waits
# for, also the batch's making and the writing itself. (The `tokens_per_second` of our own --json is rank 0's own timer
# without waiting for the others after the update, and the median without the first step alone; it is in the results.)
# Memory: the sum over ranks of the peak RSS over the RSS of the process with everything imported; ours is the peak of
# the one process over its RSS just after exec. Pages that processes share count in each that touches them.
# Foreign CPU: what the two CPUs did beside the run while it was on, of their time.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${ZERO_PEERS_VENV:-$HOME/.cache/zero-peers} build=1 install=1 args=()
while (($#)); do
  case $1 in
    --venv) venv=${2:?--venv needs a folder}; shift ;;
    --venv=*) venv=${1#*=} ;;
    --no-build) build=0 ;;
    --table) exec python3 bench/peer/table.py "${2:?--table needs a file}" ;;
    --table=*) exec python3 bench/peer/table.py "${1#*=}" ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; echo; exec python3 bench/peer/run.py --help ;;
    --list) args+=("$1"); build=0 install=0 ;;
    *) args+=("$1") ;;
  esac
  shift
done
((install)) || exec python3 bench/peer/run.py "${args[@]}"

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
  echo "error: $venv has no torch, transformers and deepspeed, and was not made by this command: name another folder" >&2
  exit 2
fi
((build)) && cargo build --release --quiet -p zero-examples --example gpt2_1_5b
PATH=$(cd "$venv/bin" && pwd):$PATH # ninja is there
export PATH
exec python bench/peer/run.py "${args[@]}"
