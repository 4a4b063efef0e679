//! Checkpoints in Hugging Face's format, made from a module and its names.
#![allow(dead_code)] // each test uses its part

pub mod small;

use std::collections::HashMap;
use std::path::Path;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use safetensors::tensor::{Dtype, TensorView, serialize};
use zero_models::HfParam;

/// A tensor of a checkpoint.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Entry {
    pub fn f32(name: &str, shape: &[usize], values: &[f32]) -> Self {
        Self {
            name: name.to_string(),
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }

    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        self.bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }
}

/// Returns the parameters of a model as its `state_dict` has them, in 32 bits.
pub fn state_dict<M: Module<Flex>>(model: &M, params: &[HfParam]) -> Vec<Entry> {
    struct Values(HashMap<ParamId, Vec<f32>>);
    impl ModuleVisitor<Flex> for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Flex, D>>) {
            self.0.insert(param.id, param.val().into_data().to_vec().unwrap());
        }
    }
    let mut values = Values(HashMap::new());
    model.visit(&mut values);
    params
        .iter()
        .map(|param| {
            let mut values = values.0[&param.id].clone();
            if param.transposed {
                let [out, inputs] = [param.shape[0], param.shape[1]];
                values = (0..out * inputs).map(|i| values[(i % inputs) * out + i / inputs]).collect();
            }
            Entry::f32(&param.name, &param.shape, &values)
        })
        .collect()
}

/// Adds noise to every parameter of a model, so that none is constant.
pub fn noisy<M: Module<Flex>>(model: M) -> M {
    struct Noise;
    impl ModuleMapper<Flex> for Noise {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Flex, D>>) -> Param<Tensor<Flex, D>> {
            param.map(|x| {
                let noise = Tensor::random(x.shape(), Distribution::Normal(0.0, 0.2), &x.device());
                x + noise
            })
        }
    }
    model.map(&mut Noise)
}

/// Returns the bytes of a safetensors file.
pub fn file_bytes(entries: &[Entry]) -> Vec<u8> {
    let views = entries.iter().map(|entry| {
        let view = TensorView::new(entry.dtype, entry.shape.clone(), &entry.bytes).unwrap();
        (entry.name.clone(), view)
    });
    serialize(views, None).unwrap()
}

/// Writes `model.safetensors`.
pub fn write_single(dir: &Path, entries: &[Entry]) {
    std::fs::write(dir.join("model.safetensors"), file_bytes(entries)).unwrap();
}

/// Writes shards of `per_shard` tensors and their index.
pub fn write_sharded(dir: &Path, entries: &[Entry], per_shard: usize) {
    let mut map = serde_json::Map::new();
    for (i, shard) in entries.chunks(per_shard).enumerate() {
        let file = format!("model-{i:05}.safetensors");
        std::fs::write(dir.join(&file), file_bytes(shard)).unwrap();
        map.extend(shard.iter().map(|entry| (entry.name.clone(), file.clone().into())));
    }
    write_index(dir, map);
}

/// Writes `model.safetensors.index.json`.
pub fn write_index(dir: &Path, weight_map: serde_json::Map<String, serde_json::Value>) {
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
