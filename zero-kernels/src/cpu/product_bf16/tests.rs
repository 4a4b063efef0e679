use super::*;
use crate::cpu::parallel::gemm_threads;
use crate::cpu::testing::{assert_panics, numbers, same_bits};

const SIZES: [usize; 5] = [1, 3, 17, 33, 100];

fn halves(len: usize, seed: u64) -> Vec<bf16> {
    numbers(len, seed).into_iter().map(bf16::from_f32).collect()
}

/// A way to multiply: the one detected for this CPU, or a given one.
type Multiply = fn(Out<'_>, MatrixBf16<'_>, MatrixBf16<'_>);

fn detected(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    multiply(out, a, b, gemm_threads());
}

/// Multiplies in f32, with the best vectors of this CPU.
fn fallback(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    widened_in(pulp::Arch::new(), out, a, b);
}

/// Multiplies in f32 without vectors.
fn scalar(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    widened_in(pulp::Arch::Scalar, out, a, b);
}

/// Multiplies in f32 with AVX2, where the CPU has it.
#[cfg(target_arch = "x86_64")]
fn avx2(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    widened_in(pulp::x86::V3::try_new().map_or(pulp::Arch::Scalar, pulp::Arch::V3), out, a, b);
}

fn widened_in(vectors: pulp::Arch, out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    let target = out.into_target(a.rows, b.columns);
    if a.rows > 0 && b.columns > 0 {
        widened::multiply(vectors, target, a, b, gemm_threads());
    }
}

/// The elements of a product in f64, and the sums of the absolute values of their terms.
struct Reference {
    values: Vec<f64>,
    sizes: Vec<f64>,
}

fn reference(a: MatrixBf16<'_>, b: MatrixBf16<'_>) -> Reference {
    let wide = |from: MatrixBf16<'_>| -> Vec<f64> {
        let at = |i: usize, j: usize| from.data[i * from.row_stride + j * from.column_stride].to_f64();
        (0..from.rows).flat_map(|i| (0..from.columns).map(move |j| at(i, j))).collect()
    };
    let (x, turned) = (wide(a), wide(b.transposed()));
    let (k, m) = (a.columns, b.columns);
    let terms = |i: usize| (0..k).map(|l| x[i / m * k + l] * turned[i % m * k + l]).collect::<Vec<_>>();
    let (values, sizes) = (0..a.rows * m)
        .map(|i| terms(i).into_iter().fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs())))
        .unzip();
    Reference { values, sizes }
}

impl Reference {
    fn add(&mut self, value: impl Fn(usize) -> f64) {
        for (i, (sum, size)) in self.values.iter_mut().zip(&mut self.sizes).enumerate() {
            *sum += value(i);
            *size += value(i).abs();
        }
    }

    /// Panics unless every value is right, up to the sums' errors and a relative rounding error of half of `step`.
    fn assert(&self, got: &[f64], step: f64) {
        assert_eq!(got.len(), self.values.len());
        for (i, ((got, expected), size)) in got.iter().zip(&self.values).zip(&self.sizes).enumerate() {
            let sums = 1e-5 * size;
            let bound = sums + step / 2.0 * (expected.abs() + sums);
            assert!((got - expected).abs() <= bound, "[{i}]: {got}, expected {expected} within {bound:e}");
        }
    }
}

/// Checks every kind of result of `a * b` against f64.
fn check(way: Multiply, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    let (n, m) = (a.rows, b.columns);
    let expected = reference(a, b);
    let mut out = vec![f32::NAN; n * m];
    way(Out::F32 { data: &mut out, add: false }, a, b);
    expected.assert(&out.iter().copied().map(f64::from).collect::<Vec<_>>(), 0.0);

    let before = numbers(n * m, 7);
    out.copy_from_slice(&before);
    way(Out::F32 { data: &mut out, add: true }, a, b);
    let mut with = reference(a, b);
    with.add(|i| f64::from(before[i]));
    with.assert(&out.iter().copied().map(f64::from).collect::<Vec<_>>(), 0.0);

    let (bias, residual) = (halves(m, 8), halves(n * m, 9));
    for (with_bias, with_residual) in [(false, false), (true, false), (false, true), (true, true)] {
        let (bias, residual) = (with_bias.then_some(&bias[..]), with_residual.then_some(&residual[..]));
        let begin = (with_bias || with_residual).then_some(Begin { bias, residual });
        let mut with = Reference { values: expected.values.clone(), sizes: expected.sizes.clone() };
        with.add(|i| bias.map_or(0.0, |bias| bias[i % m].to_f64()));
        with.add(|i| residual.map_or(0.0, |residual| residual[i].to_f64()));
        let mut out = vec![bf16::NAN; n * m];
        way(Out::Bf16 { data: &mut out, begin }, a, b);
        with.assert(&out.iter().map(|value| value.to_f64()).collect::<Vec<_>>(), 1.0 / 128.0);
    }
}

fn ways() -> Vec<Multiply> {
    let all: Vec<Multiply> = vec![detected, fallback, scalar];
    #[cfg(target_arch = "x86_64")]
    let all = {
        let with = avx512::Avx512::<48>::detect().map(|_| -> [Multiply; 3] { [vectors, narrow, emulated] });
        all.into_iter().chain([avx2 as Multiply]).chain(with.into_iter().flatten()).collect()
    };
    all
}

/// Multiplies with `vdpbf16ps`.
#[cfg(target_arch = "x86_64")]
fn vectors(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    by_tiles(avx512::Avx512::<48>::detect().expect("the caller has seen it"), out, a, b);
}

/// Multiplies with `vdpbf16ps`, by narrow tiles.
#[cfg(target_arch = "x86_64")]
fn narrow(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    by_tiles(avx512::Avx512::<32>::detect().expect("the caller has seen it"), out, a, b);
}

/// Emulates `tdpbf16ps`.
#[cfg(target_arch = "x86_64")]
fn emulated(out: Out<'_>, a: MatrixBf16<'_>, b: MatrixBf16<'_>) {
    by_tiles(Emulated(avx512::Avx512::<48>::detect().expect("the caller has seen it")), out, a, b);
}

#[cfg(target_arch = "x86_64")]
fn by_tiles<const R: usize, const C: usize>(
    tiles: impl blocks::Tiles<R, C>,
    out: Out<'_>,
    a: MatrixBf16<'_>,
    b: MatrixBf16<'_>,
) {
    let target = out.into_target(a.rows, b.columns);
    if a.rows > 0 && b.columns > 0 {
        blocks::multiply(tiles, target, a, b, gemm_threads());
    }
}

/// AMX tiles emulated in memory, on a CPU that can pack them.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Emulated(#[allow(dead_code)] avx512::Avx512<48>); // Held, not read.

// SAFETY: it holds an `Avx512`, which exists only where the CPU has the features.
#[cfg(target_arch = "x86_64")]
unsafe impl blocks::Tiles<{ amx::SIDE }, { amx::SIDE }> for Emulated {
    const UNIT: usize = amx::PAIRS;
    const AT_ONCE: usize = 8 * amx::PAIRS;

    fn run(self, work: impl pulp::NullaryFnOnce<Output = ()>) {
        work.call();
    }

    fn pack(self, strip: blocks::Strip<'_>, to: &mut [u32]) {
        let blocks::Strip { from, is_rows, lines, depth, pairs } = strip;
        // SAFETY: this is made only where the processor has the features.
        unsafe {
            match is_rows {
                true => from.pack::<{ amx::SIDE }, true>(lines, depth, pairs, to),
                false => from.pack::<{ amx::SIDE }, false>(lines, depth, pairs, to),
            }
        }
    }

    /// Multiplies tile by tile as Intel's Software Developer's Manual defines TDPBF16PS.
    unsafe fn multiply(self, a: &[u32], b: &[u32], sums: &mut [[f32; amx::SIDE]; amx::SIDE], add: bool) {
        const SQUARE: usize = amx::SIDE * amx::PAIRS;
        let flush = |x: f32| if x.is_subnormal() { 0.0 } else { x };
        let halves = |pair: u32| [pair << 16, pair & 0xffff_0000].map(|bits| flush(f32::from_bits(bits)));
        if !add {
            *sums = [[0.0; amx::SIDE]; amx::SIDE];
        }
        for (a, b) in a.as_chunks::<SQUARE>().0.iter().zip(b.as_chunks::<SQUARE>().0) {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (column, sum) in sums.iter_mut().enumerate() {
                    let mut both = [0f32; 2];
                    for pair in 0..amx::PAIRS {
                        let (a, b) = (halves(a[row * amx::PAIRS + pair]), halves(b[pair * amx::SIDE + column]));
                        for (sum, (a, b)) in both.iter_mut().zip(a.into_iter().zip(b)) {
                            *sum = flush(a.mul_add(b, *sum));
                        }
                    }
                    *sum = flush(*sum + flush(both[0] + both[1]));
                }
            }
        }
    }
}

#[test]
fn agrees_with_f64_for_odd_sizes_and_transposes() {
    for n in SIZES {
        for k in SIZES {
            for m in SIZES {
                let (a, b) = (halves(n * k, 1), halves(k * m, 2));
                for a in [MatrixBf16::new(&a, n, k), MatrixBf16::new(&a, k, n).transposed()] {
                    for b in [MatrixBf16::new(&b, k, m), MatrixBf16::new(&b, m, k).transposed()] {
                        ways().into_iter().for_each(|way| check(way, a, b));
                    }
                }
            }
        }
    }
}

#[test]
fn agrees_with_f64_for_strided_views() {
    let (n, k, m) = (37, 41, 59);
    let (a, b) = (halves(3 * n * (2 * k + 5), 1), halves(3 * k * (2 * m + 5), 2));
    for a in [
        MatrixBf16::strided(&a, n, k, k + 5, 1),
        MatrixBf16::strided(&a, n, k, 1, n + 3),
        MatrixBf16::strided(&a, n, k, 2 * k + 1, 2),
        MatrixBf16::strided(&a, n, k, 0, 1),
        MatrixBf16::strided(&a, n, k, 1, 0),
        MatrixBf16::strided(&a, 1, k, usize::MAX, 1),
        MatrixBf16::strided(&a, 1, k, usize::MAX, 2),
    ] {
        for b in [
            MatrixBf16::strided(&b, k, m, m + 5, 1),
            MatrixBf16::strided(&b, k, m, 1, k + 3),
            MatrixBf16::strided(&b, k, m, 2, 2 * k + 1),
            MatrixBf16::strided(&b, k, m, 0, 0),
            MatrixBf16::strided(&b, k, m, 0, 1),
            MatrixBf16::strided(&b, k, 1, 3, usize::MAX),
        ] {
            ways().into_iter().for_each(|way| check(way, a, b));
        }
    }
}

#[test]
fn agrees_with_f64_over_several_parts_of_the_depth() {
    for (n, k, m) in [(9, 2049, 50), (50, 5001, 9), (3, 9001, 3)] {
        let (a, b) = (halves(n * k, 1), halves(k * m, 2));
        ways()
            .into_iter()
            .for_each(|way| check(way, MatrixBf16::new(&a, k, n).transposed(), MatrixBf16::new(&b, k, m)));
        ways()
            .into_iter()
            .for_each(|way| check(way, MatrixBf16::new(&a, n, k), MatrixBf16::new(&b, m, k).transposed()));
    }
}

/// Matrices of rank one and of small integers, whose sums are exact, so that every element must be right, whatever the
/// number of blocks.
#[test]
fn blocks_meet_without_gaps() {
    for (n, k, m) in [(2100, 5, 1300), (5, 4500, 4300), (770, 3072, 800), (1030, 1030, 3)] {
        let whole = |len, seed, most: f32| numbers(len, seed).iter().map(|x| (x * most).trunc()).collect::<Vec<_>>();
        let [u, v] = [whole(n, 1, 8.0), whole(m, 2, 8.0)];
        let [s, t] = [whole(k, 3, 2.0), whole(k, 4, 2.0)];
        let outer =
            |u: &[f32], v: &[f32]| -> Vec<f32> { u.iter().flat_map(|u| v.iter().map(move |v| u * v)).collect() };
        let narrow = |x: &[f32]| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        let sum: f32 = s.iter().zip(&t).map(|(s, t)| s * t).sum();
        let scaled: Vec<_> = u.iter().map(|u| u * sum).collect();
        let (expected, a, b) = (outer(&scaled, &v), narrow(&outer(&u, &s)), narrow(&outer(&t, &v)));
        let rounded = narrow(&expected);
        for way in ways() {
            let (mut out, mut halves) = (vec![f32::NAN; n * m], vec![bf16::NAN; n * m]);
            let (a, b) = (MatrixBf16::new(&a, n, k), MatrixBf16::new(&b, k, m));
            way(Out::F32 { data: &mut out, add: false }, a, b);
            way(Out::Bf16 { data: &mut halves, begin: None }, a, b);
            assert!(out == expected && halves == rounded, "{n} x {k} x {m}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for (n, k, m) in [(129, 270, 1030), (1030, 270, 129), (65, 5000, 100)] {
        let (a, b, r) = (halves(n * k, 1), halves(k * m, 2), halves(n * m, 3));
        for way in ways() {
            let run = || {
                let (mut out, mut rounded) = (vec![1.0; n * m], vec![bf16::NAN; n * m]);
                let (a, b) = (MatrixBf16::new(&a, n, k), MatrixBf16::new(&b, k, m));
                way(Out::F32 { data: &mut out, add: true }, a, b);
                let begin = Some(Begin { bias: Some(&r[..m]), residual: Some(&r) });
                way(Out::Bf16 { data: &mut rounded, begin }, a, b);
                out.extend(rounded.iter().map(|value| value.to_f32()));
                out
            };
            same_bits(run);
        }
    }
}

/// An element's bits depend only on its row, its column and the depth, not on its position or storage.
#[test]
fn the_other_sizes_and_the_strides_change_no_bit() {
    let (n, k, m) = (70, 333, 130);
    let (a, b) = (halves(n * k, 1), halves(k * m, 2));
    let turned: Vec<_> = (0..k * m).map(|i| b[i % k * m + i / k]).collect();
    let (a, b, turned) = (MatrixBf16::new(&a, n, k), MatrixBf16::new(&b, k, m), MatrixBf16::new(&turned, m, k));
    let product = |a, b| {
        let mut out = vec![0f32; MatrixBf16::rows(&a) * MatrixBf16::columns(&b)];
        detected(Out::F32 { data: &mut out, add: false }, a, b);
        out
    };
    let whole = product(a, b);
    assert_eq!(whole, product(a, turned.transposed()));
    let narrow = product(a, MatrixBf16::strided(&b.data[61..], k, 7, m, 1));
    for i in 0..n {
        assert_eq!(narrow[i * 7..][..7], whole[i * m + 61..][..7]);
    }
}

#[test]
fn all_ways_agree_and_all_but_tiles_to_the_bit() {
    let (n, k, m) = (77, 770, 131);
    let (a, b) = (halves(n * k, 1), halves(k * m, 2));
    let (a, b) = (MatrixBf16::new(&a, n, k), MatrixBf16::new(&b, m, k).transposed());
    let product = |way: Multiply| {
        let mut out = vec![f32::NAN; n * m];
        way(Out::F32 { data: &mut out, add: false }, a, b);
        out
    };
    let (sizes, fallback) = (reference(a, b).sizes, product(fallback));
    assert_eq!(product(scalar), fallback);
    #[cfg(target_arch = "x86_64")]
    assert_eq!(product(avx2), fallback);
    #[cfg(target_arch = "x86_64")]
    if !widened_only() {
        assert_eq!(product(vectors), fallback);
    }
    for way in ways() {
        for (i, (kernel, fallback)) in product(way).iter().zip(&fallback).enumerate() {
            assert!(f64::from((kernel - fallback).abs()) <= 1e-6 * sizes[i], "[{i}]: {kernel} against {fallback}");
        }
    }
}

#[test]
fn rounds_once_to_nearest_even() {
    // 1 + 2^-8 lies half way between 1 and its successor, 1 + 3 * 2^-8 half way between odd and even.
    let step = 1.0 / 256.0;
    let a = [1.0, step, 2.0 * step].map(bf16::from_f32);
    let ones = [bf16::ONE; 3];
    for way in ways() {
        for (k, expected) in [(2, 1.0), (3, 1.0 + 4.0 * step)] {
            let mut out = [bf16::NAN];
            let (a, b) = (MatrixBf16::new(&a[..k], 1, k), MatrixBf16::new(&ones[..k], k, 1));
            way(Out::Bf16 { data: &mut out, begin: None }, a, b);
            assert_eq!(out[0].to_f32(), expected);
        }
        // Rounded before the residual were added, the half step would be lost.
        let (residual, mut out) = ([bf16::from_f32(step)], [bf16::NAN]);
        let begin = Some(Begin { bias: Some(&residual), residual: Some(&residual) });
        way(Out::Bf16 { data: &mut out, begin }, MatrixBf16::new(&a[..1], 1, 1), MatrixBf16::new(&ones[..1], 1, 1));
        assert_eq!(out[0].to_f32(), 1.0 + 2.0 * step);
    }
}

/// The CPU's `tdpbf16ps`, if it has one, gives the bits that the module's documentation describes.
#[test]
#[cfg(target_arch = "x86_64")]
fn tiles_add_even_and_odd_products_apart() {
    if widened_only() {
        return;
    }
    let product = |way: Multiply, a: &[bf16], b: &[bf16], (n, k, m): (usize, usize, usize)| {
        let mut out = vec![f32::NAN; n * m];
        way(Out::F32 { data: &mut out, add: false }, MatrixBf16::new(a, n, k), MatrixBf16::new(b, k, m));
        out
    };
    let one = |a: &[f32]| {
        let a: Vec<_> = a.iter().map(|x| bf16::from_f32(*x)).collect();
        product(emulated, &a, &vec![bf16::ONE; a.len()], (1, a.len(), 1))[0]
    };
    let big = 2f32.powi(24);
    // In order: 1 after 2^24 is lost, unless it is of the other kind.
    assert_eq!([one(&[big, 0.0, 1.0, 0.0, -big]), one(&[big, 1.0, -big])], [0.0, 1.0]);
    assert_eq!(one(&[f32::MIN_POSITIVE / 2.0]), 0.0, "a denormal input");
    if amx::Amx::detect().is_some() {
        let shape = (70, 3333, 90);
        let (a, b) = (halves(shape.0 * shape.1, 1), halves(shape.1 * shape.2, 2));
        assert_eq!(product(detected, &a, &b, shape), product(emulated, &a, &b, shape));
    }
}

/// The CPU's `vdpbf16ps` gives the bits that the module's documentation describes.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_kernel_adds_the_odd_product_first_and_flushes_denormals() {
    if widened_only() {
        return;
    }
    let product = |a: &[f32], b: &[f32]| {
        let [a, b] = [a, b].map(|x| x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>());
        let mut out = [f32::NAN];
        let sum = Out::F32 { data: &mut out, add: false };
        vectors(sum, MatrixBf16::new(&a, 1, a.len()), MatrixBf16::new(&b, b.len(), 1));
        out[0]
    };
    let big = 2f32.powi(24);
    assert_eq!(product(&[0.0, big, 1.0, -big], &[1.0; 4]), 1.0, "the even one first would give 0");
    assert_eq!(product(&[0.0, big, -big, 1.0], &[1.0; 4]), 0.0);
    assert_eq!(product(&[f32::MIN_POSITIVE / 2.0], &[4.0]), 0.0, "a denormal input");
    assert_eq!(product(&[f32::MIN_POSITIVE], &[0.5]), 0.0, "a denormal sum");
    assert_eq!(product(&[f32::INFINITY, 1.0, 1.0], &[1.0; 3]), f32::INFINITY);
    assert!(product(&[f32::INFINITY, 1.0], &[0.0, 1.0]).is_nan());
    assert!(product(&[f32::NAN, 1.0], &[1.0, 1.0]).is_nan());
}

#[test]
fn an_empty_depth_gives_what_the_product_begins_with() {
    let bias = halves(5, 1);
    for way in ways() {
        let (a, b) = (MatrixBf16::new(&[], 3, 0), MatrixBf16::new(&[], 0, 5));
        let (mut out, mut rounded) = (vec![f32::NAN; 15], vec![bf16::NAN; 15]);
        way(Out::F32 { data: &mut out, add: false }, a, b);
        way(Out::Bf16 { data: &mut rounded, begin: Some(Begin { bias: Some(&bias), residual: None }) }, a, b);
        assert_eq!(out, [0.0; 15]);
        assert_eq!(rounded, bias.repeat(3));
    }
    multiply(
        Out::F32 { data: &mut [], add: true },
        MatrixBf16::new(&[], 0, 2),
        MatrixBf16::new(&bias[..4], 2, 2),
        gemm_threads(),
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let data = halves(6, 1);
    let (a, b) = (MatrixBf16::new(&data, 2, 3), MatrixBf16::new(&data, 3, 2));
    assert_panics(&["width of the left matrix"], || detected(Out::F32 { data: &mut [0.0; 4], add: true }, a, a));
    assert_panics(&["`out` has 3 elements, expected 4 for 2 x 2"], || {
        detected(Out::F32 { data: &mut [0.0; 3], add: true }, a, b)
    });
    for (bias, residual, message) in [(3, 4, "`bias` has 3 elements, expected 2"), (2, 5, "`residual` has 5 elements")]
    {
        assert_panics(&[message], || {
            let begin = Begin { bias: Some(&data[..bias]), residual: Some(&data[..residual]) };
            detected(Out::Bf16 { data: &mut [bf16::ZERO; 4], begin: Some(begin) }, a, b);
        });
    }
    assert_panics(&["wrong number of elements for a matrix of 2 x 2"], || _ = MatrixBf16::new(&data, 2, 2));
    assert_panics(&["beyond its 6 elements"], || _ = MatrixBf16::strided(&data, 2, 3, 4, 1));
    assert_panics(&["beyond its 6 elements"], || _ = MatrixBf16::strided(&data, 3, 3, usize::MAX, 2));
}

/// Returns whether this CPU lacks the kernel's instructions.
#[cfg(target_arch = "x86_64")]
fn widened_only() -> bool {
    avx512::Avx512::<48>::detect().is_none()
}
