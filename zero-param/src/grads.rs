//! A backward pass and its reduced gradients: of each parameter what this rank updates.

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

/// Elements that are worth a task of their own.
const TASK: usize = 1 << 16;

/// What gradients of `norm` are multiplied by so that it is at most `most`, as PyTorch's `clip_grad_norm_` computes it.
fn clip_factor(most: f64, norm: f64) -> f64 {
    (most / (norm + 1e-6)).min(1.0)
}

/// The means over the ranks of a backward pass's gradients, in fp32. Parameters that no rank has used have none.
#[derive(Debug)]
pub struct Grads {
    zero: Zero,
    /// By parameter.
    pieces: Vec<Option<Vec<f32>>>,
}

impl Zero {
    /// Runs `loss`, then its backward pass, in which gradients are reduced, and gives the loss's value and the gradients. A
    /// collective. Gradients of other leaves than parameters are dropped.
    /// The order of the forward pass is that of the reductions, so gradients of what was computed before are reduced at the end.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`]. A gather that fails inside of `loss` travels as a panic payload, which whoever runs the ranks catches.
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

    /// Runs `both`, a forward and its backward pass, and gives what it gives and the gradients.
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
    /// Adds those of another micro-batch. For a mean over `n` micro-batches divide each loss by `n`.
    ///
    /// # Panics
    ///
    /// When they are of another sharded module.
    pub fn add(&mut self, other: Grads) {
        assert!(Arc::ptr_eq(&self.zero.shared, &other.zero.shared), "gradients of two modules do not add up");
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

    /// Multiplies all by `factor`.
    pub fn scale(&mut self, factor: f32) {
        for piece in self.pieces.iter_mut().flatten() {
            piece.par_chunks_mut(TASK).for_each(|part| part.iter_mut().for_each(|x| *x *= factor));
        }
    }

    /// The norm of all gradients of the module, in which each element counts once. A collective. The same bits at every stage.
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

    /// Scales all so that their norm is at most `most`, and gives the norm that they had. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn clip_norm(&mut self, most: f64) -> Result<f64, Error> {
        let norm = self.norm()?;
        self.clip(most, norm);
        Ok(norm)
    }

    /// The same where their norm is known; what they were multiplied by.
    pub(crate) fn clip(&mut self, most: f64, norm: f64) -> f64 {
        let factor = clip_factor(most, norm);
        // A norm that is not a number makes no factor below 1, and gradients stay as they are.
        if factor < 1.0 {
            self.scale(factor as f32);
        }
        factor
    }

    /// Bytes that this rank holds of them.
    #[cfg(feature = "trainer")]
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().flatten().map(|piece| size_of_val(&piece[..]) as u64).sum()
    }

    /// The first parameter, in the module's order, with an element here that is an infinity or not a number.
    #[cfg(feature = "trainer")]
    pub(crate) fn first_odd(&self) -> Option<usize> {
        let odd = |piece: &Option<Vec<f32>>| piece.iter().flatten().any(|x| !x.is_finite());
        self.pieces.iter().position(odd)
    }

    /// What this rank has of a parameter's gradient, if it has one: its elements `[rank * ceil(n / ranks), ...)`, or all.
    pub fn get(&self, path: &str) -> Option<&[f32]> {
        let slot = self.zero.slots.iter().find(|slot| slot.path == path)?;
        self.pieces[slot.index].as_deref()
    }

    /// The parameters that have one, on any rank.
    pub(crate) fn updated(&self) -> impl Iterator<Item = usize> {
        (0..self.pieces.len()).filter(|&index| self.pieces[index].is_some())
    }

    /// As Burn's optimizers take them, in the shapes of the pieces.
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

/// Gradients of no meaning of the parameters `updated`: Burn's optimizers visit what has one.
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
