#!/usr/bin/env python3
"""zero-train-cli/tests/wizard.py [ZERO]

Answers the questions of `zero config` on a pseudo-terminal, as a person would, and checks the file that comes of it. ZERO is
the program (default: target/debug/zero).
"""
import os
import pty
import select
import sys
import tempfile
import time

ZERO = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "target/debug/zero")
DOWN = b"\x1b[B"
UP = b"\x1b[A"
ANSWERS = [("Which type of machine", UP), ("How many different machines", b""), ("json file to a DeepSpeed config", b""),
           ("ZeRO optimization stage", DOWN), ("Where to offload optimizer states", b""), ("Where to offload parameters", b""),
           ("How many gradient accumulation steps", b"4"), ("use gradient clipping", b"y"), ("gradient clipping value", b"0.5"),
           ("save 16-bit model weights", b""), ("deepspeed.zero.Init", b""), ("Mixture-of-Experts", b""),
           ("How many CPU(s)", b"3"), ("mixed precision", b"")]
EXPECTED = ["  gradient_accumulation_steps: 4", "  gradient_clipping: 0.5", "  zero_stage: 3", "num_processes: 3",
            "use_cpu: true"]

file = os.path.join(tempfile.mkdtemp(), "zero.yaml")
pid, terminal = pty.fork()
if pid == 0:
    os.execv(ZERO, ["zero", "config", "--output", file])
seen = b""


def wait_for(text):
    global seen
    deadline = time.time() + 20
    while text.encode() not in seen:
        if time.time() > deadline:
            sys.exit(f"no {text!r} within 20 s; the terminal shows {seen[-400:]!r}")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                seen += os.read(terminal, 4096)
            except OSError:
                sys.exit(f"zero ended before {text!r}; the terminal shows {seen[-400:]!r}")


for question, answer in ANSWERS:
    wait_for(question)
    time.sleep(0.1)
    os.write(terminal, answer + b"\r")
wait_for("Wrote the configuration to")
lines = open(file).read().splitlines()
missing = [line for line in EXPECTED if line not in lines]
sys.exit(f"missing in {lines}: {missing}" if missing else print(f"{len(ANSWERS)} questions answered; the file is right"))
