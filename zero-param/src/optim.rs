//! Optimizers of shards: AdamW, Adam and LAMB by the engine, other elementwise ones by Burn.

use std::ops::RangeInclusive;

use burn::module::Module;
#[cfg(feature = "trainer")]
use burn::module::ParamGroup;
use burn_optim::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn_optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LBFGSConfig, LambConfig,
    LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use serde::Serialize;
use serde_json::Value;
use zero_core::CommError;
use zero_core::config::{Float, Tier};
use zero_kernels::Rule;

use crate::engine::caught;
use crate::error::Error;
use crate::grads::Grads;
use crate::update::Updates;
use crate::zero::Zero;

/// The configuration of one of Burn's optimizers.
pub trait OptimizerConfig {
    /// Builds Burn's optimizer, if it can work on shards.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if it needs full parameters.
    fn elementwise(&self) -> Result<ModuleOptimizer, Error>;

    /// Returns the engine's rule for this configuration, if there is one, and how each gradient is clipped. Its state can be offloaded and
    /// saved, and it may need norms over all ranks.
    #[doc(hidden)]
    fn rule(&self) -> Option<(Rule, Option<GradientClippingConfig>)> {
        None
    }

    /// Builds the optimizer of full parameters that a learner of burn-train would use for this configuration.
    #[doc(hidden)]
    fn of_wholes(&self) -> Result<ModuleOptimizer, Error> {
        self.elementwise()
    }
}

macro_rules! elementwise {
    ($($config:ident $rule:expr;)*) => {$(
        impl OptimizerConfig for $config {
            fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
                Ok(self.init())
            }
            fn rule(&self) -> Option<(Rule, Option<GradientClippingConfig>)> {
                let rule: fn(&Fields) -> Option<Rule> = $rule;
                let fields = Fields::of(self);
                Some((rule(&fields)?, fields.clipping()))
            }
        }
    )*};
}

macro_rules! refused {
    ($($config:ident $optimizer:literal $reason:literal;)*) => {$(
        impl OptimizerConfig for $config {
            fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
                let instead = "use AdamW, Adam, Sgd, AdaGrad, RmsProp, Lion, Adan or Lamb";
                Err(Error::Optimizer { optimizer: $optimizer, reason: $reason, instead })
            }
        }
    )*};
}

elementwise! {
    AdaGradConfig |_| None;
    AdamConfig |config| (!config.is_set("amsgrad")).then_some(Rule::Adam {
        beta_1: config.number("beta_1")?,
        beta_2: config.number("beta_2")?,
        epsilon: config.number("epsilon")?,
        weight_decay: config.0["weight_decay"]["penalty"].as_f64().unwrap_or(0.0) as f32,
        bias_correction: true,
    });
    AdamWConfig |config| (!config.is_set("amsgrad") && !config.is_set("cautious_weight_decay")).then_some(Rule::AdamW {
        beta_1: config.number("beta_1")?,
        beta_2: config.number("beta_2")?,
        epsilon: config.number("epsilon")?,
        weight_decay: config.number("weight_decay")?,
        bias_correction: true,
    });
    AdanConfig |_| None;
    LionConfig |_| None;
    RmsPropConfig |_| None;
    SgdConfig |_| None;
}

refused! {
    AdafactorConfig "Adafactor" "computes sums over rows and columns of a parameter";
    LBFGSConfig "LBFGS" "computes dot products over all parameters";
    MuonConfig "Muon" "orthogonalizes full gradients";
}

/// The fields of one of Burn's configurations. They are private, but serialization shows them.
struct Fields(Value);

impl Fields {
    fn of(config: &impl Serialize) -> Self {
        Self(serde_json::to_value(config).unwrap_or_default())
    }

    fn number(&self, name: &str) -> Option<f32> {
        self.0[name].as_f64().map(|number| number as f32)
    }

    fn is_set(&self, name: &str) -> bool {
        self.0[name] == true
    }

    fn clipping(&self) -> Option<GradientClippingConfig> {
        serde_json::from_value(self.0["grad_clipping"].clone()).ok().flatten()
    }
}

/// LAMB with bounded trust ratios, as in DeepSpeed and in `zero-burn`. Burn's [`LambConfig`] has no bounds.
#[derive(Debug, Clone)]
pub struct BoundedLamb {
    /// All other settings.
    pub lamb: LambConfig,
    /// The smallest and the largest trust ratio. DeepSpeed's defaults are 0.01 and 10.
    pub ratios: RangeInclusive<f32>,
}

impl OptimizerConfig for BoundedLamb {
    fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
        let instead = "pass its configuration to Zero::optimizer, which sums the norms over ranks, or use AdamW";
        Err(Error::Optimizer { optimizer: "Lamb", reason: "computes norms of full parameters", instead })
    }

    fn rule(&self) -> Option<(Rule, Option<GradientClippingConfig>)> {
        let fields = Fields::of(&self.lamb);
        let rule = Rule::Lamb {
            beta_1: fields.number("beta_1")?,
            beta_2: fields.number("beta_2")?,
            epsilon: fields.number("epsilon")?,
            weight_decay: fields.number("weight_decay")?,
            bias_correction: true,
            min_coeff: *self.ratios.start(),
            max_coeff: *self.ratios.end(),
        };
        Some((rule, fields.clipping()))
    }
}

impl OptimizerConfig for LambConfig {
    fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
        if has_trust_ratio(self) { unbounded(self).elementwise() } else { Ok(self.init()) }
    }

    fn rule(&self) -> Option<(Rule, Option<GradientClippingConfig>)> {
        unbounded(self).rule().filter(|_| has_trust_ratio(self))
    }

    fn of_wholes(&self) -> Result<ModuleOptimizer, Error> {
        Ok(self.init())
    }
}

fn has_trust_ratio(config: &LambConfig) -> bool {
    Fields::of(config).0["use_trust_ratio"] != false
}

fn unbounded(config: &LambConfig) -> BoundedLamb {
    BoundedLamb { lamb: config.clone(), ratios: 0.0..=f32::INFINITY }
}

const CLIP: &str = "clip by the norm of all gradients with Grads::clip_norm";

/// Name and reason in the error for an optimizer group that clips gradients.
const OF_A_GROUP: (&str, &str) = (
    "the gradient clipping of an optimizer group",
    "may compute norms of full gradients (Burn reveals clipping only for an optimizer without groups)",
);

/// An optimizer whose state is sharded: this rank holds its part.
pub struct Optimizer {
    inner: ModuleOptimizer,
    zero: Zero,
    /// The engine's updates and their rule; `None` if one of Burn's optimizers updates the shards.
    pub(crate) engine: Option<(Updates, Rule)>,
}

impl Zero {
    /// Builds an optimizer of the module's shards.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] for an optimizer that needs full parameters, or that clips by the norm of each parameter ([`Grads::clip_norm`]
    /// clips by the norm of all). [`Error::State`] for one that needs its parameters in memory, if model state is on a disk, or in 16 bit on a device.
    ///
    /// ```
    /// # use burn_optim::{AdamWConfig, MuonConfig};
    /// # use zero_param::OptimizerConfig;
    /// assert!(AdamWConfig::new().elementwise().is_ok());
    /// assert!(MuonConfig::new().elementwise().err().unwrap().to_string().contains("Muon"));
    /// ```
    pub fn optimizer(&self, config: &impl OptimizerConfig) -> Result<Optimizer, Error> {
        let (inner, engine) = match config.rule() {
            Some((rule, clipping)) => {
                let updates = Updates::default();
                let inner = ModuleOptimizer::from(updates.ruled(rule));
                let clipping = clipping.map(|clipping| clipping.init());
                (clipping.into_iter().fold(inner, ModuleOptimizer::with_grad_clipping), Some((updates, rule)))
            }
            None => (config.elementwise()?, None),
        };
        let clips = match inner.grad_clipping() {
            Some(GradientClipping::Norm(_)) => Some(("GradientClipping::Norm", "computes norms of full gradients")),
            // A user's configuration with groups.
            None if inner.has_gradient_clipping() => Some(OF_A_GROUP),
            _ => None,
        };
        if let Some((optimizer, reason)) = clips {
            return Err(Error::Optimizer { optimizer, reason, instead: CLIP });
        }
        self.optimizer_with(inner, engine)
    }

    /// Wraps an optimizer that the caller has assembled, such as one with groups or a rule of its own. The caller guarantees that it is
    /// elementwise: any other rule would compute on shards as if they were parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if any of its groups clips. Burn reveals only how the first group clips and whether another one does, which may
    /// be by norms of full gradients. [`Error::State`] if model state is on a disk, or in 16 bit on a device.
    pub fn optimizer_of(&self, inner: ModuleOptimizer) -> Result<Optimizer, Error> {
        if inner.has_gradient_clipping() {
            let (optimizer, reason) = OF_A_GROUP;
            return Err(Error::Optimizer { optimizer, reason, instead: CLIP });
        }
        self.optimizer_with(inner, None)
    }

    fn optimizer_with(&self, inner: ModuleOptimizer, engine: Option<(Updates, Rule)>) -> Result<Optimizer, Error> {
        let is_lamb = engine.as_ref().is_some_and(|(_, rule)| matches!(rule, Rule::Lamb { .. }));
        if is_lamb && self.runtime().rank.config.int8_optimizer_states {
            let expected = "LAMB reads its moments twice, and 8 bits are too few for that: use AdamW, or ZeroConfig::bf16_optimizer_states";
            return Err(Error::State(expected.into()));
        }
        let refused = [
            (
                self.runtime().rank.config.offload.keeps_state(Tier::Disk),
                "updates parameters in memory, but model state is on a disk: keep it in memory",
            ),
            (
                !self.shared.is_on_host() && self.runtime().rank.config.param_dtype != Float::F32,
                "updates fp32 values, but shards are on a device in 16 bit: train in fp32",
            ),
            (
                self.runtime().rank.config.bf16_optimizer_states,
                "keeps its state in fp32: leave ZeroConfig::bf16_optimizer_states out",
            ),
            (
                self.runtime().rank.config.int8_optimizer_states,
                "keeps its state in fp32: leave ZeroConfig::int8_optimizer_states out",
            ),
            (
                self.runtime().rank.config.ema_decay.is_some(),
                "keeps no moving averages: leave ZeroConfig::ema_decay out",
            ),
        ];
        if let Some((_, reason)) = refused.iter().find(|(is_refused, _)| engine.is_none() && *is_refused) {
            return Err(Error::State(format!("this optimizer of Burn's {reason}, or use AdamW, Adam or LAMB")));
        }
        Ok(Optimizer { inner, zero: self.clone(), engine })
    }

    /// Builds the optimizer for a rule of the engine. Parameters for which `decays` returns false, by path and shape, have no weight decay.
    #[cfg(feature = "trainer")]
    pub(crate) fn optimizer_by(&self, rule: Rule, decays: impl Fn(&str, &[usize]) -> bool) -> Optimizer {
        let spared = self.parameters.iter().filter(|parameter| !decays(&parameter.path, parameter.shape.as_slice()));
        let spared = ParamGroup::from_paths(spared.map(|parameter| parameter.path.clone()).collect());
        let updates = Updates::default();
        let inner = ModuleOptimizer::from(updates.ruled(rule));
        let inner = inner.with_group(spared, updates.ruled(rule.with_weight_decay(0.0)), None);
        Optimizer { inner, zero: self.clone(), engine: Some((updates, rule)) }
    }
}

impl Optimizer {
    /// Updates the module. A collective: afterwards every rank reads the other ranks' updates.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if `grads` has parameters that `model` does not have; [`Error::Comm`].
    pub fn step<M: Module>(&mut self, lr: impl Into<ModuleLearningRate>, model: M, grads: Grads) -> Result<M, Error> {
        let (lr, sees_gradients) = (lr.into(), self.inner.has_gradient_clipping());
        self.step_by(model, grads, sees_gradients, |optimizer, model, grads| optimizer.step(lr, model, grads))
    }

    /// Runs [`Optimizer::step`] with `update` calling Burn's optimizer. If `update` neither reads nor changes gradients, it does not see
    /// them, and they may stay on a disk.
    pub(crate) fn step_by<M: Module>(
        &mut self,
        mut model: M,
        grads: Grads,
        sees_gradients: bool,
        update: impl FnOnce(&mut ModuleOptimizer, M, GradientsParams) -> M,
    ) -> Result<M, Error> {
        let zero = self.zero.clone();
        if !grads.are_of(&zero) {
            return Err(Error::State("the gradients are of another module than the optimizer's".into()));
        }
        if let Some(path) = zero.first_changed(&model) {
            return Err(Error::State(format!(
                "parameter '{path}' was changed after the backward pass, or is of a model before the last step: pass the model that the \
                 step returned, and publish changes with Zero::publish_changes before the next backward pass"
            )));
        }
        caught(|| zero.check_replicas())?;
        let updated: Vec<usize> = grads.updated().collect();
        let (fed, gradients) = match sees_gradients || self.engine.is_none() {
            true => (grads.into_burn(&model)?, (Vec::new(), 1.0)),
            false => (grads.placeholders(&model)?, grads.into_cells()),
        };
        caught(|| zero.begin_update())?;
        match &self.engine {
            Some((updates, _)) => updates.begin(&zero, &updated, gradients),
            None => {
                if !zero.shared.is_on_host() {
                    updated.iter().for_each(|&index| zero.parameters[index].copy_to_base());
                    model = zero.lay(model);
                }
                updated.iter().for_each(|&index| zero.parameters[index].withdraw());
            }
        }
        let model = update(&mut self.inner, model, fed);
        let ended = caught(|| {
            zero.publish(&model, &updated);
            self.engine.as_ref().map_or(Ok(()), |(updates, _)| updates.end(&zero))?;
            Ok::<M, CommError>(zero.rebase(model))
        });
        Ok(ended??)
    }

    /// Exchanges the parameters with their moving averages ([`ZeroConfig::ema_decay`](crate::ZeroConfig)), to evaluate or save these. A
    /// second call exchanges them back, bit by bit; do not train in between. A parameter without an average, because it is frozen or has not
    /// been updated, stays. A collective.
    ///
    /// # Errors
    ///
    /// [`Error::State`] without averages; [`Error::Comm`].
    pub fn swap_averages<M: Module>(&mut self, model: M) -> Result<M, Error> {
        let averages = self.engine.as_ref().filter(|_| self.zero.runtime().rank.config.ema_decay.is_some());
        let Some((updates, _)) = averages else {
            return Err(Error::State(
                "there are no moving averages: set ZeroConfig::ema_decay, and use AdamW, Adam or LAMB".into(),
            ));
        };
        let swapped = caught(|| {
            self.zero.fence("weights and their averages are exchanged");
            updates.swap_averages(&self.zero);
            self.zero.rebase(model)
        });
        Ok(swapped?)
    }

    /// Sets the momentum from the next step on, for schedules that cycle it.
    #[cfg(feature = "trainer")]
    pub(crate) fn set_momentum(&self, momentum: f32, second_beta: f32) {
        if let Some((updates, _)) = &self.engine {
            updates.set_momentum(momentum, second_beta);
        }
    }

    /// Returns Burn's optimizer. Its records hold this rank's shards; the state of AdamW, Adam and LAMB is in checkpoints alone.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.inner
    }
}
