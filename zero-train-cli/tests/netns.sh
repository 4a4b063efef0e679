#!/usr/bin/env bash
# Checks ranks on several hosts: network namespaces of this machine, each with a name, an address, a link and files of its
# own, under Open MPI over TCP. Prints one line per check; exits 1 when one has failed. Takes about two minutes.
#
#   tests/netns.sh ZERO_BINARY TEXT     as root; needs openmpi-bin, iproute2 and a `zero` built with --features mpi
#
# * Parity: 2 and 3 hosts have the losses of as many threads, bit by bit, and the gradients went through their links.
# * A link that swallows everything, from the middle of a step on and with no reset: every rank ends by its own deadline, with
#   exit code 75 and its flight record. Open MPI's mpirun then waits for a daemon that it cannot reach: it is ended here.
# * A link that is down, and stays so, under `zero launch`: that ends mpirun; on the other host the rank ends by its deadline
#   and orted once TCP has given up, which the system's default for `tcp_retries2`, 15, makes about 16 minutes: here it is 4.
# * A link that is cut for a moment, then cut until the ranks have given up: the first is waited out, after the second
#   `zero launch` starts again from the last checkpoint, and the losses are those of a run that nothing broke.
set -euo pipefail
export LC_ALL=C
(($# == 2)) || { echo "usage: $0 ZERO_BINARY TEXT" >&2; exit 2; }
((EUID == 0)) || { echo "error: network namespaces take root: run as root" >&2; exit 2; }
for tool in ip bridge unshare mpirun python3; do
  command -v "$tool" >/dev/null ||
    { echo "error: no $tool: apt-get install iproute2 util-linux openmpi-bin python3" >&2; exit 2; }
done
zero=$(realpath "$1") text=$(realpath "$2")
deadline=5 grace=5 # seconds
leave=3            # seconds that a rank which has given up waits for the others to do so too
slack=7            # seconds for a busy machine

work=$(mktemp -d)
prefix=zero-$$- # of the namespaces; their hosts are called n0, n1, n2
hosts=(n0 n1 n2)
network=10.77.0
job=
failures=0

# ---- hosts ----

# Processes of the hosts, a line each: host, process, command.
processes() {
  local host pid
  for host in "${hosts[@]}"; do
    for pid in $(ip netns pids "$prefix$host" 2>/dev/null); do
      echo "$host $pid $(tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline")"
    done
  done
}

# Ends what is left on the hosts.
sweep() {
  local host pid
  while read -r host pid _; do
    kill -KILL "$pid" 2>/dev/null || true
  done < <(processes)
}

clean() {
  local name
  if [[ -n $job ]]; then
    kill -KILL "$job" 2>/dev/null || true
    wait "$job" 2>/dev/null || true
  fi
  sweep
  # The links go with their namespaces.
  for name in switch "${hosts[@]}"; do
    ip netns del "$prefix$name" 2>/dev/null || true
  done
  rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# A namespace in which nothing is sent but by the ranks and Open MPI.
namespace() {
  ip netns add "$prefix$1"
  ip netns exec "$prefix$1" sh -c '
    cd /proc/sys/net/ipv6/conf 2>/dev/null || exit 0
    echo 1 >all/disable_ipv6
    echo 1 >default/disable_ipv6'
}

build() {
  local host number=0
  namespace switch
  ip -n "${prefix}switch" link add bridge type bridge
  ip -n "${prefix}switch" link set bridge up
  echo "127.0.0.1 localhost" >"$work/names"
  mkdir "$work/here" "$work/shared"
  for host in "${hosts[@]}"; do
    number=$((number + 1))
    echo "$network.$number $host" >>"$work/names"
    mkdir -p "$work/$host/tmp"
    namespace "$host"
    ip -n "${prefix}switch" link add "$host" type veth peer name eth0 netns "$prefix$host"
    ip -n "${prefix}switch" link set "$host" master bridge up
    ip -n "$prefix$host" link set lo up
    ip -n "$prefix$host" addr add "$network.$number/24" dev eth0
    ip -n "$prefix$host" link set eth0 up
  done
  # Runs a command on a host. $work/here is the host's own folder, $work/shared is the same on all.
  cat >"$work/on" <<SCRIPT
#!/bin/sh
exec ip netns exec "$prefix\$1" unshare --uts sh -euc '
  hostname "\$1"
  mount --bind "$work/\$1" $work/here
  mount --bind $work/names /etc/hosts
  export TMPDIR=$work/here/tmp
  shift
  exec "\$@"' sh "\$@"
SCRIPT
  # What mpirun calls in place of ssh: as there, nothing of its environment comes along.
  cat >"$work/agent" <<SCRIPT
#!/bin/sh
host=\$1
shift
exec env -i PATH="\$PATH" HOME=/root $work/on "\$host" sh -c "\$*"
SCRIPT
  # A rank that leaves its exit code and the time, in ms, on its host.
  cat >"$work/rank" <<SCRIPT
#!/bin/sh
"\$@"
code=\$?
echo "\$code \$(date +%s%3N)" >$work/here/ended
exit \$code
SCRIPT
  chmod +x "$work/on" "$work/agent" "$work/rank"
}

# A host's link to the others swallows everything, with its carrier left on; or is down; or works.
swallow() { bridge -n "${prefix}switch" link set dev "$1" state 0; }
down() { ip -n "${prefix}switch" link set "$1" down; }
mend() {
  ip -n "${prefix}switch" link set "$1" up
  # Refused until the link has its carrier again.
  until_true 5 bridge -n "${prefix}switch" link set dev "$1" state 3 2>/dev/null
}

# Bytes that a host has received.
received() { ip netns exec "$prefix$1" cat /sys/class/net/eth0/statistics/rx_bytes; }

# ---- checks ----

ok() { printf 'ok    %s\n' "$*"; }
bad() {
  printf 'FAIL  %s\n' "$*"
  failures=$((failures + 1))
}
# check WHAT COMMAND...: prints WHAT, with the outcome of the command.
check() {
  local what=$1
  shift
  if "$@"; then ok "$what"; else bad "$what"; fi
}
# For a run whose other checks mean nothing now.
give_up() {
  bad "$1"
  shift
  tail -n 20 "$@" 2>/dev/null | cut -c1-300 || true
  exit 1
}

now() { date +%s%3N; }
seconds() { printf '%d.%d s' $(($1 / 1000)) $(($1 % 1000 / 100)); }
# until_true SECONDS COMMAND...: waits until the command succeeds; fails if it does not in time.
until_true() {
  local end=$(($(now) + $1 * 1000))
  shift
  until "$@"; do
    (($(now) < end)) || return 1
    sleep 0.05
  done
}

# ---- runs ----

# What Open MPI needs: TCP between the hosts' addresses, and the agent. `pml ob1`: UCX would find the machine behind the hosts.
mpi=(--mca pml ob1 --mca btl "tcp,self" --mca btl_tcp_if_include "$network.0/24" --mca oob_tcp_if_include "$network.0/24"
  --mca plm_rsh_agent "$work/agent" --mca plm_rsh_no_tree_spawn 1)
train=(train --model tiny --data "$text" --seq 64 --threads 1 --json)

# slots RANKS: hosts for mpirun.
slots() {
  local list
  list=$(printf '%s:1,' "${hosts[@]:0:$1}")
  echo "${list%,}"
}
losses() { grep -o '"step":[0-9]*,"loss":[^,]*,"grad_norm":[^,]*' "$1/metrics.jsonl"; }
steps() { if [[ -e $1/metrics.jsonl ]]; then wc -l <"$1/metrics.jsonl"; else echo 0; fi; }
has_steps() { (($(steps "$1") >= $2)); }
same_losses() { cmp -s <(losses "$1") <(losses "$2"); }
is_over() { ! kill -0 "$job" 2>/dev/null; }
no_process() { [[ -z $(processes) ]]; }
no_process_of() { [[ -z $(ip netns pids "$prefix$1") ]]; }
no_rank() { ! grep -q "^n[0-9] [0-9]* $zero train " <<<"$(processes)"; }
is_sound() { timeout 20 "$zero" inspect "$1" >"$work/log" 2>&1; }
are_recorded() { [[ -s $work/n0/flight/flight-rank-0.json && -s $work/n1/flight/flight-rank-1.json ]]; }

# Bytes that each rank received from other machines in a run, by its own account: here every other rank is one.
accounts() {
  python3 - "$1/metrics.jsonl" <<'PYTHON'
import json, sys
steps = [json.loads(line)["ranks"] for line in open(sys.argv[1])]
print(*(sum(ranks[rank]["wire_bytes"]["from_other_machines"] for ranks in steps) for rank in range(len(steps[0]))))
PYTHON
}

parity() {
  local ranks=$1 stage=$2 rank=0 of=$work/shared/parity-$1 account host got before=()
  timeout -k 5 60 "$zero" "${train[@]}" --steps 5 --stage "$stage" --ranks "$ranks" --out "$of/threads" \
    >"$work/log" 2>&1 </dev/null || give_up "parity: threads of one process: exit code $?" "$work/log"
  for host in "${hosts[@]:0:ranks}"; do
    before+=("$(received "$host")")
  done
  timeout -k 5 60 "$work/on" n0 mpirun --allow-run-as-root -n "$ranks" --host "$(slots "$ranks")" --bind-to none "${mpi[@]}" \
    "$zero" "${train[@]}" --steps 5 --stage "$stage" --out "$of/hosts" >"$work/log" 2>&1 </dev/null ||
    give_up "parity: $ranks hosts: exit code $?" "$work/log"
  check "$ranks ranks on $ranks hosts, stage $stage: losses and gradient norms of $(steps "$of/hosts") steps are those of \
$ranks threads, bit by bit (last $(losses "$of/hosts" | tail -n 1 | sed 's/.*"loss":\([^,]*\).*/\1/'))" \
    same_losses "$of/threads" "$of/hosts"
  for account in $(accounts "$of/hosts"); do
    got=$(($(received "n$rank") - before[rank]))
    check "  n$rank received $got bytes through its link; rank $rank counted $account from other machines" \
      test "$got" -ge "$account" -a "$got" -le $((account + account / 20 + 1000000))
    rank=$((rank + 1))
  done
}

# An empty folder for a run on two hosts, and nothing that an earlier one has left.
fresh() {
  out=$work/shared/$1
  mkdir "$out"
  rm -rf "$work"/n?/flight "$work"/n?/ended
}

# cut HOW STEPS: cuts n1's link in the middle of the step after so many; its time, and what n1 has received a moment later.
cut_link() {
  until_true 60 has_steps "$out" "$2" || give_up "no $2 steps within 60 s" "$out/log"
  sleep 0.1
  "$1" n1
  cut_at=$(now)
  sleep 0.1
  through=$(received n1)
}

# What the ranks left on their hosts, and what the records say.
watch_ranks() {
  local host rank code at one both since
  until_true $((deadline + 15)) no_rank || bad "  a rank is left $((deadline + 15)) s after the cut"
  since=$(($(received n1) - through))
  check "  bytes that came to n1 since the cut: $since" test "$since" -le 1000
  for rank in 0 1; do
    host=n$rank code=none at=$(now)
    [[ ! -e $work/$host/ended ]] || read -r code at <"$work/$host/ended"
    check "  rank $rank on $host ended $(seconds $((at - cut_at))) after the cut with exit code $code (deadline $deadline s)" \
      test "$code" = 75 -a $((at - cut_at)) -le $(((deadline + leave + slack) * 1000))
    check "  rank $rank left its flight record on $host" test -s "$work/$host/flight/flight-rank-$rank.json"
  done
  check "  a rank said how long it waited, where and for whom" \
    grep -q "rank 0 waited ${deadline}[0-9][0-9][0-9] ms in .* for rank(s) \[1\]" "$out/log"
  for rank in 0 1; do
    one=$("$zero" flight "$work/n$rank/flight" 2>&1) || true
    check "  zero flight on n$rank: $(head -n 1 <<<"$one")" grep -q "^rank $((1 - rank)) is late: rank(s) \[$rank\]" <<<"$one"
  done
  # Each waits for the other: neither is late if both came to the same operation.
  both=$("$zero" flight "$work/n0/flight" "$work/n1/flight" 2>&1) || true
  check "  zero flight of both: $(grep -E ' is late: | waits for ' <<<"$both" | paste -sd ';')" \
    grep -qE '^rank 0 (waits for \[1\]|is late)|^rank 1 (waits for \[0\]|is late)' <<<"$both"
}

silent_cut() {
  local ended
  fresh silent
  timeout -k 5 90 "$work/on" n0 mpirun --allow-run-as-root -n 2 --host "$(slots 2)" --bind-to none "${mpi[@]}" \
    "$work/rank" "$zero" "${train[@]}" --stage 3 --shard-size 1 --steps 10000 --deadline $deadline --flight "$work/here/flight" \
    --out "$out" >"$out/log" 2>&1 </dev/null &
  job=$!
  cut_link swallow 4
  ok "a link between groups that shard, which swallows everything, cut after step $(steps "$out"), under mpirun"
  watch_ranks
  if until_true 3 is_over; then
    ended="mpirun ended by itself"
  else
    ended="mpirun still waited 3 s after its ranks and was ended"
    kill -TERM "$job"
  fi
  local code=0
  wait "$job" 2>/dev/null || code=$?
  job=
  check "  $ended; exit code $code" test "$code" -ne 0
  sweep
  mend n1
}

# Starts `zero launch` on n0 with options for it before --, and for the ranks after.
start_launch() {
  printf '%s slots=1\n' n0 n1 >"$out/hosts"
  timeout -k 5 120 "$work/on" n0 "$zero" launch --ranks 2 --hosts "$out/hosts" "${mpi[@]/#/--mpirun-option=}" --grace $grace \
    "$@" --deadline $deadline --flight "$work/here/flight" --out "$out" >"$out/log" 2>&1 </dev/null &
  job=$!
}

lasting_cut() {
  local code=0 took host
  fresh lasting
  for host in n0 n1; do
    # TCP gives up after 6 s without an answer.
    ip netns exec "$prefix$host" sh -c 'echo 4 >/proc/sys/net/ipv4/tcp_retries2'
  done
  start_launch -- "$work/rank" "$zero" "${train[@]}" --steps 10000
  cut_link down 4
  ok "a link that is down, cut after step $(steps "$out"), under zero launch"
  watch_ranks
  until_true $((deadline + 15)) is_over || bad "  zero launch still waits $(seconds $(($(now) - cut_at))) after the cut"
  took=$(($(now) - cut_at))
  is_over || kill -TERM "$job"
  wait "$job" 2>/dev/null || code=$?
  job=
  check "  zero launch ended $(seconds "$took") after the cut ($(grep -o 'mpirun was still running.*' "$out/log" ||
    echo 'mpirun ended by itself')); exit code $code" test "$code" -ne 0 -a "$took" -le $(((deadline + 15) * 1000))
  check "  no process on n0" no_process_of n0
  until_true 15 no_process || true
  took=$(($(now) - cut_at))
  check "  no process on n1, with the link still down: orted ended within $(seconds "$took") of the cut" no_process
  processes | cut -c1-150
  sweep
  mend n1
  for host in n0 n1; do
    ip netns exec "$prefix$host" sh -c 'echo 15 >/proc/sys/net/ipv4/tcp_retries2'
  done
}

restart() {
  local code=0 before paused
  mkdir "$work/shared/unbroken"
  timeout -k 5 90 "$zero" "${train[@]}" --steps 30 --ranks 2 --out "$work/shared/unbroken" >"$work/log" 2>&1 </dev/null ||
    give_up "an unbroken run of threads: exit code $?" "$work/log"
  fresh restarted
  start_launch --max-restarts 1 -- "${train[@]}" --steps 30 --save "$out/checkpoints" --save-every 5
  cut_link swallow 3
  before=$(steps "$out")
  sleep 1.4
  paused=$(steps "$out")
  mend n1
  check "a link that swallows everything for $(seconds $(($(now) - cut_at))) after step $before" test "$paused" -eq "$before"
  until_true 20 has_steps "$out" $((before + 3)) || true
  check "  training went on: $(steps "$out") steps $(seconds $(($(now) - cut_at))) after the cut" \
    has_steps "$out" $((before + 3))
  cut_link swallow 12
  ok "and again after step $(steps "$out"), until both ranks have given up, under zero launch --max-restarts 1"
  until_true $((deadline + slack)) are_recorded || bad "  the ranks have not given up"
  mend n1
  ok "  both ranks had given up $(seconds $(($(now) - cut_at))) after the cut"
  until_true 90 is_over || kill -TERM "$job"
  wait "$job" 2>/dev/null || code=$?
  job=
  check "  zero launch ended $(seconds $(($(now) - cut_at))) after the cut; exit code $code" test "$code" -eq 0
  check "  $(grep -o 'the ranks ended with exit code .*' "$out/log" || echo "no restart")" \
    grep -q 'restart 1 of 1, from the last intact checkpoint' "$out/log"
  check "  losses and gradient norms of $(steps "$out") steps are those of an unbroken run of 2 threads, bit by bit" \
    same_losses "$work/shared/unbroken" "$out"
  check "  the checkpoint of step 30 is sound" is_sound "$out/checkpoints/step-00000030"
  until_true 15 no_process || true
  check "  no process on any host" no_process
  sweep
}

began=$(now)
build
parity 2 3
parity 3 2
silent_cut
lasting_cut
restart
echo "$failures failed, $(seconds $(($(now) - began)))"
((failures == 0))
