//! cargo test -p zero-train-cli --test train export
//!
//! Exports sharded checkpoints to Hugging Face's format: exact for any number of saving ranks; and every invalid
//! checkpoint is rejected.

use crate::common;
use crate::sharded;

use std::path::Path;

use assert_cmd::Command;
use burn::tensor::{bf16, f16};
use serde_json::json;
use sharded::{Whole, bert, element, gpt2, loaded, save_model, save_tensors, state, tensors};
use zero_core::checkpoint::{Checkpoint, ElementType};
use zero_models::hf_export::{ExportDtype, ExportOptions};
use zero_models::{Gpt2Config, KeyMap, ModelConfig};
use zero_train::export::{Weights, export_checkpoint};

fn options(dtype: ExportDtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

fn configs() -> [ModelConfig; 3] {
    [gpt2().into(), Gpt2Config { tie_word_embeddings: false, ..gpt2() }.into(), bert().into()]
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    names(dir).into_iter().map(|name| (name.clone(), std::fs::read(dir.join(name)).unwrap())).collect()
}

#[test]
fn the_checkpoint_of_any_number_of_ranks_is_exported_exactly() {
    for config in configs() {
        for world in 1..=3 {
            let dir = tempfile::tempdir().unwrap();
            let checkpoint = save_model(&config, dir.path(), world);
            for dtype in ExportDtype::ALL {
                let rounded = |x: f32| match dtype {
                    ExportDtype::Fp32 => x,
                    ExportDtype::Fp16 => f16::from_f32(x).to_f32(),
                    ExportDtype::Bf16 => bf16::from_f32(x).to_f32(),
                };
                let expected: Vec<(String, Vec<f32>)> = config
                    .parameters()
                    .into_iter()
                    .map(|param| {
                        let values = (0..param.numel()).map(|i| rounded(element(&param.path, i))).collect();
                        (param.path, values)
                    })
                    .collect();
                let [one, many] = ["one", "many"].map(|name| dir.path().join(format!("{name}-{dtype}")));
                let exported = export_checkpoint(&checkpoint, &one, &options(dtype), None, Weights::Trained).unwrap();
                assert_eq!((exported.step, &exported.model, exported.skipped.len()), (3, &config, 0));
                assert_eq!(loaded(&config, &one), expected, "{dtype}, {world} ranks");
                let sharded = ExportOptions { max_shard_bytes: 2000, chunk_elems: 37, ..options(dtype) };
                let exported = export_checkpoint(&checkpoint, &many, &sharded, None, Weights::Trained).unwrap();
                assert!(exported.written.files.len() > 2);
                assert_eq!(loaded(&config, &many), expected, "{dtype}, {world} ranks, sharded");
            }
        }
    }
}

#[test]
fn files_do_not_depend_on_the_ranks_that_saved() {
    let config = ModelConfig::from(bert());
    let exports = [1, 2, 3].map(|world| {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        export_checkpoint(
            &save_model(&config, dir.path(), world),
            &out,
            &ExportOptions::default(),
            None,
            Weights::Trained,
        )
        .unwrap();
        files(&out)
    });
    assert!(exports[0] == exports[1] && exports[0] == exports[2]);
}

/// A model trained in 16 bit without masters keeps its exact bits.
#[test]
fn parameters_in_16_bit_are_exact() {
    let config = ModelConfig::from(bert());
    for (saved, dtype) in [(ElementType::Bf16, ExportDtype::Bf16), (ElementType::F16, ExportDtype::Fp16)] {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = save_tensors(&tensors(&config, saved), &state(&config), dir.path(), 3, 2);
        let [narrow, wide] = ["narrow", "wide"].map(|name| dir.path().join(name));
        export_checkpoint(&checkpoint, &narrow, &options(dtype), None, Weights::Trained).unwrap();
        export_checkpoint(&checkpoint, &wide, &options(ExportDtype::Fp32), None, Weights::Trained).unwrap();
        let values = loaded(&config, &narrow);
        assert_eq!(values, loaded(&config, &wide));
        let rounded = match saved {
            ElementType::F16 => f16::from_f32(element("pooler.bias", 5)).to_f32(),
            _ => bf16::from_f32(element("pooler.bias", 5)).to_f32(),
        };
        let bias = values.iter().find(|(path, _)| path == "pooler.bias").unwrap();
        assert_eq!(bias.1[5], rounded);
    }
}

#[test]
fn the_folder_above_stands_for_its_newest_sound_checkpoint() {
    let config = ModelConfig::from(gpt2());
    let dir = tempfile::tempdir().unwrap();
    let saves = dir.path().join("checkpoints");
    for step in [1, 2] {
        save_tensors(&tensors(&config, ElementType::F32), &state(&config), &saves, step, 2);
    }
    let exported =
        export_checkpoint(&saves, &dir.path().join("a"), &ExportOptions::default(), None, Weights::Trained).unwrap();
    assert_eq!((exported.step, exported.checkpoint), (2, saves.join("step-00000002")));

    std::fs::remove_file(saves.join("step-00000002/rank-00001-of-00002.safetensors")).unwrap();
    let exported =
        export_checkpoint(&saves, &dir.path().join("b"), &ExportOptions::default(), None, Weights::Trained).unwrap();
    assert_eq!((exported.step, exported.skipped.len()), (1, 1));
    let error = export_checkpoint(
        &saves.join("step-00000002"),
        &dir.path().join("c"),
        &ExportOptions::default(),
        None,
        Weights::Trained,
    );
    assert!(error.unwrap_err().to_string().contains("rank-00001-of-00002.safetensors"));
}

/// Returns the error of exporting these tensors with this state; no files are left.
fn refusal(tensors: &[Whole], state: &serde_json::Value) -> String {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_tensors(tensors, state, &dir.path().join("saves"), 3, 2);
    let error =
        export_checkpoint(&checkpoint, &dir.path().join("out"), &ExportOptions::default(), None, Weights::Trained)
            .unwrap_err();
    assert_eq!(names(dir.path()), ["saves"]);
    error.to_string()
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let config = ModelConfig::from(gpt2());
    let (all, state) = (tensors(&config, ElementType::F32), state(&config));
    let at = |name: &str| all.iter().position(|whole| whole.name == name).unwrap();

    let mut edited = all.clone();
    edited[at("model.h.1.ln_2.gamma")].name = "model.h.1.ln_2.gama".to_string();
    let text = refusal(&edited, &state);
    assert_contains(&text, &["1 missing: model.h.1.ln_2.gamma; 1 unexpected: model.h.1.ln_2.gama", "step-00000003"]);

    let mut edited = all.clone();
    edited[at("model.h.0.mlp.c_fc.weight")].shape.reverse();
    let text = refusal(&edited, &state);
    assert_contains(&text, &["\"model.h.0.mlp.c_fc.weight\" has shape [48, 12], expected [12, 48]"]);

    let mut edited = all.clone();
    edited[at("model.wpe")].dtype = ElementType::I32;
    assert_contains(&refusal(&edited, &state), &["\"model.wpe\" has elements of type I32, expected F32, F16 or BF16"]);

    let fewer = json!({ "model": ModelConfig::from(Gpt2Config { n_layer: 1, ..gpt2() }) });
    assert_contains(&refusal(&all, &fewer), &["12 unexpected: model.h.1.", "and 2 more"]);
    let untied = json!({ "model": ModelConfig::from(Gpt2Config { tie_word_embeddings: false, ..gpt2() }) });
    assert_contains(&refusal(&all, &untied), &["1 missing: model.lm_head"]);
}

/// A program that trains its own model.
#[test]
fn a_module_of_no_known_family_keeps_its_names_or_is_given_others() {
    let config = ModelConfig::from(gpt2());
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    let save = |state: &serde_json::Value, name: &str| {
        save_tensors(&tensors(&config, ElementType::F32), state, &of(name), 3, 2)
    };
    let (known, unknown) = (save(&state(&config), "known"), save(&json!({ "engine": {} }), "unknown"));
    let fp32 = options(ExportDtype::Fp32);
    let exported = export_checkpoint(&unknown, &of("paths"), &fp32, None, Weights::Trained).unwrap();
    assert_eq!((exported.model.architecture(), names(&of("paths"))), (None, vec!["model.safetensors".to_string()]));
    let bytes = std::fs::read(of("paths/model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for param in config.parameters() {
        assert_eq!(file.tensor(&param.path).unwrap().shape(), param.shape);
    }
    // With the names of transformers it is what a GPT-2 is exported as, but for the order in the file.
    export_checkpoint(&known, &of("transformers"), &fp32, None, Weights::Trained).unwrap();
    let rules = ["^=>transformer.", "gamma$=>weight", "beta$=>bias", "(wte|wpe)$=>$1.weight"];
    let map = KeyMap::new(&rules, &[] as &[&str]).unwrap();
    export_checkpoint(&unknown, &of("renamed"), &fp32, Some(&map), Weights::Trained).unwrap();
    std::fs::copy(of("transformers/config.json"), of("renamed/config.json")).unwrap();
    assert_eq!(loaded(&config, &of("renamed")), loaded(&config, &of("transformers")));
}

#[test]
fn what_a_checkpoint_says_of_its_model_must_be_readable() {
    let all = tensors(&gpt2().into(), ElementType::F32);
    for (model, part) in [
        (json!({ "family": "rwkv", "config": {} }), "rwkv"),
        (json!("gpt2"), "is not a configuration of a known model"),
        (json!({ "family": "gpt2", "config": { "n_head": 7 } }), "n_head = 7"),
        (json!({ "family": "gpt2" }), "config"),
    ] {
        assert_contains(&refusal(&all, &json!({ "model": model })), &[part]);
    }
}

#[test]
fn a_damaged_byte_is_found_and_nothing_is_left() {
    let config = ModelConfig::from(gpt2());
    let dir = tempfile::tempdir().unwrap();
    let saves = dir.path().join("saves");
    let checkpoint = save_model(&config, &saves, 2);
    let file = checkpoint.join("rank-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    // The file's first tensors are "model."; its last are the optimizer's.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header + 3] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let error =
        export_checkpoint(&checkpoint, &dir.path().join("out"), &ExportOptions::default(), None, Weights::Trained)
            .unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert_contains(&format!("{error} {source}"), &["is corrupt in", "crc32c"]);
    assert_eq!(names(dir.path()), ["saves"]);
}

// ---- the command ----

fn zero(args: &[&str]) -> (String, String, i32) {
    let output = Command::new(env!("CARGO_BIN_EXE_zero")).arg("export").args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr), output.status.code().unwrap())
}

#[test]
fn the_command_exports() {
    let config = ModelConfig::from(gpt2());
    let dir = tempfile::tempdir().unwrap();
    let saves = dir.path().join("saves");
    save_model(&config, &saves, 2);
    let [saves, a, b] = ["saves", "a", "b"].map(|name| dir.path().join(name).to_str().unwrap().to_string());
    let (out, _, code) = zero(&[&saves, &a]);
    assert_eq!(code, 0);
    assert_contains(&out, &["step 3: wrote GPT2LMHeadModel with 28 tensors in bf16", "1 file(s)", &a]);
    assert_eq!(names(Path::new(&a)), ["config.json", "model.safetensors"]);
    let (out, _, code) = zero(&[&saves, &b, "--dtype", "fp32", "--max-shard-size", "5KB"]);
    assert_eq!(code, 0);
    assert_contains(&out, &["in fp32"]);
    let expected: Vec<_> = config
        .parameters()
        .into_iter()
        .map(|param| (0..param.numel()).map(|i| element(&param.path, i)).collect::<Vec<f32>>())
        .collect();
    assert_eq!(loaded(&config, Path::new(&b)).into_iter().map(|(_, values)| values).collect::<Vec<_>>(), expected);
}

/// From training to a Hugging Face folder, with only the command.
#[test]
fn what_the_command_trained_is_exported() {
    let dir = tempfile::tempdir().unwrap();
    common::write_inputs(dir.path());
    let [model, rows, saves, out] =
        ["model", "rows.safetensors", "saves", "hf"].map(|name| dir.path().join(name).to_str().unwrap().to_string());
    let args = ["train", "--model", &model, "--data", &rows, "--ranks", "3", "--steps", "2", "--save", &saves];
    Command::new(env!("CARGO_BIN_EXE_zero")).args(args).args(["--stage", "3", "--json"]).assert().success();
    let (_, error, code) = zero(&[&saves, &out, "--dtype", "fp32"]);
    assert_eq!((error.as_str(), code), ("", 0));

    let config = ModelConfig::from_file(&Path::new(&out).join("config.json")).unwrap();
    let saved = Checkpoint::open(&Path::new(&saves).join("step-00000002")).unwrap();
    let exported = loaded(&config, Path::new(&out));
    assert_eq!(exported.len(), 28);
    for (path, values) in exported {
        let name = format!("model.{path}");
        let bytes = saved.read(&name, 0..saved.tensor(&name).unwrap().numel()).unwrap();
        assert_eq!(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>(), bytes, "{path}");
    }
}

#[test]
fn the_command_refuses_in_one_message_with_code_2() {
    let config = ModelConfig::from(gpt2());
    let dir = tempfile::tempdir().unwrap();
    let saves = dir.path().join("saves");
    save_model(&config, &saves, 2);
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let refused = |args: &[&str], parts: &[&str]| {
        let (out, error, code) = zero(args);
        assert_eq!((out.as_str(), code), ("", 2), "{error}");
        assert_contains(&error, parts);
        error
    };
    let error = refused(&[&path("saves"), &path("saves")], &["cannot create folder", "name one that does not exist"]);
    assert_eq!(error.lines().count(), 1, "{error}");
    refused(&[&path("absent"), &path("out")], &["no checkpoint in", "step-..."]);
    refused(&[&path("step-00000009"), &path("out")], &["the checkpoint is missing"]);
    refused(&[&path("saves"), &path("a/b")], &["create it first"]);
    refused(&[&path("saves"), &path("out"), "--dtype", "int8"], &["expected bf16, fp16 or fp32"]);
    refused(&[&path("saves"), &path("out"), "--max-shard-size", "0"], &["such as 6GiB"]);
    assert_eq!(names(dir.path()), ["saves"]);
}
