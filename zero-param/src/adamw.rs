//! AdamW over a shard in one pass, by the kernel that `zero-burn` uses. It has the same bits, state and records as Burn's AdamW, which
//! updates tensors on other devices.

use std::ops::Range;

use burn::backend::DispatchDevice;
use burn::tensor::{Device, Tensor};
use burn_optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer};
use serde::Serialize;
use serde_json::Value;
use zero_kernels::Rule;
use zero_kernels::update::{Chunk, Elements, Kernel, Norms, State, update_chunk};

use crate::device::{held, hold};
use crate::piece::Raw;

#[derive(Clone)]
pub(crate) struct FusedAdamW(Rule, AdamW);

impl FusedAdamW {
    /// Builds the optimizer that `config` describes, or `None` if it uses options that the kernel lacks.
    pub(crate) fn of(config: &AdamWConfig) -> Option<Self> {
        let fields = fields(config);
        let is_plain = |name: &str| matches!(fields[name], Value::Null | Value::Bool(false));
        if !["cautious_weight_decay", "amsgrad", "grad_clipping"].into_iter().all(is_plain) {
            return None;
        }
        let rule = Rule::AdamW {
            beta_1: number(&fields, "beta_1")?,
            beta_2: number(&fields, "beta_2")?,
            epsilon: number(&fields, "epsilon")?,
            weight_decay: number(&fields, "weight_decay")?,
            bias_correction: true,
        };
        Some(Self(rule, config.build()))
    }
}

#[cfg(feature = "trainer")]
impl FusedAdamW {
    /// Builds the optimizer for an AdamW rule.
    pub(crate) fn by(rule: Rule) -> Self {
        Self(rule, AdamWConfig::new().build())
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
        let (tensor, [moment_1, moment_2], _) = update(tensor, Some(grad), [moment_1, moment_2], kernel, 0..0);
        let momentum = AdaptiveMomentumState { time: time + 1, moment_1, moment_2, max_moment_2: None };
        (tensor, Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(mut state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

/// Returns the fields of one of Burn's configurations. They are private, but serialization shows them.
pub(crate) fn fields(config: &impl Serialize) -> Value {
    serde_json::to_value(config).unwrap_or_default()
}

pub(crate) fn number(fields: &Value, name: &str) -> Option<f32> {
    fields[name].as_f64().map(|number| number as f32)
}

/// Runs `kernel` over shards, in place if there are no other handles to them. Returns the next parameter and states, and the sums over the
/// elements `counted`, which a first pass computes.
pub(crate) fn update<const D: usize>(
    parameter: Tensor<D>,
    gradient: Option<Tensor<D>>,
    states: [Tensor<D>; 2],
    kernel: Kernel,
    counted: Range<usize>,
) -> (Tensor<D>, [Tensor<D>; 2], Norms) {
    let (mut parameter, [mut a, mut b]) = (held(parameter), states.map(held));
    let gradient = gradient.map(|gradient| held(gradient).to_contiguous());
    let expected = "it is contiguous, and a piece's gradient is fp32";
    let stretch = Chunk {
        p: elements(&mut parameter),
        g: Elements::F32(gradient.as_ref().map_or(&[], |gradient| gradient.as_slice().expect(expected))),
        a: State::F32(elements(&mut a)),
        b: State::F32(elements(&mut b)),
        copy: None,
        average: None,
        first: 0,
    };
    let norms = update_chunk(kernel, 1.0, stretch, counted);
    (hold(parameter), [a, b].map(hold), norms)
}

/// Returns a shard's elements for writing. Copies the shard first if there are other handles to it.
fn elements(piece: &mut Raw) -> &mut [f32] {
    let (begin, end) = piece.layout().contiguous_offsets().expect("pieces are contiguous");
    &mut piece.storage_mut()[begin..end]
}
