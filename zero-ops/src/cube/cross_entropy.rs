//! Cross-entropy of a linear layer's rows, with logits for some rows at a time.
//!
//! For each chunk of rows: its logits by a product, one kernel that computes each row's loss and overwrites the logits with their gradient,
//! and two products of that gradient, for `x` and for `weight`. For 16-bit operands the logits and their gradient are in 16 bit, like any
//! product of such tensors; the exponentials, the sums and the results of the gradient's products are in fp32. The mean's divisor, a number
//! that stays on the device, is applied to the products: a logits' gradient in fp16 would vanish if divided by thousands of rows.

mod kernels;

use burn_cubecl::CubeRuntime;
use burn_cubecl::kernel::{cast, slice};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Metadata, Shape};
use cubecl::prelude::*;

use super::many::array;
use super::product::product;
use super::rows::{Blocks, address_type, cubes, dims, stride, strided, units, vector_size, with_whole_rows, zeros};
use super::tensor::{OnCube, empty, first, launch, packed, run};
use crate::options::CrossEntropyOptions;
use kernels::{count_kernel, mean_kernel, padded_kernel, place_kernel, rows_kernel};

/// Maximum size of a chunk's logits in bytes: on a device of less than 10 GiB, and of more than 40 GiB. Each further chunk reads and writes
/// the weight's gradient in fp32 once more.
const LOGITS_BYTES: [usize; 2] = [256 << 20, 1 << 30];

/// Returns the size for this device: a tenth of its largest allocation, which CubeCL sets to a quarter of a GPU's memory.
fn logits_bytes<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    let largest = x.client.properties().memory.max_page_size;
    usize::try_from(largest / 10).unwrap_or(usize::MAX).clamp(LOGITS_BYTES[0], LOGITS_BYTES[1])
}

/// Allocates a chunk's logits. Memory of more than [`LOGITS_BYTES`]`[0]` is kept between steps: CubeCL would otherwise place it in a page
/// of a sixteenth of the device's memory.
fn logits_memory<R: CubeRuntime>(like: &CubeTensor<R>, shape: [usize; 2], dtype: DType) -> CubeTensor<R> {
    if shape[0] * shape[1] * dtype.size() <= LOGITS_BYTES[0] {
        return empty(like, shape, dtype);
    }
    let kept = like.client.memory_persistent_allocation((), |()| empty(like, shape, dtype));
    kept.expect("a hint to the allocator does not fail")
}

/// Chunks are a multiple of this many rows if possible: products favour it, and no slice then needs a copy.
const ROWS: usize = 256;

/// Rows of logits are padded to a multiple of this many bytes: their vectors are then aligned for any vocabulary, and matrix units have no
/// remainder. In the padding the weight is 0; only products read it.
const ROW_BYTES: usize = 128;

/// Row at which the product for the weight may be split: a view must begin at a multiple of the devices' alignment, 256 bytes.
const PRODUCT_ROWS: usize = 128;

/// Factor of fp16 gradients of logits, at most 1: the smallest fp16 number is 2^-24, and some smaller gradients matter.
const FP16_SCALE: f32 = 1024.0;

/// The ignored target, in the type of the targets.
#[derive(Clone, Copy)]
struct Ignored {
    is_any: bool,
    value: InputScalar,
}

impl Ignored {
    fn new(ignored: Option<i64>, dtype: DType) -> Self {
        // A number that the type cannot hold is never a target.
        let ignored = ignored.filter(|ignored| dtype == DType::I64 || i32::try_from(*ignored).is_ok());
        Self { is_any: ignored.is_some(), value: InputScalar::new(ignored.unwrap_or(0), dtype) }
    }
}

/// Converts targets to a type that kernels can read.
fn ids<R: CubeRuntime>(targets: CubeTensor<R>) -> CubeTensor<R> {
    packed(if matches!(targets.dtype, DType::I32 | DType::I64) { targets } else { cast(targets, DType::I32) })
}

fn count<R: CubeRuntime>(targets: &CubeTensor<R>, ignored: Ignored) -> CubeTensor<R> {
    let n = targets.meta.shape()[0];
    let counted = empty(targets, [1], DType::F32);
    let units = units(&targets.client, n, 8, 256);
    // SAFETY: units read targets below `n`, and one writes the only element.
    unsafe {
        launch! {
            count_kernel on targets.client, (CubeCount::new_single(), CubeDim::new_1d(units as u32)),
            [targets.clone(), counted.clone()],
            n, ignored.value, ignored.is_any, units, targets.dtype.into()
        }
    }
    counted
}

fn mean<R: CubeRuntime>(losses: CubeTensor<R>, counted: CubeTensor<R>) -> CubeTensor<R> {
    let n = losses.meta.shape()[0];
    let mean = empty(&losses, [1], DType::F32);
    let units = units(&losses.client, n, 8, 256);
    // SAFETY: units read losses below `n`, and one writes the only element.
    unsafe {
        launch! {
            mean_kernel on losses.client, (CubeCount::new_single(), CubeDim::new_1d(units as u32)),
            [losses, counted, mean.clone()],
            n, units
        }
    }
    mean
}

/// A call's operands, and the buffers of its results.
struct Call<R: CubeRuntime> {
    x: CubeTensor<R>,
    /// Padded with rows of zeros after the vocabulary.
    weight: CubeTensor<R>,
    vocabulary: usize,
    targets: CubeTensor<R>,
    ignored: Ignored,
    /// Soft cap of the logits.
    cap: Option<f32>,
    losses: CubeTensor<R>,
    counted: CubeTensor<R>,
    scale: f32,
}

impl<R: CubeRuntime> Call<R> {
    fn new(x: CubeTensor<R>, weight: CubeTensor<R>, targets: CubeTensor<R>, options: CrossEntropyOptions) -> Self {
        let targets = ids(targets);
        let ignored = Ignored::new(options.ignored, targets.dtype);
        let cap = options.cap.map(|cap| cap as f32);
        let counted = count(&targets, ignored);
        let losses = empty(&x, [dims(&x)[0]], DType::F32);
        let scale = if x.dtype == DType::F16 { FP16_SCALE } else { 1.0 };
        let [vocabulary, _] = dims(&weight);
        let weight = padded(with_whole_rows(weight), vocabulary.next_multiple_of(ROW_BYTES / x.elem_size()));
        Self { x: with_whole_rows(x), weight, vocabulary, targets, ignored, cap, losses, counted, scale }
    }

    /// Returns the rows of a chunk whose logits take at most `bytes`, about the same for all chunks.
    fn rows_per_chunk(&self, bytes: usize) -> usize {
        let ([n, _], [columns, _]) = (dims(&self.x), dims(&self.weight));
        let most = (bytes / (columns * self.x.elem_size())).max(1);
        let most = if most > ROWS { most / ROWS * ROWS } else { most };
        let even = n.div_ceil(n.div_ceil(most));
        even.next_multiple_of(ROWS).min(most).min(n)
    }

    /// Returns the rows of `x` in `range`.
    fn rows(&self, range: std::ops::Range<usize>) -> CubeTensor<R> {
        let [n, d] = dims(&self.x);
        if range == (0..n) { self.x.clone() } else { slice(self.x.clone(), &[range, 0..d]) }
    }

    /// Computes logits `[rows, v]`, with padding columns after them.
    fn logits(&self, x: CubeTensor<R>) -> CubeTensor<R> {
        let ([rows, _], [columns, _], dtype) = (dims(&x), dims(&self.weight), x.dtype);
        let logits = logits_memory(&x, [rows, columns], dtype);
        let by = permute(self.weight.clone(), &[1, 0]);
        product(x, by, logits)
    }

    /// Computes the losses of the rows from `first`, and overwrites `logits` with their gradient if `is_gradient`.
    fn losses(&self, logits: &CubeTensor<R>, first: usize, is_gradient: bool) {
        let ([rows, _], v) = (dims(logits), self.vocabulary);
        let width = vector_size(&[logits]);
        let stride = stride(logits, width);
        let units = units(&logits.client, v, 16, 512);
        // SAFETY: units read and write vectors of rows of `logits`, which are multiples of a vector, and existing targets and losses of
        // `rows` rows from `first` on; the target's column is only compared.
        unsafe {
            launch! {
                rows_kernel on logits.client,
                (CubeCount::new_1d(cubes(rows) as u32), CubeDim::new_1d(units as u32), address_type(&[logits]), width),
                [logits.clone(), self.targets.clone(), self.losses.clone()],
                stride, first, rows, v, self.scale, self.cap.unwrap_or(1.0), self.ignored.value, self.ignored.is_any,
                self.cap.is_some(), is_gradient, units,
                [logits.dtype.into(), self.targets.dtype.into()]
            }
        }
    }

    /// Returns the product for `weight` without padding rows, in a buffer as large as the gradient that it is added to, which the allocator
    /// can reuse. The remainder of [`PRODUCT_ROWS`] is a separate product, so that units read vectors in both.
    fn weight_gradient(&self, d_logits: &CubeTensor<R>, x: &CubeTensor<R>) -> CubeTensor<R> {
        let ([rows, d], v) = (dims(x), self.vocabulary);
        let part = empty(x, [v, d], DType::F32);
        let whole = v / PRODUCT_ROWS * PRODUCT_ROWS;
        for range in [0..whole, whole..v].into_iter().filter(|range| !range.is_empty()) {
            let lhs = permute(view(d_logits, range.start, [rows, range.len()]), &[1, 0]);
            let out = view(&part, range.start * d, [range.len(), d]);
            product(lhs, x.clone(), out);
        }
        part
    }

    /// Writes or adds `part` to its rows of a gradient, divided by the mean's divisor.
    fn place(&self, part: CubeTensor<R>, out: &CubeTensor<R>, first: usize, is_added: bool) {
        let [rows, d] = dims(&part);
        let size = vector_size(&[&part, out]);
        let (blocks, address) = (Blocks::new(rows, d), address_type(&[&part, out]));
        // SAFETY: units read rows below `rows` of `part`, and write the same number of existing rows of `out` from `first` on.
        unsafe {
            launch! {
                place_kernel on part.client, (blocks.count(d / size), Blocks::dim(), address, size), [],
                strided(part, size), array(&self.counted), array(out), first, blocks.extent(d / size), self.scale, is_added
            }
        }
    }
}

/// Pads rows with rows of zeros, to `rows` in total.
fn padded<R: CubeRuntime>(x: CubeTensor<R>, rows: usize) -> CubeTensor<R> {
    let ([given, d], dtype) = (dims(&x), x.dtype);
    if given == rows || d == 0 {
        return x;
    }
    let out = empty(&x, [rows, d], dtype);
    let size = vector_size(&[&x, &out]);
    let (blocks, address) = (Blocks::new(rows, d), address_type(&[&x, &out]));
    // SAFETY: units read rows below `given` of `x`, and write those below `rows` of `out`.
    unsafe {
        launch! {
            padded_kernel on x.client, (blocks.count(d / size), Blocks::dim(), address, size), [],
            strided(x, size), array(&out), given, blocks.extent(d / size), dtype.into()
        }
    }
    out
}

/// Returns a tensor of another shape in `x`'s memory from element `first` on, with the row stride of `x`.
fn view<R: CubeRuntime>(x: &CubeTensor<R>, first: usize, shape: [usize; 2]) -> CubeTensor<R> {
    let handle = x.handle.clone().offset_start((first * x.elem_size()) as u64);
    let meta = Metadata::new(Shape::from(shape), x.meta.strides().clone());
    CubeTensor::new(x.client.clone(), handle, meta, x.device.clone(), x.dtype)
}

/// Returns ranges of `each` of `n` rows.
fn chunks(n: usize, each: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..n).step_by(each).map(move |first| first..n.min(first + each))
}

fn loss<R: CubeRuntime>(
    [x, weight, targets]: [CubeTensor<R>; 3],
    options: CrossEntropyOptions,
    most: Option<usize>,
) -> CubeTensor<R> {
    if dims(&x)[0] == 0 {
        return zeros(&x, [1], DType::F32);
    }
    let most = most.unwrap_or_else(|| logits_bytes(&x));
    let call = Call::new(x, weight, targets, options);
    for range in chunks(dims(&call.x)[0], call.rows_per_chunk(most)) {
        let logits = call.logits(call.rows(range.clone()));
        call.losses(&logits, range.start, false);
    }
    mean(call.losses.clone(), call.counted)
}

/// Returns the loss, and the gradients for `x` and, with `of_weight`, for `weight`.
fn loss_with_gradients<R: CubeRuntime>(
    [x, weight, targets]: [CubeTensor<R>; 3],
    options: CrossEntropyOptions,
    most: Option<usize>,
    of_weight: bool,
) -> Vec<CubeTensor<R>> {
    let ([n, d], [v, _]) = (dims(&x), dims(&weight));
    let dx = empty(&x, [n, d], DType::F32);
    if n == 0 {
        let d_weight = of_weight.then(|| zeros(&weight, [v, d], DType::F32));
        return [zeros(&x, [1], DType::F32), dx].into_iter().chain(d_weight).collect();
    }
    let d_weight = of_weight.then(|| empty(&x, [v, d], DType::F32));
    let most = most.unwrap_or_else(|| logits_bytes(&x));
    let call = Call::new(x, weight, targets, options);
    for range in chunks(n, call.rows_per_chunk(most)) {
        let x = call.rows(range.clone());
        let logits = call.logits(x.clone());
        call.losses(&logits, range.start, true);
        let d_logits = logits;
        let part = empty(&x, [range.len(), d], DType::F32);
        call.place(product(d_logits.clone(), call.weight.clone(), part), &dx, range.start, false);
        if let Some(d_weight) = &d_weight {
            let part = call.weight_gradient(&d_logits, &x);
            call.place(part, d_weight, 0, range.start > 0);
        }
    }
    [mean(call.losses.clone(), call.counted), dx].into_iter().chain(d_weight).collect()
}

/// Implements [`fused_linear_cross_entropy`](crate::FusedBackend::fused_linear_cross_entropy).
pub(crate) fn linear_cross_entropy<T: OnCube>(x: T, weight: T, targets: T, options: CrossEntropyOptions) -> T {
    let outputs = [(Shape::from([1]), DType::F32)];
    let body = move |inputs, _| [loss(inputs, options, None)];
    let [loss] = run("cross-entropy", [x, weight, targets], None, outputs, body);
    loss
}

/// Implements [`linear_cross_entropy_with_gradients`](crate::FusedBackend::linear_cross_entropy_with_gradients).
///
/// A target that is neither ignored nor a column makes the loss NaN: a device cannot report which one it was.
pub(crate) fn linear_cross_entropy_with_gradients<T: OnCube>(
    x: T,
    weight: T,
    targets: T,
    options: CrossEntropyOptions,
) -> (T, T, T) {
    let [loss, dx, d_weight] = with_gradients([x, weight, targets], options, true);
    (loss, dx, d_weight)
}

/// Implements [`linear_cross_entropy_with_x_gradient`](crate::FusedBackend::linear_cross_entropy_with_x_gradient).
pub(crate) fn linear_cross_entropy_with_x_gradient<T: OnCube>(
    x: T,
    weight: T,
    targets: T,
    options: CrossEntropyOptions,
) -> (T, T) {
    let [loss, dx] = with_gradients([x, weight, targets], options, false);
    (loss, dx)
}

fn with_gradients<T: OnCube, const OUTPUTS: usize>(
    operands: [T; 3],
    options: CrossEntropyOptions,
    of_weight: bool,
) -> [T; OUTPUTS] {
    let shapes = [Shape::from([1]), operands[0].shape(), operands[1].shape()];
    let promised = shapes.into_iter().take(OUTPUTS).map(|shape| (shape, DType::F32)).collect();
    let made = T::run("cross-entropy with gradients", operands.into(), promised, move |given| {
        loss_with_gradients(first(&mut given.into_iter()), options, None, of_weight)
    });
    made.try_into().unwrap_or_else(|_| unreachable!("the kernel returns all outputs"))
}

compiled! {
    let [n, v] = [1024, 50257];
    for dtype in TYPES {
        for ids in [DType::I32, DType::I64] {
            for ignored in [None, Some(-1)] {
                let new = |cap| {
                    let options = CrossEntropyOptions { ignored, cap };
                    Call::new(tensor([n, 64], dtype), tensor([v, 64], dtype), tensor([n], ids), options)
                };
                let call = new(None);
                let logits = tensor([n, dims(&call.weight)[0]], dtype);
                for call in [&call, &new(Some(30.0))] {
                    call.losses(&logits, 0, false);
                    call.losses(&logits, 0, true);
                }
                mean(call.losses.clone(), call.counted.clone());
                for d in WIDTHS {
                    padded(tensor([v, d], dtype), 50304);
                    let [part, out] = [(); 2].map(|()| tensor([n, d], DType::F32));
                    call.place(part.clone(), &out, 0, false);
                    call.place(part, &out, 0, true);
                }
            }
        }
    }
}

#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests {
    use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};

    use super::*;
    use crate::cube::tested::{Plain, TestRuntime};

    fn rows(values: Vec<f32>, shape: [usize; 2]) -> CubeTensor<TestRuntime> {
        Tensor::<Plain, 2>::from_data(TensorData::new(values, shape), &Default::default()).into_primitive().tensor()
    }

    fn values<const D: usize>(x: CubeTensor<TestRuntime>) -> Vec<f32> {
        Tensor::<Plain, D>::from_primitive(TensorPrimitive::Float(x)).into_data().to_vec().unwrap()
    }

    /// Tests 600 rows in chunks of one row, of some, of 256, and in one; with vocabularies below and above a product's rows.
    #[test]
    fn chunks_change_nothing() {
        [(11, None), (300, None), (300, Some(0.5))].into_iter().for_each(|(v, cap)| chunks_of(v, cap));
    }

    fn chunks_of(v: usize, cap: Option<f64>) {
        let options = CrossEntropyOptions { ignored: Some(-1), cap };
        let [n, d] = [600, 6];
        let number = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 50.0;
        let given = || {
            let ids: Vec<i32> = (0..n).map(|i| if i % 5 == 0 { -1 } else { (i % v) as i32 }).collect();
            let ids = Tensor::<Plain, 1, Int>::from_data(TensorData::new(ids, [n]), &Default::default());
            let x = rows((0..n * d).map(number).collect(), [n, d]);
            [x, rows((7..7 + v * d).map(number).collect(), [v, d]), ids.into_primitive()]
        };
        let one = loss_with_gradients(given(), options, None, true);
        let [expected_loss, expected_dx, expected_d_weight] =
            [values::<1>(one[0].clone()), values::<2>(one[1].clone()), values::<2>(one[2].clone())];
        assert!(expected_loss[0] > 1.0 && expected_dx.iter().any(|value| value.abs() > 1e-5));
        let close = |what: &str, got: &[f32], expected: &[f32]| {
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                assert!((got - expected).abs() <= 1e-6, "{what}[{i}]: {got}, {expected}");
            }
        };
        for chunk in [1, 100, 256, 300] {
            let bytes = chunk * v.next_multiple_of(ROW_BYTES / 4) * 4;
            let made = loss_with_gradients(given(), options, Some(bytes), true);
            close("loss", &values::<1>(made[0].clone()), &expected_loss);
            close("dx", &values::<2>(made[1].clone()), &expected_dx);
            close("d weight", &values::<2>(made[2].clone()), &expected_d_weight);
            let frozen = loss_with_gradients(given(), options, Some(bytes), false);
            assert_eq!(frozen.len(), 2, "a frozen weight has no gradient");
            close("loss of a frozen weight", &values::<1>(frozen[0].clone()), &expected_loss);
            close("dx of a frozen weight", &values::<2>(frozen[1].clone()), &expected_dx);
            close("loss alone", &values::<1>(super::loss(given(), options, Some(bytes))), &expected_loss);
        }
    }
}
