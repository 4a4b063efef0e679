//! cargo test -p zero-models --test models checkpoints
//!
//! Checkpoints that load, in every layout that Hugging Face has written, and malformed ones that must not.

use crate::common;

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_flex::Flex;
use common::small::{bert as bert_config, gpt2 as gpt2_config};
use common::{Entry, file_bytes, state_dict, write_index, write_sharded, write_single};
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use zero_models::safetensors_file::Checkpoint;
use zero_models::{Bert, Gpt2, Gpt2Config, ModelConfig, ModelError, bert, gpt2};

fn fresh() -> Gpt2<Flex> {
    gpt2_config().init(&Default::default())
}

fn entries_of(model: &Gpt2<Flex>) -> Vec<Entry> {
    state_dict(model, &gpt2::weights::hf_params(model))
}

fn entries() -> Vec<Entry> {
    entries_of(&fresh())
}

fn load(dir: &Path) -> Result<Gpt2<Flex>, ModelError> {
    gpt2::weights::load(fresh(), dir, &Default::default())
}

/// Returns the error of loading the folder.
fn refusal(dir: &Path) -> String {
    load(dir).map(|_| "loaded").unwrap_err().to_string()
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no \"{part}\" in: {text}");
    }
}

fn values(entries: &[Entry]) -> Vec<(String, Vec<f32>)> {
    entries.iter().map(|entry| (entry.name.clone(), entry.values())).collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn what_is_written_is_loaded_and_ids_stay() {
    let dir = folder();
    let written = entries();
    write_single(dir.path(), &written);

    let model = fresh();
    let ids = gpt2::weights::hf_names(&model);
    assert!(!model.wte.is_initialized() && !model.ln_f.gamma.is_initialized(), "naming draws nothing");
    let loaded = gpt2::weights::load(model, dir.path(), &Default::default()).unwrap();
    assert_eq!(gpt2::weights::hf_names(&loaded), ids);
    assert_eq!(values(&entries_of(&loaded)), values(&written));
}

#[test]
fn shards_are_one_checkpoint() {
    let dir = folder();
    let written = entries();
    write_sharded(dir.path(), &written, 5);
    let loaded = load(dir.path()).unwrap();
    assert_eq!(values(&entries_of(&loaded)), values(&written));
}

#[test]
fn a_single_file_goes_before_an_index() {
    let dir = folder();
    write_sharded(dir.path(), &entries(), 5);
    let written = entries();
    write_single(dir.path(), &written);
    let loaded = load(dir.path()).unwrap();
    assert_eq!(values(&entries_of(&loaded)), values(&written));
}

#[test]
fn other_float_types_are_converted() {
    type Convert = fn(f32) -> Vec<u8>;
    type Rounded = fn(f32) -> f32;
    let cases: [(Dtype, Convert, Rounded); 3] = [
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes().to_vec(), |x| f16::from_f32(x).to_f32()),
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes().to_vec(), |x| bf16::from_f32(x).to_f32()),
        (Dtype::F64, |x| (x as f64).to_le_bytes().to_vec(), |x| x),
    ];
    for (dtype, convert, rounded) in cases {
        let dir = folder();
        let original = entries();
        let written: Vec<Entry> = original
            .iter()
            .map(|entry| Entry {
                dtype,
                bytes: entry.values().into_iter().flat_map(convert).collect(),
                ..entry.clone()
            })
            .collect();
        write_single(dir.path(), &written);
        let loaded = load(dir.path()).unwrap();
        for ((name, got), (_, wanted)) in values(&entries_of(&loaded)).into_iter().zip(values(&original)) {
            let wanted: Vec<f32> = wanted.into_iter().map(rounded).collect();
            assert_eq!(got, wanted, "{dtype:?} {name}");
        }
    }
}

#[test]
fn the_prefix_may_be_absent_and_buffers_and_the_tied_head_are_not_loaded() {
    let dir = folder();
    let written = entries();
    let mut stripped: Vec<Entry> =
        written.iter().map(|entry| Entry { name: entry.name.replace("transformer.", ""), ..entry.clone() }).collect();
    stripped.push(Entry::f32("h.0.attn.bias", &[1, 1, 8, 8], &[1.0; 64]));
    stripped.push(Entry::f32("h.1.attn.masked_bias", &[], &[-1e4]));
    stripped.push(Entry::f32("lm_head.weight", &[23, 12], &written[0].values()));
    write_single(dir.path(), &stripped);
    let loaded = load(dir.path()).unwrap();
    assert_eq!(values(&entries_of(&loaded)), values(&written));
    // A head of other numbers is another model.
    *stripped.last_mut().unwrap() = Entry::f32("lm_head.weight", &[23, 12], &[7.0; 23 * 12]);
    write_single(dir.path(), &stripped);
    assert_contains(
        &refusal(dir.path()),
        &["\"lm_head.weight\"", "\"wte.weight\"", "set tie_word_embeddings to false"],
    );
}

#[test]
fn a_family_is_found_without_a_model_type() {
    let of = |config: &str| ModelConfig::from_json(config);
    for (config, family) in [
        (r#"{"model_type": "bert"}"#, "BertForPreTraining"),
        (r#"{"architectures": ["BertForMaskedLM"], "hidden_size": 48, "num_attention_heads": 4}"#, "BertForMaskedLM"),
        (r#"{"type_vocab_size": 2, "hidden_size": 48, "num_attention_heads": 4}"#, "BertForPreTraining"),
        (r#"{"n_embd": 48, "n_head": 4}"#, "GPT2LMHeadModel"),
        (r#"{"architectures": ["Qwen2ForCausalLM"]}"#, "Qwen2ForCausalLM"),
        (r#"{"architectures": ["Qwen3Model"]}"#, "Qwen3ForCausalLM"),
        (r#"{"architectures": ["Gemma2ForCausalLM"]}"#, "Gemma2ForCausalLM"),
        (r#"{"architectures": ["Phi3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}"#, "Phi3ForCausalLM"),
        (r#"{"rms_norm_eps": 1e-6}"#, "LlamaForCausalLM"),
        (r#"{"encoder_layers": 2, "decoder_layers": 2}"#, "BartForConditionalGeneration"),
        (r#"{"architectures": ["MT5ForConditionalGeneration"]}"#, "MT5ForConditionalGeneration"),
        (r#"{"relative_attention_num_buckets": 32}"#, "T5ForConditionalGeneration"),
    ] {
        assert_eq!(of(config).unwrap().architecture(), Some(family), "{config}");
    }
    for (config, got) in [
        (r#"{"model_type": "qwen3_moe"}"#, "model_type \"qwen3_moe\""),
        (r#"{"architectures": ["Qwen2MoeForCausalLM"]}"#, "the architecture \"Qwen2MoeForCausalLM\""),
        (r#"{"architectures": ["Gemma4ForCausalLM"]}"#, "the architecture \"Gemma4ForCausalLM\""),
        (r#"{"hidden_size": 8}"#, "no model_type"),
    ] {
        let told = of(config).unwrap_err().to_string();
        assert_contains(
            &told,
            &[got, "expected one of these values of model_type: gpt2, bart, t5, mt5, bert, roberta, "],
        );
    }
}

#[test]
fn quantized_folders_and_pointers_are_named() {
    let config = r#"{"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}"#;
    let told = ModelConfig::from_json(config).unwrap_err().to_string();
    assert_contains(&told, &["quantization_config = \"gptq\"", "checkpoints that are not quantized (--quantize"]);
    let dir = folder();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n";
    std::fs::write(dir.path().join("model.safetensors"), pointer).unwrap();
    let told = Checkpoint::open(dir.path()).err().unwrap().to_string();
    assert_contains(&told, &["model.safetensors is a Git LFS pointer", "git lfs pull"]);
}

#[test]
fn the_tied_head_stands_in_for_an_absent_embedding() {
    let dir = folder();
    let mut written = entries();
    written[0].name = "lm_head.weight".to_string();
    write_single(dir.path(), &written);
    let loaded = load(dir.path()).unwrap();
    assert_eq!(entries_of(&loaded)[0].values(), written[0].values());
}

#[test]
fn an_untied_head_is_a_parameter() {
    let config = Gpt2Config { tie_word_embeddings: false, ..gpt2_config() };
    let dir = folder();
    let device = Default::default();
    let written = entries_of(&config.init(&device));
    write_single(dir.path(), &written);
    let loaded = gpt2::weights::load(config.init(&device), dir.path(), &device).unwrap();
    assert_eq!(values(&entries_of(&loaded)), values(&written));

    write_single(dir.path(), &entries());
    let error = gpt2::weights::load::<Flex>(config.init(&device), dir.path(), &device).unwrap_err();
    assert_contains(&error.to_string(), &["1 missing: lm_head.weight"]);
}

#[test]
fn a_pretrained_folder_is_config_and_weights() {
    let dir = folder();
    let written = entries();
    write_single(dir.path(), &written);
    let text = serde_json::to_string(&gpt2_config()).unwrap();
    std::fs::write(dir.path().join("config.json"), text).unwrap();
    let loaded: Gpt2<Flex> = gpt2::weights::from_pretrained(dir.path(), &Default::default()).unwrap();
    assert_eq!(values(&entries_of(&loaded)), values(&written));

    std::fs::write(dir.path().join("config.json"), r#"{"model_type": "bert"}"#).unwrap();
    let error = gpt2::weights::from_pretrained::<Flex>(dir.path(), &Default::default());
    assert_contains(&error.unwrap_err().to_string(), &["config.json", "expected \"gpt2\""]);
}

fn bert_logits(model: &Bert<Flex>) -> Vec<f32> {
    let ids = Tensor::<Flex, 2, Int>::from_ints([[1, 5, 3, 22]], &Default::default());
    let (logits, _) = model.forward(ids.clone(), ids.zeros_like(), None);
    logits.into_data().to_vec().unwrap()
}

#[test]
fn bert_is_loaded_transposed_and_under_its_older_names() {
    let device = Default::default();
    let original: Bert<Flex> = bert_config().init(&device);
    let written = state_dict(&original, &bert::weights::hf_params(&original));
    let wide = written.iter().find(|entry| entry.name.ends_with("1.intermediate.dense.weight")).unwrap();
    assert_eq!(wide.shape, [20, 12]);

    let mut older: Vec<Entry> = written
        .iter()
        .map(|entry| Entry {
            name: entry.name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
            ..entry.clone()
        })
        .collect();
    let positions: Vec<u8> = (0..8i64).flat_map(i64::to_le_bytes).collect();
    older.push(Entry {
        name: "bert.embeddings.position_ids".to_string(),
        dtype: Dtype::I64,
        shape: vec![1, 8],
        bytes: positions,
    });
    let bias = written.iter().find(|entry| entry.name == "cls.predictions.bias").unwrap();
    older.push(Entry { name: "cls.predictions.decoder.bias".to_string(), ..bias.clone() });

    for entries in [written, older] {
        let dir = folder();
        write_single(dir.path(), &entries);
        let loaded = bert::weights::load(bert_config().init(&device), dir.path(), &device).unwrap();
        assert_eq!(bert_logits(&loaded), bert_logits(&original));
        assert_eq!(loaded.num_params(), original.num_params());
    }
}

#[test]
fn a_folder_without_a_checkpoint_is_refused() {
    let dir = folder();
    let text = refusal(dir.path());
    assert_contains(&text, &["no checkpoint in", "model.safetensors.index.json"]);
    std::fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert_contains(&refusal(dir.path()), &["safe_serialization=True"]);
    assert_contains(&refusal(&dir.path().join("absent")), &["this is not a folder"]);
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let dir = folder();
    let bytes = file_bytes(&entries());
    let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let claimed = format!("it claims {} bytes", header_end - 8);
    for (length, reason) in [
        (0, "expected 8 bytes for the header length, the file has 0"),
        (7, "expected 8 bytes for the header length, the file has 7"),
        (8, &claimed),
        (header_end - 1, &claimed),
        (header_end, "the file has 0 after the header"),
        (bytes.len() - 1, "bytes, the file has"),
    ] {
        std::fs::write(dir.path().join("model.safetensors"), &bytes[..length]).unwrap();
        assert_contains(&refusal(dir.path()), &["model.safetensors cannot be read", reason, "again"]);
    }
}

#[test]
fn a_file_that_is_not_safetensors_is_refused() {
    let dir = folder();
    let mut long = file_bytes(&entries());
    long.push(0);
    let mut no_json = 4u64.to_le_bytes().to_vec();
    no_json.extend(b"nope");
    let overlapping = br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut overlap = (overlapping.len() as u64).to_le_bytes().to_vec();
    overlap.extend(overlapping);
    overlap.extend([0; 4]);
    for bytes in [long, no_json, overlap] {
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        assert_contains(&refusal(dir.path()), &["cannot be read as a safetensors file"]);
    }
}

#[test]
fn a_wrong_shape_names_tensor_shapes_and_file() {
    let dir = folder();
    let mut written = entries();
    let at = written.iter().position(|entry| entry.name == "transformer.h.1.mlp.c_fc.weight").unwrap();
    written[at].shape.reverse();
    write_single(dir.path(), &written);
    assert_contains(
        &refusal(dir.path()),
        &[
            "tensor \"transformer.h.1.mlp.c_fc.weight\" in model.safetensors has shape [48, 12], expected [12, 48]",
            "config.json",
        ],
    );
}

#[test]
fn a_tied_head_of_another_shape_is_refused() {
    let dir = folder();
    let mut written = entries();
    written.push(Entry::f32("lm_head.weight", &[24, 12], &[0.0; 24 * 12]));
    write_single(dir.path(), &written);
    assert_contains(&refusal(dir.path()), &["\"lm_head.weight\"", "[24, 12], expected [23, 12]"]);
}

#[test]
fn missing_and_unexpected_tensors_are_listed_together() {
    let dir = folder();
    let mut written = entries();
    written[1].name = "classifier.weight".to_string();
    write_single(dir.path(), &written);
    assert_contains(&refusal(dir.path()), &["1 missing: transformer.wpe.weight", "1 unexpected: classifier.weight"]);

    write_single(dir.path(), &written[20..]);
    assert_contains(&refusal(dir.path()), &["20 missing", "and 10 more"]);
}

#[test]
fn two_tensors_for_one_parameter_are_refused() {
    let dir = folder();
    let mut written = entries();
    let twice = Entry { name: "wpe.weight".to_string(), ..written[1].clone() };
    written.push(twice);
    write_single(dir.path(), &written);
    assert_contains(&refusal(dir.path()), &["\"transformer.wpe.weight\"", "\"wpe.weight\"", "same parameter"]);
}

#[test]
fn other_element_types_are_refused() {
    let dir = folder();
    let mut written = entries();
    written[3].dtype = Dtype::I32;
    write_single(dir.path(), &written);
    let name = format!("tensor \"{}\"", written[3].name);
    assert_contains(&refusal(dir.path()), &[&name, "I32", "expected F32"]);
}

#[test]
fn an_index_that_names_an_absent_file_is_refused() {
    let dir = folder();
    write_sharded(dir.path(), &entries(), 12);
    std::fs::remove_file(dir.path().join("model-00001.safetensors")).unwrap();
    assert_contains(&refusal(dir.path()), &["\"model-00001.safetensors\"", "not in that folder"]);
}

#[test]
fn an_index_that_points_outside_its_folder_is_refused() {
    let parent = folder();
    std::fs::write(parent.path().join("model.safetensors"), file_bytes(&entries())).unwrap();
    let dir = parent.path().join("inner");
    std::fs::create_dir(&dir).unwrap();
    let absolute = parent.path().join("model.safetensors");
    for shard in
        ["../model.safetensors", absolute.to_str().unwrap(), "..", ".", "", "a/b", "..\\model.safetensors", "inner/"]
    {
        let mut map = serde_json::Map::new();
        map.insert("transformer.wte.weight".to_string(), shard.into());
        write_index(&dir, map);
        assert_contains(&refusal(&dir), &["must be a plain file name in the folder"]);
    }
}

#[test]
fn an_index_that_disagrees_with_its_shards_is_refused() {
    let dir = folder();
    let written = entries();
    std::fs::write(dir.path().join("model-00000.safetensors"), file_bytes(&written)).unwrap();
    let listing = |entries: &[Entry]| {
        entries
            .iter()
            .map(|entry| (entry.name.clone(), "model-00000.safetensors".into()))
            .collect::<serde_json::Map<_, _>>()
    };

    write_index(dir.path(), listing(&written[1..]));
    assert_contains(&refusal(dir.path()), &["\"transformer.wte.weight\"", "does not list it there"]);

    let mut map = listing(&written);
    map.insert("extra".to_string(), "model-00000.safetensors".into());
    write_index(dir.path(), map);
    assert_contains(&refusal(dir.path()), &["\"extra\"", "the shard does not have it"]);
}

#[test]
fn an_index_that_is_no_index_is_refused() {
    let dir = folder();
    for text in ["", "[]", "{}", r#"{"weight_map": {"a": 1}}"#] {
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        assert_contains(&refusal(dir.path()), &["is not a safetensors index"]);
    }
}

#[test]
fn a_checkpoint_is_read_by_name() {
    let dir = folder();
    let written = [Entry::f32("b", &[2], &[1.5, -2.0]), Entry::f32("a", &[0, 3], &[])];
    write_single(dir.path(), &written);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
    let tensor = checkpoint.get("b").unwrap();
    assert_eq!((tensor.shape, tensor.dtype), ([2].as_slice(), Dtype::F32));
    assert_eq!(tensor.to_f32().unwrap(), [1.5, -2.0]);
    assert!(checkpoint.get("a").unwrap().to_f32().unwrap().is_empty());
    assert!(checkpoint.get("c").is_none());
}
