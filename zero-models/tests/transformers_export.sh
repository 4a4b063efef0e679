#!/bin/sh
# Checks that Hugging Face's transformers loads what this project exports: a tiny model of each family, heads tied and untied,
# fp32 and bf16, one file and several. No key may be missing, unexpected or of another shape; logits in fp32 must agree to 1e-5;
# the bf16 tensors must be torch's own rounding of the fp32 ones, to the bit.
#
#   zero-models/tests/transformers_export.sh PYTHON     PYTHON has torch, transformers and safetensors; nothing is downloaded
set -eu
cd "$(dirname "$0")/../.."
python=${1:?name a Python with torch, transformers and safetensors}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cargo run --quiet -p zero-models --example export_tiny -- "$dir"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$python" - "$dir" <<'PYTHON'
import glob, json, os, sys
import torch, transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
root = sys.argv[1]
print(f"torch {torch.__version__}, transformers {transformers.__version__}")


CLASSES = {"gpt2": "GPT2LMHeadModel", "bert": "BertForPreTraining", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
           "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
           "phi3": "Phi3ForCausalLM", "bart": "BartForConditionalGeneration", "bart-classes": "BartForSequenceClassification",
           "t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"}
for name, prefix in (("bert", "Bert"), ("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"), ("distilbert", "DistilBert")):
    CLASSES |= {f"{name}-mlm": f"{prefix}ForMaskedLM", f"{name}-classes": f"{prefix}ForSequenceClassification"}


def load(folder):
    name = os.path.basename(folder)
    architecture = AutoConfig.from_pretrained(folder).architectures
    assert architecture == [CLASSES[name.split("_")[0]]], architecture
    cls = getattr(transformers, architecture[0])
    model, info = cls.from_pretrained(folder, output_loading_info=True, dtype="auto")
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (name, key, info[key])
    wanted = torch.bfloat16 if "-bf16-" in name else torch.float32
    assert model.dtype == wanted, (name, model.dtype)
    return model.eval()


def tensors(folder):
    found = {}
    for file in glob.glob(f"{folder}/*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}, opened.metadata()
        found.update(load_file(file))
    return found


def close(what, got, wanted, mask=None):
    errors = (got.float() - torch.tensor(wanted).view(got.shape)).abs()
    error = (errors if mask is None else errors[mask.bool()]).max().item()
    assert error < 1e-5, (what, error)
    return error


for reference in sorted(glob.glob(f"{root}/*.json")):
    name = os.path.basename(reference)[: -len(".json")]
    ours = json.load(open(reference))
    inputs = {key: torch.tensor(value) for key, value in ours.items() if key not in ("logits", "relation")}
    for files in ("one", "many"):
        folder = f"{root}/{name}-fp32-{files}"
        assert os.path.exists(f"{folder}/model.safetensors.index.json") == (files == "many")
        with torch.no_grad():
            result = load(folder)(**inputs)
        if not name.startswith("bert_"):
            # Padding of a RoBERTa has no position there, and the first ones beyond the text here. Nothing reads it.
            is_roberta = name.endswith(("roberta-mlm_tied", "roberta-mlm_untied", "camembert-mlm_tied", "camembert-mlm_untied"))
            error = close(name, result.logits, ours["logits"], inputs["attention_mask"] if is_roberta else None)
        else:
            error = close(name, result.prediction_logits, ours["logits"])
            error = max(error, close(name, result.seq_relationship_logits, ours["relation"]))
        print(f"{name} fp32, {files}: keys exact, logits within {error:.1e} of "
              f"{max(abs(x) for x in ours['logits']):.1f} at most")
    load(f"{root}/{name}-bf16-one")
    wide, narrow = tensors(f"{root}/{name}-fp32-one"), tensors(f"{root}/{name}-bf16-one")
    assert wide.keys() == narrow.keys()
    many = tensors(f"{root}/{name}-fp32-many")
    assert wide.keys() == many.keys() and all(torch.equal(wide[key], many[key]) for key in wide)
    elements = 0
    for key, tensor in wide.items():
        assert torch.equal(tensor.to(torch.bfloat16).view(torch.int16), narrow[key].view(torch.int16)), (name, key)
        elements += tensor.numel()
    print(f"{name} bf16: keys exact, {len(wide)} tensors, {elements} elements are torch's rounding")
PYTHON
