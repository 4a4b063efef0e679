//! `cargo test -p zero-models --test models quantize`

use burn::module::{Param, ParamId};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_flex::Flex;
use serde_json::Value;
use zero_models::lora::Adaptable;
use zero_models::quantize::{Format, Quantized, load};
use zero_models::safetensors_file::Checkpoint;
use zero_models::{BartConfig, Gpt2Config, LlamaConfig, ModelError, Seq2SeqLm, T5Config, bart, gpt2, llama, t5};
use zero_ops::FusedBackend;

use crate::hf_parity::{first_rows, fixture};

/// Returns the values that the backend reads from quantized rows.
fn dequantized(rows: Tensor<Flex, 2>, how: Quantized) -> Tensor<Flex, 2> {
    let dtype = burn::tensor::FloatDType::F32;
    let values = <Flex as FusedBackend>::dequantized(rows.into_primitive().tensor(), how, dtype);
    Tensor::from_primitive(TensorPrimitive::Float(values))
}

fn quantized(
    x: &[f32],
    how: Quantized,
    device: &<Flex as burn::tensor::backend::BackendTypes>::Device,
) -> Tensor<Flex, 2> {
    let shape = [x.len() / how.width, how.width];
    zero_ops::quantized_parameter(shape, how.format, device, |range| x[range].to_vec())
}

#[test]
fn nf4_is_that_of_bitsandbytes() {
    let file: Value = serde_json::from_slice(&std::fs::read(fixture("nf4.json")).unwrap()).unwrap();
    let [x, expected]: [Vec<f32>; 2] = ["x", "nf4"].map(|key| serde_json::from_value(file[key].clone()).unwrap());
    let how = Quantized { format: Format::Nf4, width: x.len() };
    let got: Vec<f32> = dequantized(quantized(&x, how, &Default::default()), how).into_data().to_vec().unwrap();
    assert_eq!(got, expected);
}

/// Replaces the weights of linear layers by their dequantized values.
fn as_if<M: Adaptable<Flex>>(mut model: M, format: Format) -> M {
    model.linears(&mut |_, layer| {
        let [_, width] = layer.sizes();
        let (how, values) = (Quantized { format, width }, layer.weight.val());
        let rows = quantized(&values.to_data().to_vec::<f32>().unwrap(), how, &values.device());
        layer.weight = Param::initialized(ParamId::new(), dequantized(rows, how));
    });
    model
}

/// Returns the largest difference between the logits of the quantized and the unquantized model, relative to the largest logit.
fn off(what: &str, [got, expected, plain]: [Vec<f32>; 3]) -> f32 {
    let largest = plain.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let off = |other: &[f32]| got.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest;
    assert!(off(&expected) <= 1e-5, "{what}: off by {}", off(&expected));
    off(&plain)
}

#[test]
fn a_quantised_model_computes_with_the_values_that_its_weights_stand_for() {
    let device = Default::default();
    macro_rules! check {
        ($folder:literal, $config:ident, $family:ident, $run:expr) => {
            let dir = fixture($folder);
            let config = $config::from_file(&dir.join("config.json")).unwrap();
            let plain = || $family::weights::load(config.init::<Flex>(&device), &dir, &device).unwrap();
            let [int8, int4, nf4] = Format::NAMES.map(|(name, format)| {
                let loaded = load(
                    config.init(&device),
                    &dir,
                    format,
                    |_| false,
                    |model, checkpoint| $family::weights::load_from(model, checkpoint, &device),
                );
                let models = [loaded.unwrap(), as_if(plain(), format), plain()];
                let logits = models.map(|model| $run(model).into_data().to_vec().unwrap());
                off(&format!("{} in {name}", $folder), logits)
            });
            assert!(0.0 < int8 && int8 < int4.min(nf4), "{}: {int8}, {int4}, {nf4}", $folder);
        };
    }
    check!("gpt2_tiny", Gpt2Config, gpt2, |model: gpt2::Gpt2<Flex>| model.forward(first_rows::<2>(
        "gpt2_tiny",
        "input_ids",
        2
    )));
    check!("llama_tiny", LlamaConfig, llama, |model: llama::Llama<Flex>| model.forward(first_rows::<2>(
        "llama_tiny",
        "input_ids",
        2
    )));
    check!("bart_tiny", BartConfig, bart, |model: bart::Bart<Flex>| {
        let [ids, labels] = ["input_ids", "labels"].map(|name| first_rows::<2>("bart_tiny", name, 1));
        let from = model.decoder_inputs(labels);
        model.forward(ids, None, from)
    });
    check!("flan_t5_tiny", T5Config, t5, |model: t5::T5<Flex>| {
        let [ids, labels] = ["input_ids", "labels"].map(|name| first_rows::<2>("flan_t5_tiny", name, 1));
        let from = model.decoder_inputs(labels);
        model.forward(ids, None, from)
    });
}

#[test]
fn a_weight_without_a_scale_is_told() {
    let (dir, device) = (tempfile::tempdir().unwrap(), Default::default());
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("gpt2_tiny").join(file), dir.path().join(file)).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let data = {
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let name = file.names().into_iter().find(|name| name.ends_with("h.0.mlp.c_fc.weight")).unwrap();
        file.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize
    };
    bytes[data..data + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let config = Gpt2Config::from_file(&dir.path().join("config.json")).unwrap();
    let loaded = |format| {
        load::<Flex, _>(
            config.init(&device),
            dir.path(),
            format,
            |_| false,
            |model, from: &Checkpoint| gpt2::weights::load_from(model, from, &device),
        )
    };
    let error = loaded(Format::Nf4).unwrap_err();
    assert!(matches!(error, ModelError::NotFinite { .. }), "{error}");
    assert!(error.to_string().contains("mlp.c_fc.weight"), "{error}");
}
