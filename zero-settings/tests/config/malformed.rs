//! No input makes the configuration panic: bytes, arbitrary trees, and modified real configurations.

use proptest::prelude::*;
use proptest::sample::select;
use zero_settings::{Auto, Config, Context, Format, MixedPrecision};

const DEEPSPEED: &str = include_str!("../configs/deepspeed_zero3.json");
const ACCELERATE: &str = include_str!("../configs/accelerate_zero3_cpu.yaml");

/// Every value left to the program.
const AUTO: &str = r#"{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
}"#;

/// Reads a text and, if that works, resolves it with no values supplied and with all.
fn read(format: Format, text: &str) {
    let Ok(config) = Config::from_text("x/y", format, text) else { return };
    let _ = config.nvme_path();
    let auto = Auto {
        hidden_size: Some(64),
        micro_batch: Some(2),
        accumulation: Some(2),
        learning_rate: Some(0.1),
        weight_decay: Some(0.1),
        beta_1: Some(0.9),
        beta_2: Some(0.9),
        epsilon: Some(0.1),
        total_steps: Some(2),
        warmup_steps: Some(1),
        gradient_clipping: Some(1.0),
        mixed_precision: Some(MixedPrecision::Fp16),
        save_16bit_model: Some(true),
    };
    for context in [Context::default(), Context { world: Some(2), auto, ..Context::default() }] {
        // An outline is refused for nothing that a plan is not.
        match config.outline(&context) {
            Ok((plan, filled)) => assert!(!plan.explain_filled(&filled).is_empty()),
            Err(_) => assert!(config.resolve(&context).is_err()),
        }
        match config.resolve(&context) {
            Ok(plan) => {
                assert_eq!(plan.batch.global, plan.batch.micro * plan.batch.accumulation * plan.world);
                assert!(!plan.explain().is_empty());
            }
            Err(error) => assert!(!error.to_string().is_empty() && !error.problems().is_empty()),
        }
    }
}

fn name() -> impl Strategy<Value = String> {
    let known = [
        "zero_optimization",
        "stage",
        "optimizer",
        "scheduler",
        "type",
        "params",
        "fp16",
        "bf16",
        "enabled",
        "lr",
        "betas",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_param",
        "offload_optimizer",
        "device",
        "zenflow",
        "deepspeed_config",
        "distributed_type",
        "num_processes",
        "mixed_precision",
        "zero_stage",
        "tensorboard",
        "cpu_offload",
        "bfloat16",
        "timers",
    ];
    prop_oneof![9 => select(known.to_vec()).prop_map(str::to_owned), 1 => "\\PC{0,8}"]
}

fn tree() -> impl Strategy<Value = String> {
    let words = ["auto", "cpu", "none", "AdamW", "SGD", "OneCycle", "WarmupLR", "DEEPSPEED", "no", "fp16"];
    let leaf = prop_oneof![
        Just("null".to_owned()),
        any::<bool>().prop_map(|value| value.to_string()),
        (-2_i64..6).prop_map(|value| value.to_string()),
        any::<i64>().prop_map(|value| value.to_string()),
        any::<f64>().prop_map(|value| serde_json::json!(value).to_string()),
        select(words.to_vec()).prop_map(|word| format!("{word:?}")),
        "\\PC{0,8}".prop_map(|text| serde_json::json!(text).to_string()),
    ];
    leaf.prop_recursive(5, 60, 8, |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            4 => prop::collection::btree_map(name(), inner, 0..8).prop_map(|entries| {
                let pairs: Vec<_> =
                    entries.iter().map(|(key, value)| format!("{}:{value}", serde_json::json!(key))).collect();
                format!("{{{}}}", pairs.join(","))
            }),
        ]
    })
}

/// A real text with a few parts removed, duplicated or overwritten.
fn mutated(text: &'static str) -> impl Strategy<Value = String> {
    let edit = (any::<prop::sample::Index>(), 0_usize..12, "[\\x20-\\x7e\n]{0,6}|\"auto\"|-1|0|1e400|null|true|\\{\\}");
    prop::collection::vec(edit, 1..4).prop_map(move |edits| {
        let mut text = text.to_owned();
        for (at, length, insert) in edits {
            let at = at.index(text.len().max(1)).min(text.len());
            let end = (at + length).min(text.len());
            text.replace_range(at..end, &insert);
        }
        text
    })
}

/// A real JSON with one value replaced.
fn replaced() -> impl Strategy<Value = String> {
    (select(vec![DEEPSPEED, AUTO]), any::<prop::sample::Index>(), tree()).prop_map(|(text, at, value)| {
        let lines: Vec<&str> = text.lines().collect();
        let at = at.index(lines.len());
        let line = |(index, line): (usize, &&str)| match line.split_once(':') {
            Some((key, rest)) if index == at && !rest.trim_end().ends_with('{') => {
                format!("{key}: {value}{}", if rest.trim_end().ends_with(',') { "," } else { "" })
            }
            _ => (*line).to_owned(),
        };
        lines.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn strings(text in "\\PC{0,200}|[\\x00-\\x7f]{0,200}|[-a-z:&*<>|\\[\\]{}'\", \n\t#!?%0-9.]{0,200}") {
        read(Format::Json, &text);
        read(Format::Yaml, &text);
    }

    #[test]
    fn trees(text in tree()) {
        read(Format::Json, &text);
        read(Format::Yaml, &text);
    }

    #[test]
    fn changed_json(text in prop_oneof![mutated(DEEPSPEED), mutated(AUTO)]) {
        read(Format::Json, &text);
    }

    #[test]
    fn changed_values(text in replaced()) {
        read(Format::Json, &text);
    }

    #[test]
    fn changed_yaml(text in mutated(ACCELERATE)) {
        read(Format::Yaml, &text);
    }

    #[test]
    fn bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["x.json", "x.yaml", "x"] {
            let path = folder.path().join(name);
            std::fs::write(&path, &bytes).unwrap();
            let _ = Config::from_file(&path);
        }
    }
}

#[test]
fn bombs_are_errors() {
    for depth in [100, 1000, 100_000] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let bomb = format!("{}{}", open.repeat(depth), close.repeat(depth));
            read(Format::Json, &bomb);
            assert!(Config::from_text("x", Format::Json, &bomb).is_err());
            assert!(Config::from_text("x", Format::Yaml, &bomb).is_err());
        }
    }
    let block: String = (0..5000).map(|depth| format!("{}a:\n", " ".repeat(depth % 300))).collect();
    assert!(Config::from_text("x", Format::Yaml, &block).is_err());
    let many: Vec<String> = (0..100_000).map(|at| format!("\"{at}\":1")).collect();
    let error = Config::from_text("x", Format::Json, &format!("{{{}}}", many.join(","))).unwrap_err();
    assert_eq!(error.problems().len(), 100);
}
