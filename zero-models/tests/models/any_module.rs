//! A module outside this crate's families, loaded and exported under other names.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_flex::Flex;
use zero_models::hf_export::{ExportDtype, ExportOptions, export};
use zero_models::{KeyMap, ModuleConfig, load_module};

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    layers: Vec<Linear<B>>,
}

fn block() -> Block<Flex> {
    let device = Default::default();
    let linear = |from, to| LinearConfig::new(from, to).init(&device);
    Block { norm: LayerNormConfig::new(3).init(&device), layers: vec![linear(3, 4), linear(4, 2)] }
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

#[test]
fn weights_go_out_and_come_back_by_rules() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    let names = KeyMap::new(
        &["^norm\\.gamma$=>encoder.norm.weight", "^norm\\.beta$=>encoder.norm.bias", "^layers\\.=>encoder.fc."],
        &["fc\\..*weight$"],
    )
    .unwrap();
    let shapes = [("norm.gamma", vec![3]), ("norm.beta", vec![3]), ("layers.0.weight", vec![3, 4])];
    let more = [("layers.0.bias", vec![4]), ("layers.1.weight", vec![4, 2]), ("layers.1.bias", vec![2])];
    let parameters = shapes.into_iter().chain(more).map(|(path, shape)| (path.to_string(), shape));
    let config = ModuleConfig::new(parameters).renamed(&names).unwrap();
    let element = |path: &str, at: usize| path.len() as f32 + at as f32 / 16.0;
    let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
    export(&config.into(), &out, &options, |param, range| Ok(range.map(|at| element(&param.path, at)).collect()))
        .unwrap();

    let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    // As PyTorch has it: [out, in].
    assert_eq!(file.tensor("encoder.fc.0.weight").unwrap().shape(), [4, 3]);

    let loaded = load_module(block(), &out, &names, &Default::default()).unwrap();
    let expected = |path: &str, count: usize| (0..count).map(|at| element(path, at)).collect::<Vec<_>>();
    assert_eq!(values(loaded.norm.gamma.val()), expected("norm.gamma", 3));
    assert_eq!(values(loaded.layers[0].weight.val()), expected("layers.0.weight", 12));
    assert_eq!(values(loaded.layers[1].weight.val()), expected("layers.1.weight", 8));
    assert_eq!(values(loaded.layers[1].bias.as_ref().unwrap().val()), expected("layers.1.bias", 2));

    // Under its own names it has not these.
    let own = KeyMap::new(&[] as &[&str], &[] as &[&str]).unwrap();
    let told = load_module(block(), &out, &own, &Default::default()).unwrap_err().to_string();
    assert!(told.contains("norm.gamma") && told.contains("encoder.fc.0.weight"), "{told}");
}
