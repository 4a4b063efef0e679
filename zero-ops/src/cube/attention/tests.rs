use std::cell::Cell;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{Backend, TensorData};
use burn_flex::Flex;
use burn_std::{FloatDType, Metadata};

use super::blocked::Plan;
use super::*;
use crate::cube::tested::{Plain, TestRuntime};
use crate::fallback;

type Cube = CubeTensor<TestRuntime>;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// Records the largest tensor that this thread allocates.
pub(super) fn record(elems: usize) {
    LARGEST.with(|largest| largest.set(largest.get().max(elems)));
}

const BLOCKED: Way = Way::Blocked(Blocked { budget_bytes: 64 << 20 });

/// The smallest blocks: one pair and 64 queries.
const SMALL_BLOCKS: Way = Way::Blocked(Blocked { budget_bytes: 1 });

/// The kernels for matrix units with loops instead, for heads whose width is a multiple of 16. Cuts are as large as a software device's 32
/// KiB of shared memory allow.
fn in_loops(e: usize, tall: usize) -> Way {
    Way::Flash(if e < 64 { Flash::in_loops(e, 2 / tall, tall, 32 / tall) } else { Flash::in_loops(e, 1, 1, 16) })
}

/// Pseudo-random numbers between -1 and 1, the same for a given seed.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

fn on<B: Backend, const D: usize>(values: &[f32], shape: [usize; D]) -> B::FloatTensorPrimitive {
    B::float_from_data(TensorData::new(values.to_vec(), shape), &B::Device::default())
}

fn values<B: Backend, const D: usize>(x: B::FloatTensorPrimitive) -> Vec<f32> {
    let x = Tensor::<B, D>::from_primitive(TensorPrimitive::Float(x));
    // To read nothing Burn launches a kernel of no cubes, which CUDA refuses.
    if x.shape().num_elements() == 0 {
        return Vec::new();
    }
    let data = x.into_data().convert::<f32>();
    data.to_vec().expect("fp32 was asked for")
}

/// Returns rows whose stride exceeds their width and whose first element is not the buffer's first.
fn pitched(values: &[f32], [n, width]: [usize; 2]) -> Cube {
    let device = Default::default();
    let alignment = TestRuntime::client(&device).properties().memory.alignment as usize;
    let (before, stride) = (alignment / size_of::<f32>(), width + 5);
    let mut wide = vec![f32::NAN; before + n * stride];
    for (row, values) in values.chunks(width).enumerate() {
        wide[before + row * stride..][..width].copy_from_slice(values);
    }
    let len = wide.len();
    let mut x: Cube = on::<Plain, 1>(&wide, [len]);
    x.handle = x.handle.offset_start(alignment as u64);
    *x.meta = Metadata::new([n, width], [stride, 1]);
    x
}

const WIDTHS: [usize; 5] = [1, 8, 40, 64, 80];

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    t: usize,
    e: usize,
    causal: bool,
    masked: bool,
    drops: bool,
    /// Number of rows per sequence of another text.
    keys: Option<usize>,
    window: Option<usize>,
    /// Number of heads of queries that share a head of keys.
    group: usize,
    /// Soft cap of the scores.
    cap: Option<f64>,
}

const SMALL: Case = Case {
    batch: 2,
    heads: 3,
    t: 17,
    e: 8,
    causal: true,
    masked: false,
    drops: false,
    keys: None,
    window: None,
    group: 1,
    cap: None,
};

impl Case {
    /// Returns all lengths with all head widths, each with `few` of the 32 other choices. Consecutive cases differ, and all choices occur.
    /// (A software device needs a second for a few cases, most of it to compile them.)
    fn some<const N: usize>(few: usize, widths: [usize; N]) -> impl Iterator<Item = Self> {
        let shapes = [1, 2, 17, 64, 100, 257].into_iter().flat_map(move |t| widths.map(|e| (t, e)));
        shapes.enumerate().flat_map(move |(at, (t, e))| {
            (0..few).map(move |i| {
                // 5 and 32 are coprime, so all choices occur.
                let choice = (at * few + i) * 5 % 32;
                let bit = |bit: usize| choice >> bit & 1 == 1;
                let (batch, heads) = (1 + usize::from(bit(0)), 1 + 2 * usize::from(bit(1)));
                Self {
                    batch,
                    heads,
                    t,
                    e,
                    causal: bit(2),
                    masked: bit(3),
                    drops: bit(4),
                    keys: None,
                    window: None,
                    group: 1,
                    cap: None,
                }
            })
        })
    }

    fn options(self) -> AttentionOptions {
        let Self { batch, heads, e, causal, drops, window, cap, .. } = self;
        let dropout = drops.then_some(AttentionDropout { probability: 0.3, key: 0xfedc_ba98_7654_3210 });
        AttentionOptions { batch, heads, causal, window, scale: 1.0 / (e as f64).sqrt(), dropout, cap }
    }

    fn shape(self) -> [usize; 2] {
        [self.batch * self.t, self.heads * self.e]
    }

    fn keys(self) -> usize {
        self.keys.unwrap_or(self.t)
    }

    fn shape_of_keys(self) -> [usize; 2] {
        [self.batch * self.keys(), self.heads / self.group * self.e]
    }

    /// Hides every third key but the first.
    fn mask(self) -> Option<Vec<f32>> {
        let hidden = |i: usize| if i % self.keys() % 3 == 1 { -1e4 } else { 0.1 * (i % 5) as f32 };
        self.masked.then(|| (0..self.batch * self.keys()).map(hidden).collect())
    }
}

/// Inputs of a case.
struct Given {
    case: Case,
    /// `q`, `k`, `v` and the gradient of the output.
    rows: [Vec<f32>; 4],
    mask: Option<Vec<f32>>,
}

impl From<Case> for Given {
    fn from(case: Case) -> Self {
        let ([n, d], [m, c]) = (case.shape(), case.shape_of_keys());
        let rows = [(1, n * d), (2, m * c), (3, m * c), (4, n * d)].map(|(seed, len)| noise(len, seed + 10 * n as u64));
        Self { case, rows, mask: case.mask() }
    }
}

/// Output, logarithms of sums, and the gradients.
type Results = [Vec<f32>; 5];

fn expected(given: &Given) -> Results {
    expected_in(FloatDType::F64, given)
}

fn expected_in(dtype: FloatDType, Given { case, rows: [q, k, v, grad], mask }: &Given) -> Results {
    let (shape, of_keys) = (case.shape(), case.shape_of_keys());
    let on_flex = |x, shape| Flex::float_cast(on::<Flex, 2>(x, shape), dtype);
    let [q, grad] = [q, grad].map(|x| on_flex(x, shape));
    let [k, v] = [k, v].map(|x| on_flex(x, of_keys));
    let mask = mask.as_ref().map(|mask| on_flex(mask, [case.batch, case.keys()]));
    let options = case.options();
    let (out, lse) = fallback::attention_forward::<Flex>(q.clone(), k.clone(), v.clone(), mask.clone(), options);
    let [dq, dk, dv] = fallback::attention_backward::<Flex>(q, k, v, mask, out.clone(), lse.clone(), grad, options);
    let [out, dq, dk, dv] = [out, dq, dk, dv].map(values::<Flex, 2>);
    [out, values::<Flex, 3>(lse), dq, dk, dv]
}

fn separate(way: Way, Given { case, rows, mask }: &Given, make: impl Fn(&[f32], [usize; 2]) -> Cube) -> Results {
    let shape = case.shape();
    let [q, grad] = [0, 3].map(|i| make(&rows[i], shape));
    let [k, v] = [1, 2].map(|i| make(&rows[i], case.shape_of_keys()));
    let mask = mask.as_ref().map(|mask| make(mask, [case.batch, case.keys()]));
    let inputs = Inputs::new([q, k, v], mask, case.options());
    let [out, lse] = forward_of(inputs.clone(), way);
    assert_eq!((out.shape().dims(), lse.shape().dims()), (shape, [case.batch, case.heads, case.t]));
    assert_eq!(lse.dtype, DType::F32);
    let saved = Saved::new([out.clone(), lse.clone(), grad], inputs.sizes);
    let [dq, dk, dv] = backward_of(inputs, saved, way);
    let [out, dq, dk, dv] = [out, dq, dk, dv].map(values::<Plain, 2>);
    [out, values::<Plain, 3>(lse), dq, dk, dv]
}

fn joint(way: Way, Given { case, rows, mask }: &Given, make: impl Fn(&[f32], [usize; 2]) -> Cube) -> Results {
    let [n, d] = case.shape();
    let row = |row: usize| [0, 1, 2].map(|i| rows[i][row * d..][..d].to_vec()).concat();
    let qkv = make(&(0..n).flat_map(row).collect::<Vec<f32>>(), [n, 3 * d]);
    let grad = make(&rows[3], [n, d]);
    let mask = mask.as_ref().map(|mask| make(mask, [case.batch, case.t]));
    let inputs = Inputs::new([qkv], mask, case.options());
    let [out, lse] = forward_of(inputs.clone(), way);
    let saved = Saved::new([out.clone(), lse.clone(), grad], inputs.sizes);
    let [d_qkv] = backward_of(inputs, saved, way);
    assert_eq!(d_qkv.shape().dims(), [n, 3 * d]);
    let d_qkv = values::<Plain, 2>(d_qkv);
    let part = |i: usize| d_qkv.chunks(3 * d).flat_map(|row| row[i * d..][..d].to_vec()).collect();
    [values::<Plain, 2>(out), values::<Plain, 3>(lse), part(0), part(1), part(2)]
}

/// Checks that values differ by at most 1e-4 of the largest expected value.
fn assert_close(actual: &Results, expected: &Results, case: impl std::fmt::Debug) {
    for ((actual, expected), name) in actual.iter().zip(expected).zip(["out", "lse", "dq", "dk", "dv"]) {
        // If only rounding is left (a single key has probability 1, whatever its score), the tolerance is relative to the inputs.
        let largest = expected.iter().fold(0.1f32, |largest, x| largest.max(x.abs()));
        assert_eq!(actual.len(), expected.len());
        for (i, (a, b)) in actual.iter().zip(expected).enumerate() {
            let close = (a - b).abs() <= 1e-4 * largest;
            assert!(close, "{case:?}: {name}[{i}] is {a}, not {b}; the largest is {largest}");
        }
    }
}

fn plain(values: &[f32], shape: [usize; 2]) -> Cube {
    on::<Plain, 2>(values, shape)
}

fn agrees(way: Way, case: Case) {
    let given = case.into();
    let expected = expected(&given);
    assert_close(&separate(way, &given, pitched), &expected, (case, "pitched"));
    assert_close(&joint(way, &given, plain), &expected, (case, "packed"));
}

#[test]
fn blocks_agree_with_the_default_bodies() {
    for case in Case::some(2, WIDTHS) {
        agrees(BLOCKED, case);
    }
}

#[test]
fn small_blocks_agree_with_the_default_bodies() {
    for case in Case::some(4, WIDTHS).filter(|case| case.t > 64 && case.heads == 3) {
        agrees(SMALL_BLOCKS, case);
    }
}

#[test]
fn windows_agree_with_the_default_bodies() {
    for (t, window) in [(2, 1), (17, 5), (100, 70), (257, 1), (257, 64), (257, 130)] {
        for (way, masked) in [(BLOCKED, false), (SMALL_BLOCKS, true)] {
            let window = Some(window);
            agrees(way, Case { t, e: 8, masked, window, ..SMALL });
        }
    }
}

#[test]
fn soft_caps_agree_with_the_default_bodies() {
    for (t, window, masked, cap) in [(2, None, false, 0.2), (100, Some(70), true, 0.7), (257, None, true, 50.0)] {
        for (way, drops) in [(BLOCKED, false), (SMALL_BLOCKS, true)] {
            agrees(way, Case { t, e: 8, masked, drops, window, cap: Some(cap), ..SMALL });
        }
    }
}

#[test]
fn attention_across_texts_agrees_with_the_default_bodies() {
    for (t, keys) in [(1, 17), (17, 1), (100, 257), (257, 100)] {
        for (way, masked) in [(BLOCKED, true), (SMALL_BLOCKS, false), (SMALL_BLOCKS, true)] {
            let keys = Some(keys);
            let case = Case { t, e: 8, causal: false, masked, keys, ..SMALL };
            let given = case.into();
            assert_close(&separate(way, &given, pitched), &expected(&given), (case, "across"));
        }
    }
}

#[test]
fn heads_of_queries_that_share_keys_agree_with_the_default_bodies() {
    for (i, (t, causal, masked, drops)) in
        [(1, true, false, false), (17, false, true, false), (100, true, true, false), (100, true, false, true)]
            .into_iter()
            .enumerate()
    {
        for (heads, group) in [(6, 3), (4, 4)] {
            let case = Case { heads, t, e: 16, causal, masked, drops, group, ..SMALL };
            let given = case.into();
            for way in [BLOCKED, SMALL_BLOCKS, in_loops(case.e, 1 + i % 2)] {
                assert_close(&separate(way, &given, pitched), &expected(&given), (case, way));
            }
        }
    }
}

#[test]
fn the_kernels_of_matrix_units_agree_with_the_default_bodies() {
    // Lengths above and below a cube's rows: compiling the loops takes a second per case.
    for (i, case) in Case::some(1, [16, 48, 64]).filter(|case| matches!(case.t, 1 | 17 | 100)).enumerate() {
        agrees(in_loops(case.e, 1 + i % 2), case);
    }
}

/// Checks the addresses of `ldmatrix` and `mma` against NVIDIA's description of both.
#[test]
fn tiles_lie_as_matrix_units_have_them() {
    use super::tiles::{left_address, left_column, left_row, right_address};

    // A matrix in shared memory, whose elements are all different, and the elements of unit `lane`'s pair `i` after each group of eight
    // units has addressed the rows of an 8 x 8 matrix.
    const ROWS: usize = 16;
    let memory = |row: usize, column: usize| 100 * row + column;
    let loaded = |address: &dyn Fn(usize) -> (usize, usize), lane: usize, i: usize, across: bool| {
        let element = |row: usize, column: usize| {
            let (at, first) = address(8 * i + row);
            assert!(at < ROWS && first + 8 <= ROWS);
            memory(at, first + column)
        };
        let (g, p) = (lane / 4, lane % 4);
        [0, 1].map(|c| if across { element(2 * p + c, g) } else { element(g, 2 * p + c) })
    };
    for lane in 0..32 {
        let (g, p) = (lane / 4, lane % 4);
        for i in 0..4 {
            let (row, column) = (left_row(g, i), left_column(p, i));
            let wanted = [memory(row, column), memory(row, column + 1)];
            assert_eq!(loaded(&left_address, lane, i, false), wanted, "left, unit {lane}, pair {i}");
            // The last two pairs belong to the second of two neighbouring tiles. Within a tile, unit `4 g + p` has rows `2 p` and `2 p + 8`
            // of column `g`.
            let (column, row) = (g + 8 * (i / 2), 2 * p + 8 * (i % 2));
            for across in [false, true] {
                let at = |row, column| if across { memory(row, column) } else { memory(column, row) };
                let wanted = [at(row, column), at(row + 1, column)];
                let address = |lane| right_address(lane, across);
                assert_eq!(loaded(&address, lane, i, across), wanted, "right, {across}, unit {lane}, pair {i}");
            }
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    let case = Case { t: 100, e: 48, masked: true, ..SMALL };
    let given = case.into();
    let expected = expected(&given);
    for way in [BLOCKED, SMALL_BLOCKS, in_loops(case.e, 1)] {
        let [first, second] = [(); 2].map(|()| joint(way, &given, plain));
        assert_eq!(first, second, "{way:?}");
        assert_close(&first, &expected, way);
    }
}

/// In fp32 only the mask is left of such scores: the expected values are computed with the same rounding.
#[test]
fn a_mask_may_hide_everything() {
    for causal in [false, true] {
        let case = Case { t: 100, e: 16, causal, masked: true, ..SMALL };
        let mut given = Given::from(case);
        given.mask.as_mut().expect("the case has a mask")[..case.t].fill(-1e9);
        let expected = expected_in(FloatDType::F32, &given);
        for way in [BLOCKED, SMALL_BLOCKS, in_loops(case.e, 2)] {
            let actual = joint(way, &given, plain);
            assert!(actual.iter().flatten().all(|x| x.is_finite()), "{way:?} {causal}");
            // The default bodies give future keys scores above a mask as low as this one.
            if !causal {
                assert_close(&actual, &expected, (way, causal));
            }
        }
    }
}

#[test]
fn no_rows_are_no_work() {
    let case = Case { t: 0, e: 8, ..SMALL };
    assert!(joint(BLOCKED, &case.into(), plain).iter().all(Vec::is_empty));
}

#[test]
fn the_functions_give_what_the_chosen_way_gives() {
    let case = Case { t: 17, e: 40, masked: true, ..SMALL };
    let (shape, options, given) = (case.shape(), case.options(), case.into());
    let expected = expected(&given);
    let [q, k, v, grad] = given.rows.map(|rows| plain(&rows, shape));
    let mask = given.mask.map(|mask| plain(&mask, [case.batch, case.t]));
    let parts = [q.clone(), k.clone(), v.clone()];
    let (out, lse) = forward(parts.clone(), mask.clone(), options);
    let [dq, dk, dv] = backward(parts, mask.clone(), [out.clone(), lse.clone(), grad.clone()], options);
    let [of_out, of_dq, of_dk, of_dv] = [out, dq, dk, dv].map(values::<Plain, 2>);
    assert_close(&[of_out, values::<Plain, 3>(lse), of_dq, of_dk, of_dv], &expected, "separate");

    let qkv = Plain::float_cat(vec![q, k, v], 1);
    let (out, lse) = forward([qkv.clone()], mask.clone(), options);
    let [d_qkv] = backward([qkv], mask, [out.clone(), lse.clone(), grad], options);
    let parts = fallback::unpack::<Plain>(d_qkv).map(values::<Plain, 2>);
    let [of_dq, of_dk, of_dv] = parts;
    assert_close(&[values::<Plain, 2>(out), values::<Plain, 3>(lse), of_dq, of_dk, of_dv], &expected, "packed");
}

/// The scores of all pairs of rows are never in one tensor.
#[test]
fn no_tensor_holds_all_scores() {
    let case = Case { batch: 1, heads: 4, t: 512, e: 8, ..SMALL };
    let (given, scores) = (case.into(), case.batch * case.heads * case.t * case.t);
    LARGEST.with(|largest| largest.set(0));
    separate(SMALL_BLOCKS, &given, plain);
    let largest = LARGEST.with(Cell::get);
    let inputs = case.t * case.heads * case.e;
    assert!((inputs..=inputs.max(64 * case.t)).contains(&largest), "{largest} of {scores}");
    assert!(largest < scores / 16);
}

#[test]
fn blocks_keep_to_their_budget() {
    let budget = 64 << 20;
    for t in [1, 2, 63, 64, 65, 512, 1000, 1024, 8192, 100_000] {
        for pairs in [1, 12, 200, 100_000] {
            for causal in [false, true] {
                for bytes in [4, 6, 8, 12] {
                    let sizes = Sizes {
                        pairs,
                        heads: 1,
                        group: 1,
                        t,
                        s: t,
                        e: 64,
                        causal,
                        window: None,
                        scale: 1.0,
                        cap: None,
                    };
                    let plan = Plan::new(sizes, budget, bytes);
                    let taken = plan.pairs * plan.queries * t * bytes;
                    let least = t.min(64) * t * bytes;
                    assert!(taken <= budget.max(least), "{sizes:?}: {plan:?}");
                    assert!(plan.queries >= t.min(64) && plan.queries <= t && plan.pairs <= pairs);
                    // Blocks are not needlessly small: they hold all that they can, or use at least a quarter of the budget.
                    let all = plan.pairs == pairs.min(32768) && (plan.queries == t || causal);
                    assert!(all || 4 * taken >= budget, "{sizes:?}: {plan:?}");
                }
            }
        }
    }
}

/// Rows in 16 bit are computed in fp32 and rounded once.
#[test]
fn rows_in_16_bit_are_rounded_at_the_end() {
    let case = Case { t: 40, e: 48, masked: true, ..SMALL };
    for dtype in [DType::F16, DType::BF16] {
        in_16_bit(dtype, case, |_, case| vec![BLOCKED, in_loops(case.e, 1)]);
    }
}

/// The kernels at the sizes of models, if the device has matrix units.
fn matrix_units_agree_with_the_default_bodies(dtype: DType, e: usize) {
    let long = Case { heads: 2, t: 1000, e, ..SMALL };
    let shared = [(4, 2, true), (7, 7, false)].map(|(heads, group, masked)| Case {
        heads,
        group,
        t: 257,
        masked,
        drops: !masked,
        ..long
    });
    for case in [long].into_iter().chain(shared).chain(Case::some(2, [e])) {
        in_16_bit(dtype, case, |inputs, _| Flash::on(inputs, &[]).map(Way::Flash).into_iter().collect());
    }
}

#[test]
fn matrix_units_agree_in_bf16_and_heads_of_64() {
    matrix_units_agree_with_the_default_bodies(DType::BF16, 64);
}

#[test]
fn matrix_units_agree_in_bf16_and_heads_of_128() {
    matrix_units_agree_with_the_default_bodies(DType::BF16, 128);
}

#[test]
fn matrix_units_agree_in_f16_and_heads_of_64() {
    matrix_units_agree_with_the_default_bodies(DType::F16, 64);
}

#[test]
fn matrix_units_agree_in_f16_and_heads_of_128() {
    matrix_units_agree_with_the_default_bodies(DType::F16, 128);
}

fn in_16_bit(dtype: DType, case: Case, ways: impl Fn(&Inputs<TestRuntime>, Case) -> Vec<Way>) {
    let digits = if dtype == DType::F16 { 11 } else { 8 };
    if !Plain::supports_dtype(&Default::default(), dtype) {
        return println!("skipped: the device has no {dtype:?}");
    }
    let round = |x: &[f32], shape| Plain::float_cast(plain(x, shape), dtype.into());
    let mut given = Given::from(case);
    let shapes = [case.shape(), case.shape_of_keys(), case.shape_of_keys(), case.shape()];
    for (rows, shape) in given.rows.iter_mut().zip(shapes) {
        *rows = values::<Plain, 2>(round(rows, shape));
    }
    let expected = expected(&given);
    let [q, k, v] = [0, 1, 2].map(|i| round(&given.rows[i], shapes[i]));
    let ways = ways(&Inputs::new([q, k, v], None, case.options()), case);
    if ways.is_empty() {
        println!("skipped: the device has no matrix units for {dtype:?}");
    }
    for way in ways {
        let actual = if case.group == 1 { joint(way, &given, round) } else { separate(way, &given, round) };
        for (actual, expected) in actual.iter().zip(&expected) {
            let largest = expected.iter().fold(0.1f32, |largest, x| largest.max(x.abs()));
            // Probabilities and their gradients are also rounded when a product reads them.
            let bound = largest * 4.0 / (1 << digits) as f32;
            let apart = actual.iter().zip(expected).fold(0f32, |apart, (a, b)| apart.max((a - b).abs()));
            assert!(apart <= bound, "{case:?} {way:?} {dtype:?}: {apart} > {bound}");
        }
    }
}
