#!/usr/bin/env python3
"""Writes token rows that ours and PyTorch both read, without a download: a safetensors file with `input_ids` [rows, T].

    bench/gpu/make_rows.py --seq 1024 --bpe ~/.cargo/registry/src/*/tiktoken-rs-*/assets/r50k_base.tiktoken rows.safetensors

With --bpe FILE (a table in tiktoken's format, such as the one in the crate tiktoken-rs), rows have GPT-2's own
tokens; the text must then be ASCII, because only there Python's `re` splits words as GPT-2 does. Without --bpe, each byte is a
token (ids 0 to 255): a step does the same work, but with few different tokens. With --random N, writes N rows of uniformly
random tokens from the full vocabulary.
"""

import argparse
import base64
import random
import re
from pathlib import Path

from common import VOCABULARY, BadInput, at_least, run, write_rows

TEXT = Path(__file__).resolve().parents[2] / "examples/data/tinyshakespeare.txt"
# GPT-2's splitting, for ASCII: letters, digits, other characters, each with a space before it, and white space.
WORDS = re.compile(rb"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def read_ranks(path):
    """{bytes: id} of a table in tiktoken's format: base64 and id on each line."""
    try:
        lines = Path(path).read_text().splitlines()
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path} is not a tiktoken table ({error}): expected base64 and an id on each line") from None


def merged(word, ranks):
    """Ids of one word: the neighbours of the least rank are joined until none is in the table."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        pairs = [(ranks.get(a + b, VOCABULARY), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        least, i = min(pairs)
        if least == VOCABULARY:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    try:
        return [ranks[part] for part in parts]
    except KeyError as error:
        raise BadInput(f"the table has no token for the bytes {error}: it is not GPT-2's") from None


def encode(text, ranks):
    """GPT-2's tokens of ASCII text, as bytes."""
    if not text.isascii():
        at = next(i for i, byte in enumerate(text) if byte > 127)
        raise BadInput(f"byte {at} of the text is not ASCII: --bpe splits ASCII text only; leave it out, or use another text")
    known, ids = {}, []
    for word in WORDS.findall(text):
        if word not in known:
            known[word] = merged(word, ranks)
        ids.extend(known[word])
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output file; its name must end in .safetensors")
    parser.add_argument("--seq", type=at_least(2), default=1024, help="tokens per row (default: 1024)")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: examples/data/tinyshakespeare.txt")
    parser.add_argument("--bpe", type=Path, metavar="FILE", help="GPT-2's token table, r50k_base.tiktoken")
    parser.add_argument("--random", type=at_least(1), metavar="N", help="write N rows of random tokens instead of a text")
    args = parser.parse_args()
    if args.out.suffix != ".safetensors":
        raise BadInput(f"{args.out}: the name must end in .safetensors; ours detects the format by it")
    if args.random and args.bpe:
        raise BadInput("--random and --bpe exclude each other: remove one")
    if args.random:
        source, kind = random.Random(0), "random tokens"
        ids = [source.randrange(VOCABULARY) for _ in range(args.random * args.seq)]
    else:
        try:
            text = args.text.read_bytes()
        except OSError as error:
            raise BadInput(f"cannot read {args.text}: {error.strerror}") from None
        ids = encode(text, read_ranks(args.bpe)) if args.bpe else list(text)
        kind = "GPT-2's tokens" if args.bpe else "bytes"
    rows = write_rows(args.out, ids, args.seq)
    print(f"{args.out}: {rows} rows of {args.seq}, {kind}, {len(set(ids))} different")


if __name__ == "__main__":
    run(main)
