//! A backward pass and its reduced gradients: for each parameter, those of the elements that this rank updates.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use burn_optim::GradientsParams;
use rayon::prelude::*;
use zero_core::{Buffer, ReduceOp};
use zero_kernels::cpu::norm::sum_of_squares;

use crate::clock;
use crate::error::Error;
use crate::random;
use crate::slot::Slot;
use crate::zero::Zero;

/// Number of elements that are worth a task of their own.
const TASK: usize = 1 << 16;

/// Returns the factor that brings gradients of `norm` to at most `most`, computed as in PyTorch's `clip_grad_norm_`.
fn clip_factor(most: f64, norm: f64) -> f64 {
    (most / (norm + 1e-6)).min(1.0)
}

/// The means over the ranks of a backward pass's gradients, in fp32. Parameters that no rank has used have none.
#[derive(Debug)]
pub struct Grads {
    zero: Zero,
    /// Indexed by parameter.
    pieces: Vec<Option<Vec<f32>>>,
}

impl Zero {
    /// Runs `loss`, then its backward pass, which reduces gradients. Returns the loss's value and the gradients. A collective. Gradients of
    /// leaves other than parameters are dropped. Reductions follow the order of the forward pass within `loss`; gradients of what was
    /// computed before it are reduced at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]. A gather that fails inside of `loss` unwinds with a panic payload, which the launcher of the ranks catches.
    pub fn backward<const D: usize>(&self, loss: impl FnOnce() -> Tensor<D>) -> Result<(Tensor<D>, Grads), Error> {
        self.pass(|| {
            let loss = {
                let _ordered = clock::forward();
                loss()
            };
            let value = loss.clone().inner();
            drop(loss.backward());
            value
        })
    }

    /// Runs `both`, a forward and backward pass, and returns its result and the gradients.
    pub(crate) fn pass<T>(&self, both: impl FnOnce() -> T) -> Result<(T, Grads), Error> {
        let reducer = self.shared.reducer();
        reducer.begin();
        self.shared.ahead.begin_pass();
        let value = {
            let _drawn = random::during(&self.shared.draws);
            both()
        };
        self.shared.ahead.end_pass();
        let means = reducer.finish()?;
        for (slot, _) in self.slots.iter().zip(&means).filter(|(_, mean)| mean.is_some()) {
            slot.count_reduced();
        }
        Ok((value, Grads { zero: self.clone(), pieces: means }))
    }
}

impl Grads {
    /// Adds the gradients of another micro-batch. For a mean over `n` micro-batches divide each loss by `n`.
    ///
    /// # Panics
    ///
    /// If they belong to another sharded module.
    pub fn add(&mut self, other: Grads) {
        assert!(Arc::ptr_eq(&self.zero.shared, &other.zero.shared), "cannot add gradients of two different modules");
        for (sum, piece) in self.pieces.iter_mut().zip(other.pieces) {
            match (sum.as_mut(), piece) {
                (Some(sum), Some(piece)) => sum
                    .par_chunks_mut(TASK)
                    .zip(piece.par_chunks(TASK))
                    .for_each(|(sum, piece)| sum.iter_mut().zip(piece).for_each(|(a, b)| *a += b)),
                (None, piece) => *sum = piece,
                (Some(_), None) => {}
            }
        }
    }

    /// Multiplies all gradients by `factor`.
    pub fn scale(&mut self, factor: f32) {
        for piece in self.pieces.iter_mut().flatten() {
            piece.par_chunks_mut(TASK).for_each(|part| part.iter_mut().for_each(|x| *x *= factor));
        }
    }

    /// Returns the norm of all gradients of the module, in which each element counts once. A collective. Has the same bits at every stage.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn norm(&self) -> Result<f64, Error> {
        let shared = &self.zero.shared;
        let squares =
            |(slot, piece): (&Arc<Slot>, &Option<Vec<f32>>)| Some(sum_of_squares(&piece.as_ref()?[slot.counted()]));
        let sum = self.zero.slots.iter().zip(&self.pieces).filter_map(squares).sum();
        let sums = shared.comm.all_reduce(Buffer::F64(vec![sum]), ReduceOp::Sum)?.into_f64();
        Ok(sums[0].sqrt())
    }

    /// Scales all gradients so that their norm is at most `most`, and returns the norm before that. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn clip_norm(&mut self, most: f64) -> Result<f64, Error> {
        let norm = self.norm()?;
        self.clip(most, norm);
        Ok(norm)
    }

    /// Clips like [`Grads::clip_norm`] with a known `norm`. Returns the factor.
    pub(crate) fn clip(&mut self, most: f64, norm: f64) -> f64 {
        let factor = clip_factor(most, norm);
        // A NaN norm gives no factor below 1, and gradients stay unchanged.
        if factor < 1.0 {
            self.scale(factor as f32);
        }
        factor
    }

    /// Returns the number of bytes of the gradients on this rank.
    #[cfg(feature = "trainer")]
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().flatten().map(|piece| size_of_val(&piece[..]) as u64).sum()
    }

    /// Returns the first parameter, in the module's order, with an infinite or NaN element on this rank.
    #[cfg(feature = "trainer")]
    pub(crate) fn first_odd(&self) -> Option<usize> {
        let odd = |piece: &Option<Vec<f32>>| piece.iter().flatten().any(|x| !x.is_finite());
        self.pieces.iter().position(odd)
    }

    /// Returns this rank's part of a parameter's gradient, if it has one: elements `[rank * ceil(n / ranks), ...)`, or all.
    pub fn get(&self, path: &str) -> Option<&[f32]> {
        let slot = self.zero.slots.iter().find(|slot| slot.path == path)?;
        self.pieces[slot.index].as_deref()
    }

    /// Returns the parameters that have a gradient on any rank.
    pub(crate) fn updated(&self) -> impl Iterator<Item = usize> {
        (0..self.pieces.len()).filter(|&index| self.pieces[index].is_some())
    }

    /// Converts the gradients to those that Burn's optimizers take, in the shapes of the shards.
    pub(crate) fn into_burn<M: Module>(self, model: &M) -> Result<GradientsParams, Error> {
        let mut feed = Feed { ids: &self.zero.ids, zero: &self.zero, pieces: self.pieces, fed: GradientsParams::new() };
        model.visit(&mut feed);
        match feed.pieces.iter().position(Option::is_some) {
            Some(index) => Err(Error::Missing { path: self.zero.slots[index].path.clone() }),
            None => Ok(feed.fed),
        }
    }
}

struct Feed<'a> {
    ids: &'a HashMap<ParamId, usize>,
    zero: &'a Zero,
    pieces: Vec<Option<Vec<f32>>>,
    fed: GradientsParams,
}

impl ModuleVisitor for Feed<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.ids.get(&param.id) else { return };
        if let Some(piece) = self.pieces[index].take() {
            let data = TensorData::new(piece, self.zero.slots[index].base.clone());
            self.fed.register(param.id, Tensor::<D>::from_data(data, &param.base().device().without_autodiff()));
        }
    }
}

/// Returns dummy gradients for the parameters `updated`, as Burn's optimizers visit only parameters with a gradient.
pub(crate) fn mark<M: Module>(model: &M, updated: Vec<usize>, zero: &Zero) -> GradientsParams {
    let mut marks = Mark { ids: &zero.ids, updated, marks: GradientsParams::new() };
    model.visit(&mut marks);
    marks.marks
}

struct Mark<'a> {
    ids: &'a HashMap<ParamId, usize>,
    updated: Vec<usize>,
    marks: GradientsParams,
}

impl ModuleVisitor for Mark<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.get(&param.id).is_some_and(|index| self.updated.contains(index)) {
            self.marks.register(param.id, Tensor::<D>::zeros([1; D], &param.base().device().without_autodiff()));
        }
    }
}
