#!/bin/sh
# Checks that Accelerate reads what `zero config` writes. Needs Python 3 and, the first time, PyPI (accelerate brings torch).
#
#   tests/accelerate.sh [VENV]     VENV is made if need be and kept (default: ../target/accelerate-venv)
set -eu
cd "$(dirname "$0")/.."
venv=${1:-../target/accelerate-venv}
if ! "$venv/bin/python" -c 'import accelerate' 2>/dev/null; then
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet accelerate
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cargo run --quiet --bin zero -- config --defaults --stage 3 --ranks 4 --clip 1 --accumulation 2 --dtype bf16 \
    --offload-param cpu --output "$dir/three.yaml"
cargo run --quiet --bin zero -- config --defaults --deepspeed-config ds.json --output "$dir/file.yaml"
"$venv/bin/python" - "$dir" <<'PYTHON'
import sys
from accelerate.commands.config.config_args import load_config_from_file

three = load_config_from_file(f"{sys.argv[1]}/three.yaml")
assert three.distributed_type == "DEEPSPEED" and three.num_processes == 4, three
assert three.mixed_precision == "bf16", three.mixed_precision
wanted = {"zero_stage": 3, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "offload_param_device": "cpu",
          "offload_optimizer_device": "none", "zero3_init_flag": True, "zero3_save_16bit_model": False}
assert three.deepspeed_config == wanted, three.deepspeed_config
file = load_config_from_file(f"{sys.argv[1]}/file.yaml")
assert file.deepspeed_config["deepspeed_config_file"] == "ds.json", file.deepspeed_config
print("Accelerate reads both files")
PYTHON
