#!/bin/sh
# Checks that PEFT loads an adapter that `zero` has trained: its logits are those of the merged model in transformers, to 1e-5.
#
#   zero-train-cli/tests/peft.sh PYTHON     PYTHON has torch, transformers and peft; nothing is downloaded
set -eu
cd "$(dirname "$0")/../.."
python=${1:?name a Python with torch, transformers and peft}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
zero() { cargo run --quiet -p zero-train-cli --bin zero -- "$@"; }
for model in gpt2_tiny,c_attn,mlp.c_proj qwen2_tiny,q_proj,v_proj,down_proj llama_tiny,q_proj,k_proj,o_proj,gate_proj; do
base=tests/fixtures/${model%%,*} targets=${model#*,} run=$dir/${model%%,*}
zero train --weights $base --data $base/batches.safetensors --seq 16 --batch 4 --ranks 2 --threads 1 --steps 8 --lr 1e-2 \
  --lora-r 4 --lora-targets "$targets" --lora-rslora --save "$run/checkpoints" >"$dir/log" 2>&1
zero export "$run/checkpoints" "$run/adapter" --dtype fp32
zero export "$run/checkpoints" "$run/merged" --merge --dtype fp32
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" - $base "$run" <<'PYTHON'
import sys
import torch, transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

transformers.logging.disable_progress_bar()
base, dir = sys.argv[1:]
ids = load_file(f"{base}/batches.safetensors")["input_ids"][:4]
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad():
    plain, adapted, merged = (model(ids).logits for model in
                              (load(base), PeftModel.from_pretrained(load(base), f"{dir}/adapter").eval(), load(f"{dir}/merged")))
changed, apart = (plain - adapted).abs().max().item(), (adapted - merged).abs().max().item()
print(f"{base}: the adapter changes logits by {changed:.2f}; beside the weights and merged into them they are {apart:.1e} apart")
assert changed > 0.1 and apart < 1e-5
PYTHON
done
