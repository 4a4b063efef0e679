#!/usr/bin/env bash
# Prints the diff from a plain Burn program to one on the trainer, with ranks, stages, resume, evaluation and report, and the number of
# removed and added lines.
set -euo pipefail
cd "$(dirname "$0")/.."
code() { grep -v '^ *//' "$1" | sed 's#"\(\.\./\)*examples/data#"../data#; s#"\(\.\./\)*data#"../data#'; }
plain=bench/bare/src/bin/own_model.rs ours=examples/examples/own_model.rs
diff -u <(code $plain) <(code $ours) | tail -n +3 || true
count() { diff <(code $plain) <(code $ours) | grep -c "^$1" || true; }
echo "lines removed: $(count '<'), added: $(count '>'), of $(code $plain | wc -l); $ours has $(wc -l <$ours)"
