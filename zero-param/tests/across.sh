#!/usr/bin/env bash
# Compares training on Burn 0.22 with training on Burn 0.21, with the same options and files: losses on 1 to 4 ranks at all stages, and
# most features. Each version also resumes the other's checkpoints. Usage: across.sh ZERO FOLDER, the binary of `zero` (Burn 0.21) and
# the folder of zero-param's programs (Burn 0.22).
set -euo pipefail
zero=$(realpath "$1") programs=$(realpath "$2")
fixture=$(cd "$(dirname "$0")/../../tests/fixtures/gpt2_tiny" && pwd)
data=$fixture/batches.safetensors text=$(realpath "$(dirname "$0")/../../examples/data/tinyshakespeare.txt")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
old=("$zero" train) new=("$programs/zero-022" train)

on() { # FRONT STEPS FOLDER [options]: losses of a run that saves
  local -n front=$1
  local file=(--config "$work/${config:-cut}.json")
  [[ ${config:-} != none ]] || file=()
  # All but vectors are cut.
  echo '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": '"$stage"', "stage3_param_persistence_threshold": 0}}' \
    >"$work/cut.json"
  sed 's/{/{"bf16": {"enabled": true}, /' "$work/cut.json" >"$work/half.json"
  "${launch[@]}" "${front[@]}" --data "$data" "${file[@]}" --steps "$2" --batch 2 \
    --ranks "$ranks" --stage "$stage" --save "$work/$3" --save-every 3 --out "$work/$3-out" "${@:4}" \
    >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  values "$work/$3-out/metrics.jsonl" loss
}
values() { # FILE KEY: of each line that has it
  python3 -c 'import json, sys; [print(line[sys.argv[2]]) for line in map(json.loads, open(sys.argv[1])) if line.get(sys.argv[2]) is not None]' "$@"
}
evaluated() { # FOLDER: what was measured of rows held out
  python3 -c 'import json, sys; [print(value) for event in map(json.loads, open(sys.argv[1])) for _, value in event.get("values", [])]' \
    "$work/$1-out/events.jsonl"
}
same() { # FILE FILE
  python3 - "$@" <<'PYTHON'
import sys
a, b = ([float(line) for line in open(file)] for file in sys.argv[1:])
assert len(a) == len(b) and a, (a, b)
assert all(abs(x - y) < 1e-6 * abs(y) or x == y for x, y in zip(a, b)), (a, b)
worst = max(abs(x - y) / abs(y or 1) for x, y in zip(a, b))
print(f"  {len(a)} values, largest relative difference {worst:.1e}")
PYTHON
}
launch=() weights=(--weights "$fixture" --decay-except nothing --shuffle false)

for ranks in 1 2 3 4; do
  echo "$ranks rank(s), all stages"
  for ranks_are in threads processes; do
    case $ranks_are in
    threads) launch=() ;;
    processes) launch=("$zero" launch --sockets --ranks "$ranks" --) ;;
    esac
    [ "$ranks $ranks_are" != '1 processes' ] || continue # That is alone too.
    for stage in 0 1 2 3; do
      for front in old new; do
        on $front 6 "$ranks-$ranks_are-$stage-$front" "${weights[@]}" >"$work/losses"
        [ "$ranks_are $stage" != 'threads 0' ] || cp "$work/losses" "$work/$ranks-$front.losses"
        diff "$work/$ranks-$front.losses" "$work/losses" ||
          { echo "$ranks $ranks_are at stage $stage: other bits than threads at stage 0 ($front)"; exit 1; }
      done
    done
  done
  same "$work/$ranks-new.losses" "$work/$ranks-old.losses"
done

launch=() ranks=2 stage=3
goes_on() { # NAME [options]: the same from the first step on, and from front to front
  echo "$1: from the first step on"
  on old 6 "$1-old" "${weights[@]}" "${@:2}" >"$work/old.losses"
  on new 6 "$1-new" "${weights[@]}" "${@:2}" >"$work/new.losses"
  same "$work/new.losses" "$work/old.losses"
  tail -n 3 "$work/old.losses" >"$work/expected"
  echo "$1: three steps more, on 0.22 and back on 0.21"
  on new 6 "$1-on" "${weights[@]}" "${@:2}" --resume "$work/$1-old/step-00000003" >"$work/on.losses"
  same "$work/on.losses" "$work/expected"
  on old 6 "$1-back" "${weights[@]}" "${@:2}" --resume "$work/$1-new/step-00000003" >"$work/back.losses"
  same "$work/back.losses" "$work/expected"
}
goes_on AdamW
echo 'AdamW: from 0.21 to 0.22 and back, without an update: every bit is the same'
"$programs/examples/copy" "$fixture" "$work/AdamW-old/step-00000003" "$work/copy"
python3 - "$work"/{AdamW-old,copy}/step-00000003/manifest.json <<'PYTHON'
import json, sys
# Tensors with their checksums.
one, other = ({key: json.load(open(path))[key] for key in ("step", "world", "tensors", "state")} for path in sys.argv[1:])
different = [key for key in one if one[key] != other[key]]
assert not different, f"{different} differ: {one} {other}"
PYTHON
# Masks are the same: they follow from seed, rank and draw.
cp -r "$fixture" "$work/dropping"
sed -i 's/_pdrop": 0.0/_pdrop": 0.1/' "$work/dropping/config.json"
weights=(--weights "$work/dropping" --decay-except nothing --shuffle false)
goes_on dropout --save-async # Beside the training.
weights=(--weights "$fixture" --decay-except nothing --shuffle false)

echo 'fresh weights, micro-batches, a schedule, clipping, decay, shuffled rows, rows held out'
by_options=(--model tiny --seed 7 --shuffle --accumulation 3 --schedule cosine --warmup 2 --lr 3e-3 --clip 0.5 --weight-decay 0.1
  --beta2 0.95 --eval 5 --eval-every 2)
for front in old new; do
  config=none on $front 8 "options-$front" "${by_options[@]}" >"$work/$front.losses"
  for key in grad_norm lr; do values "$work/options-$front-out/metrics.jsonl" $key >>"$work/$front.losses"; done
  evaluated "options-$front" >>"$work/$front.losses"
done
same "$work/new.losses" "$work/old.losses"

echo 'micro-batches that are reduced once per step, or each: the bits of a step at all stages'
for each in false true; do
  for stage in 0 1 3; do
    echo '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3, "zero_optimization":
      {"stage": '$stage', "stage3_param_persistence_threshold": 0}, "gradient_accumulation_kwargs": {"sync_each_batch": '$each'}}' >"$work/once.json"
    for front in old new; do
      config=once on $front 4 "once-$front" "${weights[@]}" >"$work/$front-$stage.losses"
      diff "$work/$front-0.losses" "$work/$front-$stage.losses" || { echo "stage $stage: other bits than at stage 0 ($front)"; exit 1; }
    done
    same "$work/new-$stage.losses" "$work/old-$stage.losses"
  done
done
stage=3

echo 'moving averages of the weights, evaluated in their place'
for front in old new; do
  config=none on $front 6 "averages-$front" --model tiny --seed 7 --ema-decay 0.9 --eval-ema --eval 5 --eval-every 2 >"$work/$front.losses"
  evaluated "averages-$front" >>"$work/$front.losses"
done
same "$work/new.losses" "$work/old.losses"

echo 'bfloat16: the same bits at all stages'
for stage in 0 1 2 3; do
  for front in old new; do
    config=half on $front 6 "bf16-$stage-$front" "${weights[@]}" >"$work/losses"
    [ "$stage" != 0 ] || cp "$work/losses" "$work/bf16-$front.losses"
    diff "$work/bf16-$front.losses" "$work/losses" || { echo "bfloat16 at stage $stage: other bits than at stage 0 ($front)"; exit 1; }
  done
done
near() { # FILE FILE
  python3 - "$@" <<'PYTHON'
import sys
old, new = ([float(line) for line in open(file)] for file in sys.argv[1:])
worst = max(abs(a - b) / b for a, b in zip(new, old, strict=True))
print(f"  {len(old)} values, largest relative difference {worst:.1e}")
assert len(old) > 1 and worst < 2e-3, (old, new)
PYTHON
}
same "$work"/bf16-{new,old}.losses

echo 'fp16 with a dynamic loss scale, which overflows at first; the scale goes on after a resume'
echo '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
  "fp16": {"enabled": true, "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2}}' >"$work/fp16.json"
for front in old new; do
  config=fp16 on $front 9 "fp16-$front" "${weights[@]}" >"$work/$front.losses"
  for key in loss_scale grad_norm; do values "$work/fp16-$front-out/metrics.jsonl" $key >>"$work/$front.losses"; done
done
same "$work/new.losses" "$work/old.losses"
config=fp16 on new 9 fp16-on "${weights[@]}" --resume "$work/fp16-old/step-00000003" >"$work/on.losses"
values "$work/fp16-on-out/metrics.jsonl" loss_scale >>"$work/on.losses"
for key in loss loss_scale; do values "$work/fp16-old-out/metrics.jsonl" $key | tail -n 6; done >"$work/expected"
same "$work/on.losses" "$work/expected"

echo 'checkpointed blocks, with dropout: the losses of runs without'
for options in '' '--checkpoint-activations 1' '--checkpoint-activations all' '--offload-activations --offload-to disk --swap '"$work"; do
  for front in old new; do
    # shellcheck disable=SC2086
    config=none on $front 4 "blocks-$front" --weights "$work/dropping" $options >"$work/$front.losses"
  done
  [ -z "$options" ] && cp "$work/new.losses" "$work/expected"
  same "$work/new.losses" "$work/old.losses"
  diff "$work/new.losses" "$work/expected"
done

echo 'settings of the engine'
ranks=4
while read -r settings; do
  echo "$settings"
  for front in old new; do
    # shellcheck disable=SC2086
    config=none on $front 4 "settings-$front" "${weights[@]}" $settings --swap "$work" >"$work/$front.losses"
  done
  same "$work/new.losses" "$work/old.losses"
done <<'SETTINGS'
--offload optimizer
--offload all --offload-to disk
--offload optimizer --offload-to disk --offload-ratio 0.5 --bf16-optimizer-states
--int8-optimizer-states
--shard-size 2
--secondary-shard-size 2 --quantized-weights int8
SETTINGS
# Vectors, which are not sharded on Burn 0.22, are in blocks of other buckets.
echo '--quantized-gradients int4'
for front in old new; do
  config=none on $front 4 "quantized-$front" "${weights[@]}" --quantized-gradients int4 >"$work/$front.losses"
done
near "$work"/{old,new}.losses
ranks=2

echo 'optimizers of the engine, with sums of gradients and a schedule that cycles the momentum'
for type in Adam SGD Lion Adagrad Muon; do
  echo '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": '$stage', "stage3_param_persistence_threshold": 0},
    "gradient_allreduce_op": "sum", "optimizer": {"type": "'$type'", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 2}}}' >"$work/rule.json"
  for front in old new; do
    config=rule on $front 4 "$type-$front" "${weights[@]}" >"$work/$front.losses"
  done
  # Muon computes in bf16, where the last bit of a gradient may change a number by 2^-8 of it.
  if [ $type = Muon ]; then
    config=rule on new 4 Muon-on "${weights[@]}" --resume "$work/Muon-old/step-00000003" >"$work/on.losses"
    { head -n 3 "$work/old.losses"; tail -n 1 "$work/on.losses"; } >"$work/goes-on.losses"
    near "$work"/{old,goes-on}.losses
  fi
  if [ $type = Muon ]; then near "$work"/{old,new}.losses; else same "$work"/{new,old}.losses; fi
done

echo 'LAMB, a schedule and a 16-bit model by a file of DeepSpeed'
cat >"$work/file.json" <<'JSON'
{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
 "optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "eps": 1e-8, "weight_decay": 0.1}},
 "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 2e-3, "total_num_steps": 8}},
 "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": true}}
JSON
config=file goes_on LAMB
python3 - "$work"/LAMB-{old,new}-out/16bit-model-00000006/model.safetensors <<'PYTHON'
import array, json, sys
headers, values = [], []
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    begin = 8 + int.from_bytes(data[:8], "little")
    headers.append(json.loads(data[8:begin]))
    bits = array.array("I", (half << 16 for half in array.array("H", data[begin:])))
    values.append(array.array("f", bits.tobytes()))
assert headers[0] == headers[1], headers
assert all(abs(a - b) <= 2**-7 * abs(b) for a, b in zip(*values, strict=True))
PYTHON

echo 'ranks that are processes: the bits of threads, and a run that goes on'
on new 6 threads "${weights[@]}" >"$work/threads.losses"
launch=("$zero" launch --sockets --ranks "$ranks" --)
on new 3 processes "${weights[@]}" >"$work/processes.losses"
on new 6 processes "${weights[@]}" --resume auto >"$work/processes.losses"
diff "$work/processes.losses" "$work/threads.losses"

echo 'BERT on text, from fresh weights with dropout, what it predicts, and on from one front to the other'
launch=() data=$text
"$zero" tokenizer "$work/words" --data "$text" --vocab-size 500 >/dev/null
mkdir "$work/bert"
sed 's/_prob": 0.0/_prob": 0.1/; s/"vocab_size": .*/"vocab_size": 500/' "$fixture/../bert_tiny/config.json" >"$work/bert/config.json"
bert=(--model "$work/bert" --task bert-pretraining --tokenizer "$work/words" --seq 32 --seed 3 --accumulation 2 --eval 8 --eval-every 3)
config=none on old 6 old-bert "${bert[@]}" >"$work/old.losses"
config=none on new 6 new-bert "${bert[@]}" >"$work/new.losses"
for front in old new; do evaluated "$front-bert" >>"$work/$front.losses"; done
same "$work/new.losses" "$work/old.losses"
config=none on new 6 new-bert "${bert[@]}" --resume "$work/old-bert/step-00000003" | tail -n 3 >"$work/on.losses"
for front in old new; do config=none on $front 6 "$front-half" "${bert[@]}" --dtype bf16 >"$work/$front.losses"; done
near "$work"/{old,new}.losses
values "$work/old-bert-out/metrics.jsonl" loss | tail -n 3 >"$work/expected"
same "$work/on.losses" "$work/expected"

echo 'Llama and its variants: from Hugging Face weights in fp32 and bf16, a resume, fresh weights, LoRA'
for family in llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3; do
  echo "$family"
  folder=$fixture/../${family}_tiny
  data=$folder/batches.safetensors weights=(--weights "$folder" --decay-except nothing --shuffle false)
  for front in old new; do on $front 6 "$family-$front" "${weights[@]}" >"$work/$front.losses"; done
  same "$work"/{new,old}.losses
  on new 6 "$family-on" "${weights[@]}" --resume "$work/$family-old/step-00000003" >"$work/on.losses"
  tail -n 3 "$work/old.losses" >"$work/expected"
  same "$work/on.losses" "$work/expected"
  for front in old new; do config=half on $front 4 "$family-half-$front" "${weights[@]}" --checkpoint-activations all >"$work/$front.losses"; done
  near "$work"/{old,new}.losses
  for options in "--model $folder --seed 5" "--weights $folder --lora-r 2 --lora-targets all-linear"; do
    # shellcheck disable=SC2086
    for front in old new; do config=none on $front 4 "$family-more-$front" $options >"$work/$front.losses"; done
    same "$work"/{new,old}.losses
  done
done
echo 'a convolutional net of Burn'"'"'s modules: from one version to the other'
own=("$(dirname "$zero")/examples/own_model") new_own=("$programs/examples/own_model")
convolve() { # FRONT FOLDER [options]
  local -n front=$1
  "${front[@]}" --ranks 2 --batch 16 --steps 6 --stage 3 --eval-every 3 --save "$work/$2" --save-every 3 --out "$work/$2-out" "${@:3}" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
  values "$work/$2-out/metrics.jsonl" loss | tail -n 3 >"$work/$2.losses"
  evaluated "$2" | tail -n 2 >>"$work/$2.losses"
}
for front in own new_own; do
  other=$([ $front = own ] && echo new_own || echo own)
  convolve $front $front
  convolve $other $other-on --resume "$work/$front/step-00000003"
  same "$work/$other-on.losses" "$work/$front.losses"
done

echo 'LoRA from the same weights, and its checkpoints on the other version'
data=$fixture/batches.safetensors lora=(--weights "$fixture" --lora-r 2 --lora-alpha 4)
for front in old new; do config=none on $front 6 "lora-$front" "${lora[@]}" >"$work/$front.losses"; done
same "$work"/{new,old}.losses
for front in old new; do config=none on $front 4 "lora-table-$front" "${lora[@]}" --lora-targets c_attn,wte >"$work/$front.table"; done
same "$work"/{new,old}.table
for front in old new; do
  other=$([ $front = old ] && echo new || echo old)
  config=none on $front 6 "lora-on-$front" "${lora[@]}" --resume "$work/lora-$other/step-00000003" | tail -n 3 >"$work/on.losses"
  tail -n 3 "$work/old.losses" >"$work/expected"
  same "$work/on.losses" "$work/expected"
done

echo 'LoRA with dropout, and with checkpointed blocks'
for options in '' '--checkpoint-activations all'; do
  for front in old new; do
    # shellcheck disable=SC2086
    config=none on $front 4 "lora-drop-$front" "${lora[@]}" --lora-targets all-linear --lora-dropout 0.2 $options >"$work/$front.losses"
  done
  same "$work"/{new,old}.losses
done

echo 'QLoRA'
for options in '--quantize nf4' '--quantize int8' '--quantize int4 --dtype bf16' '--quantize nf4 --offload all --offload-to disk'; do
  for front in old new; do
    # shellcheck disable=SC2086
    config=none on $front 4 "qlora-$front" "${lora[@]}" --lora-targets all-linear $options >"$work/$front.losses"
  done
  same "$work"/{new,old}.losses
done

echo 'text from the checkpoints of either version'
generated() { # PROGRAM FOLDER [options]
  "$1" generate "$work/$2" --prompt 'First Citizen: we' --prompt O --max-new-tokens 16 --json "${@:3}" >"$work/text" 2>"$work/log" ||
    { cat "$work/log" >&2; exit 1; }
  cat "$work/text"
}
mkdir "$work/gpt2-other"
echo '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "activation_function": "relu",
  "tie_word_embeddings": false, "scale_attn_weights": false}' >"$work/gpt2-other/config.json"
for given in tiny llama-tiny "$work/gpt2-other"; do
  model=$(basename "$given")
  for front in old new; do
    declare -n program=$front
    "${program[@]}" --model "$given" --data "$text" --steps 20 --seq 64 --batch 4 --lr 3e-3 --save "$work/$model-$front" \
      --out "$work/$model-$front-out" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    grep -q 'generated text' "$work/log" || { echo 'no sample after training'; exit 1; }
    for options in '' '--beams 3' '--temperature 0.8 --top-k 40 --seed 5' '--ranks 3 --dtype bf16' '--ranks 2 --offload disk' \
      '--quantize int8' '--kv-cache-dtype bf16'; do
      # shellcheck disable=SC2086
      for of in "$zero" "$programs/zero-022"; do generated "$of" "$model-$front" --swap "$work" $options >"$work/$(basename "$of").text"; done
      diff "$work"/{zero,zero-022}.text || { echo "$model, $front, $options: other text"; exit 1; }
    done
    values "$work/$model-$front-out/metrics.jsonl" loss >"$work/$front.losses"
  done
  same "$work"/{new,old}.losses
done

echo 'classifiers, and models that generate text from text, with dropout'
(
  cd "$work"
  python3 - <<'PYTHON'
import json

words = "cat dog sat ran on under mat tree was glad not here".split()
sentence = lambda at: " ".join(words[(at * at + 5 * i + at * i) % 12] for i in range(4 + at % 5))
with open("rows.jsonl", "w") as rows:
    for at in range(163):
        text = sentence(at)
        kind, answer = ("cats", "cat") if "cat" in text else ("dogs", "dog ran") if "dog" in text else ("none", "not here glad")
        print(json.dumps({"class": kind, "answer": answer, "text": text, "score": at % 7 / 3}), file=rows)
with open("text.txt", "w") as text:
    print("\n".join(sentence(at) + ("\n" if at % 6 == 5 else "") for at in range(240)), file=text)
bert = {"vocab_size": 61, "max_position_embeddings": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
distilled = {"vocab_size": 61, "max_position_embeddings": 24, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
bart = {"vocab_size": 61, "max_position_embeddings": 24, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3, "forced_bos_token_id": 2, "forced_eos_token_id": 3}
t5 = {"vocab_size": 61, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.1, "eos_token_id": 3}
for name, config in {"bert": bert, "roberta": {**bert, "pad_token_id": 0}, "distilbert": distilled, "bart": bart, "t5": t5}.items():
    import os
    os.mkdir(f"model-{name}")
    json.dump({"model_type": name, **config}, open(f"model-{name}/config.json", "w"))
os.mkdir("model-t5-gated")
json.dump({"model_type": "t5", **t5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, open("model-t5-gated/config.json", "w"))
PYTHON
  "$zero" tokenizer tok --data text.txt --vocab-size 61 >log 2>&1 || { cat log; exit 1; }
)
tasked() { # PROGRAM NAME [options]: losses of steps and of evaluations, and predictions
  local -n front=$1
  (cd "$work" && "${front[@]}" --tokenizer tok --data rows.jsonl --seq 16 --batch 3 --eval 20 --steps 5 --lr 1e-2 \
    --save "$2-$1" --out "$2-$1-out" --predictions "$2-$1.predicted" "${@:3}" >log 2>&1) || { cat "$work/log" >&2; exit 1; }
  values "$work/$2-$1-out/metrics.jsonl" loss
  evaluated "$2-$1"
}
for model in bert roberta distilbert bart; do
  echo "$model as a classifier"
  for options in '--label-field score --ranks 2 --stage 2' '--label-field class' '--label-field class --ranks 3 --stage 3'; do
    # Without a correlation near 0, whose relative difference says nothing.
    # shellcheck disable=SC2086
    for front in old new; do tasked $front class-$model --task text-classification --model model-$model $options | sed -n 1,7p >"$work/$front.losses"; done
    same "$work"/{new,old}.losses
    [[ $options = *score* ]] || diff "$work"/class-$model-{old,new}.predicted
  done
  # Weights without a head, and an adapter on them.
  "$zero" export "$work/class-$model-old" "$work/hf-$model" --dtype fp32 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  for front in old new; do
    tasked $front lora-$model --task text-classification --weights hf-$model --label-field class --lora-r 2 --ranks 2 --stage 3 \
      --checkpoint-activations all >"$work/$front.losses"
  done
  same "$work"/{new,old}.losses
done
for model in bart t5 t5-gated; do
  echo "$model from text to text"
  for options in '' '--ranks 3 --stage 3' '--ranks 2 --stage 2 --checkpoint-activations all'; do
    # shellcheck disable=SC2086
    for front in old new; do tasked $front texts-$model --label-field answer --model model-$model $options >"$work/$front.losses"; done
    same "$work"/{new,old}.losses
  done
  diff "$work"/texts-$model-{old,new}.predicted
  for at in 0 1 2 3; do
    tasked new stages-$model --label-field answer --model model-$model --ranks 2 --stage $at >"$work/$at.losses"
    diff "$work"/{0,$at}.losses || { echo "stage $at: other bits than stage 0"; exit 1; }
  done
  for options in '' '--beams 3' '--ranks 2 --quantize int8'; do
    for of in "$zero" "$programs/zero-022"; do
      # shellcheck disable=SC2086
      (cd "$work" && "$of" generate texts-$model-new --tokenizer tok --prompt 'cat sat on mat' --prompt 'dog' --max-new-tokens 8 --json $options) \
        >"$work/$(basename "$of").text" 2>"$work/log" || { cat "$work/log"; exit 1; }
    done
    diff "$work"/{zero,zero-022}.text
  done
done

echo 'packed conversations'
python3 - "$work/pairs.jsonl" <<'PYTHON'
import json, random, sys

random.seed(1)
words = "cat dog sat ran on under mat tree was glad not here".split()
with open(sys.argv[1], "w") as rows:
    for _ in range(120):
        prompt, completion = (" ".join(random.choices(words, k=random.randint(1, most))) for most in (9, 25))
        print(json.dumps({"prompt": prompt + " ?", "completion": " " + completion}), file=rows)
PYTHON
for model in tiny llama-tiny; do
  for options in '' '--stage 1 --checkpoint-activations all'; do
    for front in old new; do
      # shellcheck disable=SC2086
      (cd "$work" && declare -n program=$front && "${program[@]}" --model $model --data pairs.jsonl --seq 64 --batch 2 --ranks 2 --steps 5 --lr 1e-3 \
        --packing --eval 4 --out "packed-$front" $options >log 2>&1) || { cat "$work/log"; exit 1; }
      values "$work/packed-$front/metrics.jsonl" loss >"$work/$front.losses"
    done
    same "$work"/{new,old}.losses
  done
done

echo 'preferences'
for model in gpt2_tiny qwen3_tiny gemma2_tiny; do
  mkdir "$work/prefer-$model"
  cp "$fixture/../texts/$model"/* "$fixture/../$model"/*.{json,safetensors} "$work/prefer-$model"
  python3 - "$fixture/../preferences.json" "$work" "$model" <<'PYTHON'
import json, sys

made, work, model = sys.argv[1:]
case = json.load(open(made))["training"][0]
open(f"{work}/prefer-{model}/chat_template.jinja", "w").write(case["template"])
open(f"{work}/preferences.jsonl", "w").writelines(json.dumps(row) + "\n" for row in case["rows"])
PYTHON
  for options in '' '--ranks 3 --stage 3 --checkpoint-activations all' '--ranks 2 --lora-r 2 --lora-targets all-linear --quantize nf4'; do
    for front in old new; do
      # shellcheck disable=SC2086
      (cd "$work" && declare -n program=$front && "${program[@]}" --task dpo --weights prefer-$model --data preferences.jsonl --seq 32 --batch 2 \
        --steps 5 --lr 1e-3 --eval 4 --out "prefer-$front-out" $options >log 2>&1) || { cat "$work/log"; exit 1; }
      # Rewards are differences of log-probabilities: they are compared absolutely.
      { values "$work/prefer-$front-out/metrics.jsonl" loss; evaluated prefer-$front | awk '{ printf "%.9f\n", 1 + $1 }'; } >"$work/$front.losses"
    done
    same "$work"/{new,old}.losses
  done
done

echo 'answers at evaluations'
python3 - "$work/preferences.jsonl" "$work/answers.jsonl" <<'PYTHON'
import json, sys

rows = map(json.loads, open(sys.argv[1]))
open(sys.argv[2], "w").writelines(json.dumps({"messages": row["prompt"] + row["chosen"]}) + "\n" for row in rows)
PYTHON
for front in old new; do
  (cd "$work" && declare -n program=$front && "${program[@]}" --weights prefer-qwen3_tiny --data answers.jsonl --seq 32 --batch 2 --steps 5 --lr 1e-3 \
    --ranks 2 --stage 3 --eval 5 --eval-metric exact-match --predictions $front.answers --out "answers-$front-out" >log 2>&1) ||
    { cat "$work/log"; exit 1; }
  { values "$work/answers-$front-out/metrics.jsonl" loss; evaluated answers-$front; } >"$work/$front.losses"
done
same "$work"/{new,old}.losses
diff "$work"/{new,old}.answers

echo 'a run that is killed goes on from its last checkpoint'
killed=(--weights "$fixture" --data "$fixture/batches.safetensors" --batch 2 --steps 60 --save-every 2)
for ranks_are in threads processes; do
  ways=(--ranks 3)
  [ $ranks_are = threads ] || ways=()
  started=("${new[@]}")
  [ $ranks_are = threads ] || started=("$zero" launch --sockets --ranks 3 -- "${new[@]}")
  "${started[@]}" "${killed[@]}" "${ways[@]}" --save "$work/whole-$ranks_are" --out "$work/whole-$ranks_are-out" >"$work/log" 2>&1 ||
    { cat "$work/log"; exit 1; }
  setsid "${started[@]}" "${killed[@]}" "${ways[@]}" --save "$work/cut-$ranks_are" >"$work/log" 2>&1 &
  until [ -e "$work/cut-$ranks_are/step-00000006" ]; do sleep 0.02; kill -0 $! || { cat "$work/log"; exit 1; }; done
  kill -9 -- -$!
  wait $! 2>/dev/null || true
  "${started[@]}" "${killed[@]}" "${ways[@]}" --save "$work/cut-$ranks_are" --out "$work/cut-$ranks_are-out" --resume "$work/cut-$ranks_are" \
    >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  values "$work/whole-$ranks_are-out/metrics.jsonl" loss >"$work/expected"
  values "$work/cut-$ranks_are-out/metrics.jsonl" loss >"$work/on.losses"
  resumed=$(wc -l <"$work/on.losses")
  [ "$resumed" -gt 0 ] && [ "$resumed" -lt 60 ] || { echo "$resumed steps after the resume"; exit 1; }
  diff <(tail -n "$resumed" "$work/expected") "$work/on.losses"
  echo "  $ranks_are: the same bits in the last $resumed steps"
done
