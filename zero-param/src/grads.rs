//! A backward pass and its reduced gradients: for each parameter, those of the elements that this rank updates.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_optim::GradientsParams;
use zero_core::ReduceOp;
use zero_engine::backend::{Backend, DType};
use zero_engine::cell::Kind;
use zero_engine::update::norms::own_squares;
use zero_engine::values::{numbers_of, of_type, part};

use crate::clock;
use crate::device::hold;
use crate::engine::{Burn, Cell, caught};
use crate::error::Error;
use crate::random;
use crate::storage;
use crate::tensors::Raw;
use crate::zero::Zero;

/// Returns the factor that brings gradients of `norm` to at most `most`, computed as in PyTorch's `clip_grad_norm_`.
fn clip_factor(most: f64, norm: f64) -> f64 {
    (most / (norm + 1e-6)).min(1.0)
}

/// The means over the ranks of a backward pass's gradients. Parameters that no rank has used have none.
#[derive(Debug)]
pub struct Grads {
    zero: Zero,
    /// Indexed by parameter.
    cells: Vec<Option<Arc<Cell>>>,
    /// Factor of all gradients, which the update multiplies by.
    factor: f32,
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
        self.pass(|| differentiated(loss))
    }

    /// Runs `loss` and its backward pass like [`Zero::backward`], but does not reduce gradients: this rank keeps them in full, in fp32, and the
    /// next [`Zero::backward`] adds them to its own. Several micro-batches then cost one reduction. Returns the loss's value.
    ///
    /// DeepSpeed and PyTorch call this `no_sync`.
    pub fn backward_no_sync<const D: usize>(&self, loss: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        self.pass_no_sync(|| differentiated(loss))
    }

    /// Runs `both`, a forward and backward pass, and returns its result and the gradients.
    pub(crate) fn pass<T>(&self, both: impl FnOnce() -> T) -> Result<(T, Grads), Error> {
        let value = self.run(false, both);
        let cells = caught(|| self.shared.passes.end(self.runtime()))??;
        Ok((value, Grads { zero: self.clone(), cells, factor: 1.0 }))
    }

    /// Runs `both` like [`Zero::pass`], and keeps the gradients for the next pass.
    pub(crate) fn pass_no_sync<T>(&self, both: impl FnOnce() -> T) -> T {
        let value = self.run(true, both);
        self.shared.passes.hold(self.runtime());
        value
    }

    fn run<T>(&self, is_held: bool, both: impl FnOnce() -> T) -> T {
        self.shared.passes.begin(&self.members, is_held);
        let _drawn = random::during(self.runtime());
        let released = storage::during();
        let value = both();
        released.end();
        value
    }
}

/// Runs `loss` and its backward pass; returns the loss's value.
fn differentiated<const D: usize>(loss: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
    let loss = {
        let _ordered = clock::forward();
        loss()
    };
    storage::release();
    let value = loss.clone().inner();
    drop(loss.backward());
    value
}

impl Grads {
    /// Adds the gradients of another micro-batch. For a mean over `n` micro-batches divide each loss by `n`.
    ///
    /// # Panics
    ///
    /// If they belong to another sharded module.
    pub fn add(&mut self, mut other: Grads) {
        assert!(self.are_of(&other.zero), "cannot add gradients of two different modules");
        self.multiply();
        other.multiply();
        for (sum, next) in self.cells.iter_mut().zip(other.cells) {
            *sum = match (sum.take(), next) {
                (Some(sum), Some(next)) => {
                    let template = sum.template(Kind::Gradient, Cell::derivation("add", &[&sum, &next]));
                    Some(Cell::ready(template, Burn::add(sum.into_local(), next.into_local())))
                }
                (sum, next) => sum.or(next),
            };
        }
    }

    /// Multiplies all gradients by `factor`.
    pub fn scale(&mut self, factor: f32) {
        self.factor *= factor;
    }

    /// Multiplies the elements by the factor.
    fn multiply(&mut self) {
        let factor = std::mem::replace(&mut self.factor, 1.0);
        if factor == 1.0 {
            return;
        }
        for cell in self.cells.iter_mut() {
            *cell = cell.take().map(|cell| {
                let template = cell.template(Kind::Gradient, Cell::derivation("scale", &[&cell]));
                let (dtype, wide) = (cell.dtype, of_type::<Burn>(cell.into_local(), DType::F32));
                Cell::ready(template, of_type::<Burn>(Burn::mul_scalar(wide, factor.into()), dtype))
            });
        }
    }

    /// Returns the norm of all gradients of the module, in which each element counts once. A collective. Has the same bits at every stage.
    ///
    /// # Errors
    ///
    /// [`Error::Comm`].
    pub fn norm(&self) -> Result<f64, Error> {
        let runtime = self.zero.runtime();
        let (world, place) = (runtime.rank.world, runtime.rank.owners(0).1);
        // One sum of squares per parameter and rank, zero if another rank computes it.
        let mut sums = vec![0.0; self.cells.len() * world];
        for (sums, sum) in sums.chunks_exact_mut(world).zip(own_squares(&self.cells)) {
            sums[place] = sum;
        }
        let sum: f64 = caught(|| runtime.reduce_scalars(sums, ReduceOp::Sum))?.iter().sum();
        Ok(sum.sqrt() * f64::from(self.factor.abs()))
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

    /// Returns the first parameter, in the module's order, with an infinite or NaN element on this rank.
    #[cfg(feature = "trainer")]
    pub(crate) fn first_odd(&self) -> Option<usize> {
        let is_odd = |cell: &Option<Arc<Cell>>| {
            cell.as_ref().is_some_and(|cell| numbers_of(&cell.data()).any(|number| !number.is_finite()))
        };
        self.cells.iter().position(is_odd)
    }

    /// Returns this rank's part of a parameter's gradient in fp32, if it has one: elements `[rank * ceil(n / ranks), ...)`, with `rank` and
    /// `ranks` those of the group of `ZeroConfig::shard_size`. Of a vector, and at stage 0, all.
    pub fn get(&self, path: &str) -> Option<Vec<f32>> {
        let parameter = self.zero.parameters.iter().find(|parameter| parameter.path == path)?;
        let cell = self.cells[parameter.index].as_ref()?;
        let elements = cell.partition.len(cell.place());
        let data = cell.data();
        Some(numbers_of(&data).take(elements).map(|number| number as f32 * self.factor).collect())
    }

    /// Returns whether these are gradients of this module.
    pub(crate) fn are_of(&self, zero: &Zero) -> bool {
        Arc::ptr_eq(&self.zero.shared, &zero.shared)
    }

    /// Returns the parameters that have a gradient on any rank.
    pub(crate) fn updated(&self) -> impl Iterator<Item = usize> {
        (0..self.cells.len()).filter(|&index| self.cells[index].is_some())
    }

    /// Takes the gradients, and their factor.
    pub(crate) fn into_cells(self) -> (Vec<Option<Arc<Cell>>>, f32) {
        (self.cells, self.factor)
    }

    /// Converts the gradients to those that Burn's optimizers take, in fp32 and in the shapes of the bases.
    pub(crate) fn into_burn<M: Module>(self, model: &M) -> Result<GradientsParams, Error> {
        let (zero, factor, mut cells) = (self.zero, self.factor, self.cells);
        feed(&zero, model, |index| {
            let cell = cells[index].take()?;
            let elements = cell.partition.len(cell.place()).max(1);
            let local = of_type::<Burn>(cell.into_local(), DType::F32);
            let local = if factor == 1.0 { local } else { Burn::mul_scalar(local, factor.into()) };
            Some(zero.parameters[index].shaped(part::<Burn>(local, 0..elements)))
        })
    }

    /// Returns a placeholder for each gradient, as Burn's optimizers visit only parameters with a gradient.
    pub(crate) fn placeholders<M: Module>(&self, model: &M) -> Result<GradientsParams, Error> {
        feed(&self.zero, model, |index| self.cells[index].as_ref().map(|_| self.zero.parameters[index].placeholder()))
    }
}

/// Registers the gradients that `gradient` returns by parameter.
fn feed<M: Module>(
    zero: &Zero,
    model: &M,
    gradient: impl FnMut(usize) -> Option<Raw>,
) -> Result<GradientsParams, Error> {
    let mut feed = Feed { zero, gradient, is_seen: vec![false; zero.parameters.len()], fed: GradientsParams::new() };
    model.visit(&mut feed);
    let Feed { mut gradient, is_seen, fed, .. } = feed;
    let missing = is_seen.iter().enumerate().find(|(index, is_seen)| !**is_seen && gradient(*index).is_some());
    match missing {
        Some((index, _)) => Err(Error::Missing { path: zero.parameters[index].path.clone() }),
        None => Ok(fed),
    }
}

struct Feed<'a, F> {
    zero: &'a Zero,
    gradient: F,
    is_seen: Vec<bool>,
    fed: GradientsParams,
}

impl<F: FnMut(usize) -> Option<Raw>> ModuleVisitor for Feed<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.zero.ids.get(&param.id) else { return };
        self.is_seen[index] = true;
        if let Some(gradient) = (self.gradient)(index) {
            self.fed.register(param.id, hold::<D>(gradient));
        }
    }
}
