//! The updates of one step, in the order that lets them overlap.
//!
//! Updates of arrays in memory run at once. If other arrays are on a disk, updates in memory run after those have begun, so that the disk
//! is busy meanwhile. Updates on a device run together.

use std::sync::Arc;

use zero_core::{Collective, CommError};

use super::Job;
use super::norms::{own_sums, trust};
use super::overlapped::{Updates, run_jobs};
use super::plan::{ParamState, Update, Where};
use crate::backend::Backend;
use crate::cell::Cell;
use crate::cell::rank::Rank;

/// The updates of one step.
pub struct Step<B: Backend> {
    rank: Arc<Rank<B>>,
    updates: Option<Arc<Updates<B>>>,
    /// Updates on this thread that have a second pass.
    here: Vec<Job<B>>,
    /// Updates on this thread that run after the overlapped ones have begun.
    later: Vec<Job<B>>,
    overlapped: Vec<Job<B>>,
    on_device: Vec<Job<B>>,
    /// Updates whose matrices are orthogonalized.
    matrices: Vec<Job<B>>,
    /// Number of updates so far.
    count: usize,
}

impl<B: Backend> Step<B> {
    /// Begins a step. `updates` is there if the rank keeps state outside of the backend.
    pub fn new(rank: Arc<Rank<B>>, updates: Option<Arc<Updates<B>>>) -> Self {
        rank.copier.sweep();
        let [here, later, overlapped, on_device, matrices] = std::array::from_fn(|_| Vec::new());
        Self { rank, updates, here, later, overlapped, on_device, matrices, count: 0 }
    }

    /// Adds the update of one parameter, and returns the parameter's next version, which may be pending. Called after a fence: no rank
    /// reads the version that is replaced.
    pub fn add(&mut self, update: Update<B>, state: &mut ParamState<B>) -> Arc<Cell<B>> {
        let (place, job) = update.plan(self.count, state);
        self.count += 1;
        let version = job.version();
        match place {
            _ if job.kernel.is_muon() => self.matrices.push(job),
            Where::Here if self.updates.is_some() && !job.is_first_pass() => self.later.push(job),
            Where::Here => self.here.extend(job.run()),
            Where::Overlapped => self.overlapped.push(job),
            Where::Device => self.on_device.push(job),
        }
        version
    }

    /// Returns whether an update has a second pass, so that the ranks exchange sums or matrices.
    pub fn has_second_pass(&self) -> bool {
        self.has_sums() || !self.matrices.is_empty()
    }

    fn has_sums(&self) -> bool {
        [&self.here, &self.overlapped, &self.on_device].into_iter().flatten().any(Job::is_first_pass)
    }

    /// Runs all updates but those that overlap what follows the step. A collective if an update has a second pass. `ranks` are the ranks of
    /// the run, and `owners` are those in the order of their shards. If `factor` is given, gradients on a device are multiplied by it.
    ///
    /// # Errors
    ///
    /// If a disk or the collective fails.
    pub fn run(
        &mut self,
        factor: Option<B::Tensor>,
        ranks: &dyn Collective,
        owners: &dyn Collective,
    ) -> Result<(), CommError> {
        if self.has_second_pass()
            && let Some(updates) = &self.updates
        {
            // They use the same arrays as the updates of the last step.
            updates.wait(&self.rank)?;
        }
        if self.has_sums() {
            self.first_passes(|sums| ranks.all_gather_values(sums))?;
            self.here.drain(..).for_each(|job| drop(job.run()));
        }
        super::matrices::run(std::mem::take(&mut self.matrices), &self.rank, owners)?;
        super::device::run(std::mem::take(&mut self.on_device), factor);
        Ok(())
    }

    /// Starts the updates that overlap what follows the step. The gradients may have been dropped.
    ///
    /// # Errors
    ///
    /// If an update of the last step has failed.
    pub fn start(self) -> Result<(), CommError> {
        if !self.overlapped.is_empty() {
            let updates = self.updates.as_ref().expect("only offloaded state has such updates");
            updates.start(&self.rank, self.overlapped)?;
        }
        self.later.into_iter().for_each(|job| drop(job.run()));
        Ok(())
    }

    /// Runs the first passes that remain (those of `here` have run), and prepares all second passes.
    fn first_passes(
        &mut self,
        all_gather: impl FnOnce(&[f64]) -> Result<Vec<Vec<f64>>, CommError>,
    ) -> Result<(), CommError> {
        let first: Vec<_> = self.overlapped.extract_if(.., |job| job.is_first_pass()).collect();
        self.overlapped.extend(run_jobs(first, &self.rank)?);
        // In the order in which the forward pass waits for them.
        self.overlapped.sort_by_key(|job| job.number);
        let first: Vec<_> = self.on_device.extract_if(.., |job| job.is_first_pass()).collect();
        self.on_device.extend(super::device::run(first, None));
        let jobs = self.here.iter_mut().chain(&mut self.overlapped).chain(&mut self.on_device);
        let jobs: Vec<&mut Job<B>> = jobs.filter(|job| job.is_first_pass()).collect();
        let sums = all_gather(&own_sums(&jobs, self.count))?;
        trust(jobs, &sums);
        Ok(())
    }
}
