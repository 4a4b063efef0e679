//! Fitting a run into memory and onto a disk: its needs, the available space, and the tier that follows.

use std::path::Path;

use zero_core::Partition;
use zero_core::accounting::StateBytes;
use zero_core::config::Tier;
use zero_core::estimate::{Precision, model_state};
use zero_kernels::Rule;
use zero_models::hf_export::parse_bytes;

use super::backend::name as option_name;
use super::options::{Blocks, Hyperparameters, OffloadTo};
use super::profile::Profile;
use super::ranks::Ranks;
use super::zero_plan::{offload_to, zero_plan};
use super::{BackendChoice, OffloadChoice, Options};
use crate::config::{Config, OffloadDevice, ZeroPlan};
use crate::error::{Result, wrong};
use zero_kernels::update::BLOCK;

use crate::memory::{available_bytes, format_bytes, left_to_others};

/// Peak bytes of a run, by kind; an estimate except for model state, which is exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Model state of one rank.
    pub state: StateBytes,
    /// Gathered parameters, gradients in flight and optimizer temporaries of one rank.
    pub working: u64,
    /// Activations kept for the backward pass, and logits, of one rank.
    pub activations: u64,
    /// Number of ranks on this machine, or on the one with the most.
    pub ranks: u64,
    /// Model state of one rank in host memory, if the backend has its own memory.
    pub host: u64,
    /// Model state of one rank on the disk.
    pub disk: u64,
}

impl MemoryNeed {
    /// Returns the memory that `plan` needs.
    pub(super) fn new(profile: &Profile, plan: &ZeroPlan, backend: BackendChoice) -> Self {
        let (stage, ranks) = (plan.zero.stage, plan.world);
        let mut state = state_of(profile, plan);
        // Takes out of `state` what is offloaded to where `is_there` says.
        let mut offloaded = |is_there: fn(&OffloadDevice) -> bool| {
            let before = state.total();
            if plan.offload_optimizer.as_ref().is_some_and(|offload| is_there(&offload.device)) {
                let [of_gradients, of_state] = plan.zero_config(0).offloaded_shares();
                let stays = |leaves: f64, bytes: u64| ((1.0 - leaves) * bytes as f64) as u64;
                state.optimizer = stays(of_state, state.optimizer);
                // At stage 1, gradients are reduced at the end of the backward pass: until then, full gradients stay on the backend.
                let leave = stage.shards_gradients();
                // The first parameter's gradient, which comes last, stays in memory until its update. In a step of one micro-batch, nothing
                // large is left beside it.
                let first = profile.parameters.first().map_or(0, |&first| first as u64 * precision(plan).gradient);
                let is_kept = backend == BackendChoice::Cpu && plan.offload_param.is_none();
                let is_beside = is_kept && plan.batch.accumulation > 1;
                let first = if is_beside { first / plan.shards() as u64 } else { 0 };
                let stays = stays(of_gradients, state.gradients).max(first.min(state.gradients));
                state.gradients = if leave { stays } else { state.gradients };
            }
            if plan.offload_param.as_ref().is_some_and(|offload| is_there(&offload.device)) {
                state.parameters = 0;
            }
            before - state.total()
        };
        let mut disk = offloaded(|device| matches!(device, OffloadDevice::Nvme { .. }));
        let is_apart = backend != BackendChoice::Cpu;
        let mut host = if is_apart { offloaded(|device| *device == OffloadDevice::Cpu) } else { 0 };
        let inputs = profile.activations.offloaded(plan.zero.checkpointed_blocks);
        let inputs_leave = match plan.offload_activations {
            None => false,
            Some(OffloadDevice::Cpu) => {
                host += if is_apart { inputs } else { 0 };
                is_apart
            }
            Some(OffloadDevice::Nvme { .. }) => {
                disk += inputs;
                true
            }
        };
        // A frozen parameter is gathered, but has no gradient.
        let (largest, trained) = (profile.largest(), profile.parameters.iter().copied().max().unwrap_or(0));
        let piece = if stage.shards_optimizer() { Partition::new(trained, plan.shards()).stride() } else { trained };
        // One gathered copy, one dense gradient (a head's is summed in fp32) and its reduced shard, and two buckets in flight with their
        // results.
        let gathered = if stage.shards_parameters() { largest } else { 0 };
        let workspace = if matches!(plan.rule(), Rule::Muon { .. }) { MUON * trained } else { 0 };
        let Precision { parameter, gradient, .. } = precision(plan);
        let reduced = piece + 3 * plan.zero.reduce_bucket_size.min(profile.num_trained());
        let mut working = workspace + parameter as usize * gathered + 4 * trained + gradient as usize * reduced;
        if plan.nvme_path().is_some() {
            let settings = plan.zero_config(0).offload.disk;
            working += settings.buffer_count * settings.buffer_bytes;
        }
        Self {
            state,
            working: working as u64,
            activations: profile.activations.bytes(plan.zero.checkpointed_blocks, inputs_leave),
            ranks: ranks as u64,
            host,
            disk,
        }
    }

    /// Returns the same needs with `ranks` ranks on a machine.
    #[must_use]
    pub fn with_ranks_here(self, ranks: usize) -> Self {
        Self { ranks: ranks as u64, ..self }
    }

    /// Returns the sum over the ranks of a machine.
    pub fn total(&self) -> u64 {
        (self.state.total() + self.working + self.activations) * self.ranks
    }

    pub(super) fn arithmetic(&self) -> String {
        format!(
            "{} ranks x ({} model state + {} working memory + {} activations) = {}",
            self.ranks,
            format_bytes(self.state.total()),
            format_bytes(self.working),
            format_bytes(self.activations),
            format_bytes(self.total())
        )
    }
}

/// Bytes per element of the largest matrix that Muon's exchange and iterations take: two matrices of what is sent and received, the full
/// matrix, its bf16 copy, a product, and two squares (with the Gram variant four, each at most half as large).
const MUON: usize = 22;

/// Returns the bytes of one rank's model state by the ZeRO formula.
pub(super) fn state_of(profile: &Profile, plan: &ZeroPlan) -> StateBytes {
    let (ranks, precision) = (plan.shards() as u64, precision(plan));
    let mut trained = model_state(profile.num_trained() as u64, plan.zero.stage, ranks, precision);
    if matches!(plan.rule(), Rule::Muon { .. }) {
        // A matrix has one state, and the other parameters have two.
        let state = plan.zero_config(0).optimizer_state_dtype().size() as u64;
        let state = Precision { parameter: 0, gradient: 0, optimizer: state };
        trained.optimizer -= model_state(profile.matrices as u64, plan.zero.stage, ranks, state).optimizer;
    }
    if plan.zero_config(0).int8_optimizer_states {
        // A scale in fp32 for each block.
        let scales = Precision { parameter: 0, gradient: 0, optimizer: 4 * plan.rule().states() as u64 };
        let blocks = profile.num_trained().div_ceil(BLOCK) as u64;
        trained.optimizer += model_state(blocks, plan.zero.stage, ranks, scales).optimizer;
    }
    let exactly = |numel: usize| numel * precision.parameter as usize;
    let frozen = profile.frozen_bytes(exactly, |_| true);
    let frozen = model_state(frozen, plan.zero.stage, ranks, Precision { parameter: 1, gradient: 0, optimizer: 0 });
    // The secondary shards of everything that is gathered often, and the quantised codes of the primary shards.
    let is_large = |numel: usize| numel > plan.zero.param_persistence_threshold;
    let trained_bytes = |bytes: &dyn Fn(usize) -> usize| -> u64 {
        profile.parameters.iter().filter(|&&numel| is_large(numel)).map(|&numel| bytes(numel) as u64).sum()
    };
    let often = trained_bytes(&exactly) + profile.frozen_bytes(exactly, is_large);
    let second = plan.zero.secondary_shard_size.map_or(0, |size| often / size as u64);
    let in_memory = plan.zero_config(0).offload.parameters != Tier::Disk;
    let [of_trained, of_frozen] =
        plan.zero_config(0).weights().map(|how| move |numel| how.map_or(0, |how| how.bytes(numel)));
    // But for rows that are quantised already.
    let codes =
        trained_bytes(&of_trained) + profile.frozen_bytes(of_frozen, is_large) - profile.frozen_bytes(|_| 0, is_large);
    let codes = if in_memory && ranks > 1 { codes / ranks } else { 0 };
    StateBytes { parameters: trained.parameters + frozen.parameters + second + codes, ..trained }
}

/// Returns the bytes of one rank's model state after an update. In host memory at stage 3, shards of 16-bit parameters are then their masters,
/// rounded when they are read. Before the first update, and after a checkpoint is loaded, they take memory of their own.
pub(super) fn settled_state(profile: &Profile, plan: &ZeroPlan, backend: BackendChoice) -> StateBytes {
    let (state, ranks, precision) = (state_of(profile, plan), plan.shards() as u64, precision(plan));
    let offload = plan.zero_config(0).offload;
    let in_memory = backend == BackendChoice::Cpu && ![offload.optimizer, offload.parameters].contains(&Tier::Disk);
    if !in_memory || !plan.zero.stage.shards_parameters() || ranks == 1 || precision.parameter == 4 {
        return state;
    }
    let shards = Precision { parameter: precision.parameter, gradient: 0, optimizer: 0 };
    let of_masters = model_state(profile.num_trained() as u64, plan.zero.stage, ranks, shards).parameters;
    StateBytes { parameters: state.parameters - of_masters, ..state }
}

/// Returns the bytes per parameter of each kind of model state.
pub(super) fn precision(plan: &ZeroPlan) -> Precision {
    let config = plan.zero_config(0);
    Precision {
        parameter: config.param_dtype.size() as u64,
        gradient: config.gradient_dtype.unwrap_or(config.param_dtype).size() as u64,
        optimizer: config.optimizer_arrays(plan.rule().states()).sum::<usize>() as u64,
    }
}

/// Memory and disk space that a run may use.
#[derive(Clone)]
pub(super) struct Budget {
    /// Memory of the backend. `None`: unknown, and not limited.
    memory: Option<u64>,
    /// Host memory, if the backend has its own memory.
    host: Option<u64>,
    /// Free bytes of the disk that state is offloaded to.
    pub(super) disk: Option<u64>,
    /// Bytes of the machine's memory that are left to other programs.
    left: u64,
    /// The most ranks of a machine, if they are processes; `None` stands for all ranks.
    pub(super) ranks_here: Option<usize>,
}

impl Budget {
    pub(super) fn new(options: &Options, ranks: &Ranks<'_>) -> Result<Self> {
        // Where state will lie: what the file says, or --swap.
        let nvme_path = options.config.as_deref().map(Config::from_file).transpose()?.and_then(|file| file.nvme_path());
        let limit = size("memory", &options.memory)?;
        let available = match options.backend {
            BackendChoice::Cpu => available_bytes(),
            device => device.memory(),
        };
        // A given limit may be used in full.
        let left = match (limit, options.backend) {
            (None, BackendChoice::Cpu) => available.map_or(0, left_to_others),
            _ => 0,
        };
        let memory = available.map(|available| available - left).into_iter().chain(limit).min();
        let host = available_bytes().filter(|_| options.backend != BackendChoice::Cpu);
        // The minimum over ranks, so that ranks on several machines choose the same tier.
        let (memory, host) = (ranks.least(memory)?, ranks.least(host)?);
        let disk = ranks.least(free_disk(nvme_path.as_deref().unwrap_or(options.swap_dir())))?;
        Ok(Self { memory, host, disk, left, ranks_here: ranks.most_on_a_machine() })
    }

    /// Formats the memory that may be used.
    pub(super) fn told(&self) -> Option<String> {
        self.memory.map(|memory| format_bytes(memory) + &self.left_told())
    }

    fn left_told(&self) -> String {
        match self.left {
            0 => String::new(),
            left => {
                format!(" ({} more are reserved for other programs; --memory SIZE changes this)", format_bytes(left))
            }
        }
    }

    pub(super) fn holds(&self, need: &MemoryNeed) -> bool {
        self.memory.is_none_or(|memory| need.total() <= memory)
            && (need.host == 0 || self.host.is_none_or(|host| need.host * need.ranks <= host))
            && (need.disk == 0 || self.disk.is_none_or(|disk| need.disk * need.ranks <= disk))
    }

    /// Formats the resource that is insufficient.
    pub(super) fn but(&self, need: &MemoryNeed) -> String {
        match (self.memory, self.host, self.disk) {
            (Some(memory), ..) if need.total() > memory => {
                format!(", but {} of memory may be used{}", format_bytes(memory), self.left_told())
            }
            (_, Some(host), _) if need.host * need.ranks > host => {
                let needed = format_bytes(need.host * need.ranks);
                format!(", and {needed} of host memory, of which {} are free", format_bytes(host))
            }
            (.., Some(disk)) => {
                let needed = format_bytes(need.disk * need.ranks);
                format!(", and {needed} on the disk, which has {} free", format_bytes(disk))
            }
            _ => String::new(),
        }
    }
}

/// Returns the free bytes of the file system of a folder, or of its nearest parent that exists.
fn free_disk(folder: &Path) -> Option<u64> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let existing = folder.ancestors().find(|ancestor| ancestor.is_dir()).unwrap_or(Path::new("."));
    zero_core::offload::free_bytes(existing).ok()
}

/// A model that is to fit: its width, its profile by the rows of a micro-batch, and the budget.
pub(super) struct Candidate<'a> {
    pub(super) hidden_size: Option<usize>,
    pub(super) profile: &'a dyn Fn(usize) -> Result<Profile>,
    pub(super) budget: &'a Budget,
}

/// Options with the plan's choices filled in, and a message about these.
pub(super) type Fitting = (Options, Option<String>);

/// Options, and the memory that a run with them needs.
type Taken = (Options, MemoryNeed);

/// Parses the size given for an option, if there is one.
fn size(option: &'static str, given: &Option<String>) -> Result<Option<u64>> {
    let read = |given: &String| parse_bytes(given).map_err(|error| wrong(option, given, error.to_string()));
    given.as_ref().map(read).transpose()
}

/// Returns the limit of activations on a rank, if there is one.
fn limit(options: &Options) -> Result<Option<u64>> {
    size("activation-memory", &options.activation_memory)
}

impl Candidate<'_> {
    /// Returns the memory that a run with these options needs.
    pub(super) fn need(&self, options: &Options) -> Result<MemoryNeed> {
        let plan = zero_plan(options, self.hidden_size)?;
        let need = MemoryNeed::new(&(self.profile)(plan.batch.micro)?, &plan, options.backend);
        Ok(need.with_ranks_here(self.budget.ranks_here.unwrap_or(plan.world)))
    }

    /// Returns the fewest blocks to checkpoint with which activations stay within their limit or, without a limit, a run fits.
    fn blocks(&self, options: &Options) -> Result<Option<Blocks>> {
        let plan = zero_plan(options, self.hidden_size)?;
        let activations = (self.profile)(plan.batch.micro)?.activations;
        let most = match limit(options)? {
            Some(limit) => limit,
            None => {
                let need = self.need(options)?;
                let others = need.total() - need.activations * need.ranks;
                let rest = self.budget.memory.and_then(|memory| memory.checked_sub(others));
                let Some(rest) = rest else { return Ok(None) };
                rest / need.ranks
            }
        };
        Ok(activations.fewest(most, options.offload_activations).map(Blocks))
    }

    /// Returns the options and the memory that they need, if it fits; with `is_free`, checkpoints the fewest blocks.
    fn fit(&self, mut with: Options, is_free: bool) -> Result<Option<Taken>> {
        if is_free || with.activation_memory.is_some() {
            let Some(fewest) = self.blocks(&with)? else { return Ok(None) };
            with.checkpoint_activations = Some(fewest);
        }
        let taken = self.need(&with)?;
        Ok(self.budget.holds(&taken).then_some((with, taken)))
    }

    /// Keeps as much of the optimizer's state in memory as there is room for, because a step waits for what is moved.
    fn least_offloaded(&self, (with, taken): Taken) -> Result<Taken> {
        /// Fraction of the memory that is left for errors of the estimate.
        const SPARE: f64 = 0.05;
        let Some(memory) = self.budget.memory else { return Ok((with, taken)) };
        let most = (memory as f64 * (1.0 - SPARE)) as u64;
        // In hundredths, as a user would write it.
        let leaves = |hundredths: u8| Options { offload_ratio: Some(f64::from(hundredths) / 100.0), ..with.clone() };
        let (mut fewest, mut enough) = (0_u8, 100_u8);
        while fewest < enough {
            let middle = fewest.midpoint(enough);
            if self.need(&leaves(middle))?.total() <= most { enough = middle } else { fewest = middle + 1 }
        }
        let with = leaves(enough);
        let taken = self.need(&with)?;
        Ok((with, taken))
    }

    /// Returns the cheapest tier of memory and disk in which the model fits, or the given one with --offload or --config,
    /// if it fits. Unless the options specify activations, these are checkpointed, and then their inputs offloaded, before
    /// more state is: recomputation costs a third of a step at most, and moving state often more.
    pub(super) fn cheapest(&self, options: &Options) -> Result<Option<Taken>> {
        // Moments in 8 bits are kept with no state on a disk.
        let in_memory = options.int8_optimizer_states && matches!(offload_to(options)?, OffloadTo::Disk);
        let tiers: &[Option<OffloadChoice>] = match (options.offload, &options.config) {
            (Some(given), _) => &[Some(given)],
            _ if in_memory => &[None],
            (None, Some(_)) => &[None],
            (None, None) => match options.stage.unwrap_or(3) {
                0 => &[None],
                1 | 2 => &[None, Some(OffloadChoice::Optimizer)],
                _ => &[None, Some(OffloadChoice::Optimizer), Some(OffloadChoice::All)],
            },
        };
        let Options { checkpoint_activations, config, offload_activations, .. } = options;
        let is_free = checkpoint_activations.is_none() && config.is_none() && !offload_activations;
        let ways: &[(bool, bool)] = match is_free {
            true => &[(false, false), (true, false), (true, true)],
            false => &[(false, *offload_activations)],
        };
        for &offload in tiers {
            for &(is_free, offload_activations) in ways {
                let with = Options { offload, offload_activations, ..options.clone() };
                let Some(taken) = self.fit(with, is_free)? else { continue };
                let is_left = options.offload.is_none() && offload.is_some() && options.offload_ratio.is_none();
                return Ok(Some(if is_left { self.least_offloaded(taken)? } else { taken }));
            }
        }
        Ok(None)
    }

    /// Describes what a run would take if only the disk had more room; `None` if it would not fit then either.
    pub(super) fn disk_needed(&self, options: &Options) -> Result<Option<String>> {
        let Some(free) = self.budget.disk else { return Ok(None) };
        let roomy = Budget { disk: None, ..self.budget.clone() };
        let Some((_, taken)) = (Candidate { budget: &roomy, ..*self }).cheapest(options)? else { return Ok(None) };
        Ok(Some(format!(
            "it takes {} in memory and {} on the disk, which has {} free; free some space, or choose a folder on a larger disk (--swap, or \
             nvme_path in a file)",
            format_bytes(taken.total()),
            format_bytes(taken.disk * taken.ranks),
            format_bytes(free)
        )))
    }

    /// Returns the most rows of a micro-batch with which the model fits, up to `most`; 1 if none do.
    fn largest_batch(&self, options: &Options, most: usize) -> Result<usize> {
        let fits = |rows: usize| -> Result<bool> {
            let hyper = Hyperparameters { batch: Some(rows), ..options.hyper.clone() };
            Ok(self.cheapest(&Options { hyper, ..options.clone() })?.is_some())
        };
        let (mut fitting, mut beyond) = (1, 2);
        while beyond <= most && fits(beyond)? {
            (fitting, beyond) = (beyond, beyond * 2);
        }
        beyond = beyond.min(most + 1);
        while beyond - fitting > 1 {
            let middle = fitting.midpoint(beyond);
            if fits(middle)? { fitting = middle } else { beyond = middle }
        }
        Ok(fitting)
    }

    /// Fills in the choices left to the plan: the rows of a micro-batch, at most `rows`; offloading; and activation
    /// checkpointing. Returns the options unchanged if the model does not fit.
    ///
    /// # Errors
    ///
    /// The errors of the plan; [`TrainError`](crate::TrainError) if activations exceed their limit.
    pub(super) fn fitting(&self, options: &Options, rows: usize) -> Result<Fitting> {
        let mut options = options.clone();
        let mut said = Vec::new();
        if options.auto_find_batch_size {
            let batch = self.largest_batch(&options, rows)?;
            said.push(format!("The largest micro-batch that fits: --batch {batch}."));
            options.hyper.batch = Some(batch);
        }
        let limit = limit(&options)?;
        let Some((with, taken)) = self.cheapest(&options)? else {
            let last = Options { offload_activations: options.config.is_none(), ..options.clone() };
            if limit.is_some() && self.blocks(&last)?.is_none() {
                let expected = "expected more: activations take more than this even with every block checkpointed; use \
                                a smaller --batch or shorter rows";
                return Err(wrong("activation-memory", options.activation_memory.unwrap_or_default(), expected));
            }
            return Ok((options, None));
        };
        let offload = with.offload.filter(|_| options.offload.is_none());
        let ratio = with.offload_ratio.filter(|&ratio| options.offload_ratio.is_none() && ratio < 1.0);
        let blocks = with.checkpoint_activations.filter(|of| options.checkpoint_activations.is_none() && of.0 > 0);
        let activations = with.offload_activations && !options.offload_activations;
        let chosen: Vec<String> = [
            offload.map(|offload| format!("--offload {}", option_name(offload))),
            ratio.map(|ratio| format!("--offload-ratio {ratio}")),
            blocks.map(|blocks| format!("--checkpoint-activations {blocks}")),
            activations.then(|| "--offload-activations".into()),
        ]
        .into_iter()
        .flatten()
        .collect();
        if !chosen.is_empty() {
            let without = self.need(&options)?;
            let there = match (taken.host, taken.disk) {
                (0, 0) => String::new(),
                (host, 0) => format!(", {} in host memory", format_bytes(host * taken.ranks)),
                (_, disk) => {
                    format!(", {} on disk in {}", format_bytes(disk * taken.ranks), options.swap_dir().display())
                }
            };
            let why = match limit {
                Some(limit) if self.budget.holds(&without) => {
                    format!(", but activations may take at most {} per rank", format_bytes(limit))
                }
                _ => self.budget.but(&without),
            };
            said.push(format!("With the given options: {}{why}.", without.arithmetic()));
            let (chosen, memory) = (chosen.join(" "), format_bytes(taken.total()));
            said.push(format!("So the run uses {chosen}: {memory} in memory{there}."));
        }
        Ok((with, Some(said.join("\n")).filter(|said| !said.is_empty())))
    }
}
