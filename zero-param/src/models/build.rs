//! Building a model: parameters are set by path, one at a time, and configurations are checked.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use zero_models::{ModelConfig, ModelError, ModelParam};

/// Fills `model` with the values in a Hugging Face folder, or, without a folder, with initial values by `seed`; parameters of a head that the
/// folder lacks get initial values too. A thread reads or generates them, and each parameter takes its values when it is initialized: `shard`
/// holds one at a time.
///
/// # Errors
///
/// If the folder is of another model.
pub(super) fn begin<M: Module>(
    model: M,
    config: &ModelConfig,
    folder: Option<&Path>,
    seed: u64,
) -> Result<M, ModelError> {
    let (sender, next) = sync_channel(0);
    // An error means that the model was dropped.
    let mut each = move |param: ModelParam, of| drop(sender.send((param.path, of)));
    let config = config.clone();
    match folder {
        Some(folder) => {
            config.check_without_head(folder)?;
            let folder = folder.to_path_buf();
            std::thread::spawn(move || {
                config.read_without_head(&folder, seed, &mut each).expect("the folder was checked")
            });
        }
        None => drop(std::thread::spawn(move || config.fresh(seed, &mut each))),
    }
    let values = Arc::new(Mutex::new(Values { next, early: BTreeMap::new() }));
    Ok(model.map(&mut Fill { path: Vec::new(), values }))
}

/// Values by path.
struct Values {
    next: Receiver<(String, Vec<f32>)>,
    /// Values that came before those that were asked for.
    early: BTreeMap<String, Vec<f32>>,
}

impl Values {
    fn take(&mut self, path: &str) -> Vec<f32> {
        loop {
            if let Some(values) = self.early.remove(path) {
                return values;
            }
            let (found, values) = self.next.recv().unwrap_or_else(|_| panic!("no values for parameter {path}"));
            self.early.insert(found, values);
        }
    }
}

struct Fill {
    path: Vec<String>,
    values: Arc<Mutex<Values>>,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (path, values) = (self.path.join("."), self.values.clone());
        let (device, shape, id) = (param.lazy_device(), param.lazy_shape(), param.id);
        let of = shape.clone();
        let init = move |device: &Device, train: bool| {
            let values = values.lock().expect("no thread panics that holds it").take(&path);
            Tensor::from_data(TensorData::new(values, of), device).set_require_grad(train)
        };
        Param::uninitialized(id, init, device, true, shape)
    }
}
