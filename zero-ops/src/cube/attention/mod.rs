//! Attention of rows `[n, d]`, forward and backward, without storing the scores of all pairs of rows.
//!
//! [`flash`] has one kernel forward and two backward, for matrix units and 16 bit. Otherwise [`blocked`] computes the scores of a block of
//! queries with Burn's products, and turns them into probabilities with one kernel. The semantics are those of `crate::fallback`; computed
//! in fp32 and rounded once, when results are stored or enter a product.
//!
//! Shape suffixes: those of `crate::backend`, and `e` for the width of a head, `pairs = b * h`.

mod blocked;
mod dropped;
mod flash;
mod kernels;
mod softmax;
#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests;
mod tiles;

use burn_backend::TensorMetadata;
use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::cast;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::prelude::*;

use self::blocked::Blocked;
use self::flash::Flash;
use super::rows::with_whole_rows;
use super::tensor::{OnCube, Plain, empty, first, packed, run};
use crate::fallback::{of_shared_heads, with_all_heads};
use crate::options::{AttentionDropout, AttentionOptions};

/// Implements [`attention_forward`](crate::FusedBackend::attention_forward), also of packed rows. Returns rows `[n, d]` and their
/// logarithms of sums `[b, h, t]`, which are fp32 whatever the type of the rows.
///
/// `parts`: query, key and value `[n, d]`, or all three in one `[n, 3 d]`, of one type that [is a float](super::tensor::is_float), with
/// rows at any stride. `mask`: `[b, s]`, of any float type. Keys and values may have `s` rows per sequence and queries `t`, and fewer heads,
/// `[m, c]`: consecutive heads of queries share one.
pub(crate) fn forward<T: OnCube, const N: usize>(parts: [T; N], mask: Option<T>, options: AttentionOptions) -> (T, T) {
    let (shape, dtype) = (parts[0].shape(), parts[0].dtype());
    let lse = Shape::from([options.batch, options.heads, shape[0] / options.batch]);
    let outputs = [(Shape::from([shape[0], shape[1] * N / 3]), dtype), (lse, DType::F32)];
    let name = if N == 1 { "packed attention" } else { "attention" };
    run(name, parts, mask, outputs, move |parts, mask| {
        let inputs = Inputs::new(parts, mask, options);
        let way = Way::of(&inputs, &[]);
        forward_of(inputs, way)
    })
    .into()
}

/// Implements [`attention_backward`](crate::FusedBackend::attention_backward), also of packed rows. Returns the gradients of `parts`.
///
/// `saved`: the output, the logarithms of sums and the output's gradient: `[n, d]` in the type of `parts`, and `[b, h, t]` in fp32, as
/// [`forward`] returned them.
pub(crate) fn backward<T: OnCube, const N: usize>(
    parts: [T; N],
    mask: Option<T>,
    saved: [T; 3],
    options: AttentionOptions,
) -> [T; N] {
    let promised = parts.iter().map(|part| (part.shape(), part.dtype())).collect();
    let given = parts.into_iter().chain(saved).chain(mask).collect();
    let name = if N == 1 { "packed attention: gradient" } else { "attention: gradient" };
    let made = T::run(name, given, promised, move |given| {
        let mut given = given.into_iter();
        let (parts, saved) = (first::<_, N>(&mut given), first(&mut given));
        let inputs = Inputs::new(parts, given.next(), options);
        let saved = Saved::new(saved, inputs.sizes);
        let way = Way::of(&inputs, &[&saved.grad]);
        backward_of::<_, N>(inputs, saved, way).into()
    });
    made.try_into().unwrap_or_else(|_| unreachable!("the kernel returns a gradient for each part"))
}

/// Algorithm of attention.
#[derive(Clone, Copy, Debug)]
enum Way {
    Flash(Flash),
    Blocked(Blocked),
}

impl Way {
    /// Chooses the algorithm for inputs, and for other rows that it reads.
    fn of<R: CubeRuntime>(inputs: &Inputs<R>, others: &[&Rows<R>]) -> Self {
        Flash::on(inputs, others).map_or_else(|| Self::Blocked(Blocked::default()), Self::Flash)
    }
}

/// Some columns of rows: those of head `i` begin at `column + i * e`.
#[derive(Clone)]
struct Rows<R: CubeRuntime> {
    /// `[n, _]`; the elements of a row are contiguous.
    tensor: CubeTensor<R>,
    column: usize,
    /// Number of rows per sequence.
    t: usize,
    /// Number of heads of queries that share a head of these rows.
    group: usize,
}

impl<R: CubeRuntime> Rows<R> {
    fn new(x: CubeTensor<R>, t: usize) -> Self {
        Self { tensor: with_whole_rows(x), column: 0, t, group: 1 }
    }
}

/// Returns the rows of queries, keys and values: each in its own tensor, or all in one.
fn three<R: CubeRuntime, const N: usize>(parts: [CubeTensor<R>; N], sizes: Sizes) -> [Rows<R>; 3] {
    let parts = parts.map(|part| Rows::new(part, sizes.t));
    [0, 1, 2].map(|i| Rows {
        column: if N == 1 { i * sizes.width() } else { 0 },
        t: if i == 0 { sizes.t } else { sizes.s },
        group: if i == 0 { 1 } else { sizes.group },
        ..parts[i * N / 3].clone()
    })
}

/// The sizes of a problem.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Number of sequences times heads.
    pairs: usize,
    heads: usize,
    /// Number of heads of queries that share a head of keys.
    group: usize,
    /// Number of rows per sequence.
    t: usize,
    /// Number of keys per sequence: `t`, except in cross-attention, which is not causal.
    s: usize,
    /// Width of a head.
    e: usize,
    causal: bool,
    /// Maximum number of keys that a causal query sees, including its own.
    window: Option<usize>,
    scale: f32,
    /// Soft cap of the scores.
    cap: Option<f32>,
}

impl Sizes {
    fn new([n, d]: [usize; 2], [keys, c]: [usize; 2], options: AttentionOptions) -> Self {
        let AttentionOptions { batch, heads, causal, window, scale, cap, .. } = options;
        let (t, s) = (n / batch, keys / batch);
        let group = d.checked_div(c).unwrap_or(1);
        let (scale, cap) = (scale as f32, cap.map(|cap| cap as f32));
        Self { pairs: batch * heads, heads, group, t, s, e: d / heads, causal, window, scale, cap }
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

    /// Returns whether there are as many keys as queries, no window and no soft cap.
    fn is_plain(&self) -> bool {
        self.s == self.t && self.window.is_none() && self.cap.is_none()
    }
}

/// Inputs of both passes.
#[derive(Clone)]
struct Inputs<R: CubeRuntime> {
    sizes: Sizes,
    q: Rows<R>,
    k: Rows<R>,
    v: Rows<R>,
    /// `[b, s]` in fp32, packed. If not `masked`, a placeholder that no kernel reads.
    mask: CubeTensor<R>,
    masked: bool,
    dropout: Option<AttentionDropout>,
}

impl<R: CubeRuntime> Inputs<R> {
    fn new<const N: usize>(parts: [CubeTensor<R>; N], mask: Option<CubeTensor<R>>, options: AttentionOptions) -> Self {
        let of = |i: usize| {
            let [rows, width] = parts[i].shape().dims();
            [rows, width * N / 3]
        };
        let sizes = Sizes::new(of(0), of(N / 2), options);
        let [q, k, v] = three(parts, sizes);
        let masked = mask.is_some();
        let mask = mask.map_or_else(|| scratch(&q.tensor, &[1], DType::F32), full);
        Self { sizes, q, k, v, mask, masked, dropout: options.dropout }
    }

    fn dtype(&self) -> DType {
        self.q.tensor.dtype
    }

    /// Returns whether shared heads of keys must be repeated first.
    fn repeats_heads(&self, way: Way) -> bool {
        self.sizes.group > 1 && !self.sizes.is_empty() && matches!(way, Way::Blocked(_))
    }

    /// Returns the same inputs with a head of keys and values for each head of queries.
    fn with_all_heads(&self) -> Self {
        let sizes = Sizes { group: 1, ..self.sizes };
        let [k, v] = [&self.k, &self.v].map(|rows| {
            Rows::new(with_all_heads::<Plain<R>>(packed(rows.tensor.clone()), sizes.width(), sizes.e), rows.t)
        });
        Self { sizes, k, v, ..self.clone() }
    }

    fn variant(&self) -> Variant {
        let Sizes { causal, cap, .. } = self.sizes;
        Variant { causal, capped: cap.is_some(), masked: self.masked, drops: self.dropout.is_some() }
    }
}

/// Compile-time options of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    causal: bool,
    capped: bool,
    masked: bool,
    drops: bool,
}

/// Additional inputs of the backward pass.
struct Saved<R: CubeRuntime> {
    /// `[b, h, t]` in fp32, packed.
    lse: CubeTensor<R>,
    grad: Rows<R>,
    /// Result of [`along`](kernels::along).
    along: CubeTensor<R>,
}

impl<R: CubeRuntime> Saved<R> {
    fn new([out, lse, grad]: [CubeTensor<R>; 3], sizes: Sizes) -> Self {
        let (lse, [out, grad]) = (full(lse), [out, grad].map(|x| Rows::new(x, sizes.t)));
        let along = if sizes.is_empty() { lse.clone() } else { kernels::along(sizes, &out, &grad) };
        Self { lse, grad, along }
    }
}

/// Converts a tensor to fp32, row-major without gaps.
fn full<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    packed(cast(x, DType::F32))
}

fn forward_of<R: CubeRuntime>(inputs: Inputs<R>, way: Way) -> [CubeTensor<R>; 2] {
    if inputs.repeats_heads(way) {
        return forward_of(inputs.with_all_heads(), way);
    }
    let Sizes { pairs, heads, t, .. } = inputs.sizes;
    let like = &inputs.q.tensor;
    let out = scratch(like, &[inputs.sizes.rows(), inputs.sizes.width()], inputs.dtype());
    let lse = scratch(like, &[pairs / heads, heads, t], DType::F32);
    if !inputs.sizes.is_empty() {
        match way {
            Way::Flash(flash) => flash.forward(&inputs, &out, &lse),
            Way::Blocked(blocked) => blocked.forward(&inputs, &out, &lse),
        }
    }
    [out, lse]
}

fn backward_of<R: CubeRuntime, const N: usize>(inputs: Inputs<R>, saved: Saved<R>, way: Way) -> [CubeTensor<R>; N] {
    let sizes = inputs.sizes;
    let parts = [&inputs.q, &inputs.k, &inputs.v];
    if inputs.repeats_heads(way) {
        let gradients: [CubeTensor<R>; 3] = backward_of(inputs.with_all_heads(), saved, way);
        let width = |i: usize| parts[i].tensor.meta.shape()[1];
        return std::array::from_fn(|i| match i {
            0 => gradients[0].clone(),
            _ => of_shared_heads::<Plain<R>>(gradients[i].clone(), width(i), sizes.e),
        });
    }
    let gradients = std::array::from_fn(|i| scratch(&inputs.q.tensor, parts[i].tensor.meta.shape(), inputs.dtype()));
    if !sizes.is_empty() {
        let three = three(gradients.clone(), sizes);
        match way {
            Way::Flash(flash) => flash.backward(&inputs, &saved, &three),
            Way::Blocked(blocked) => blocked.backward(&inputs, &saved, &three),
        }
    }
    gradients
}

/// Calls [`empty`]. Every tensor of this module is allocated here.
fn scratch<R: CubeRuntime>(like: &CubeTensor<R>, shape: &[usize], dtype: DType) -> CubeTensor<R> {
    #[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
    tests::record(shape.iter().product::<usize>());
    empty(like, shape.to_vec(), dtype)
}

/// Returns a grid of at least `cubes` cubes: devices allow 65535 along an axis.
fn grid(cubes: usize) -> CubeCount {
    const LONGEST: usize = 32768;
    let x = cubes.clamp(1, LONGEST);
    CubeCount::Static(x as u32, cubes.div_ceil(x).max(1) as u32, 1)
}

compiled! {
    let [t, heads] = [512, 2];
    let blocked = Way::Blocked(Blocked { budget_bytes: 1 << 20 });
    for (dtype, e) in TYPES.into_iter().flat_map(|dtype| [64, 128].map(|e| (dtype, e))) {
        let some = Some(AttentionDropout { probability: 0.1, key: 1 << 40 });
        let cases =
            [(false, false, None), (false, true, some), (true, false, None), (true, false, some), (true, true, None)];
        let cases = cases.map(|(causal, masked, dropout)| (causal, masked, dropout, None));
        for (causal, masked, dropout, cap) in cases.into_iter().chain([(true, false, None, Some(50.0))]) {
            let options = AttentionOptions { batch: 1, heads, causal, window: None, scale: 0.125, dropout, cap };
            let mask = masked.then(|| tensor([1, t], DType::F32));
            let inputs = Inputs::new([tensor([t, 3 * heads * e], dtype)], mask, options);
            let flash = Flash::on(&inputs, &[]).map(Way::Flash);
            assert_eq!(flash.is_some(), dtype != DType::F32 && cap.is_none(), "16 bit on matrix units, without a cap");
            for way in flash.into_iter().chain([blocked]) {
                let [out, lse] = forward_of(inputs.clone(), way);
                check();
                let [_] = backward_of(inputs.clone(), Saved::new([out.clone(), lse, out], inputs.sizes), way);
                check();
            }
        }
    }
}
