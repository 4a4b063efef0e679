#!/usr/bin/env python3
"""Measures traffic and step time over a slow link. Two "machines" with two ranks each are network namespaces of this machine; tc limits
the rate of the link between them, and --delay adds a latency each way.

  bench/across.py --zero target/release/zero [--model gpt2] [--seq 64] [--batch 1] [--steps 4] [--rounds 2] [--rate 1gbit] [--delay 0.2]

Run as root. Needs iproute2, and /dev/net/tun for the delay: frames of up to 64 KiB are read from one end and written to the other
after the delay (this also works on kernels without netem). There is one run per row and round, in turn; bf16, stage 3, AdamW, random
text. Bytes per step are those that the first machine's link receives (counted by the kernel, including headers and other traffic).
Time is the median step after the first. All four ranks share the machine's cores, so a step computes the same in all rows.
"""
import argparse, collections, ctypes, errno, fcntl, json, os, random, secrets, select, signal, statistics, struct, subprocess, sys, tempfile, time
from pathlib import Path

ROWS = [
    ("all four ranks shard", []),
    ("--secondary-shard-size 2", ["--secondary-shard-size", "2"]),
    ("... --quantized-weights int8", ["--secondary-shard-size", "2", "--quantized-weights", "int8"]),
    ("... and --quantized-gradients int8", ["--secondary-shard-size", "2", "--quantized-weights", "int8", "--quantized-gradients", "int8"]),
    ("... and --quantized-gradients int4", ["--secondary-shard-size", "2", "--quantized-weights", "int8", "--quantized-gradients", "int4"]),
    ("--shard-size 2", ["--shard-size", "2"]),
    ("--shard-size 2 --quantized-gradients int8", ["--shard-size", "2", "--quantized-gradients", "int8"]),
    ("--shard-size 2 --quantized-gradients int4", ["--shard-size", "2", "--quantized-gradients", "int4"]),
]
HOSTS = ["n0", "n1"]
PREFIX = f"zero-across-{os.getpid()}-"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zero", type=Path, required=True)
parser.add_argument("--model", default="gpt2")
parser.add_argument("--seq", type=int, default=64)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--rate", default="1gbit")
parser.add_argument("--delay", type=float, default=0.0, help="latency in milliseconds, each way")
parser.add_argument("--rows", help="run only these rows, numbered from 0, such as 0,1,5")
args = parser.parse_args()
if os.geteuid() != 0:
    sys.exit("error: network namespaces need root: run as root")


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def received():
    return int(subprocess.check_output(["ip", "netns", "exec", PREFIX + "n0", "cat", "/sys/class/net/eth0/statistics/rx_bytes"]))


def tap(host):
    """An end of the link in the namespace of a host."""
    with open(f"/var/run/netns/{PREFIX}{host}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"setns to {host}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # IFF_TAP, IFF_NO_PI
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH", b"eth0", 0x0002 | 0x1000))
    return end


def relay(ready):
    """Hands frames from each end to the other, late."""
    ends = [tap(host) for host in HOSTS]
    os.write(ready, b".")
    late = {end: collections.deque() for end in ends}
    while True:
        due = min((queue[0][0] for queue in late.values() if queue), default=None)
        # A look in good time: select rounds up.
        wait = None if due is None else max(0.0, due - time.monotonic() - 5e-5)
        for end in select.select(ends, [], [], wait)[0]:
            frame = os.read(end, 1 << 17)
            late[ends[1] if end == ends[0] else ends[0]].append((time.monotonic() + args.delay / 1e3, frame))
        for end, queue in late.items():
            while queue and queue[0][0] <= time.monotonic():
                frame = queue.popleft()[1]
                try:
                    os.write(end, frame)
                except OSError as error:
                    if error.errno not in (errno.EIO, errno.EAGAIN):  # That end is not up yet, or full.
                        raise


def build():
    for host in HOSTS:
        ip("netns", "add", PREFIX + host)
    if args.delay:
        told, ready = os.pipe()
        children.append(os.fork())
        if not children[-1]:
            try:
                relay(ready)
            except Exception as error:
                print(f"error: the link failed: {error}", file=sys.stderr)
            os._exit(1)
        os.close(ready)
        if not os.read(told, 1):
            sys.exit("error: cannot create a TUN device for the delay: check that /dev/net/tun exists")
    else:
        ip("link", "add", "eth0", "netns", PREFIX + "n0", "type", "veth", "peer", "name", "eth0", "netns", PREFIX + "n1")
    for number, host in enumerate(HOSTS, 1):
        name = PREFIX + host
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
        if args.delay:
            ip("-n", name, "link", "set", "eth0", "mtu", "65000")
        ip("-n", name, "link", "set", "eth0", "up")
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", args.rate, "burst", "256k",
                        "latency", "50ms"], check=True)


def run(options, text, out):
    world, local = 4, 2
    shared = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29871",
              "ZERO_SECRET": secrets.token_hex(32)}
    command = [args.zero, "train", "--model", args.model, "--data", text, "--seq", args.seq, "--batch", args.batch, "--steps", args.steps,
               "--stage", 3, "--dtype", "bf16", "--threads", 1, "--out", out, "--json", *options]
    before, ranks = received(), []
    for rank in range(world):
        host = HOSTS[rank // local]
        # A kernel's identity of its own tells ranks which of them are neighbours.
        identity = out / f"{host}.id"
        identity.write_text(f"{PREFIX}{host}\n")
        here = f'mount --bind {identity} /proc/sys/kernel/random/boot_id; hostname {host}; exec "$@"'
        on_host = ["ip", "netns", "exec", PREFIX + host, "unshare", "--uts", "--mount", "sh", "-ec", here, "sh"]
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}
        log = open(out / f"rank-{rank}.log", "w")
        ranks.append(subprocess.Popen(on_host + list(map(str, command)), env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
    deadline = time.monotonic() + 1800
    codes = [rank.wait(timeout=max(1, deadline - time.monotonic())) for rank in ranks]
    if any(codes):
        logs = "".join((out / f"rank-{rank}.log").read_text()[-600:] for rank in range(world))
        sys.exit(f"error: ranks ended with {codes}: {logs}")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    crossed = (received() - before) / len(steps)
    counted = sum(rank["wire_bytes"]["from_other_machines"] for step in steps for rank in step["ranks"] if rank["rank"] < local) / len(steps)
    return statistics.median(step["step_ms"] / 1e3 for step in steps[1:]), crossed, steps[-1]["loss"], counted


children = []
if args.rows:
    ROWS = [ROWS[int(number)] for number in args.rows.split(",")]
try:
    build()
    seen = {name: [] for name, _ in ROWS}
    with tempfile.TemporaryDirectory() as there:
        text, source = Path(there) / "text.txt", random.Random(0)
        text.write_text(" ".join(source.choice("the of and to in is was he for it".split()) for _ in range(16 * args.steps * args.seq * args.batch)))
        for number in range(args.rounds):
            for row, (name, options) in enumerate(ROWS):
                out = Path(there) / f"{number}-{row}"
                out.mkdir()
                seen[name].append(run(options, text, out))
    print(f"{args.model}, bf16, stage 3, 2 x 2 ranks, {args.batch} x {args.seq} tokens each, a link of {args.rate} and {args.delay} ms each way, medians of {args.rounds} round(s)")
    print("| | a step | of the first | across, a step | of the first | by metrics.jsonl | last loss |")
    print("|---|---|---|---|---|---|---|")
    first = None
    for name, runs in seen.items():
        seconds, crossed, loss, counted = (statistics.median(values) for values in zip(*runs))
        first = first or (seconds, crossed)
        print(f"| {name} | {seconds:.2f} s | {seconds / first[0]:.2f} | {crossed / 1e6:.1f} MB | {crossed / first[1]:.3f} | {counted / 1e6:.1f} MB | {loss:.4f} |")
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", PREFIX + host], check=False, stderr=subprocess.DEVNULL)
