#!/bin/sh
# Checks the event files against the real TensorBoard package. Needs Python 3 and, the first time, PyPI.
#
#   tests/tensorboard.sh [VENV]     VENV is made if need be and kept (default: target/tensorboard-venv)
set -eu
cd "$(dirname "$0")/../.."
venv=${1:-target/tensorboard-venv}
if ! "$venv/bin/python" -c 'import tensorboard' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet 'tensorboard==2.19.0' 'setuptools<81'
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
cargo build --workspace --quiet --example write_events
target/debug/examples/write_events "$logs"
"$venv/bin/python" zero-train-cli/tests/read_tensorboard.py "$logs"
