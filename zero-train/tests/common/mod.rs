//! What the tests of training runs share.
#![allow(dead_code)] // each test uses its part

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

/// A model folder and token rows, small enough that a step takes milliseconds.
pub fn write_inputs(dir: &Path) {
    // Dropout, so that random numbers must go on too.
    let config = json!({
        "model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0
    });
    std::fs::create_dir(dir.join("model")).unwrap();
    std::fs::write(dir.join("model/config.json"), config.to_string()).unwrap();
    // So wide that its pieces are worth a disk.
    let wide = json!({
        "model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 192, "n_layer": 1, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0
    });
    std::fs::create_dir(dir.join("wide")).unwrap();
    std::fs::write(dir.join("wide/config.json"), wide.to_string()).unwrap();
    let ids: Vec<u8> = (0..37 * 12i32).flat_map(|i| ((i * i + i / 12) % 61).to_le_bytes()).collect();
    let rows = TensorView::new(Dtype::I32, vec![37, 12], &ids).unwrap();
    safetensors::serialize_to_file([("input_ids", rows)], None, &dir.join("rows.safetensors")).unwrap();
}

/// Step, loss and gradient norm of every line.
pub fn trajectory(run: &Path) -> Vec<[String; 3]> {
    let text = std::fs::read_to_string(run.join("out/metrics.jsonl")).unwrap();
    let of = |line: &str| {
        let metrics: Value = serde_json::from_str(line).unwrap();
        // As written: shortest decimal forms of f64, equal exactly when the numbers are.
        ["step", "loss", "grad_norm"].map(|key| metrics[key].to_string())
    };
    text.lines().map(of).collect()
}
