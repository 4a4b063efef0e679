//! cargo test -p zero-models --test models lora
//!
//! Adapters of PEFT, made by `tests/fixtures/make_lora.py`: their effect on logits, and that they are written as by PEFT.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Tensor, s};
use burn_flex::Flex;
use serde_json::{Value, json};
use zero_models::hf_export::{ExportDtype, ExportOptions, export};
use zero_models::lora::{LoraConfig, adapt, load, merge, merge_with};
use zero_models::safetensors_file::Checkpoint;
use zero_models::{
    AdaptedModel, Bart, Bert, BertConfig, BertHead, Gpt2, Gpt2Config, Llama, ModelConfig, Seq2SeqLm, T5, bart, bert,
    gpt2, llama, t5,
};

use crate::common::small;
use crate::hf_parity::{first_rows, fixture};

/// The adapter of the Llama also adapts the embedding table.
const CASES: [&str; 5] = ["gpt2_tiny", "bert_tiny_classes", "llama_tiny", "t5_tiny", "bart_tiny_classes"];

fn config(case: &str) -> ModelConfig {
    ModelConfig::from_file(&fixture(case).join("config.json")).unwrap()
}

fn reference(case: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(case).join("lora/reference.json")).unwrap()).unwrap()
}

fn gpt2_with(dir: &Path, adapter: Option<&Path>) -> Gpt2<Flex> {
    let model = gpt2::weights::from_pretrained(dir, &Default::default()).unwrap();
    match adapter {
        Some(adapter) => load(model, &config("gpt2_tiny"), adapter, &Default::default()).unwrap(),
        None => model,
    }
}

fn bert_with(dir: &Path, adapter: Option<&Path>) -> Bert<Flex> {
    let model = bert::weights::from_pretrained(dir, &Default::default()).unwrap();
    match adapter {
        Some(adapter) => load(model, &config("bert_tiny_classes"), adapter, &Default::default()).unwrap(),
        None => model,
    }
}

fn llama_with(dir: &Path, adapter: Option<&Path>) -> Llama<Flex> {
    let model = llama::weights::from_pretrained(dir, &Default::default()).unwrap();
    match adapter {
        Some(adapter) => load(model, &config("llama_tiny"), adapter, &Default::default()).unwrap(),
        None => model,
    }
}

fn t5_with(dir: &Path, adapter: Option<&Path>) -> T5<Flex> {
    let model = t5::weights::from_pretrained(dir, &Default::default()).unwrap();
    match adapter {
        Some(adapter) => load(model, &config("t5_tiny"), adapter, &Default::default()).unwrap(),
        None => model,
    }
}

fn bart_with(dir: &Path, adapter: Option<&Path>) -> Bart<Flex> {
    let model = bart::weights::from_pretrained(dir, &Default::default()).unwrap();
    match adapter {
        Some(adapter) => load(model, &config("bart_tiny_classes"), adapter, &Default::default()).unwrap(),
        None => model,
    }
}

/// Computes logits as the script does.
fn logits(case: &str, dir: &Path, adapter: Option<&Path>) -> Vec<Vec<f32>> {
    let rows = |logits: Tensor<Flex, 2>| -> Vec<Vec<f32>> {
        logits.iter_dim(0).map(|row| row.into_data().to_vec().unwrap()).collect()
    };
    match case {
        "gpt2_tiny" | "llama_tiny" | "t5_tiny" => {
            let rows_of = |name| first_rows::<2>(case, name, 1);
            let ids = rows_of("input_ids");
            let out = match case {
                "gpt2_tiny" => gpt2_with(dir, adapter).forward(ids),
                "t5_tiny" => {
                    let model = t5_with(dir, adapter);
                    model.forward(ids, Some(rows_of("attention_mask")), model.decoder_inputs(rows_of("labels")))
                }
                _ => llama_with(dir, adapter).forward(ids),
            };
            [0, 5].into_iter().flat_map(|t| rows(out.clone().slice(s![0, t..t + 1, 0..8]).squeeze_dim(0))).collect()
        }
        "bart_tiny_classes" => {
            let [ids, mask] = ["input_ids", "attention_mask"].map(|name| first_rows::<2>(case, name, 4));
            rows(bart_with(dir, adapter).classify(ids, Some(mask)))
        }
        _ => {
            let [ids, types, mask] =
                ["input_ids", "token_type_ids", "attention_mask"].map(|name| first_rows::<2>("bert_tiny", name, 4));
            rows(bert_with(dir, adapter).classify(ids, types, Some(mask)))
        }
    }
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], expected: &Value) {
    let expected: Vec<Vec<f32>> = serde_json::from_value(expected.clone()).unwrap();
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
        assert!((got - expected).abs() <= 1e-5, "{got} {expected}");
    }
}

#[test]
fn adapters_of_peft_make_the_same_logits_beside_the_weights_and_merged_into_them() {
    for case in CASES {
        let (dir, adapter) = (fixture(case), fixture(case).join("lora"));
        assert_close(&logits(case, &dir, Some(&adapter)), &reference(case)["logits"]);
        let out = tempfile::tempdir().unwrap();
        let merged = out.path().join("merged");
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
        merge(&dir, &adapter, &merged, &options).unwrap();
        assert_close(&logits(case, &merged, None), &reference(case)["merged"]);
        assert_eq!(ModelConfig::from_file(&merged.join("config.json")).unwrap(), config(case));
    }
}

/// Returns the elements of a module's parameters, by path.
fn by_path<M: Module<Flex>>(module: &M) -> HashMap<String, Vec<f32>> {
    small::by_path(module).into_iter().collect()
}

#[test]
fn an_adapter_is_written_as_it_was_read() {
    for case in CASES {
        let (dir, adapter) = (fixture(case), fixture(case).join("lora"));
        let values = match case {
            "gpt2_tiny" => by_path(&gpt2_with(&dir, Some(&adapter))),
            "llama_tiny" => by_path(&llama_with(&dir, Some(&adapter))),
            "t5_tiny" => by_path(&t5_with(&dir, Some(&adapter))),
            "bart_tiny_classes" => by_path(&bart_with(&dir, Some(&adapter))),
            _ => by_path(&bert_with(&dir, Some(&adapter))),
        };
        let lora = LoraConfig::from_dir(&adapter).unwrap();
        let model = AdaptedModel::new(config(case), lora.clone(), Some(dir)).unwrap();
        let elements: usize = model.parameters().iter().map(|param| param.numel()).sum();
        assert_eq!(elements as u64, reference(case)["trained"]);
        let model = ModelConfig::from(model);
        let text = serde_json::to_string(&model).unwrap();
        assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), model);

        let temporary = tempfile::tempdir().unwrap();
        let out = temporary.path().join("adapter");
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
        export(&model, &out, &options, |param, range| Ok(values[&param.path][range].to_vec())).unwrap();
        // Tensor for tensor, bit for bit. PEFT sorts them otherwise.
        let read = |dir: &Path| -> Vec<(String, Vec<usize>, Vec<u8>)> {
            let bytes = std::fs::read(dir.join("adapter_model.safetensors")).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let mut all: Vec<_> =
                file.iter().map(|(name, view)| (name.into(), view.shape().to_vec(), view.data().to_vec())).collect();
            // PEFT saves the table of embeddings beside what is added to it.
            all.retain(|(name, ..): &(String, _, _)| !name.contains("base_layer"));
            all.sort();
            all
        };
        assert!(read(&out) == read(&adapter), "{case}");
        assert_eq!(LoraConfig::from_dir(&out).unwrap(), lora);
        // What PEFT reads besides.
        let [ours, theirs] = [&out, &adapter].map(|dir| -> Value {
            serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap()
        });
        for key in
            ["peft_type", "task_type", "bias", "fan_in_fan_out", "r", "use_rslora", "target_modules", "modules_to_save"]
        {
            let sorted = |keys: &Value| {
                keys[key].as_array().map(|names| names.iter().map(Value::to_string).collect::<BTreeSet<_>>())
            };
            match key {
                "target_modules" => assert_eq!(sorted(&ours), sorted(&theirs), "{case} {key}"),
                _ => assert_eq!(ours[key], theirs[key], "{case} {key}"),
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_told() {
    let gpt2 = config("gpt2_tiny");
    let bad = |lora: LoraConfig| AdaptedModel::new(gpt2.clone(), lora, None).unwrap_err().to_string();
    let targets = |names: &[&str]| LoraConfig {
        target_modules: names.iter().map(ToString::to_string).collect(),
        ..LoraConfig::default()
    };
    let text = bad(targets(&["c_atn"]));
    assert!(text.contains("did you mean \"c_attn\"?") && text.contains("c_attn, c_fc, c_proj"), "{text}");
    assert!(bad(targets(&["q_proj"])).contains("\"q_proj\", which matches no layer of the model"));
    assert!(bad(targets(&["h\\.[0"])).contains("target_modules \"h\\\\.[0\": "), "{}", bad(targets(&["h\\.[0"])));
    assert!(bad(LoraConfig { r: 0, ..LoraConfig::default() }).contains("r = 0"));
    assert!(bad(LoraConfig { lora_dropout: 1.0, ..LoraConfig::default() }).contains("lora_dropout = 1"));
    assert!(
        bad(LoraConfig { modules_to_save: vec!["clasifier".into()], ..LoraConfig::default() })
            .contains("modules_to_save")
    );

    // A table that is the head too.
    let wte = LoraConfig { target_modules: vec!["wte".into()], ..LoraConfig::default() };
    let adapted = AdaptedModel::new(gpt2.clone(), wte, None).unwrap();
    let out = std::env::temp_dir().join("never-written");
    let error = merge_with(&adapted, &fixture("gpt2_tiny"), &out, &ExportOptions::default(), |_| unreachable!());
    assert!(error.unwrap_err().to_string().contains("wte cannot be merged: the head uses the same table"));

    // An adapter for another base.
    let model = gpt2::weights::from_pretrained::<Flex>(&fixture("gpt2_tiny"), &Default::default()).unwrap();
    let text =
        load(model, &gpt2, &fixture("bert_tiny_classes").join("lora"), &Default::default()).unwrap_err().to_string();
    assert!(
        text.contains("is for another model") && text.contains("use the base model that it was trained with"),
        "{text}"
    );
    let wider = Gpt2Config { n_embd: 96, ..Gpt2Config::from_file(&fixture("gpt2_tiny").join("config.json")).unwrap() };
    let model = wider.init::<Flex>(&Default::default());
    let text = load(model, &wider.into(), &fixture("gpt2_tiny/lora"), &Default::default()).unwrap_err().to_string();
    assert!(text.contains("is for another model") && text.contains("expected [4, 96]"), "{text}");

    // Files that ask for more, are cut short, or are not there.
    let dir = tempfile::tempdir().unwrap();
    let write = |config: Value| std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).unwrap();
    let text = |()| LoraConfig::from_dir(dir.path()).unwrap_err().to_string();
    assert!(text(()).contains("adapter_config.json"));
    write(json!({"peft_type": "LORA", "r": 4, "use_dora": true}));
    assert!(text(()).contains("LoRA with use_dora = true is not implemented"));
    for how in ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"] {
        write(json!({"peft_type": "LORA", "r": 4, "init_lora_weights": how}));
        let text = text(());
        assert!(text.contains(how) && text.contains("path_initial_model_for_weight_conversion"), "{text}");
    }
    for how in [json!(true), json!(false), json!(null), json!("gaussian"), json!("orthogonal"), json!("eva")] {
        write(json!({"peft_type": "LORA", "r": 4, "init_lora_weights": how, "loftq_config": {}, "corda_config": null}));
        LoraConfig::from_dir(dir.path()).unwrap();
    }
    write(json!({"peft_type": "LORA", "r": 4, "loftq_config": {"loftq_bits": 4}}));
    assert!(text(()).contains("LoRA with loftq_config"));
    write(json!({"peft_type": "IA3"}));
    assert!(text(()).contains("peft_type = \"IA3\""));
    write(json!({"peft_type": "LORA", "r": "four"}));
    assert!(text(()).contains("cannot be read as JSON"));
    write(json!({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "mlp.c_proj"]}));
    let bytes = std::fs::read(fixture("gpt2_tiny/lora/adapter_model.safetensors")).unwrap();
    std::fs::write(dir.path().join("adapter_model.safetensors"), &bytes[..bytes.len() / 2]).unwrap();
    let model = gpt2::weights::from_pretrained::<Flex>(&fixture("gpt2_tiny"), &Default::default()).unwrap();
    let error = load(model, &gpt2, dir.path(), &Default::default()).unwrap_err().to_string();
    assert!(error.contains("the file has 6416 after the header"), "{error}");
}

#[test]
fn layers_are_named_as_peft_names_them() {
    let paths = |model: &ModelConfig, targets: &[&str]| -> usize {
        let lora =
            LoraConfig { target_modules: targets.iter().map(ToString::to_string).collect(), ..LoraConfig::default() };
        AdaptedModel::new(model.clone(), lora, None).unwrap().parameters().len() / 2
    };
    let gpt2 = config("gpt2_tiny");
    // PEFT's own: c_attn of two blocks. c_proj is attention's and the feed-forward layer's.
    assert_eq!(paths(&gpt2, &[]), 2);
    assert_eq!(paths(&gpt2, &["c_proj"]), 4);
    assert_eq!(paths(&gpt2, &["all-linear"]), 8);
    assert_eq!(paths(&gpt2, &[".*\\.h\\.1\\.(attn|mlp)\\.c_proj"]), 2);
    assert_eq!(paths(&config("bert_tiny_classes"), &[]), 4);
    // q and v of the seven attentions of three and two layers; all seven attentions, and two matrices in each layer.
    assert_eq!((paths(&config("t5_tiny"), &[]), paths(&config("t5_tiny"), &["all-linear"])), (14, 38));
    // With a gate, and a head of its own that has no adapter.
    assert_eq!(paths(&config("flan_t5_tiny"), &["all-linear"]), 6 * 4 + 4 * 3);
    // Nor has it by name, where it is a layer of its own.
    let roberta = config("roberta_tiny_classes");
    let targets = |saved: &[&str]| -> Vec<String> {
        let lora = LoraConfig {
            target_modules: ["query", "dense"].map(String::from).into(),
            modules_to_save: saved.iter().map(ToString::to_string).collect(),
            ..LoraConfig::default()
        };
        AdaptedModel::new(roberta.clone(), lora, None)
            .unwrap()
            .parameters()
            .into_iter()
            .map(|param| param.name)
            .collect()
    };
    assert!(targets(&[]).iter().any(|name| name.contains("classifier.dense.lora_A")));
    assert!(targets(&["classifier", "score"]).iter().all(|name| !name.contains("classifier.dense.lora_A")));
    // What PEFT would adapt beside them and this program does not.
    for (case, target) in [
        ("llama_tiny", "lm_head"),
        ("qwen2_tiny", "lm_head"),
        ("bert_tiny", "position_embeddings"),
        ("bart_tiny", "lm_head"),
        ("t5_tiny", "lm_head"),
        ("flan_t5_tiny", "lm_head"),
        ("t5_tiny", "relative_attention_bias"),
        ("t5_tiny", "shared"),
    ] {
        let lora = LoraConfig {
            target_modules: vec!["q_proj".into(), "query".into(), "q".into(), target.into()],
            ..LoraConfig::default()
        };
        let told = AdaptedModel::new(config(case), lora, None).unwrap_err().to_string();
        assert!(told.contains(target) && told.contains("a table that cannot have an adapter"), "{told}");
    }
    // Look-around, and names of other families beside those that are there.
    assert_eq!(paths(&gpt2, &["^(?!.*mlp).*c_proj$"]), 2);
    assert_eq!(paths(&gpt2, &["q_proj", "v_proj", "c_attn"]), 2);
    // A head that is saved whole has no adapter: six layers of each of two blocks, and the pooler.
    let bert = config("bert_tiny_classes");
    let all = LoraConfig { target_modules: vec!["all-linear".into()], ..LoraConfig::default() };
    let saved = LoraConfig { modules_to_save: vec!["classifier".into()], ..all.clone() };
    let names = |lora: LoraConfig| -> Vec<String> {
        AdaptedModel::new(bert.clone(), lora, None).unwrap().parameters().into_iter().map(|param| param.name).collect()
    };
    assert!(names(all).iter().any(|name| name.contains("classifier.lora_A")));
    assert!(names(saved).iter().all(|name| !name.contains("classifier.lora_")));
}

/// Other files of PEFT: of the bare model, with resized tables, and pickled.
#[test]
fn adapters_of_other_saves_are_read() {
    let (case, device) = ("llama_tiny", Default::default());
    let dir = tempfile::tempdir().unwrap();
    let lora = fixture(case).join("lora");
    let bytes = std::fs::read(lora.join("adapter_model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let write = |rename: &dyn Fn(&str) -> String, more: &[(&str, &[f32])]| {
        let data: Vec<Vec<u8>> =
            more.iter().map(|(_, values)| values.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let mut all: Vec<_> = file.iter().map(|(name, view)| (rename(name), view)).collect();
        for ((name, values), data) in more.iter().zip(&data) {
            let shape = vec![61, values.len() / 61];
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, data).unwrap();
            all.push((name.to_string(), view));
        }
        std::fs::copy(lora.join("adapter_config.json"), dir.path().join("adapter_config.json")).unwrap();
        safetensors::serialize_to_file(all, None, &dir.path().join("adapter_model.safetensors")).unwrap();
    };
    let expected = by_path(&llama_with(&fixture(case), Some(&lora)));
    write(&|name| name.replace("base_model.model.model.", "base_model.model."), &[]);
    assert!(by_path(&llama_with(&fixture(case), Some(dir.path()))) == expected);

    // A head that the file has whole is loaded, merged, and not trained.
    let head = vec![0.5; 61 * 32];
    write(&str::to_string, &[("base_model.model.lm_head.weight", &head)]);
    let model = llama_with(&fixture(case), Some(dir.path()));
    assert!(by_path(&model)["lm_head"] == head && by_path(&model)["norm"] == expected["norm"]);
    assert!(!model.lm_head.as_ref().unwrap().is_require_grad());
    let out = dir.path().join("merged");
    let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
    // Its own table is adapted, which a head of its own does not mind.
    merge(&fixture(case), dir.path(), &out, &options).unwrap();
    let merged: Llama<Flex> = llama::weights::from_pretrained(&out, &device).unwrap();
    assert!(by_path(&merged)["lm_head"] == head);

    std::fs::rename(dir.path().join("adapter_model.safetensors"), dir.path().join("adapter_model.bin")).unwrap();
    let told = load(merged, &config(case), dir.path(), &device).unwrap_err().to_string();
    assert!(told.contains("has adapter_model.bin, which is not supported"), "{told}");
}

#[test]
fn a_fresh_adapter_changes_nothing_and_alone_is_trained() {
    type A = burn::backend::Autodiff<Flex>;
    let model = gpt2::weights::from_pretrained::<A>(&fixture("gpt2_tiny"), &Default::default()).unwrap();
    let ids = || {
        Tensor::<A, 2, burn::tensor::Int>::from_data(
            first_rows::<2>("gpt2_tiny", "input_ids", 2).into_data(),
            &Default::default(),
        )
    };
    let before = model.loss(ids()).into_scalar();
    let lora = LoraConfig { target_modules: vec!["c_attn".into()], ..LoraConfig::default() };
    let model = adapt(model, &config("gpt2_tiny"), &lora, &Default::default()).unwrap();
    assert_eq!(model.loss(ids()).into_scalar(), before);
    let adapter = model.h[0].attn.c_attn.adapter.as_ref().unwrap();
    assert!(adapter.a.val().is_require_grad() && adapter.b.val().is_require_grad());
    let attention = &model.h[0].attn;
    assert!(!model.wte.val().is_require_grad() && !attention.c_attn.weight.val().is_require_grad());
    assert!(!attention.c_proj.weight.val().is_require_grad() && attention.c_proj.adapter.is_none());
    assert_eq!(adapter.a.val().dims(), [48, 8]);
}

#[test]
fn heads_are_those_of_transformers() {
    let device = Default::default();
    // A classifier over weights of pre-training: its own head is fresh.
    let file = fixture("bert_tiny").join("config.json");
    let pretraining = BertConfig::from_file(&file).unwrap();
    assert_eq!(pretraining.head, BertHead::PreTraining);
    let classes = BertHead::Classes(["a", "b", "c"].map(String::from).into());
    let config = BertConfig { head: classes, ..pretraining.clone() };
    let error =
        bert::weights::load(config.init::<Flex>(&device), &fixture("bert_tiny"), &device).unwrap_err().to_string();
    assert!(error.contains("2 missing: classifier.weight, classifier.bias"), "{error}");
    let weights = Checkpoint::open(&fixture("bert_tiny")).unwrap();
    let (model, fresh) = bert::weights::load_without_head(config.init::<Flex>(&device), &weights, &device).unwrap();
    assert_eq!(fresh, ["classifier.weight", "classifier.bias"]);
    // The encoder's rows of both are the same.
    let [ids, types, mask] =
        ["input_ids", "token_type_ids", "attention_mask"].map(|name| first_rows::<2>("bert_tiny", name, 4));
    let whole: Bert<Flex> = bert::weights::from_pretrained(&fixture("bert_tiny"), &device).unwrap();
    let hidden = |model: &Bert<Flex>| model.forward_hidden(ids.clone(), types.clone(), Some(mask.clone())).into_data();
    assert_eq!(hidden(&model), hidden(&whole));

    // Masked tokens alone: fewer parameters, the same logits.
    let masked = BertConfig { head: BertHead::MaskedLm, ..pretraining };
    assert_eq!(masked.parameter_shapes().len(), whole_names(&whole) - 4);
    let model = bert::weights::load(masked.init::<Flex>(&device), &fixture("bert_tiny"), &device).unwrap();
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("masked");
    let values = by_path(&model);
    let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
    export(&masked.clone().into(), &dir, &options, |param, range| Ok(values[&param.path][range].to_vec())).unwrap();
    assert_eq!(BertConfig::from_file(&dir.join("config.json")).unwrap(), masked);
    assert!(Checkpoint::open(&dir).unwrap().names().all(|name| !name.contains("pooler") && !name.contains("seq_")));
    let (whole_logits, _) = whole.forward(ids.clone(), types.clone(), Some(mask.clone()));
    assert_eq!(model.predict_tokens(ids, types, Some(mask)).into_data(), whole_logits.into_data());
}

fn whole_names(model: &Bert<Flex>) -> usize {
    bert::weights::hf_names(model).len()
}
