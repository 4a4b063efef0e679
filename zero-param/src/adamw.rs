//! AdamW over a piece in one pass: the kernel of the other front, with the bits, the state and the records of Burn's own, which steps
//! what is on another device.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::tensor::{Device, Tensor};
use burn_optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer};
use serde_json::Value;
use zero_kernels::Rule;
use zero_kernels::update::{Elements, Kernel, State, Stretch, run_stretch};

use crate::piece::Raw;

#[derive(Clone)]
pub(crate) struct FusedAdamW(Rule, AdamW);

impl FusedAdamW {
    /// The optimizer that `config` describes; none if it asks for more than the pass does.
    pub(crate) fn of(config: &AdamWConfig) -> Option<Self> {
        // Its fields are private, but it is saved as what it is.
        let fields = serde_json::to_value(config).ok()?;
        let number = |name: &str| fields[name].as_f64().map(|number| number as f32);
        let is_plain = |name: &str| matches!(fields[name], Value::Null | Value::Bool(false));
        if !["cautious_weight_decay", "amsgrad", "grad_clipping"].into_iter().all(is_plain) {
            return None;
        }
        let rule = Rule::AdamW {
            beta_1: number("beta_1")?,
            beta_2: number("beta_2")?,
            epsilon: number("epsilon")?,
            weight_decay: number("weight_decay")?,
            bias_correction: true,
        };
        Some(Self(rule, config.build()))
    }
}

impl Optimizer for FusedAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: f64,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        if !matches!(tensor.device().as_dispatch(), DispatchDevice::Flex(_)) {
            return self.1.step(lr, tensor, grad, state);
        }
        let momentum = state.map(|state| state.momentum).unwrap_or_else(|| {
            let zeros = || Tensor::zeros(tensor.shape(), &tensor.device());
            AdaptiveMomentumState { time: 0, moment_1: zeros(), moment_2: zeros(), max_moment_2: None }
        });
        let AdaptiveMomentumState { time, moment_1, moment_2, .. } = momentum;
        let kernel = Kernel::new(self.0, lr, time + 1);
        let [tensor, grad, m, v] = [tensor, grad, moment_1, moment_2].map(Tensor::into_dispatch);
        let (tensor, m, v) = <Dispatch as UpdateBackend>::update(tensor, grad, m, v, kernel);
        let [tensor, moment_1, moment_2] = [tensor, m, v].map(Tensor::from_dispatch);
        let momentum = AdaptiveMomentumState { time: time + 1, moment_1, moment_2, max_moment_2: None };
        (tensor, Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(mut state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

#[backend_extension(Flex)]
trait UpdateBackend: Backend {
    /// The next parameter, and the states; in place where nobody else holds them.
    fn update(
        parameter: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        kernel: Kernel,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl UpdateBackend for Flex {
    fn update(mut parameter: Raw, gradient: Raw, mut first: Raw, mut second: Raw, kernel: Kernel) -> (Raw, Raw, Raw) {
        let gradient = gradient.to_contiguous();
        let stretch = Stretch {
            p: elements(&mut parameter),
            g: Elements::F32(gradient.as_slice().expect("it is contiguous, and a piece's gradient is fp32")),
            a: State::F32(elements(&mut first)),
            b: State::F32(elements(&mut second)),
            copy: None,
            first: 0,
        };
        run_stretch(kernel, 1.0, stretch, 0..0);
        (parameter, first, second)
    }
}

/// The elements of a piece, to be written: it is copied where it is held elsewhere too.
fn elements(piece: &mut Raw) -> &mut [f32] {
    let (begin, end) = piece.layout().contiguous_offsets().expect("pieces are contiguous");
    &mut piece.storage_mut()[begin..end]
}
