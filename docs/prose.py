#!/usr/bin/env python3
"""The prose of help texts, errors and rustdoc. `docs/prose.py` prints the share of rustdoc lines that begin with words such as What, Whether
or Of; `docs/prose.py OLD` also draws ten options, ten errors and ten documented items with a fixed seed, and prints their texts in revision
OLD and in the working tree. An item that was renamed since is not drawn."""
import pathlib, random, re, subprocess, sys

repo = pathlib.Path(__file__).resolve().parents[1]
banned = re.compile(r"(What|Whether|Of|How|Those|As|That|Which|Where|With) ")
git = lambda *words: subprocess.run(["git", *words], cwd=repo, capture_output=True, text=True, check=True).stdout

def sources(revision):
    """Yields name and text of each source file of the crates."""
    names = git("ls-tree", "-r", "--name-only", revision).split() if revision else git("ls-files").split()
    for name in names:
        if re.match(r"zero-[\w-]+/src/.*\.rs$", name):
            text = git("show", f"{revision}:{name}") if revision else (repo / name).read_text() if (repo / name).exists() else ""
            yield name, text.split("#[cfg(test)]\nmod tests")[0]

def items(revision):
    """Returns the first paragraphs of options, errors and items, by the crate and their names."""
    options, errors, docs = {}, {}, {}
    for name, text in sources(revision):
        crate = name.split("/")[0]
        paragraph = r"((?:[ \t]*///.*\n)+)((?:[ \t]*#\[.*\n(?:(?![ \t]*pub).*\n)*?)*)"
        for doc, attributes, item in re.findall(paragraph + r"[ \t]*(?:pub )?(?:const |unsafe )*(?:fn |struct |enum |trait |type )?(\w+)", text):
            lines = [re.sub(r"^\s*///\s?", "", line) for line in doc.splitlines()]
            first = " ".join(lines[: lines.index("") if "" in lines else None])
            (options if "arg(" in attributes else docs)[f"{crate} {item}"] = first
        for message, variant in re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.|\\\n)*)"[^]]*\)\]\s*(?:#\[.*\n\s*)*(\w+)', text):
            errors[f"{crate} {variant}"] = re.sub(r"\\\n\s*", "", message)
    return options, errors, docs

lines = [line for _, text in sources(None) for line in re.findall(r"^\s*//[/!] ?(\S.*)$", text, flags=re.M)]
share = sum(bool(banned.match(line)) for line in lines) / len(lines)
print(f"{share:.1%} of {len(lines)} lines of rustdoc begin with such a word")
for old, new, kind in zip(items(sys.argv[1]), items(None), ("help", "error", "rustdoc")) if sys.argv[1:] else ():
    common = sorted(set(old) & set(new))
    changed = sum(old[name] != new[name] for name in common)
    print(f"\n{kind}: {changed} of {len(common)} texts were changed")
    for name in random.Random(47).sample(common, 10): print(f"  {name}\n    before: {old[name]}\n    after:  {new[name]}")
sys.exit(share >= 0.03)
