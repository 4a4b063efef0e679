//! cargo run --release -p zero-models --example hidden_states -- FOLDER < IDS
//!
//! Computes the last layer's output of a BERT, a RoBERTa or a DistilBERT in a Hugging Face folder with any head. Reads a JSON list of
//! token ids per line, and writes a JSON list of rows per line. `bench/minilm.py` compares them with those of transformers.

use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};
use std::path::PathBuf;

use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::Flex;
use zero_models::BertConfig;
use zero_models::bert::weights;
use zero_models::safetensors_file::Checkpoint;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args_os().nth(1).ok_or("name the model's folder")?);
    let device = Default::default();
    let model = BertConfig::from_file(&folder.join("config.json"))?.init::<Flex>(&device);
    let (model, fresh) = weights::load_without_head(model, &Checkpoint::open(&folder)?, &device)?;
    eprintln!("not in the weights, and not used here: {fresh:?}");
    for line in stdin().lock().lines() {
        let ids: Vec<i32> = serde_json::from_str(&line?)?;
        let shape = [1, ids.len()];
        let ids = Tensor::<Flex, 2, Int>::from_data(TensorData::new(ids, shape), &device);
        let hidden = model.forward_hidden(ids.clone(), ids.zeros_like(), None);
        let [_, rows, width] = hidden.dims();
        let values: Vec<f32> = hidden.into_data().to_vec().map_err(|error| format!("{error:?}"))?;
        let rows: Vec<&[f32]> = values.chunks_exact(width).take(rows).collect();
        writeln!(stdout(), "{}", serde_json::to_string(&rows)?)?;
    }
    Ok(())
}
