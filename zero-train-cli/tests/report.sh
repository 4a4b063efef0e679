#!/bin/sh
# Opens reports in headless Chromium: of a run, and of two runs beside each other. Needs Chromium, Python 3 and, the first time, PyPI.
#
#   zero-train-cli/tests/report.sh [OUT] [VENV]    screenshots go to OUT (default: target/report); VENV is made if need be and kept
set -eu
cd "$(dirname "$0")/../.."
out=${1:-target/report}
venv=${2:-target/report-venv}
if ! "$venv/bin/python" -c 'import playwright' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet 'playwright==1.56.0'
fi
rm -rf "$out"
mkdir -p "$out"
for stage in 0 3; do
    cargo run --quiet --example own_model -- --steps 100 --batch 32 --eval-every 20 --stage $stage \
        --out "$out/stage-$stage" >/dev/null 2>&1
done
cargo run --quiet --bin zero -- report "$out/stage-0" "$out/stage-3" --output "$out/both.html"
"$venv/bin/python" zero-train-cli/tests/check_report.py "$out/stage-3/report.html" "$out/run.png" --width 1100
"$venv/bin/python" zero-train-cli/tests/check_report.py "$out/both.html" "$out/both.png" --width 400 --dark
ls -l "$out"/*.png
