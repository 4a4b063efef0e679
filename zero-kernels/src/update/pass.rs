//! One parallel pass over this rank's shard of a parameter, its gradient and its state, in host memory.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::blocks;
use super::elements::Elements;
use super::rule::{Kernel, Sweep};
use super::state::{State, round_both, widened};
use crate::cpu::half::{nearest, wide};
use crate::cpu::norm::Squares;

/// Elements per task: a handful of arrays of this length fit a core's second-level cache.
const CHUNK: usize = 1 << 13;

/// Elements of an update that are held at a time.
const SHORT: usize = 1 << 10;

/// The 16-bit copy of a parameter, an output.
pub enum Target<'a> {
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// Sums of squares of a parameter and of its update.
#[derive(Debug, Clone, Copy, Default)]
pub struct Norms {
    /// Sum for the parameter.
    pub parameter: Squares,
    /// Sum for its update.
    pub update: Squares,
}

impl Norms {
    /// Returns the sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self { parameter: self.parameter.plus(other.parameter), update: self.update.plus(other.update) }
    }
}

/// An exponential moving average of a parameter.
pub struct Average<'a> {
    /// The average, as long as the parameter.
    pub values: &'a mut [f32],
    /// The weight of the old average in an update.
    pub decay: f64,
    /// Set if `values` are uninitialized: the average then starts with the parameter.
    pub fresh: bool,
}

impl Average<'_> {
    /// Moves the average towards `p`, by the formula of PyTorch's `lerp`. Each operation is rounded, so that all CPUs give
    /// the same bits; PyTorch fuses the product and the sum.
    #[inline(always)]
    fn follow(self, p: &[f32]) {
        let weight = (1.0 - self.decay) as f32;
        match self.fresh {
            true => self.values.copy_from_slice(p),
            false if weight < 0.5 => self.values.iter_mut().zip(p).for_each(|(a, &p)| *a += weight * (p - *a)),
            false => self.values.iter_mut().zip(p).for_each(|(a, &p)| *a = p - (p - *a) * (1.0 - weight)),
        }
    }

    fn chunks(&mut self) -> impl Iterator<Item = Average<'_>> {
        let (decay, fresh) = (self.decay, self.fresh);
        self.values.chunks_mut(CHUNK).map(move |values| Average { values, decay, fresh })
    }
}

/// The arrays of a contiguous part of the shard. All have the same length, except that a gradient and states that the pass
/// does not read are empty.
pub struct Chunk<'a> {
    /// The parameter, or its master copy.
    pub p: &'a mut [f32],
    /// The gradient.
    pub g: Elements<'a>,
    /// The rule's first state.
    pub a: State<'a>,
    /// The rule's second state.
    pub b: State<'a>,
    /// The 16-bit copy of the parameter, written after the update.
    pub copy: Option<Target<'a>>,
    /// The parameter's moving average, updated by the pass that updates the parameter.
    pub average: Option<Average<'a>>,
    /// The position of the first element in its parameter, on which the rounding of states in bfloat16 depends.
    pub first: usize,
}

/// Updates a stretch of any length by `kernel`, on all threads of the pool. The gradient is multiplied by `scale` first. A
/// first pass returns the sums over the elements `counted`.
pub fn update_chunk(kernel: Kernel, scale: f32, stretch: Chunk<'_>, counted: Range<usize>) -> Norms {
    let Chunk { p, g, a, b, copy, mut average, first } = stretch;
    let mut copies = copy.map(Target::chunks);
    let mut averages = average.as_mut().map(Average::chunks);
    let (mut g, mut a, mut b) = (chunks_of(g), a.chunks(CHUNK), b.chunks(CHUNK));
    let chunks: Vec<(Chunk<'_>, Range<usize>)> = p
        .chunks_mut(CHUNK)
        .enumerate()
        .map(|(index, p)| {
            let counted = part(&counted, index * CHUNK, p.len());
            let g = g.next().unwrap_or(Elements::F32(&[]));
            let (a, b) = (a.next().unwrap_or_default(), b.next().unwrap_or_default());
            let copy = copies.as_mut().and_then(Iterator::next);
            let average = averages.as_mut().and_then(Iterator::next);
            (Chunk { p, g, a, b, copy, average, first: first + index * CHUNK }, counted)
        })
        .collect();
    let arch = pulp::Arch::new();
    let each = |(chunk, counted)| arch.dispatch(Task { kernel, scale, chunk, counted });
    let sums: Vec<Norms> = chunks.into_par_iter().map(each).collect();
    sums.into_iter().fold(Norms::default(), Norms::plus)
}

/// Returns the part of `range` within the `len` elements from `first` on, relative to `first`.
#[inline(always)]
fn part(range: &Range<usize>, first: usize, len: usize) -> Range<usize> {
    range.start.saturating_sub(first).min(len)..range.end.saturating_sub(first).min(len)
}

/// A chunk's update. It is inlined into the dispatched code; a closure would be compiled for the baseline CPU.
struct Task<'a> {
    kernel: Kernel,
    scale: f32,
    chunk: Chunk<'a>,
    counted: Range<usize>,
}

impl pulp::NullaryFnOnce for Task<'_> {
    type Output = Norms;

    #[inline(always)]
    fn call(self) -> Norms {
        one(self.kernel, self.scale, self.chunk, self.counted)
    }
}

#[inline(always)]
fn one(kernel: Kernel, scale: f32, chunk: Chunk<'_>, counted: Range<usize>) -> Norms {
    let Chunk { p, g, a, b, copy, average, first } = chunk;
    let written = (copy, average);
    match (a, b) {
        // The matrix that Muon's first pass writes is no state.
        (State::Bf16(a), State::F32(b)) if kernel.is_muon() => {
            let mut wide = [0f32; CHUNK];
            let arrays = (p, g, widened(a, &mut wide), b);
            in_fp32(kernel, scale, arrays, Kept::Bf16(a, &mut []), first, written, counted)
        }
        (State::F32(a), State::F32(b)) => in_fp32(kernel, scale, (p, g, a, b), Kept::F32, first, written, counted),
        (State::Blocks(a), b) => {
            let mut wide = [[0f32; CHUNK]; 2];
            let [wide_a, wide_b] = wide.each_mut().map(|wide| &mut wide[..p.len()]);
            blocks::decode(a, wide_a);
            let (b, wide_b): (&mut [u8], &mut [f32]) = match b {
                State::Blocks(b) => {
                    blocks::decode(b, wide_b);
                    (b, wide_b)
                }
                // There is none, or it is Muon's matrix.
                State::F32(b) => (&mut [], b),
                State::Bf16(_) => unreachable!("all states have one form"),
            };
            in_fp32(kernel, scale, (p, g, wide_a, wide_b), Kept::Blocks(a, b), first, written, counted)
        }
        (a, b) => {
            let (a, b, mut wide) = (a.halves(), b.halves(), [[0f32; CHUNK]; 2]);
            let [wide_a, wide_b] = &mut wide;
            let arrays = (p, g, widened(a, wide_a), widened(b, wide_b));
            in_fp32(kernel, scale, arrays, Kept::Bf16(a, b), first, written, counted)
        }
    }
}

/// The form in which states are stored, with where.
enum Kept<'a> {
    /// As they are computed.
    F32,
    Bf16(&'a mut [bf16], &'a mut [bf16]),
    Blocks(&'a mut [u8], &'a mut [u8]),
}

/// Runs a pass over a parameter, its gradient and its states. The updated states are rounded into `kept`.
#[inline(always)]
fn in_fp32(
    kernel: Kernel,
    scale: f32,
    (p, g, a, b): (&mut [f32], Elements<'_>, &mut [f32], &mut [f32]),
    kept: Kept<'_>,
    first: usize,
    (copy, average): (Option<Target<'_>>, Option<Average<'_>>),
    counted: Range<usize>,
) -> Norms {
    match (kernel.pass, g) {
        (Sweep::Second { trust }, Elements::F32(g)) if kernel.is_muon() => kernel.step_along(trust, p, g),
        (Sweep::Second { .. }, _) => {}
        (_, Elements::F32(g)) if scale == 1.0 => kernel.apply(p, g, a, b),
        (_, other) => {
            // Only here, since clearing it costs as much as a chunk's arithmetic.
            let mut converted = [0f32; CHUNK];
            kernel.apply(p, scaled_into(other, &mut converted, scale), a, b);
        }
    }
    match kept {
        _ if matches!(kernel.pass, Sweep::Second { .. }) => {}
        Kept::F32 => {}
        Kept::Bf16(kept_a, kept_b) => round_both((kept_a, a), (kept_b, b), first, kernel.time),
        Kept::Blocks(kept_a, kept_b) => {
            let both = [(kept_a, &mut *a, true), (kept_b, &mut *b, false)];
            for (kept, values, signed) in both.into_iter().filter(|(kept, ..)| !kept.is_empty()) {
                blocks::encode(values, kept, signed);
            }
        }
    }
    if kernel.is_muon() && kernel.pass == Sweep::First {
        return Norms::default();
    }
    if kernel.pass != Sweep::Only && !kernel.is_muon() {
        let (mut norms, mut along) = (Norms::default(), [0f32; SHORT]);
        for (index, p) in p.chunks_mut(SHORT).enumerate() {
            let (first, along) = (index * SHORT, &mut along[..p.len()]);
            kernel.direction(p, &a[first..], &b[first..], along);
            if let Sweep::Second { trust } = kernel.pass {
                kernel.step(trust, p, along);
                continue;
            }
            let counted = part(&counted, first, p.len());
            norms.parameter = norms.parameter.plus(Squares::of(&p[counted.clone()]));
            norms.update = norms.update.plus(Squares::of(&along[counted]));
        }
        if kernel.pass == Sweep::First {
            return norms;
        }
    }
    if let Some(average) = average {
        average.follow(p);
    }
    match copy {
        None => {}
        Some(Target::F16(out)) => out.convert_from_f32_slice(p),
        Some(Target::Bf16(out)) => out.iter_mut().zip(p).for_each(|(out, p)| *out = nearest(*p)),
    }
    Norms::default()
}

impl<'a> Target<'a> {
    fn chunks(self) -> Box<dyn Iterator<Item = Target<'a>> + 'a> {
        match self {
            Target::F16(all) => Box::new(all.chunks_mut(CHUNK).map(Target::F16)),
            Target::Bf16(all) => Box::new(all.chunks_mut(CHUNK).map(Target::Bf16)),
        }
    }
}

fn chunks_of<'a>(all: Elements<'a>) -> Box<dyn Iterator<Item = Elements<'a>> + 'a> {
    match all {
        Elements::F32(all) => Box::new(all.chunks(CHUNK).map(Elements::F32)),
        Elements::F16(all) => Box::new(all.chunks(CHUNK).map(Elements::F16)),
        Elements::Bf16(all) => Box::new(all.chunks(CHUNK).map(Elements::Bf16)),
    }
}

/// Returns a chunk of a gradient in fp32, multiplied by `scale`.
#[inline(always)]
fn scaled_into<'a>(chunk: Elements<'_>, buffer: &'a mut [f32], scale: f32) -> &'a [f32] {
    let len = match chunk {
        Elements::F32(g) => {
            buffer[..g.len()].copy_from_slice(g);
            g.len()
        }
        Elements::F16(g) => {
            g.convert_to_f32_slice(&mut buffer[..g.len()]);
            g.len()
        }
        Elements::Bf16(g) => {
            buffer.iter_mut().zip(g).for_each(|(to, g)| *to = wide(*g));
            g.len()
        }
    };
    let values = &mut buffer[..len];
    if scale != 1.0 {
        values.iter_mut().for_each(|value| *value *= scale);
    }
    values
}
