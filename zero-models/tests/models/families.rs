//! cargo test -p zero-models --test models families
//!
//! Logits, losses and text of Hugging Face's models on the same weights, as written by `tests/fixtures/make_models_reference.py`.

use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData, s};
use burn_flex::Flex;
use safetensors::SafeTensors;
use serde_json::Value;
use zero_models::generate::{CausalLm, Sampling, generate};
use zero_models::safetensors_file::Checkpoint;
use zero_models::{
    Bart, BartConfig, BartHead, Bert, BertConfig, BertHead, Llama, LlamaConfig, ModelConfig, ModelError, ProblemType,
    Seq2SeqLm, T5, T5Config, bart, bert, llama, lora, t5,
};

use crate::common::{Entry, write_single};
use crate::hf_parity::first_rows;

type B = Flex;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

pub fn json(folder: &str, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(folder).join(file)).unwrap()).unwrap()
}

/// Returns the first rows of a tensor of the fixture's batches.
pub fn rows(folder: &str, name: &str, count: usize) -> Tensor<B, 2, Int> {
    let bytes = std::fs::read(fixture(folder).join("batches.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let ids: Vec<i64> = tensor.data().as_chunks::<8>().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect();
    let all = Tensor::from_data(TensorData::new(ids, tensor.shape().to_vec()), &Default::default());
    all.slice(s![0..count])
}

/// Checks that logits differ by at most 1e-5 of the largest.
#[track_caller]
pub fn same_logits(what: &str, logits: Tensor<B, 3>, file: &Value) {
    let expected: Vec<Vec<Vec<f64>>> = serde_json::from_value(file["logits"].clone()).unwrap();
    let expected: Vec<f64> = expected.concat().concat();
    let got: Vec<f32> = logits.into_data().to_vec().unwrap();
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    let worst = got.iter().zip(&expected).map(|(got, x)| (f64::from(*got) - x).abs()).fold(0.0, f64::max);
    println!("{what}: logits differ by {worst:.1e} at most, the largest is {largest:.1}");
    assert!(worst <= 1e-5 * largest, "{what}: {worst:e}, the largest is {largest}");
}

#[track_caller]
pub fn same_loss(what: &str, got: Tensor<B, 1>, reference: &Value) {
    let (got, expected) = (f64::from(got.into_scalar()), reference["losses"][0].as_f64().unwrap());
    println!("{what}: loss {got}, expected {expected}");
    assert!((got - expected).abs() <= 1e-5 * expected, "{what}: {got}, expected {expected}");
}

/// Compares text with that of transformers, for all prompts at once and for each alone.
pub fn same_text(folder: &str, made: impl Fn(&[Vec<u32>], &Sampling) -> Vec<Vec<u32>>) {
    let file = json(folder, "generated.json");
    let tokens = |value: &Value| -> Vec<Vec<u32>> { serde_json::from_value(value.clone()).unwrap() };
    let prompts = tokens(&file["prompts"]);
    for case in file["cases"].as_array().unwrap() {
        let options = &case["options"];
        let number = |key: &str, default: f64| options[key].as_f64().unwrap_or(default);
        let token = |value: &Value| value.as_u64().map(|token| token as u32);
        let how = Sampling {
            max_new_tokens: file["max_new_tokens"].as_u64().unwrap() as usize,
            stop: token(&case["eos"]).into_iter().collect(),
            repetition_penalty: number("repetition_penalty", 1.0),
            beams: number("num_beams", 1.0) as usize,
            length_penalty: number("length_penalty", 1.0),
            forced_first: token(&options["forced_bos_token_id"]),
            forced_last: token(&options["forced_eos_token_id"]),
            ..Sampling::default()
        };
        let expected = tokens(&case["made"]);
        assert_eq!(made(&prompts, &how), expected, "{folder}: all prompts at once, {case}");
        for (prompt, expected) in prompts.iter().zip(expected) {
            assert_eq!(made(std::slice::from_ref(prompt), &how), [expected], "{folder}: {prompt:?} alone, {case}");
        }
    }
}

#[test]
fn llama_mistral_and_qwens_are_hugging_faces() {
    for folder in [
        "llama_tiny",
        "mistral_tiny",
        "qwen2_tiny",
        "qwen3_tiny",
        "gemma_tiny",
        "gemma2_tiny",
        "gemma3_tiny",
        "phi3_tiny",
    ] {
        let model: Llama<B> = llama::weights::from_pretrained(&fixture(folder), &Default::default()).unwrap();
        same_logits(folder, model.forward(rows(folder, "input_ids", 2)), &json(folder, "generated.json"));
        same_loss(folder, model.loss(rows(folder, "input_ids", 4)), &json(folder, "reference.json"));
        same_text(folder, |prompts, how| generate(&model, prompts, how, &Default::default()).unwrap());
        assert_eq!((model.positions(), model.vocabulary()), (40, 61));
    }
}

/// Attention dropout selects elementary operations, where each type of layer has its own masks.
#[test]
fn windows_of_some_layers_are_theirs_alone() {
    type A = burn::backend::Autodiff<Flex>;
    for folder in ["qwen3_tiny", "gemma2_tiny", "gemma3_tiny", "phi3_tiny"] {
        let config = LlamaConfig::from_file(&fixture(folder).join("config.json")).unwrap();
        let config = LlamaConfig { attention_dropout: 1e-12, ..config };
        let device = Default::default();
        let model = llama::weights::load(config.init::<A>(&device), &fixture(folder), &device).unwrap();
        let ids = Tensor::<A, 2, Int>::from_data(rows(folder, "input_ids", 2).into_data(), &device);
        same_logits(
            folder,
            Tensor::from_data(model.forward(ids).into_data(), &device),
            &json(folder, "generated.json"),
        );
    }
}

#[test]
fn encoders_are_hugging_faces() {
    let device = Default::default();
    for name in ["roberta_tiny_classes", "distilbert_tiny_classes"] {
        let folder = format!("{name}/masked");
        let model: Bert<B> = bert::weights::from_pretrained(&fixture(&folder), &device).unwrap();
        let (ids, mask) = (rows(name, "input_ids", 2), rows(name, "attention_mask", 2));
        let logits = model.predict_tokens(ids.clone(), ids.zeros_like(), Some(mask.clone()));
        // What stands at padding is used for nothing.
        let shown = mask.float().unsqueeze_dim::<3>(2);
        same_logits(&folder, logits * shown, &json(&folder, "logits.json"));

        // A classifier with an adapter.
        let config = ModelConfig::from_file(&fixture(name).join("config.json")).unwrap();
        let model: Bert<B> = bert::weights::from_pretrained(&fixture(name), &device).unwrap();
        let model = lora::load(model, &config, &fixture(name).join("lora"), &device).unwrap();
        let (ids, mask) = (rows(name, "input_ids", 4), rows(name, "attention_mask", 4));
        let logits = model.classify(ids.clone(), ids.zeros_like(), Some(mask));
        let reference = json(&format!("{name}/lora"), "reference.json");
        same_logits(name, logits.unsqueeze(), &serde_json::json!({ "logits": [reference["logits"]] }));
    }
}

/// A single label without `problem_type`, as in rerankers; and losses of other kinds of labels on a head with classes.
#[test]
fn heads_for_numbers_and_several_labels_are_hugging_faces() {
    let device = Default::default();
    for (name, kind, given) in [
        ("bert_tiny_score", "regression", None),
        ("bert_tiny_classes", "regression", Some(ProblemType::Regression)),
        ("bert_tiny_classes", "multi_label", Some(ProblemType::MultiLabelClassification)),
    ] {
        let config = BertConfig::from_file(&fixture(name).join("config.json")).unwrap();
        let BertHead::Classes(labels) = &config.head else { panic!("it is a classifier") };
        let problem = ProblemType::of_head(given.or(config.problem_type), labels.len()).unwrap();
        let model: Bert<B> = bert::weights::load(config.init(&device), &fixture(name), &device).unwrap();
        let [ids, types, mask] =
            ["input_ids", "token_type_ids", "attention_mask"].map(|tensor| rows("bert_tiny", tensor, 4));
        let logits = model.classify(ids, types, Some(mask));
        let reference = json(name, &format!("{kind}.json"));
        let what = format!("{name}, {kind}");
        same_logits(&what, logits.clone().unsqueeze(), &serde_json::json!({ "logits": [reference["logits"]] }));
        let targets: Vec<f64> = reference["labels"].as_array().unwrap()[..4]
            .iter()
            .flat_map(|row| row.as_array().cloned().unwrap_or_else(|| vec![row.clone()]))
            .map(|x| x.as_f64().unwrap())
            .collect();
        same_loss(&what, problem.loss(logits, &targets), &reference);
    }
}

#[test]
fn a_bart_with_a_classification_head_is_hugging_faces() {
    let (name, device) = ("bart_tiny_classes", Default::default());
    let config = ModelConfig::from_file(&fixture(name).join("config.json")).unwrap();
    assert_eq!((config.architecture(), config.classes().len()), (Some("BartForSequenceClassification"), 3));
    let model: Bart<B> = bart::weights::from_pretrained(&fixture(name), &device).unwrap();
    let (ids, mask) = (rows(name, "input_ids", 4), rows(name, "attention_mask", 4));
    let classes: Vec<f64> = first_rows::<1>(name, "labels", 4).into_data().iter().collect();
    let loss = ProblemType::SingleLabelClassification.loss(model.classify(ids.clone(), Some(mask.clone())), &classes);
    let reference = json(&format!("{name}/lora"), "reference.json");
    same_loss(name, loss, &serde_json::json!({ "losses": reference["full_losses"] }));
    let model = lora::load(model, &config, &fixture(name).join("lora"), &device).unwrap();
    let logits = model.classify(ids, Some(mask));
    same_logits(name, logits.unsqueeze(), &serde_json::json!({ "logits": [reference["logits"]] }));
}

/// Checkpoints of the bare model, of one that generates, and of one with a classification head, loaded by each other.
#[test]
fn a_barts_head_may_be_fresh_or_left_out() {
    let (device, dir) = (Default::default(), tempfile::tempdir().unwrap());
    let bytes = std::fs::read(fixture("bart_tiny").join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let bare = all.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("model.")?.to_string(), tensor)));
    let bare: Vec<_> = bare.collect();
    safetensors::serialize_to_file(bare, None, &dir.path().join("model.safetensors")).unwrap();
    let config = BartConfig::from_file(&fixture("bart_tiny_classes").join("config.json")).unwrap();
    let mut loaded = Vec::new();
    for folder in [dir.path().to_path_buf(), fixture("bart_tiny")] {
        assert!(bart::weights::load(config.init::<B>(&device), &folder, &device).is_err());
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let (model, fresh) = bart::weights::load_without_head(config.init::<B>(&device), &checkpoint, &device).unwrap();
        assert!(fresh.len() == 4 && fresh.iter().all(|name| name.starts_with("classification_head.")), "{fresh:?}");
        loaded.push(model.shared.val().into_data());
    }
    assert_eq!(loaded[0], loaded[1]);
    let generation = BartConfig { head: BartHead::Generation, ..config };
    bart::weights::load(generation.init::<B>(&device), &fixture("bart_tiny_classes"), &device).unwrap();
}

/// Checkpoints of the bare encoder, and of a model with a pooler, have no head.
#[test]
fn an_encoders_head_may_be_fresh() {
    let device = Default::default();
    for (name, prefix) in [("roberta_tiny_classes", "roberta."), ("distilbert_tiny_classes", "distilbert.")] {
        let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let bare = all.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor)));
        let bare: Vec<_> = bare.collect();
        safetensors::serialize_to_file(bare, None, &dir.path().join("model.safetensors")).unwrap();
        let config = BertConfig::from_file(&fixture(name).join("config.json")).unwrap();
        let model = config.init::<B>(&device);
        assert!(bert::weights::load(model.clone(), dir.path(), &device).is_err());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let (_, fresh) = bert::weights::load_without_head(model, &checkpoint, &device).unwrap();
        assert_eq!(fresh.len(), 4, "{fresh:?}");
    }
}

/// Compares logits, a loss and texts of a sequence-to-sequence model.
fn same_seq2seq(folder: &str, model: &impl Seq2SeqLm<B>) {
    let of = |name: &str, count: usize| rows(folder, name, count);
    let (ids, mask, labels) = (of("input_ids", 2), of("attention_mask", 2), of("labels", 2));
    let logits = model.forward(ids, Some(mask), model.decoder_inputs(labels));
    same_logits(folder, logits, &json(folder, "generated.json"));
    let loss = model.loss(of("input_ids", 4), Some(of("attention_mask", 4)), of("labels", 4));
    same_loss(folder, loss, &json(folder, "reference.json"));
    same_text(folder, |texts, how| bart::generate(model, texts, how, &Default::default()).unwrap());
}

#[test]
fn bart_is_hugging_faces() {
    let device = Default::default();
    let config = BartConfig::from_file(&fixture("bart_tiny").join("config.json")).unwrap();
    let model: Bart<B> = bart::weights::load(config.init(&device), &fixture("bart_tiny"), &device).unwrap();
    same_seq2seq("bart_tiny", &model);
}

#[test]
fn t5s_are_hugging_faces() {
    for (folder, is_tied) in [("t5_tiny", true), ("flan_t5_tiny", false)] {
        let model: T5<B> = t5::weights::from_pretrained(&fixture(folder), &Default::default()).unwrap();
        assert_eq!(model.lm_head.is_none(), is_tied);
        same_seq2seq(folder, &model);
    }
}

/// Copies the files of a fixture to a folder, with other keys in `config.json` and other tensors.
fn changed(folder: &str, keys: &[(&str, Value)], tensors: impl Fn(&mut Vec<Entry>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config = json(folder, "config.json");
    for (key, value) in keys {
        config[*key] = value.clone();
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(fixture(folder).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, tensor): (String, safetensors::tensor::TensorView<'_>)| Entry {
        name,
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
        bytes: tensor.data().to_vec(),
    };
    let mut entries: Vec<Entry> = file.tensors().into_iter().map(entry).collect();
    tensors(&mut entries);
    write_single(dir.path(), &entries);
    dir
}

/// Published files, and files written by transformers 5.
#[test]
fn the_weights_of_a_t5_decide_whether_its_head_is_tied() {
    let again = |entries: &mut Vec<Entry>, name: &str| {
        let shared = entries.iter().find(|entry| entry.name == "shared.weight").unwrap();
        let (dtype, shape, bytes) = (shared.dtype, shared.shape.clone(), shared.bytes.clone());
        entries.push(Entry { name: name.into(), dtype, shape, bytes });
    };
    let unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight";
    let flan = changed(
        "flan_t5_tiny",
        &[("tie_word_embeddings", false.into()), ("scale_decoder_outputs", Value::Null)],
        |_| (),
    );
    // mT5 is never scaled, whatever its file says.
    let mt5 = [("model_type", "mt5".into()), ("scale_decoder_outputs", true.into())];
    let mt5 = changed("flan_t5_tiny", &mt5, |entries| again(entries, "encoder.embed_tokens.weight"));
    let old = changed("t5_tiny", &[("scale_decoder_outputs", Value::Null)], |entries| {
        for name in ["lm_head.weight", "decoder.embed_tokens.weight", unused] {
            again(entries, name);
        }
        entries.retain(|entry| entry.name != "shared.weight");
    });
    let device = Default::default();
    for (dir, folder, is_tied) in [(flan, "flan_t5_tiny", false), (mt5, "flan_t5_tiny", false), (old, "t5_tiny", true)]
    {
        let config = ModelConfig::from_file(&dir.path().join("config.json")).unwrap();
        config.check(dir.path()).unwrap();
        let ModelConfig::T5(config) = config else { panic!("{config:?}") };
        assert_eq!(config.tie_word_embeddings, is_tied);
        let model: T5<B> = t5::weights::load(config.init(&device), dir.path(), &device).unwrap();
        same_seq2seq(folder, &model);
    }
    // An embedding of a half that is another one.
    let other = changed("t5_tiny", &[], |entries| {
        again(entries, "encoder.embed_tokens.weight");
        entries.last_mut().unwrap().bytes[2] ^= 1;
    });
    let told = t5::weights::from_pretrained::<B>(other.path(), &device).unwrap_err();
    assert!(matches!(told, ModelError::Untied { .. }), "{told}");
}

/// Dropout selects attention by elementary operations, which must give the same logits.
#[test]
fn attention_of_a_t5_without_kernels_is_the_same() {
    type A = burn::backend::Autodiff<Flex>;
    let device = Default::default();
    for folder in ["t5_tiny", "flan_t5_tiny"] {
        let config = T5Config::from_file(&fixture(folder).join("config.json")).unwrap();
        let config = T5Config { dropout_rate: 1e-12, ..config };
        let model = t5::weights::load(config.init::<A>(&device), &fixture(folder), &device).unwrap();
        let of = |name: &str| Tensor::<A, 2, Int>::from_data(rows(folder, name, 2).into_data(), &device);
        let logits = model.forward(of("input_ids"), Some(of("attention_mask")), model.decoder_inputs(of("labels")));
        same_logits(folder, Tensor::from_data(logits.into_data(), &device), &json(folder, "generated.json"));
    }
}

#[test]
fn parameters_of_a_t5_are_those_of_its_configuration() {
    let device = Default::default();
    for folder in ["t5_tiny", "flan_t5_tiny"] {
        let config = T5Config::from_file(&fixture(folder).join("config.json")).unwrap();
        let model = config.init::<B>(&device);
        assert_eq!(model.num_params(), config.num_params());
        let shapes: Vec<_> =
            t5::weights::hf_params(&model).into_iter().map(|param| (param.name, param.shape)).collect();
        assert_eq!(shapes, config.parameter_shapes());
    }
}

#[test]
fn what_a_bart_cannot_read_is_told() {
    let (folder, device) = (fixture("bart_tiny"), Default::default());
    let model: Bart<B> = bart::weights::from_pretrained(&folder, &device).unwrap();
    let how = Sampling { max_new_tokens: 5, ..Sampling::default() };
    for (text, how, expected) in [
        (vec![], how.clone(), "prompt 0 is empty"),
        (vec![61], how.clone(), "has the token 61, but the model has 61 tokens"),
        (vec![5; 25], how.clone(), "has 25 tokens, and with 0 new ones exceeds the model's 24 positions"),
        (vec![5], Sampling { max_new_tokens: 24, ..how.clone() }, "has 1 tokens, and with 24 new ones exceeds"),
    ] {
        let told = bart::generate(&model, &[text], &how, &device).unwrap_err().to_string();
        assert!(told.contains(expected), "{told}");
    }
    assert!(bart::generate(&model, &[], &how, &device).unwrap().is_empty());

    // Weights whose head has a bias.
    let dir = changed("bart_tiny", &[], |entries| {
        let bias = entries.iter_mut().find(|entry| entry.name == "final_logits_bias").unwrap();
        bias.bytes[..4].copy_from_slice(&1f32.to_le_bytes());
    });
    let told = bart::weights::from_pretrained::<B>(dir.path(), &device).unwrap_err().to_string();
    assert!(told.contains("final_logits_bias = values that are not 0 is not implemented"), "{told}");
}

#[test]
fn parameters_of_a_bart_are_those_of_its_configuration() {
    let config = BartConfig::from_file(&fixture("bart_tiny").join("config.json")).unwrap();
    assert_eq!(config.init::<B>(&Default::default()).num_params(), config.num_params());
    let shapes: Vec<_> = bart::weights::hf_params(&config.init::<B>(&Default::default()))
        .into_iter()
        .map(|param| (param.name, param.shape))
        .collect();
    assert_eq!(shapes, config.parameter_shapes());
}
