//! The profile of a model: parameters, memory and floating-point operations, counted in a forward pass that computes nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::{DeviceOps, ExecutionError};
use burn::tensor::{DType, Shape, Tensor, TensorData};
use burn_backend::DTypeUsageSet;
use burn_backend::backend::{Device, DeviceId};
use burn_ir::{BaseOperationIr, FloatOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};
use burn_router::{BackendRouter, MultiBackendBridge, RouterTensor, RunnerChannel, RunnerClient};
use burn_std::future::DynFut;
use parking_lot::Mutex;

use super::profile::{Activations, Profile, matrices};
use super::rows::Rows;
use crate::Result;

/// The counting backend; autodiff keeps what the backward pass needs.
pub(super) type Counting = Autodiff<BackendRouter<Counter>>;

/// Operations of a forward and a backward pass per operation of the forward pass: the backward pass has two products for each.
const PASSES: f64 = 3.0;

/// Returns the profile of training a model on `micro_batch` of its `rows` rows, counted on the first of them.
///
/// # Errors
/// Those of `model` and `loss`.
pub(super) fn profile<M: Module<Counting>>(
    [rows, micro_batch]: [usize; 2],
    model: impl FnOnce(&Count) -> Result<M>,
    loss: impl FnOnce(&M, &Rows, &Count) -> Result<Tensor<Counting, 1>>,
) -> Result<Profile> {
    static COUNTS: AtomicU16 = AtomicU16::new(0);
    let device = Count(COUNTS.fetch_add(1, Ordering::Relaxed));
    let ledger = burn_router::get_client::<Counter>(&device).ledger;
    let model = model(&device)?;
    let mut sizes = Sizes::default();
    model.visit(&mut sizes);
    let before = {
        let mut ledger = ledger.lock();
        ledger.peak = ledger.live;
        ledger.live
    };
    let rows: Vec<usize> = (0..micro_batch).map(|row| row % rows).collect();
    let rows = Rows::from(&*rows);
    let loss = loss(&model, &rows, &device)?;
    // Which of it a block of the model keeps is not seen here.
    let activations = Activations { rest: ledger.lock().peak - before, ..Activations::default() };
    drop(loss);
    let flops_per_row = PASSES * ledger.lock().flops / micro_batch as f64;
    let Sizes { parameters, matrices, frozen, .. } = sizes;
    Ok(Profile { parameters, matrices, frozen, quantized: Vec::new(), activations, flops_per_row })
}

#[derive(Default)]
struct Sizes {
    /// Names of the fields that the walk is in.
    path: Vec<String>,
    parameters: Vec<usize>,
    matrices: usize,
    frozen: Vec<usize>,
}

impl<B: burn::tensor::backend::Backend> ModuleVisitor<B> for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let (shape, is_trained) = (tensor.dims(), tensor.is_require_grad());
        if is_trained {
            self.matrices += matrices([(&*self.path.join("."), &shape[..])].into_iter());
        }
        let sizes = if is_trained { &mut self.parameters } else { &mut self.frozen };
        sizes.push(shape.iter().product());
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}

/// A channel of Burn's router that only records operations: tensors have shapes, but no values.
#[derive(Debug, Clone)]
pub(super) struct Counter;

/// The device of one count, which shares nothing with others.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Count(u16);

#[derive(Debug, Clone)]
pub(super) struct Client {
    device: Count,
    ledger: Arc<Mutex<Ledger>>,
}

/// Record of operations, and of the storage that tensors share with their views.
#[derive(Debug, Default)]
struct Ledger {
    /// Index of each tensor's storage.
    tensors: HashMap<TensorId, usize>,
    /// Bytes, and number of tensors that use them.
    storage: Vec<(u64, usize)>,
    live: u64,
    peak: u64,
    flops: f64,
    last: u64,
}

impl Ledger {
    fn add(&mut self, tensor: &TensorIr) {
        let bytes = (tensor.shape.num_elements() * tensor.dtype.size()) as u64;
        self.tensors.insert(tensor.id, self.storage.len());
        self.storage.push((bytes, 1));
        self.live += bytes;
        self.peak = self.peak.max(self.live);
    }

    fn add_view(&mut self, of: &TensorIr, tensor: &TensorIr) {
        match self.tensors.get(&of.id) {
            Some(&storage) => {
                self.tensors.insert(tensor.id, storage);
                self.storage[storage].1 += 1;
            }
            None => self.add(tensor),
        }
    }

    fn remove(&mut self, tensor: TensorId) {
        let Some(storage) = self.tensors.remove(&tensor) else { return };
        let (bytes, uses) = &mut self.storage[storage];
        *uses -= 1;
        if *uses == 0 {
            self.live -= *bytes;
        }
    }

    fn run(&mut self, operation: &OperationIr) {
        if let OperationIr::Drop(tensor) = operation {
            return self.remove(tensor.id);
        }
        self.flops += flops(operation);
        match view(operation) {
            Some((of, out)) => self.add_view(of, out),
            None => operation.outputs().for_each(|out| self.add(out)),
        }
        // What is used for the last time goes once its operation has run.
        for input in operation.inputs() {
            if input.status == burn_ir::TensorStatus::ReadWrite {
                self.remove(input.id);
            }
        }
    }
}

/// Returns the input and the output of an operation whose output shares its input's storage on all of Burn's backends.
fn view(operation: &OperationIr) -> Option<(&TensorIr, &TensorIr)> {
    use OperationIr::{BaseBool, BaseFloat, BaseInt};
    let (BaseFloat(base) | BaseInt(base) | BaseBool(base)) = operation else { return None };
    match base {
        BaseOperationIr::Reshape(op) | BaseOperationIr::Expand(op) => Some((&op.input, &op.out)),
        BaseOperationIr::SwapDims(op) => Some((&op.input, &op.out)),
        BaseOperationIr::Permute(op) => Some((&op.input, &op.out)),
        _ => None,
    }
}

/// Returns the floating-point operations of matrix products and convolutions; all others are negligible.
fn flops(operation: &OperationIr) -> f64 {
    use ModuleOperationIr as M;
    let elements = |tensor: &TensorIr| tensor.shape.num_elements() as f64;
    let last = |tensor: &TensorIr, from_the_end: usize| tensor.shape[tensor.shape.num_dims() - from_the_end] as f64;
    // Each element of what is as large as the result takes a product and a sum for each weight that meets it.
    let of = |tensor: &TensorIr, weight: &TensorIr, channel: usize| {
        2.0 * elements(tensor) * elements(weight) / weight.shape[channel] as f64
    };
    match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => 2.0 * elements(&op.out) * last(&op.lhs, 1),
        OperationIr::Module(module) => match module {
            M::Linear(op) => 2.0 * elements(&op.out) * last(&op.x, 1),
            // Scores, and what they weigh.
            M::Attention(op) => 4.0 * elements(&op.key) * last(&op.query, 2),
            M::Conv1d(op) => of(&op.out, &op.weight, 0),
            M::Conv2d(op) => of(&op.out, &op.weight, 0),
            M::Conv3d(op) => of(&op.out, &op.weight, 0),
            M::ConvTranspose1d(op) => of(&op.x, &op.weight, 0),
            M::ConvTranspose2d(op) => of(&op.x, &op.weight, 0),
            M::ConvTranspose3d(op) => of(&op.x, &op.weight, 0),
            _ => 0.0,
        },
        _ => 0.0,
    }
}

impl Device for Count {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: self.0 }
    }
}

impl DeviceOps for Count {}

impl RunnerChannel for Counter {
    type Device = Count;
    type Bridge = Self;
    type Client = Client;
    type FloatElem = f32;
    type IntElem = i32;
    type BoolElem = bool;

    fn name(_: &Count) -> String {
        "counter".into()
    }

    fn init_client(device: &Count) -> Client {
        Client { device: device.clone(), ledger: Arc::default() }
    }

    fn get_tensor_handle(_: &TensorIr, _: &Client) {}

    fn register_tensor(client: &Client, (): (), shape: Shape, dtype: DType) -> RouterTensor<Client> {
        client.tensor(shape, dtype)
    }
}

impl MultiBackendBridge for Counter {
    type TensorHandle = ();
    type Device = Count;

    fn change_backend_float((): (), _: Shape, _: &Count) {}
    fn change_backend_int((): (), _: Shape, _: &Count) {}
    fn change_backend_bool((): (), _: Shape, _: &Count) {}
}

impl Client {
    fn tensor(&self, shape: Shape, dtype: DType) -> RouterTensor<Self> {
        let tensor = RouterTensor::new(self.create_empty_handle(), shape, dtype, self.clone());
        self.ledger.lock().add(&tensor.clone().into_ir());
        tensor
    }
}

impl RunnerClient for Client {
    type Device = Count;

    fn register_op(&self, operation: OperationIr) {
        self.ledger.lock().run(&operation);
    }

    fn read_tensor_async(&self, tensor: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        let zeros = TensorData::from_bytes_vec(
            vec![0; tensor.shape.num_elements() * tensor.dtype.size()],
            tensor.shape.clone(),
            tensor.dtype,
        );
        if tensor.status == burn_ir::TensorStatus::ReadWrite {
            self.ledger.lock().remove(tensor.id);
        }
        Box::pin(core::future::ready(Ok(zeros)))
    }

    fn sync(&self) -> Result<(), ExecutionError> {
        Ok(())
    }

    fn create_empty_handle(&self) -> TensorId {
        let mut ledger = self.ledger.lock();
        ledger.last += 1;
        TensorId::new(ledger.last)
    }

    fn register_tensor_data(&self, data: TensorData) -> RouterTensor<Self> {
        self.tensor(data.shape.clone(), data.dtype)
    }

    fn device(&self) -> Count {
        self.device.clone()
    }

    fn seed(&self, _: u64) {}

    fn dtype_usage(&self, _: DType) -> DTypeUsageSet {
        burn_backend::DTypeUsage::general()
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::conv::{Conv2d, Conv2dConfig};
    use burn::nn::{Linear, LinearConfig};

    use super::*;
    use crate::TrainError;
    use crate::trainer::{FusedBackend, Task};

    #[derive(Module, Debug)]
    struct Net<B: burn::tensor::backend::Backend> {
        conv: Conv2d<B>,
        hidden: Linear<B>,
        out: Linear<B>,
    }

    struct Images;

    impl Task for Images {
        type Model<B: FusedBackend> = Net<B>;

        fn name(&self) -> String {
            "net".into()
        }

        fn rows(&self) -> usize {
            3
        }

        fn model<B: FusedBackend>(&self, device: &B::Device) -> Result<Net<B>, TrainError> {
            Ok(Net {
                conv: Conv2dConfig::new([1, 4], [3, 3]).with_bias(false).init(device),
                hidden: LinearConfig::new(4 * 6 * 6, 10).with_bias(false).init(device),
                out: LinearConfig::new(10, 2).with_bias(false).init(device),
            })
        }

        fn loss<B: FusedBackend>(
            &self,
            net: &Net<B>,
            rows: &Rows,
            device: &B::Device,
        ) -> Result<Tensor<B, 1>, TrainError> {
            let images = Tensor::<B, 4>::ones([rows.len(), 1, 8, 8], device);
            let features: Tensor<B, 2> = burn::tensor::activation::relu(net.conv.forward(images)).flatten(1, 3);
            Ok(net.out.forward(net.hidden.forward(features)).mean())
        }
    }

    #[test]
    fn products_parameters_and_activations_are_counted() {
        let counted = Images.profile(5).unwrap();
        assert_eq!(counted.parameters, [36, 1440, 20]);
        let forward = 2.0 * f64::from(36 * 36 + 1440 + 20);
        assert_eq!(counted.flops_per_row, 3.0 * forward);
        // Kept: images, what the rectifier gives (with or without what it got), and what the two layers are given.
        let least = 4 * 5 * (64 + 144 + 10);
        assert!((least..3 * least).contains(&counted.activations.rest), "{} for {least}", counted.activations.rest);
        assert_eq!(counted.activations, Images.profile(5).unwrap().activations);
    }
}
