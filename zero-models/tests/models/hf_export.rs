//! cargo test -p zero-models --test models hf_export
//!
//! Exported checkpoints: loaded again, laid out as by transformers, and never left incomplete. `transformers_export.sh` checks that
//! transformers itself loads them.

use crate::common;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use burn::module::Module;
use burn_flex::Flex;
use common::noisy;
use common::small::{self, by_path};
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use zero_models::hf_export::{ExportDtype, ExportOptions, Exported, ReadError, export};
use zero_models::llama::LlamaKind;
use zero_models::safetensors_file::Checkpoint;
use zero_models::t5::T5Kind;
use zero_models::{
    Activation, BartConfig, BartHead, BertConfig, BertHead, BertKind, Gpt2Config, LlamaConfig, ModelConfig, ModelError,
    ModelParam, ProblemType, T5Config, bart, bert, gpt2, llama, t5,
};

fn gpt2_config(tied: bool) -> Gpt2Config {
    Gpt2Config { n_inner: Some(20), tie_word_embeddings: tied, ..small::gpt2() }
}

fn bert_config(tied: bool) -> BertConfig {
    BertConfig { tie_word_embeddings: tied, ..small::bert() }
}

fn llama_config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 31,
        hidden_size: 16,
        intermediate_size: 10,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 8,
        ..LlamaConfig::preset("llama-tiny").unwrap()
    }
}

/// Returns a configuration whose encoder and decoder differ.
fn bart_config() -> BartConfig {
    BartConfig {
        vocab_size: 31,
        d_model: 12,
        encoder_layers: 1,
        encoder_attention_heads: 3,
        encoder_ffn_dim: 10,
        decoder_attention_heads: 2,
        decoder_ffn_dim: 14,
        max_position_embeddings: 8,
        ..BartConfig::preset("bart-tiny").unwrap()
    }
}

/// Returns a configuration with a tied head or its own, with a gate or without; encoder and decoder differ.
fn t5_config(model_type: T5Kind, is_gated_act: bool, tied: bool) -> ModelConfig {
    let config = T5Config {
        model_type,
        vocab_size: 31,
        d_model: 12,
        d_kv: 5,
        d_ff: 10,
        num_layers: 1,
        num_decoder_layers: 2,
        num_heads: 2,
        relative_attention_num_buckets: 6,
        is_gated_act,
        activation: if is_gated_act { Activation::GeluTanh } else { Activation::Relu },
        tie_word_embeddings: tied,
        scale_decoder_outputs: model_type == T5Kind::T5 && tied,
        ..T5Config::preset("t5-small").unwrap()
    };
    config.into()
}

fn configs() -> Vec<ModelConfig> {
    let gpt2 = [true, false].map(|tied| gpt2_config(tied).into());
    let bert = [true, false].map(|tied| bert_config(tied).into());
    // Without biases, with some, with all; heads of another width than they share.
    let llama = [
        (LlamaKind::Llama, false, None),
        (LlamaKind::Llama, true, Some(6)),
        (LlamaKind::Mistral, false, Some(2)),
        (LlamaKind::Qwen2, false, None),
        (LlamaKind::Qwen3, false, Some(6)),
        (LlamaKind::Qwen3, true, Some(2)),
        (LlamaKind::Gemma, false, Some(6)),
        (LlamaKind::Gemma3, true, Some(4)),
        (LlamaKind::Gemma2, false, Some(4)),
        (LlamaKind::Phi3, false, Some(6)),
    ]
    .map(|(model_type, attention_bias, head_dim)| {
        let tie_word_embeddings = model_type == LlamaKind::Qwen2;
        let config = LlamaConfig { model_type, attention_bias, head_dim, tie_word_embeddings, ..llama_config() };
        config.into()
    });
    let encoders =
        [BertKind::Roberta, BertKind::XlmRoberta, BertKind::Camembert, BertKind::DistilBert].map(|model_type| {
            let head = match model_type {
                BertKind::Roberta | BertKind::DistilBert => BertHead::Classes(["a", "b", "c"].map(String::from).into()),
                _ => BertHead::MaskedLm,
            };
            let tie_word_embeddings = model_type != BertKind::Camembert;
            BertConfig { model_type, head, pad_token_id: 1, tie_word_embeddings, ..bert_config(true) }.into()
        });
    let t5 = [(T5Kind::T5, false, true), (T5Kind::T5, true, false), (T5Kind::Mt5, true, false)];
    let t5 = t5.map(|(kind, is_gated, tied)| t5_config(kind, is_gated, tied));
    let bart = [BartHead::Generation, BartHead::Classes(["a", "b"].map(String::from).into())];
    let bart = bart.map(|head| BartConfig { head, ..bart_config() }.into());
    gpt2.into_iter().chain(bert).chain(encoders).chain(llama).chain(bart).chain(t5).collect()
}

type Values = Vec<(String, Vec<f32>)>;

/// Returns the parameters of a model with noise.
fn values(config: &ModelConfig) -> Values {
    let device = Default::default();
    match config {
        ModelConfig::Gpt2(config) => by_path(&noisy(config.init::<Flex>(&device))),
        ModelConfig::Bert(config) => by_path(&noisy(config.init::<Flex>(&device))),
        ModelConfig::Bart(config) => by_path(&noisy(config.init::<Flex>(&device))),
        ModelConfig::T5(config) => by_path(&noisy(config.init::<Flex>(&device))),
        ModelConfig::Llama(config) => by_path(&noisy(config.init::<Flex>(&device))),
        _ => unreachable!("the tests have none"),
    }
}

fn loaded(config: &ModelConfig, dir: &Path) -> Values {
    let device = Default::default();
    match config {
        ModelConfig::Gpt2(_) => by_path(&gpt2::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Bert(_) => by_path(&bert::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Bart(_) => by_path(&bart::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::T5(_) => by_path(&t5::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        ModelConfig::Llama(_) => by_path(&llama::weights::from_pretrained::<Flex>(dir, &device).unwrap()),
        _ => unreachable!("the tests have none"),
    }
}

fn reader(values: &Values) -> impl FnMut(&ModelParam, Range<usize>) -> Result<Vec<f32>, ReadError> {
    let values: HashMap<String, Vec<f32>> = values.iter().cloned().collect();
    move |param, range| Ok(values[&param.path][range].to_vec())
}

fn options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

fn write(config: &ModelConfig, values: &Values, out: &Path, options: &ExportOptions) -> Exported {
    export(config, out, options, reader(values)).unwrap()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn parameters_of_a_configuration_are_those_of_its_module() {
    fn shapes<M: Module<Flex>>(
        model: &M,
        params: Vec<zero_models::HfParam>,
    ) -> Vec<(String, String, Vec<usize>, bool)> {
        let paths = by_path(model).into_iter().map(|(path, _)| path);
        paths.zip(params).map(|(path, hf)| (path, hf.name, hf.shape, hf.transposed)).collect()
    }
    for config in configs() {
        let device = Default::default();
        let of_module = match &config {
            ModelConfig::Gpt2(config) => {
                let model = config.init::<Flex>(&device);
                shapes(&model, gpt2::weights::hf_params(&model))
            }
            ModelConfig::Bert(config) => {
                let model = config.init::<Flex>(&device);
                shapes(&model, bert::weights::hf_params(&model))
            }
            ModelConfig::Bart(config) => {
                let model = config.init::<Flex>(&device);
                shapes(&model, bart::weights::hf_params(&model))
            }
            ModelConfig::T5(config) => {
                let model = config.init::<Flex>(&device);
                shapes(&model, t5::weights::hf_params(&model))
            }
            ModelConfig::Llama(config) => {
                let model = config.init::<Flex>(&device);
                shapes(&model, llama::weights::hf_params(&model))
            }
            _ => unreachable!("the tests have none"),
        };
        let of_config: Vec<_> = config
            .parameters()
            .into_iter()
            .map(|param| (param.path.clone(), param.name.clone(), param.hf_shape(), param.transposed))
            .collect();
        assert_eq!(of_config, of_module);
    }
}

#[test]
fn what_is_written_is_loaded_to_the_bit_or_to_the_rounding() {
    for config in configs() {
        let written = values(&config);
        for dtype in ExportDtype::ALL {
            let rounded = |x: &f32| match dtype {
                ExportDtype::Fp32 => *x,
                ExportDtype::Fp16 => f16::from_f32(*x).to_f32(),
                ExportDtype::Bf16 => bf16::from_f32(*x).to_f32(),
            };
            let expected: Values =
                written.iter().map(|(path, x)| (path.clone(), x.iter().map(rounded).collect())).collect();
            // One file in large chunks, one file in chunks that fit nothing, and files with few tensors each.
            for (max_shard_bytes, chunk_elems) in [(1 << 40, usize::MAX), (1 << 40, 7), (3000, 100), (1, 1 << 20)] {
                let dir = tempfile::tempdir().unwrap();
                let out = dir.path().join("out");
                let options = ExportOptions { dtype, max_shard_bytes, chunk_elems, ..ExportOptions::default() };
                let exported = write(&config, &written, &out, &options);
                assert_eq!(loaded(&config, &out), expected, "{config:?}, {options:?}");
                assert_eq!(exported.files.len() > 1, max_shard_bytes < 1 << 40);
                assert_eq!(names(dir.path()), ["out"], "nothing beside it");
            }
        }
    }
}

#[test]
fn files_are_named_and_indexed_as_transformers_does() {
    let (config, dir) = (ModelConfig::from(gpt2_config(true)), tempfile::tempdir().unwrap());
    let written = values(&config);
    let one = write(&config, &written, &dir.path().join("one"), &options(ExportDtype::Bf16));
    assert_eq!(names(&dir.path().join("one")), ["config.json", "model.safetensors"]);

    let sharded = ExportOptions { max_shard_bytes: 2000, ..options(ExportDtype::Bf16) };
    let out = dir.path().join("many");
    let many = write(&config, &written, &out, &sharded);
    assert_eq!((many.tensors, many.bytes), (one.tensors, one.bytes));
    assert_eq!(many.bytes, 2 * gpt2_config(true).num_params() as u64);
    let count = many.files.len();
    let expected: Vec<String> = (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect();
    assert_eq!(many.files, expected);
    let index = read_json(&out.join("model.safetensors.index.json"));
    assert_eq!(index["metadata"]["total_size"], many.bytes);
    assert_eq!(index["metadata"]["total_parameters"], many.bytes / 2);

    // Both folders hold the same bytes under the same names.
    let [a, b] = ["one", "many"].map(|name| Checkpoint::open(&dir.path().join(name)).unwrap());
    assert_eq!(a.names().collect::<Vec<_>>(), b.names().collect::<Vec<_>>());
    assert_eq!(index["weight_map"].as_object().unwrap().len(), b.names().count());
    for name in a.names() {
        let (a, b) = (a.get(name).unwrap(), b.get(name).unwrap());
        assert_eq!((a.dtype, a.shape), (Dtype::BF16, b.shape), "{name}");
        let bits = |x: zero_models::safetensors_file::StoredTensor<'_>| {
            x.to_f32().unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(bits(a), bits(b), "{name}");
    }
    for file in &many.files {
        let bytes = std::fs::read(out.join(file)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let held: usize = file.tensors().iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(held <= 2000 || file.len() == 1, "{held} bytes in {} tensors", file.len());
    }
}

#[test]
fn the_config_is_hugging_faces() {
    let llama = |model_type| LlamaConfig { model_type, ..llama_config() }.into();
    let problem_type = Some(ProblemType::MultiLabelClassification);
    for (config, architecture) in [
        (ModelConfig::from(gpt2_config(false)), "GPT2LMHeadModel"),
        (bert_config(true).into(), "BertForPreTraining"),
        (bart_config().into(), "BartForConditionalGeneration"),
        (
            BartConfig { head: BartHead::Classes(vec!["a".into()]), problem_type, ..bart_config() }.into(),
            "BartForSequenceClassification",
        ),
        (llama(LlamaKind::Llama), "LlamaForCausalLM"),
        (llama(LlamaKind::Mistral), "MistralForCausalLM"),
        (llama(LlamaKind::Qwen2), "Qwen2ForCausalLM"),
        (llama(LlamaKind::Qwen3), "Qwen3ForCausalLM"),
        (llama(LlamaKind::Gemma), "GemmaForCausalLM"),
        (llama(LlamaKind::Gemma2), "Gemma2ForCausalLM"),
        (llama(LlamaKind::Gemma3), "Gemma3ForCausalLM"),
        (llama(LlamaKind::Phi3), "Phi3ForCausalLM"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for (dtype, name) in
            [(ExportDtype::Fp32, "float32"), (ExportDtype::Fp16, "float16"), (ExportDtype::Bf16, "bfloat16")]
        {
            let out = dir.path().join(name);
            write(&config, &values(&config), &out, &options(dtype));
            let json = read_json(&out.join("config.json"));
            assert_eq!(json["architectures"], json!([architecture]));
            assert_eq!(json["torch_dtype"], name);
            assert_eq!(ModelConfig::from_file(&out.join("config.json")).unwrap(), config);
        }
    }
}

#[test]
fn a_tied_head_is_not_written_and_an_untied_bias_is_written_twice() {
    let in_file = |config: ModelConfig| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        write(&config, &values(&config), &out, &options(ExportDtype::Fp32));
        let checkpoint = Checkpoint::open(&out).unwrap();
        let tensors =
            checkpoint.names().map(|name| (name.to_string(), checkpoint.get(name).unwrap().to_f32().unwrap()));
        tensors.collect::<BTreeMap<_, _>>()
    };
    assert!(!in_file(gpt2_config(true).into()).contains_key("lm_head.weight"));
    assert!(in_file(gpt2_config(false).into()).contains_key("lm_head.weight"));
    let tied = in_file(bert_config(true).into());
    assert!(!tied.keys().any(|name| name.contains("decoder")));
    let untied = in_file(bert_config(false).into());
    assert!(untied.contains_key("cls.predictions.decoder.weight"));
    assert_eq!(untied["cls.predictions.decoder.bias"], untied["cls.predictions.bias"]);
}

/// Every element is read once, front to back; transposed parameters are read in full.
#[test]
fn ranges_cover_each_parameter_once() {
    let config = ModelConfig::from(bert_config(true));
    let dir = tempfile::tempdir().unwrap();
    let mut asked: Vec<(String, Vec<Range<usize>>)> = Vec::new();
    let options = ExportOptions { chunk_elems: 50, ..options(ExportDtype::Bf16) };
    export(&config, &dir.path().join("out"), &options, |param, range| {
        match asked.last_mut() {
            Some((path, ranges)) if *path == param.path => ranges.push(range.clone()),
            _ => asked.push((param.path.clone(), vec![range.clone()])),
        }
        Ok(vec![0.0; range.len()])
    })
    .unwrap();
    let parameters = config.parameters();
    assert_eq!(asked.len(), parameters.len());
    for ((path, ranges), param) in asked.iter().zip(&parameters) {
        assert_eq!(*path, param.path);
        let whole = 0..param.numel();
        if param.transposed {
            assert_eq!(*ranges, [whole], "{path}");
            continue;
        }
        assert_eq!(ranges.iter().flat_map(Clone::clone).collect::<Vec<_>>(), whole.collect::<Vec<_>>());
        assert!(ranges.iter().all(|range| range.len() <= 50), "{path}: {ranges:?}");
    }
}

/// Checks that an export fails, that nothing is left, and that the message has these parts.
#[track_caller]
fn fails(
    dtype: ExportDtype,
    parts: &[&str],
    read: impl FnMut(&ModelParam, Range<usize>) -> Result<Vec<f32>, ReadError>,
) {
    let dir = tempfile::tempdir().unwrap();
    let options = ExportOptions { max_shard_bytes: 2000, ..options(dtype) };
    let error = export(&bert_config(true).into(), &dir.path().join("out"), &options, read).unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    let text = format!("{error}: {source}");
    for part in parts {
        assert!(text.contains(part), "no \"{part}\" in: {text}");
    }
    assert_eq!(names(dir.path()), [""; 0], "{text}");
}

#[test]
fn a_failed_export_leaves_nothing() {
    let late = "transform.weight";
    fails(ExportDtype::Fp32, &["\"transform.weight\"", "the rank has gone"], |param, range| match param.path == late {
        true => Err("the rank has gone".into()),
        false => Ok(vec![0.0; range.len()]),
    });
    fails(ExportDtype::Fp32, &["144 elements of parameter \"transform.weight\"", "got 143"], |param, range| {
        Ok(vec![0.0; range.len() - usize::from(param.path == late)])
    });
    fails(ExportDtype::Bf16, &["\"transform.bias\"", "got 0"], |param, range| {
        Ok(vec![0.0; if param.path == "transform.bias" { 0 } else { range.len() }])
    });
    let tensor = "tensor \"cls.predictions.transform.dense.weight\" has the element -7e4";
    fails(ExportDtype::Fp16, &[tensor, "infinite in fp16", "export as bf16 or fp32"], |param, range| {
        Ok(range.map(|i| if param.path == late && i == 100 { -70_000.0 } else { 0.0 }).collect())
    });
    fails(ExportDtype::Bf16, &["infinite in bf16", "export as fp32"], |_, range| Ok(vec![f32::MAX; range.len()]));
}

#[test]
fn a_panic_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let panicking = |param: &ModelParam, range: Range<usize>| {
        assert_ne!(param.path, "ln_f.beta", "a gather failed");
        Ok(vec![0.0; range.len()])
    };
    catch_unwind(AssertUnwindSafe(|| export(&gpt2_config(true).into(), &out, &ExportOptions::default(), panicking)))
        .unwrap_err();
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn a_folder_that_is_taken_is_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig::from(gpt2_config(true));
    let try_at = |out: &Path| -> Result<Exported, ModelError> {
        export(&config, out, &ExportOptions::default(), |_, _| panic!("read"))
    };
    std::fs::write(dir.path().join("config.json"), "mine").unwrap();
    let error = try_at(dir.path()).unwrap_err().to_string();
    assert!(error.contains("cannot create folder") && error.contains("is not empty (1 found)"), "{error}");
    assert!(try_at(&dir.path().join("config.json")).unwrap_err().to_string().contains("a file with this name exists"));
    assert_eq!(std::fs::read(dir.path().join("config.json")).unwrap(), b"mine");
    assert_eq!(names(dir.path()), ["config.json"]);

    let empty = dir.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    write(&config, &values(&config), &empty, &options(ExportDtype::Fp32));
    assert_eq!(names(&empty), ["config.json", "model.safetensors"]);
}
