#!/usr/bin/env bash
# Checks what lies in this folder, as root on Debian (a container will do), in about a minute:
#
#     deploy/check.sh [ZERO]
#
# Kubernetes: the files hold against schemas, broken ones are refused, and the launcher's command does what its comments say.
# Slurm: a real one with two nodes, both on this machine, runs slurm/zero.sbatch as it is. A stub in the place of `zero`
# fails as told; a small MPI program shows that ranks find each other; and ZERO, a build with --features mpi, trains if given.
#
# What is missing is installed. Nothing is left running or lying about, and a Slurm that is here is not touched.
set -euo pipefail
zero=${1:+$(realpath "$1")}
cd "$(dirname "$0")"
here=$PWD
work=$(mktemp -d /tmp/zero-deploy.XXXXXX) # short: paths of sockets are
step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
fail() {
    echo "error: $1" >&2
    # What a job of the stub printed, if there is one.
    cat "$work/log" >&2 2>/dev/null || true
    exit 1
}

clean() {
    local code=$?
    trap - EXIT
    if [ -e "$work/slurm.conf" ]; then stop_slurm || true; fi
    rm -f "${policy:-}"
    rm -rf "$work"
    exit "$code"
}
trap clean EXIT
trap 'exit 130' INT TERM

step 'tools'
missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need shellcheck shellcheck
need munged munge
need slurmctld slurmctld
need slurmd slurmd
need sbatch slurm-client
need mpicc libopenmpi-dev
need gcc gcc
need pgrep procps
need python3 python3
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
    # Packages of daemons start them; this script starts its own.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        policy=/usr/sbin/policy-rc.d
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$work/apt.log" 2>&1 ||
        { cat "$work/apt.log" >&2; fail "cannot install ${missing[*]}"; }
    rm -f "${policy:-}"
fi
python3 -m venv "$work/python"
"$work/python/bin/pip" install -q --disable-pip-version-check kubernetes-validate==1.37.0 PyYAML==6.0.3

step 'scripts'
shellcheck check.sh slurm/zero.sbatch

step 'kubernetes: files'
"$work/python/bin/python" kubernetes/check.py

step "kubernetes: the launcher's command"
mkdir "$work/bin"
cat >"$work/bin/zero" <<'STUB'
#!/bin/sh
echo "$*" >>"$RUN.calls"
exit "$CODE"
STUB
chmod +x "$work/bin/zero"
"$work/python/bin/python" kubernetes/check.py --launcher-command >"$work/launcher"
# The launcher pod of job $1, whose `zero` ends with $2; its own exit code is to be $2, after $3 calls of zero in all.
launcher() {
    local code=0
    PATH=$work/bin:$PATH RUN=$work/run LAUNCHER_JOB=$1 CODE=$2 sh "$work/launcher" >"$work/log" 2>&1 || code=$?
    [ "$code" = "$2" ] || fail "the launcher ended with exit code $code, expected $2"
    [ "$(wc -l <"$work/run.calls")" = "$3" ] || fail "zero was called $(wc -l <"$work/run.calls") times, expected $3"
}
launcher a 1 1 # a failure is tried again,
launcher a 2 2 # bad input
launcher a 2 2 # is not,
launcher b 0 3 # but a new job is.
grep -q -- '^launch --ranks 4 .* -- train .*--resume auto$' "$work/run.calls" || fail "$(cat "$work/run.calls")"

step 'slurm: start'
start_slurm() {
    local host ports
    host=$(hostname -s)
    read -ra ports < <(python3 -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))')
    mkdir "$work/state" "$work/tmp-n0" "$work/tmp-n1" "$work/spool-n0" "$work/spool-n1"
    mkdir -m 700 "$work/munge"
    (umask 077 && head -c 128 /dev/urandom >"$work/munge/key")
    # Nodes have as many cores as the batch script asks for, whatever this machine has. TmpFS, where PMIx keeps its files, is
    # each node's own. munge's folder is root's: so nobody else can submit anything here.
    cat >"$work/slurm.conf" <<CONF
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
TmpFS=$work/tmp-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
NodeName=n0 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=16 CoresPerSocket=16 RealMemory=65536
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=16 CoresPerSocket=16 RealMemory=65536
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
    # Nothing of it is used. Left to itself slurmd looks which version is mounted, and a container may have none that it likes.
    echo CgroupPlugin=cgroup/v1 >"$work/cgroup.conf"
    export SLURM_CONF=$work/slurm.conf
    munged --force --num-threads=2 --key-file="$work/munge/key" --socket="$work/munge/socket" \
        --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed" 2>"$work/munged.log" ||
        { cat "$work/munged.log" >&2; return 1; }
    slurmctld -c
    slurmd -N n0
    slurmd -N n1
    for _ in $(seq 100); do
        [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && return
        sleep 0.2
    done
    tail "$work"/slurm*.log >&2
    return 1
}

stop_slurm() {
    scancel --user=root --signal=KILL --full 2>/dev/null
    scancel --user=root 2>/dev/null
    local pid file
    for file in "$work"/slurmd-n?.pid "$work/slurmctld.pid" "$work/munge/pid"; do
        pid=$(cat "$file" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null
    done
    # Steps outlive slurmd. These have this folder in their names or environment, so no other Slurm's are meant.
    for pid in $(pgrep -x slurmstepd); do
        if grep -qsF "$work" "/proc/$pid/environ" || readlink "/proc/$pid/fd/"* 2>/dev/null | grep -qF "$work"; then
            kill -9 "$pid" 2>/dev/null
        fi
    done
    return 0
}
start_slurm || fail 'cannot start Slurm'
sinfo -N

# In the place of `zero`. PLAN has a word for each attempt: the exit code of all ranks; `some`, of rank 1 alone, while the
# others wait; or `wait`, for USR1.
cat >"$work/stub" <<'STUB'
#!/bin/bash
if [ "$1" = flight ]; then echo "flight of $(find "$2" -name 'flight-rank-*.json' | wc -l)"; exit; fi
# A file of its own: `zero` leaves its output there.
[ -f /proc/self/fd/1 ] || exit 1
echo "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS, $PMIX_RANK in $PMIX_NAMESPACE of $SLURM_NTASKS: $*"
read -ra plan <<<"$PLAN"
case ${plan[ZERO_RESTARTS]} in
    wait) trap 'touch "$RUN/saved-$SLURM_PROCID"; exit 138' USR1; sleep 600 & echo waits; wait ;;
    some) if [ "$SLURM_PROCID" = 1 ]; then exit 2; fi; sleep 600 ;;
    0) exit 0 ;;
    # The last argument is that of --flight.
    *) echo '{}' >"${!#}/flight-rank-$SLURM_PROCID.json"; exit "${plan[ZERO_RESTARTS]}" ;;
esac
STUB
chmod +x "$work/stub"

# Runs the batch script with program $1 and the arguments after $3; expects exit code $2, $3 attempts.
job() {
    local program=$1 expected=$2 attempts=$3 code=0 logs
    shift 3
    rm -rf "$work/log" "$work/run"
    logs=$work/run/logs
    # shellcheck disable=SC2086 # options are words
    ZERO=$program RUN=$work/run timeout 120 sbatch ${options:-} --quiet --wait --chdir="$work" --output="$work/log" \
        "$here/slurm/zero.sbatch" "$@" || code=$?
    [ "$code" = "$expected" ] || fail "the job ended with exit code $code, expected $expected"
    [ "$(find "$logs" -name 'attempt-*' 2>/dev/null | wc -l)" = "$attempts" ] || fail "expected $attempts attempts"
}
export PLAN GRACE=3 MAX_RESTARTS=2

step 'slurm: the unchanged script on two nodes'
sbatch --test-only slurm/zero.sbatch
PLAN='0' job "$work/stub" 0 1
for rank in 0 1 2 3; do
    grep -q "^rank $rank of 4, $rank in slurm.pmix.* of 4: train --model gpt2 .*--resume auto --threads 8" \
        "$work"/run/logs/*/attempt-0/rank-$rank.log || fail "rank $rank: $(cat "$work"/run/logs/*/attempt-0/rank-$rank.log)"
done

step 'slurm: a rank fails, and the next attempt does not'
PLAN='75 0' job "$work/stub" 0 2 --model tiny
grep -q 'train --model tiny ' "$work"/run/logs/*/attempt-1/rank-0.log || fail 'arguments are not passed on'
grep -qx 'flight of 4' "$work/log" || fail 'flight records are not collected and read'

step 'slurm: all attempts fail'
PLAN='1 1 1 1' job "$work/stub" 1 3

step 'slurm: bad input is not retried, even if only one rank reports it'
PLAN='2 0' job "$work/stub" 2 1
PLAN='some 0' job "$work/stub" 2 1

step 'slurm: missing program, unsupported PMI'
PLAN='0' job "$work/nothing" 2 0 2>/dev/null
PLAN='0' PMI=nothing job "$work/stub" 2 0 2>/dev/null

step 'slurm: at the time limit the job is requeued and resumes'
rm -rf "$work/run"
id=$(PLAN='wait 0' ZERO=$work/stub RUN=$work/run sbatch --parsable --chdir="$work" --output="$work/log" slurm/zero.sbatch)
signalled=
for _ in $(seq 300); do
    case $(squeue -h -j "$id" -o %T 2>/dev/null) in
        '') break ;;
        # Slurm waits two minutes before a job's next turn.
        PENDING) scontrol update job "$id" StartTime=now 2>/dev/null || true ;;
        RUNNING)
            # Who has no trap yet would be ended by the signal, with the same exit code.
            if [ -z "$signalled" ] && [ "$(cat "$work/run/logs/$id"/attempt-0/rank-*.log 2>/dev/null | grep -cx waits)" = 4 ]; then
                scancel --batch --signal=USR1 "$id"
                signalled=yes
            fi ;;
    esac
    sleep 0.2
done
# A job that has ended is gone from the queue a little later than from the list.
[ "$(scontrol show job "$id" | grep -oE 'JobState=\w+|Restarts=[0-9]+' | paste -sd' ')" = 'JobState=COMPLETED Restarts=1' ] ||
    fail "not requeued and completed: $(scontrol show job "$id")"
[ -e "$work/run/logs/$id/attempt-1/rank-0.code" ] || fail 'there is no second attempt'
[ "$(find "$work/run" -name 'saved-*' | wc -l)" = 4 ] || fail 'not every rank received the signal to save'
[ "$(cat "$work/run/logs/$id"/attempt-0/rank-*.code | sort -u)" = 138 ] || fail 'not all ranks ended by USR1'

step 'slurm: ranks that a signal ended are not restarted'
PLAN='143 0' job "$work/stub" 143 1

step 'slurm: ranks find each other'
cat >"$work/ranks.c" <<'PROGRAM'
#include <mpi.h>
#include <stdio.h>
int main(int count, char **words) {
    int given, rank, size, sum = 0;
    MPI_Init_thread(&count, &words, MPI_THREAD_MULTIPLE, &given);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d, sum %d\n", rank, size, sum);
    return MPI_Finalize();
}
PROGRAM
mpicc -o "$work/ranks" "$work/ranks.c"
# On a node by shared memory; across nodes by TCP: both nodes have this machine's name, and their ranks would take each
# other's shared memory for their own.
options='--nodes=1' job "$work/ranks" 0 1
grep -qx 'rank 1 of 2, sum 1' "$work"/run/logs/*/attempt-0/rank-1.log || fail 'ranks of one node do not find each other'
OMPI_MCA_btl=self,tcp job "$work/ranks" 0 1
grep -qx 'rank 3 of 4, sum 6' "$work"/run/logs/*/attempt-0/rank-3.log || fail 'ranks of different nodes do not find each other'
grep '^attempt 0:' "$work/log"

if [ -n "$zero" ]; then
    step 'slurm: zero trains, and resumes from a checkpoint after a rank was killed'
    seq 20000 >"$work/text"
    (
        # The pid of rank 1, once there is a checkpoint to go on from.
        for _ in $(seq 600); do
            if [ -d "$work/run/checkpoints/step-00000100" ]; then break; fi
            sleep 0.1
        done
        for pid in $(pgrep -f "^$zero train .*$work"); do
            if grep -qzx SLURM_PROCID=1 "/proc/$pid/environ"; then kill -9 "$pid"; fi
        done
    ) &
    options='--nodes=1 --ntasks-per-node=2 --cpus-per-task=1' job "$zero" 0 2 \
        --model tiny --data "$work/text" --stage 3 --steps 250 --seq 16 --batch 1
    wait
    [ "$(wc -l <"$work/run/metrics.jsonl")" = 250 ] || fail 'metrics.jsonl does not have 250 steps'
    grep -h 'resumes from .*, step [12]00,' "$work"/run/logs/*/attempt-1/rank-0.log || fail 'the run did not resume from a checkpoint'

    step 'slurm: zero with bad input'
    options='--nodes=1 --ntasks-per-node=2 --cpus-per-task=1' job "$zero" 2 1 --model tiny --data "$work/nothing"
fi
step 'done'
