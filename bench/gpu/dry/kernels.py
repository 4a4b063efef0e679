#!/usr/bin/env python3
"""What our kernels take of an H100, by its assembler, against what they took before.

    bench/gpu/dry/kernels.py --ptxas PTXAS --table kernels.txt [--accept] FOLDER...    (bench/gpu/dry.sh kernels calls it)

FOLDER is a DRY_OUT of driver.c. A line of the table is a kernel with its types and width of vectors: how many variants were
compiled, and the most that one of them takes. Fails when a kernel of ours was not compiled, spills registers, takes more
shared memory than a block may have, or when the table is another: CubeCL writes a kernel's values down in another order from
process to process, for which a few registers more or less are no difference.
"""

import argparse
import collections
import difflib
import json
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parents[3]
# What a block may have of an H100's shared memory.
SHARED = 227 << 10
# Bytes of spills that are known: the assembler keeps layer norm to 48 registers, so that more rows are in flight, for a few
# numbers that all rows share.
SPILLS = {"layer_norm_kernel": 96}
# Registers by which the same kernel may differ from process to process (253 and 254 were seen); the device hands them out by eight.
VARYING = 4


def ours():
    """The names of the kernels in the sources."""
    found = set()
    for path in (ROOT / "zero-ops/src/cube").rglob("*.rs"):
        found.update(re.findall(r"#\[cube\(launch_unchecked[^]]*\)\]\s*(?:pub\S* )?fn (\w+)", path.read_text()))
    for path in (ROOT / "zero-ops/src/cube").rglob("*.cu"):
        # Its variants have names of their own, which begin with this.
        found.update(re.findall(r"^//\s+NAME\s+(\w+?)_\.\.\.", path.read_text(), re.MULTILINE))
    return found


# What follows a kernel's name: types and widths of CubeCL's, or the variant.
BEHIND = r"(_[a-z]_|_\d|$)"


def assembled(ptxas, path):
    """Registers, bytes of static shared memory, and bytes in local memory (spills and arrays) of a module's kernel."""
    command = [ptxas, "-v", "--gpu-name", "sm_90a", path, "-o", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        sys.exit(f"{path}: ptxas: {told.stderr}")
    number = lambda pattern: int((re.search(pattern, told.stderr) or [0, 0])[1])
    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spills, number(r"(\d+) bytes stack frame")


def alike(kept, line):
    """Whether two lines of a kernel differ by no more than processes do."""
    if kept is None:
        return False
    (_, *kept), (_, *made) = kept.split(), line.split()
    # Variants, threads, registers, shared memory, spills, local memory.
    allowed = (0, 0, VARYING, 0, 0, 0)
    return all(abs(int(a) - int(b)) <= most for a, b, most in zip(kept, made, allowed))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptxas", required=True)
    parser.add_argument("--table", type=pathlib.Path, required=True)
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    args = parser.parse_args()

    names = ours()
    kernels, faults = [], 0
    for folder in args.folders:
        told = json.loads((folder / "driver.json").read_text())
        faults += told["faults"]
        of_ours = (f for f in told["functions"] if re.match("(" + "|".join(names) + ")" + BEHIND, f["name"]))
        kernels += [(f["name"], f["threads"], f["shared"], folder / f"{f['module']:03}.ptx") for f in of_ours]
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda kernel: assembled(args.ptxas, kernel[3]), kernels))

    wrong = [f"{faults} calls of the driver were refused: see the tests' output"] if faults else []
    table = collections.defaultdict(list)
    for (name, threads, dynamic, path), (registers, static, spills, local) in zip(kernels, made):
        table[name].append((threads, registers, dynamic + static, spills, local))
        if spills > SPILLS.get(name.partition("_e_")[0], 0):
            wrong.append(f"{name} spills {spills} bytes of registers to memory ({path}): it keeps too much at a time")
        if dynamic + static > SHARED:
            wrong.append(f"{name} takes {dynamic + static} bytes of shared memory, a block has {SHARED} ({path})")
    missing = [name for name in sorted(names) if not any(re.match(name + BEHIND, made) for made in table)]
    wrong += [f"{name} was not compiled: launch it in its file's test `compiled`" for name in missing]

    head = f"{'kernel, types, width':44} variants threads registers shared spilled local\n"
    lines = [
        f"{name:44} {len(variants):8} " + "{:7} {:9} {:6} {:7} {:5}\n".format(*map(max, zip(*variants)))
        for name, variants in sorted(table.items())
    ]
    if args.accept:
        args.table.write_text("".join([head, *lines]))
    before = args.table.read_text().splitlines(True) if args.table.exists() else []
    kept = {line.split()[0]: line for line in before}
    same = [kept[name] if alike(kept.get(name := line.split()[0]), line) else line for line in lines]
    difference = list(difflib.unified_diff(before, [head, *same], "kept", "compiled", n=0))
    if difference:
        wrong.append(f"{''.join(difference)}{args.table} is not what was compiled: if what changed is meant to, "
                     "run bench/gpu/dry.sh kernels --accept and commit the table")
    if wrong:
        sys.exit("\n".join(wrong))
    most = max(max(variant[1] for variant in variants) for variants in table.values())
    print(f"{len(kernels)} variants of {len(table)} kernels compiled for sm_90a as {args.table.name} says: "
          f"at most {most} registers")


if __name__ == "__main__":
    main()
