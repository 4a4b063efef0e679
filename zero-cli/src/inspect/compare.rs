//! What differs between two checkpoints: tensors by name, element by element, and the state.
//!
//! Both are read by ranges of the whole tensors, so it does not matter how many ranks saved either. In memory are the
//! headers, [`CHUNK_BYTES`] of each checkpoint and what is found. Runs on the caller.

use std::str::FromStr;

use serde::Serialize;
use zero_core::checkpoint::{Checkpoint, CheckpointError, ElementType, TensorEntry};

use super::number::Number;
use super::states::{StateDifference, compare_states};

/// Bytes of a tensor that are compared at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// What differs between checkpoints `a` and `b`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Comparison {
    /// The steps of both, which must be the same too.
    pub steps: [u64; 2],
    /// Tensors that only `a` has.
    pub only_a: Vec<String>,
    /// Tensors that only `b` has.
    pub only_b: Vec<String>,
    /// Tensors of another type or shape in `b`; their elements are not compared.
    pub unlike: Vec<Unlike>,
    /// Tensors with an element that does not have the same bits.
    pub tensors: Vec<TensorDifference>,
    /// Tensors that are the same, bit for bit.
    pub equal_tensors: usize,
    /// Elements of these.
    pub equal_elements: u64,
    /// What differs in the states, exactly whatever the tolerance.
    pub state: Vec<StateDifference>,
}

/// A tensor that is another one in the other checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unlike {
    /// Its name.
    pub name: String,
    /// What it is in `a`.
    pub a: Kind,
    /// What it is in `b`.
    pub b: Kind,
}

/// Element type and dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kind {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the whole.
    pub shape: Vec<usize>,
}

/// How the elements of one tensor differ. Its elements are `bit_equal + within + different`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDifference {
    /// Its name.
    pub name: String,
    /// Element type and dimensions, the same in both.
    #[serde(flatten)]
    pub kind: Kind,
    /// Number of elements.
    pub elements: u64,
    /// Those of the same bits, NaNs too.
    pub bit_equal: u64,
    /// Those of other bits that are within the tolerance.
    pub within: u64,
    /// Those that differ: of other bits, or by more than the tolerance if there is one.
    pub different: u64,
    /// Those among them of which one is NaN or infinite; they have no distance.
    pub not_finite: u64,
    /// The largest distance, over all elements that have one.
    pub max_abs: Option<Extreme>,
    /// The largest distance as a part of the larger magnitude of the two, 0 to 2.
    pub max_rel: Option<Extreme>,
}

/// An element that differs most.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Extreme {
    /// By how much.
    pub value: f64,
    /// Where it is, one index per dimension.
    pub at: Vec<usize>,
    /// The element in `a`, as the nearest 64-bit float.
    pub a: f64,
    /// The element in `b`.
    pub b: f64,
}

/// How far two elements may be apart and still be the same: `|a - b| <= tolerance * max(1, |a|, |b|)`, which is absolute for
/// small numbers and relative for large ones. Two NaNs are the same under any tolerance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance(f64);

impl FromStr for Tolerance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected a number from 0 up, such as 1e-6";
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && value >= 0.0 => Ok(Self(value)),
            _ => Err(expected.to_string()),
        }
    }
}

impl Comparison {
    /// Whether nothing differs by more than the tolerance.
    pub fn is_same(&self) -> bool {
        self.tensors_same() && self.state_same()
    }

    /// Whether both have the same tensors, and no element differs by more than the tolerance.
    pub fn tensors_same(&self) -> bool {
        let whole = self.only_a.is_empty() && self.only_b.is_empty() && self.unlike.is_empty();
        whole && self.tensors.iter().all(|tensor| tensor.different == 0)
    }

    /// Whether step and state are the same.
    pub fn state_same(&self) -> bool {
        self.steps[0] == self.steps[1] && self.state.is_empty()
    }
}

/// Compares two checkpoints, by bits when there is no tolerance. What a save chooses itself, such as the time, the number
/// of ranks and the files, is not compared.
///
/// # Errors
///
/// As [`Checkpoint::read`], for the first tensor that is damaged.
pub fn compare(a: &Checkpoint, b: &Checkpoint, tolerance: Option<Tolerance>) -> Result<Comparison, CheckpointError> {
    let without = |one: &Checkpoint, other: &Checkpoint| {
        one.tensors().keys().filter(|name| !other.tensors().contains_key(*name)).cloned().collect()
    };
    let mut found = Comparison {
        steps: [a.step(), b.step()],
        only_a: without(a, b),
        only_b: without(b, a),
        state: compare_states(&a.state()?, &b.state()?),
        ..Comparison::default()
    };
    let mut buffers = [vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]];
    for (name, entry) in a.tensors().iter() {
        let Some(other) = b.tensors().get(name) else { continue };
        let (kind, other) = (Kind::of(entry), Kind::of(other));
        if kind != other {
            found.unlike.push(Unlike { name: name.to_string(), a: kind, b: other });
            continue;
        }
        let tensor = compare_tensor([a, b], name, entry, tolerance, &mut buffers)?;
        if tensor.bit_equal == tensor.elements {
            found.equal_tensors += 1;
            found.equal_elements += tensor.elements;
        } else {
            found.tensors.push(tensor);
        }
    }
    Ok(found)
}

impl Kind {
    pub(super) fn of(entry: &TensorEntry) -> Self {
        Self { dtype: entry.dtype, shape: entry.shape.clone() }
    }
}

fn compare_tensor(
    checkpoints: [&Checkpoint; 2],
    name: &str,
    entry: &TensorEntry,
    tolerance: Option<Tolerance>,
    buffers: &mut [Vec<u8>; 2],
) -> Result<TensorDifference, CheckpointError> {
    let (numel, size) = (entry.numel(), entry.dtype.size());
    let mut found = TensorDifference {
        name: name.to_string(),
        kind: Kind::of(entry),
        elements: numel as u64,
        bit_equal: 0,
        within: 0,
        different: 0,
        not_finite: 0,
        max_abs: None,
        max_rel: None,
    };
    let step = CHUNK_BYTES / size;
    for start in (0..numel).step_by(step) {
        let range = start..numel.min(start + step);
        let [a, b] = buffers.each_mut().map(|buffer| &mut buffer[..range.len() * size]);
        checkpoints[0].read_into(name, range.clone(), a)?;
        checkpoints[1].read_into(name, range.clone(), b)?;
        if a == b {
            found.bit_equal += range.len() as u64;
            continue;
        }
        for (at, (a, b)) in range.zip(a.chunks_exact(size).zip(b.chunks_exact(size))) {
            if a == b {
                found.bit_equal += 1;
            } else {
                found.add(at, [a, b].map(|bytes| Number::read(entry.dtype, bytes)), tolerance);
            }
        }
    }
    Ok(found)
}

impl TensorDifference {
    /// Counts element `at` of the flat tensor, whose bits differ.
    fn add(&mut self, at: usize, [a, b]: [Number; 2], tolerance: Option<Tolerance>) {
        let distance = a.distance(b);
        let within = tolerance.is_some_and(|Tolerance(tolerance)| match distance {
            Some(distance) => distance.absolute <= tolerance * distance.larger.max(1.0),
            None => a.is_nan() && b.is_nan(),
        });
        if within {
            self.within += 1;
        } else {
            self.different += 1;
            self.not_finite += u64::from(distance.is_none());
        }
        let Some(distance) = distance else { return };
        for (max, value) in [(&mut self.max_abs, distance.absolute), (&mut self.max_rel, distance.relative())] {
            if max.as_ref().is_none_or(|max| max.value < value) {
                *max = Some(Extreme { value, at: place(at, &self.kind.shape), a: a.to_f64(), b: b.to_f64() });
            }
        }
    }
}

/// The index in each dimension of the element that is number `flat` in row-major order.
fn place(mut flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut at: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&dim| {
            let index = flat % dim;
            flat /= dim;
            index
        })
        .collect();
    at.reverse();
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_row_major() {
        assert_eq!(place(0, &[]), [0; 0]);
        assert_eq!(place(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(place(5, &[2, 1, 3]), [1, 0, 2]);
    }

    #[test]
    fn tolerances_are_numbers_from_0_up() {
        for text in ["-1", "nan", "inf", "", "1e-6x"] {
            assert!(text.parse::<Tolerance>().unwrap_err().contains("from 0 up"), "{text}");
        }
        assert_eq!("1e-6".parse(), Ok(Tolerance(1e-6)));
    }
}
