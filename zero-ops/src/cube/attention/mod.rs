//! Attention of rows `[n, d]`, forward and backward, without ever holding the scores of all pairs of rows.
//!
//! [`blocked`] makes the scores of a block of queries with Burn's products, which run on tensor cores where there are any, and
//! turns them into probabilities with one kernel. The semantics are those of `crate::fallback`; computed in fp32, rounded once
//! where results are stored (and where they enter a product).
//!
//! Shape suffixes: those of `crate::backend`, and `e` for the width of a head, `pairs = b * h`.

mod blocked;
mod kernels;
pub(super) mod on_tensors;
mod softmax;
#[cfg(test)]
mod tests;

use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::cast;
use burn_cubecl::tensor::CubeTensor;
use burn_std::DType;
use cubecl::prelude::*;

use self::blocked::Blocked;
use super::tensor::{empty, packed};
use crate::options::AttentionOptions;

/// Whether rows of this type are attended to here; others take the default bodies.
pub(crate) fn takes(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// [`attention_forward`](crate::FusedBackend::attention_forward): rows `[n, d]` and their logarithms of sums `[b, h, t]`,
/// which are fp32 whatever the type of the rows.
///
/// `q`, `k`, `v`: `[n, d]` of one type that is [taken](takes), their rows anywhere; `mask`: `[b, t]`, of any float type.
pub(crate) fn forward<R: CubeRuntime>(
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    mask: Option<CubeTensor<R>>,
    options: AttentionOptions,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let inputs = Inputs::separate([q, k, v], mask, options);
    let blocked = Blocked::on(&inputs.q.tensor);
    forward_of(inputs, blocked)
}

/// [`attention_backward`](crate::FusedBackend::attention_backward): the gradients for `q`, `k` and `v`, each `[n, d]`.
///
/// `out` and `grad`: `[n, d]` of the type of `q`; `lse`: `[b, h, t]` in fp32, as [`forward`] made it.
#[allow(clippy::too_many_arguments)] // As the method that this is the body of.
pub(crate) fn backward<R: CubeRuntime>(
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    mask: Option<CubeTensor<R>>,
    out: CubeTensor<R>,
    lse: CubeTensor<R>,
    grad: CubeTensor<R>,
    options: AttentionOptions,
) -> [CubeTensor<R>; 3] {
    let inputs = Inputs::separate([q, k, v], mask, options);
    let blocked = Blocked::on(&inputs.q.tensor);
    separate_backward(inputs, Saved::new(out, lse, grad), blocked)
}

/// [`packed_attention_forward`](crate::FusedBackend::packed_attention_forward): as [`forward`], of rows `[n, 3 d]`.
pub(crate) fn packed_forward<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    mask: Option<CubeTensor<R>>,
    options: AttentionOptions,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let inputs = Inputs::packed(qkv, mask, options);
    let blocked = Blocked::on(&inputs.q.tensor);
    forward_of(inputs, blocked)
}

/// [`packed_attention_backward`](crate::FusedBackend::packed_attention_backward): the gradient of `qkv`, `[n, 3 d]`.
pub(crate) fn packed_backward<R: CubeRuntime>(
    qkv: CubeTensor<R>,
    mask: Option<CubeTensor<R>>,
    out: CubeTensor<R>,
    lse: CubeTensor<R>,
    grad: CubeTensor<R>,
    options: AttentionOptions,
) -> CubeTensor<R> {
    let inputs = Inputs::packed(qkv, mask, options);
    let blocked = Blocked::on(&inputs.q.tensor);
    joint_backward(inputs, Saved::new(out, lse, grad), blocked)
}

/// Some columns of rows: those of a head begin at `column + head * e`.
#[derive(Clone)]
struct Rows<R: CubeRuntime> {
    /// `[n, _]`; the elements of a row lie side by side.
    tensor: CubeTensor<R>,
    column: usize,
}

impl<R: CubeRuntime> Rows<R> {
    fn new(x: CubeTensor<R>) -> Self {
        let [_, width] = x.shape().dims();
        let side_by_side = width <= 1 || x.meta.strides()[1] == 1;
        Self { tensor: if side_by_side { x } else { packed(x) }, column: 0 }
    }

    fn at_column(&self, column: usize) -> Self {
        Self { tensor: self.tensor.clone(), column }
    }
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Sequences times heads.
    pairs: usize,
    heads: usize,
    /// Rows of a sequence.
    t: usize,
    /// Width of a head.
    e: usize,
    causal: bool,
    scale: f32,
}

impl Sizes {
    fn new(n: usize, d: usize, options: AttentionOptions) -> Self {
        let AttentionOptions { batch, heads, causal, scale } = options;
        Self { pairs: batch * heads, heads, t: n / batch, e: d / heads, causal, scale: scale as f32 }
    }

    fn rows(&self) -> usize {
        self.pairs / self.heads * self.t
    }

    fn width(&self) -> usize {
        self.heads * self.e
    }

    fn is_empty(&self) -> bool {
        self.rows() == 0 || self.width() == 0
    }
}

/// What both passes read.
#[derive(Clone)]
struct Inputs<R: CubeRuntime> {
    sizes: Sizes,
    q: Rows<R>,
    k: Rows<R>,
    v: Rows<R>,
    /// `[b, t]` in fp32, packed; if not `masked`, something to bind in its place that no kernel reads.
    mask: CubeTensor<R>,
    masked: bool,
}

impl<R: CubeRuntime> Inputs<R> {
    fn separate(qkv: [CubeTensor<R>; 3], mask: Option<CubeTensor<R>>, options: AttentionOptions) -> Self {
        let [n, d] = qkv[0].shape().dims();
        Self::new(qkv.map(Rows::new), mask, Sizes::new(n, d, options))
    }

    fn packed(qkv: CubeTensor<R>, mask: Option<CubeTensor<R>>, options: AttentionOptions) -> Self {
        let [n, width] = qkv.shape().dims();
        let d = width / 3;
        let rows = Rows::new(qkv);
        Self::new([0, d, 2 * d].map(|column| rows.at_column(column)), mask, Sizes::new(n, d, options))
    }

    fn new([q, k, v]: [Rows<R>; 3], mask: Option<CubeTensor<R>>, sizes: Sizes) -> Self {
        let masked = mask.is_some();
        let mask = mask.map_or_else(|| scratch(&q.tensor, &[1], DType::F32), full);
        Self { sizes, q, k, v, mask, masked }
    }

    fn dtype(&self) -> DType {
        self.q.tensor.dtype
    }
}

/// What the backward pass reads beside the inputs.
struct Saved<R: CubeRuntime> {
    out: Rows<R>,
    /// `[b, h, t]` in fp32, packed.
    lse: CubeTensor<R>,
    grad: Rows<R>,
}

impl<R: CubeRuntime> Saved<R> {
    fn new(out: CubeTensor<R>, lse: CubeTensor<R>, grad: CubeTensor<R>) -> Self {
        Self { out: Rows::new(out), lse: full(lse), grad: Rows::new(grad) }
    }
}

/// In fp32, row-major without gaps.
fn full<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    packed(cast(x, DType::F32))
}

fn forward_of<R: CubeRuntime>(inputs: Inputs<R>, blocked: Blocked) -> (CubeTensor<R>, CubeTensor<R>) {
    let Sizes { pairs, heads, t, .. } = inputs.sizes;
    let like = &inputs.q.tensor;
    let out = scratch(like, &[inputs.sizes.rows(), inputs.sizes.width()], inputs.dtype());
    let lse = scratch(like, &[pairs / heads, heads, t], DType::F32);
    if !inputs.sizes.is_empty() {
        blocked.forward(&inputs, &out, &lse);
    }
    (out, lse)
}

fn separate_backward<R: CubeRuntime>(inputs: Inputs<R>, saved: Saved<R>, blocked: Blocked) -> [CubeTensor<R>; 3] {
    let shape = [inputs.sizes.rows(), inputs.sizes.width()];
    let gradients = [(); 3].map(|()| scratch(&inputs.q.tensor, &shape, inputs.dtype()));
    backward_into(&inputs, &saved, gradients.clone().map(Rows::new), blocked);
    gradients
}

fn joint_backward<R: CubeRuntime>(inputs: Inputs<R>, saved: Saved<R>, blocked: Blocked) -> CubeTensor<R> {
    let d = inputs.sizes.width();
    let gradient = scratch(&inputs.q.tensor, &[inputs.sizes.rows(), 3 * d], inputs.dtype());
    let rows = Rows::new(gradient.clone());
    backward_into(&inputs, &saved, [0, d, 2 * d].map(|column| rows.at_column(column)), blocked);
    gradient
}

fn backward_into<R: CubeRuntime>(inputs: &Inputs<R>, saved: &Saved<R>, gradients: [Rows<R>; 3], blocked: Blocked) {
    if inputs.sizes.is_empty() {
        return;
    }
    let along = kernels::along(inputs.sizes, &saved.out, &saved.grad);
    blocked.backward(inputs, saved, &along, &gradients);
}

/// As [`empty`]; every tensor that is made here comes from here.
fn scratch<R: CubeRuntime>(like: &CubeTensor<R>, shape: &[usize], dtype: DType) -> CubeTensor<R> {
    #[cfg(test)]
    tests::record(shape.iter().product::<usize>());
    empty(like, shape.to_vec(), dtype)
}

/// The wider of the types that index these tensors: buffers may have more than 2^32 elements.
fn address_type<'a, R: CubeRuntime>(tensors: impl IntoIterator<Item = &'a CubeTensor<R>>) -> AddressType {
    tensors.into_iter().map(CubeTensor::required_address_type).max().unwrap_or_default()
}

/// At least `cubes` cubes: devices take 65535 along an axis.
fn grid(cubes: usize) -> CubeCount {
    const LONGEST: usize = 32768;
    let x = cubes.clamp(1, LONGEST);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}
