"""What the scripts of this folder share: sizes of presets, token rows, running ours, watching the GPU, tables, errors.

Standard library only. A mistake of the caller's is `BadInput`, which `run` prints once, with exit code 2.
"""

import array
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

VOCABULARY = 50257
# Blocks, width, heads, positions: as in zero-models/src/gpt2/config.rs.
PRESETS = {
    "tiny": (2, 64, 4, 128),
    "mini": (6, 384, 6, 256),
    "gpt2": (12, 768, 12, 1024),
    "gpt2-medium": (24, 1024, 16, 1024),
    "gpt2-large": (36, 1280, 20, 1024),
    "gpt2-xl": (48, 1600, 25, 1024),
}
BACKENDS = ("cuda", "vulkan", "cpu")
# NVIDIA's data sheet of the H100 SXM, whose arithmetic the H200 shares: dense bf16.
PEAK_TFLOPS = 989.4
MIB = 2**20
# Ends what other threads wait for.
STOP = threading.Event()


class BadInput(Exception):
    """A mistake of the caller's; the text says what to change."""


def run(main):
    """Runs `main()` as the program: its result is the exit code; 2 for bad input, 130 when interrupted.

    Being ended (`timeout` does that) interrupts too, so that what runs for it is ended with it and the GPU is free again.
    """
    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        code = main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        STOP.set()
        code = 130
    except BrokenPipeError:
        sys.stdout = None
        code = 1
    sys.exit(code or 0)


def at_least(least):
    """For argparse: a whole number from `least`."""
    import argparse

    def parse(text):
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {least}")
        return int(text)

    return parse


def listed(allowed, convert=str):
    """For argparse: some of `allowed`, with commas."""
    import argparse

    def parse(text):
        names = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in names if name not in map(str, allowed)]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(map(str, allowed))}, separated by commas")
        return [convert(name) for name in names]

    return parse


def parameters(model):
    """Number of parameters of a preset; the tied head counts once."""
    layers, d, _, positions = PRESETS[model]
    return (VOCABULARY + positions) * d + layers * (12 * d * d + 13 * d) + 2 * d


def flops_per_token(model, seq):
    """Floating-point operations of one token forward and backward: 6 N + 12 L T d, attention counted whole."""
    layers, d, _, _ = PRESETS[model]
    return 6 * parameters(model) + 12 * layers * seq * d


def mfu(tokens_per_second, model, seq, peak_tflops):
    """The part of the peak that the model's own operations take."""
    return tokens_per_second * flops_per_token(model, seq) / (peak_tflops * 1e12)


# --- token rows ------------------------------------------------------------------------------------------------------

INTEGERS = {"U16": "H", "I16": "h", "I32": "i", "U32": "I", "I64": "q"}


def write_rows(path, ids, seq):
    """Writes whole rows of `seq` ids as the tensor `input_ids` [rows, seq] of a safetensors file; what is left over is
    not used. Returns the number of rows."""
    rows = len(ids) // seq
    if rows == 0:
        raise BadInput(f"{len(ids)} tokens are too few for a row of {seq}: use a longer text or a smaller --seq")
    data = array.array("H", ids[: rows * seq])
    if sys.byteorder == "big":
        data.byteswap()
    data = data.tobytes()
    tensor = {"dtype": "U16", "shape": [rows, seq], "data_offsets": [0, len(data)]}
    header = json.dumps({"input_ids": tensor}).encode()
    header += b" " * (-len(header) % 8)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(len(header).to_bytes(8, "little") + header + data)
        aside.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
    return rows


def read_rows(path):
    """(ids, rows, seq) of a safetensors file's integer tensor `input_ids` [rows, seq]; ids is an array."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    try:
        length = int.from_bytes(raw[:8], "little")
        tensor = json.loads(raw[8 : 8 + length])["input_ids"]
        begin, end = tensor["data_offsets"]
        (rows, seq), kind = tensor["shape"], tensor["dtype"]
        ids = array.array(INTEGERS[kind])
        body = raw[8 + length :]
        if not 0 <= begin <= end <= len(body):
            raise ValueError("it ends too early")
        ids.frombytes(body[begin:end])
        if len(ids) != rows * seq or rows == 0:
            raise ValueError("its length does not match its shape")
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise BadInput(f"{path} is not a safetensors file with an integer tensor input_ids [rows, T] ({error}): "
                       "make one with bench/gpu/make_rows.py") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids, rows, seq


# --- the GPU ---------------------------------------------------------------------------------------------------------

SMI_FIELDS = {"used_mib": "memory.used", "sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "watts": "power.draw",
              "celsius": "temperature.gpu", "busy_percent": "utilization.gpu"}


def number(text):
    """A figure of nvidia-smi's, or None for one that it does not tell."""
    try:
        return float(text)
    except ValueError:
        return None


class Smi:
    """nvidia-smi's figures of the first GPU while a `with` block runs: `samples` is [(unix seconds, {name: value})].

    A thread reads the lines that one nvidia-smi process prints; both end with the block. It only asks: no setting of
    the GPU is changed. Without nvidia-smi there are no samples, and `missing` says why.
    """

    def __init__(self, every_ms=200):
        self.every_ms = every_ms
        self.samples = []
        self.missing = None

    def __enter__(self):
        self.process = None
        program = shutil.which("nvidia-smi")
        if program is None:
            self.missing = "nvidia-smi not found"
            return self
        command = [program, "-i", "0", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits",
                   "-lms", str(self.every_ms)]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            self.missing = f"cannot start nvidia-smi: {error.strerror}"
            return self
        self.thread = threading.Thread(target=self._read, name="nvidia-smi")
        self.thread.start()
        return self

    def _read(self):
        for line in self.process.stdout:
            values = [number(value.strip()) for value in line.split(",")]
            if len(values) == len(SMI_FIELDS):
                self.samples.append((time.time(), dict(zip(SMI_FIELDS, values))))

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()
            self.thread.join()
            self.process.stdout.close()
            if not self.samples:
                self.missing = "nvidia-smi told nothing"

    def values(self, name, since=0.0, until=float("inf")):
        """The figures between two times, in order."""
        return [(at, sample[name]) for at, sample in list(self.samples)
                if since <= at <= until and sample[name] is not None]

    def median(self, name, since=0.0, until=float("inf")):
        values = [value for _, value in self.values(name, since, until)]
        return statistics.median(values) if values else None

    def most(self, name, since=0.0, until=float("inf")):
        return max((value for _, value in self.values(name, since, until)), default=None)


def first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def commit():
    """What git says of these scripts' checkout; the machine with the GPU may have none."""
    return first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty") or "of an unknown commit"


def digest(path):
    """The first digits of a file's SHA-256, to know a carried binary by."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def machine():
    """What the measurements are of: GPU, driver, CPU, cores, load."""
    gpu = first_line("nvidia-smi", "-i", "0", "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm",
                     "--format=csv,noheader") if shutil.which("nvidia-smi") else None
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {"gpu": gpu or "none reported by nvidia-smi", "cpu": found[1] if found else "unknown",
            "cores": len(os.sched_getaffinity(0)), "load": f"{os.getloadavg()[0]:.2f}"}


# --- running ours ----------------------------------------------------------------------------------------------------

def program(path):
    """The path of an executable, absolute."""
    found = Path(path)
    if not found.is_file():
        raise BadInput(f"{path} does not exist: build it (bench/gpu/README.md), or name another with --ours")
    if not os.access(found, os.X_OK):
        raise BadInput(f"{path} cannot be executed: chmod +x {path}")
    return found.resolve()


def watched(command, timeout, look=None, env=None):
    """Runs a command in its own process group to its end or `timeout` seconds, calling `look()` every few milliseconds.

    Returns (exit code, standard output, standard error, seconds); the exit code is None when it was ended for being late.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        begin = time.monotonic()
        try:
            process = subprocess.Popen([str(part) for part in command], stdout=stdout, stderr=stderr, env=env,
                                       start_new_session=True)
        except OSError as error:
            raise BadInput(f"cannot start {command[0]}: {error.strerror}") from None
        late = False
        try:
            while process.poll() is None:
                if look:
                    look()
                if STOP.is_set() or time.monotonic() - begin > timeout:
                    late = True
                    break
                time.sleep(0.003)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if look:
            look()
        seconds = time.monotonic() - begin
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
        return None if late else process.returncode, *texts, seconds


def time_left(args, begin):
    """Seconds that a run may take: --timeout, and no more than --budget leaves, so that the tables can still be printed."""
    if not args.budget:
        return args.timeout
    return max(1.0, min(args.timeout, args.budget - (time.monotonic() - begin)))


def last_words(text, lines=4):
    """The end of a program's output, on one line."""
    return " / ".join(line.strip() for line in text.strip().splitlines()[-lines:]) or "it said nothing"


def last_json(text):
    """The last line of a program's output as JSON, or None."""
    try:
        return json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


class Lines:
    """Lines of a growing file, with the kernel's stamp of the write that made each: `stamps` {line from 1: seconds}."""

    def __init__(self, path):
        self.path, self.stamps, self.count, self.last = path, {}, 0, None

    def look(self):
        try:
            stamp = self.path.stat().st_mtime_ns
            if stamp == self.last:
                return
            count = self.path.read_bytes().count(b"\n")
            if self.path.stat().st_mtime_ns == stamp:
                self.last = stamp
                if count > self.count:
                    self.count = count
                    self.stamps[count] = stamp / 1e9
        except OSError:
            return


def ours(binary, options, timeout, env=None):
    """Runs `binary --out FOLDER --json OPTIONS`. Returns a dict: `command`, `wall_s`, and either `error` or `summary`,
    `steps` (the lines of metrics.jsonl) and `stamps` (when each was written)."""
    with tempfile.TemporaryDirectory(prefix="zero_gpu_") as folder:
        lines = Lines(Path(folder) / "metrics.jsonl")
        command = [str(part) for part in (binary, *options)]
        code, stdout, stderr, seconds = watched([*command, "--out", folder, "--json"], timeout, lines.look, env)
        result = {"command": command, "wall_s": round(seconds, 2)}
        summary = last_json(stdout)
        if code is None:
            return {**result, "error": f"ended after {timeout:.0f} s, {lines.count} steps done: {last_words(stderr)}"}
        if code != 0 or not isinstance(summary, dict):
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            return {**result, "error": f"{last_words(stderr or stdout)} ({end})"}
        try:
            steps = [json.loads(line) for line in lines.path.read_text().splitlines()]
        except (OSError, ValueError) as error:
            return {**result, "error": f"its metrics.jsonl is not readable: {error}"}
        if not steps:
            return {**result, "error": "its metrics.jsonl is empty"}
        return {**result, "summary": summary, "steps": steps, "stamps": lines.stamps}


def between(result, warmup):
    """Milliseconds of a step, of those after `warmup`, and how they were found: from the end of one to the end of the last by the
    stamps of their lines, or the median of the steps' own `step_ms` where too few lines were seen. (A kernel stamps files every few
    milliseconds, so that a median of differences would be one of few numbers.)"""
    stamps, steps = result["stamps"], result["steps"]
    seen = [i for i in stamps if i > warmup]
    if seen and 2 * (max(seen) - min(seen)) >= len(steps) - warmup > 1:
        return (stamps[max(seen)] - stamps[min(seen)]) * 1e3 / (max(seen) - min(seen)), "between lines"
    return statistics.median(step["step_ms"] for step in steps[warmup:]), "own timer"


def device_bytes(step, key):
    """A step's `device_bytes_in_use` or `device_bytes_reserved`; None on the processor."""
    value = step.get(f"device_bytes_{key}")
    return None if value is None else int(value)


# --- tables ----------------------------------------------------------------------------------------------------------

def markdown(head, rows):
    """Prints a table."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print(flush=True)


def mib(bytes_):
    return "–" if bytes_ is None else f"{bytes_ / MIB:,.0f}"


def or_dash(value, form="{}"):
    return "–" if value is None else form.format(value)


def json_lines(path):
    """The lines of a `Record`."""
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path} has a line that is not JSON ({error}): expected a file written by --out") from None


class Record:
    """A file of JSON lines, written as they come; nothing without a path."""

    def __init__(self, path, append=False):
        self.file = None
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self.file = open(path, "a" if append else "w")
            except OSError as error:
                raise BadInput(f"cannot write {path}: {error.strerror}") from None

    def write(self, line):
        if self.file:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
