//! Burn's optimizers on shards: elementwise ones, and LAMB.

use std::ops::RangeInclusive;

use burn::module::Module;
#[cfg(feature = "trainer")]
use burn::module::ParamGroup;
use burn_optim::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn_optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LBFGSConfig, LambConfig,
    LionConfig, ModuleOptimizer, MuonConfig, OptimizerRecord, RmsPropConfig, SgdConfig,
};
use zero_kernels::Rule;

use crate::adamw::{FusedAdamW, fields, number};
use crate::error::Error;
use crate::grads::{Grads, mark};
use crate::lamb::Lamb;
use crate::slot::Slot;
use crate::zero::Zero;

/// The configuration of one of Burn's optimizers.
pub trait OptimizerConfig {
    /// Builds the optimizer, if it can work on shards.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if it needs full parameters.
    fn elementwise(&self) -> Result<ModuleOptimizer, Error>;

    /// Returns the optimizer's name in checkpoints, if they can store its state.
    fn saved_name(&self) -> Option<&'static str> {
        None
    }

    /// Builds an optimizer whose update of a shard needs norms over all ranks, and the state that it shares for them.
    #[doc(hidden)]
    fn by_norms(&self) -> Option<(ModuleOptimizer, Lamb)> {
        None
    }

    /// Builds the optimizer of full parameters that a learner of burn-train would use for this configuration.
    #[doc(hidden)]
    fn of_wholes(&self) -> Result<ModuleOptimizer, Error> {
        self.elementwise()
    }
}

macro_rules! elementwise {
    ($($config:ident $name:expr;)*) => {$(
        impl OptimizerConfig for $config {
            fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
                Ok(self.init())
            }
            fn saved_name(&self) -> Option<&'static str> {
                $name
            }
        }
    )*};
}

impl OptimizerConfig for AdamWConfig {
    fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
        Ok(FusedAdamW::of(self).map_or_else(|| self.init(), ModuleOptimizer::from))
    }
    fn saved_name(&self) -> Option<&'static str> {
        Some("adamw")
    }
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
    AdaGradConfig None;
    AdamConfig Some("adam");
    AdanConfig None;
    LionConfig None;
    RmsPropConfig None;
    SgdConfig None;
}

refused! {
    AdafactorConfig "Adafactor" "computes sums over rows and columns of a parameter";
    LBFGSConfig "LBFGS" "computes dot products over all parameters";
    MuonConfig "Muon" "orthogonalizes full gradients";
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

    fn saved_name(&self) -> Option<&'static str> {
        Some("lamb")
    }

    fn by_norms(&self) -> Option<(ModuleOptimizer, Lamb)> {
        let fields = fields(&self.lamb);
        let rule = Rule::Lamb {
            beta_1: number(&fields, "beta_1")?,
            beta_2: number(&fields, "beta_2")?,
            epsilon: number(&fields, "epsilon")?,
            weight_decay: number(&fields, "weight_decay")?,
            bias_correction: true,
            min_coeff: *self.ratios.start(),
            max_coeff: *self.ratios.end(),
        };
        let lamb = Lamb::new(rule);
        let optimizer = ModuleOptimizer::from(lamb.clone());
        let clipping =
            serde_json::from_value::<Option<GradientClippingConfig>>(fields["grad_clipping"].clone()).ok()?;
        Some((
            clipping.into_iter().fold(optimizer, |optimizer, clipping| optimizer.with_grad_clipping(clipping.init())),
            lamb,
        ))
    }
}

impl OptimizerConfig for LambConfig {
    fn elementwise(&self) -> Result<ModuleOptimizer, Error> {
        if has_trust_ratio(self) { unbounded(self).elementwise() } else { Ok(self.init()) }
    }

    fn saved_name(&self) -> Option<&'static str> {
        has_trust_ratio(self).then_some("lamb")
    }

    fn by_norms(&self) -> Option<(ModuleOptimizer, Lamb)> {
        unbounded(self).by_norms().filter(|_| has_trust_ratio(self))
    }

    fn of_wholes(&self) -> Result<ModuleOptimizer, Error> {
        Ok(self.init())
    }
}

fn has_trust_ratio(config: &LambConfig) -> bool {
    fields(config)["use_trust_ratio"] != false
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
    lamb: Option<Lamb>,
    pub(crate) saved_name: Option<&'static str>,
}

impl Zero {
    /// Builds an optimizer of the module's shards.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] for an optimizer that needs full parameters, or that clips by the norm of each parameter ([`Grads::clip_norm`]
    /// clips by the norm of all).
    ///
    /// ```
    /// # use burn_optim::{AdamWConfig, MuonConfig};
    /// # use zero_param::OptimizerConfig;
    /// assert!(AdamWConfig::new().elementwise().is_ok());
    /// assert!(MuonConfig::new().elementwise().err().unwrap().to_string().contains("Muon"));
    /// ```
    pub fn optimizer(&self, config: &impl OptimizerConfig) -> Result<Optimizer, Error> {
        let (inner, lamb) = match config.by_norms() {
            Some((inner, lamb)) => (inner, Some(lamb)),
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
        Ok(Optimizer { inner, zero: self.clone(), lamb, saved_name: config.saved_name() })
    }

    /// Wraps an optimizer that the caller has assembled, such as one with groups or a rule of its own. The caller guarantees that it is
    /// elementwise: any other rule would compute on shards as if they were parameters.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] if any of its groups clips. Burn reveals only how the first group clips and whether another one does, which may
    /// be by norms of full gradients.
    pub fn optimizer_of(&self, inner: ModuleOptimizer) -> Result<Optimizer, Error> {
        if inner.has_gradient_clipping() {
            let (optimizer, reason) = OF_A_GROUP;
            return Err(Error::Optimizer { optimizer, reason, instead: CLIP });
        }
        Ok(Optimizer { inner, zero: self.clone(), lamb: None, saved_name: None })
    }
}

#[cfg(feature = "trainer")]
impl Zero {
    /// Builds the optimizer for a rule that both integrations have. Parameters for which `decays` returns false, by path and shape, have no
    /// weight decay.
    ///
    /// # Errors
    ///
    /// [`Error::Optimizer`] for rules other than AdamW and LAMB.
    pub(crate) fn optimizer_by(&self, rule: Rule, decays: impl Fn(&str, &[usize]) -> bool) -> Result<Optimizer, Error> {
        let spared = self.slots.iter().filter(|slot| !decays(&slot.path, &slot.whole.to_vec()));
        let spared = ParamGroup::from_paths(spared.map(|slot| slot.path.clone()).collect());
        let plain = rule.with_weight_decay(0.0);
        let (inner, lamb) = match rule {
            Rule::AdamW { .. } => {
                let inner = ModuleOptimizer::from(FusedAdamW::by(rule));
                (inner.with_group(spared, FusedAdamW::by(plain), None), None)
            }
            Rule::Lamb { .. } => {
                let lamb = Lamb::new(rule);
                let inner = ModuleOptimizer::from(lamb.clone());
                (inner.with_group(spared, lamb.beside(plain), None), Some(lamb))
            }
            _ => {
                let (reason, instead) = ("has no kernel over shards with Burn 0.22", "use AdamW or LAMB");
                return Err(Error::Optimizer { optimizer: rule.name(), reason, instead });
            }
        };
        Ok(Optimizer { inner, zero: self.clone(), lamb, saved_name: Some(rule.name()) })
    }
}

impl Optimizer {
    /// Updates the module. A collective: afterwards every rank reads the other ranks' updates.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if `grads` has parameters that `model` does not have; [`Error::Comm`].
    pub fn step<M: Module>(&mut self, lr: impl Into<ModuleLearningRate>, model: M, grads: Grads) -> Result<M, Error> {
        let lr = lr.into();
        self.step_by(model, grads, |optimizer, model, grads| optimizer.step(lr.clone(), model, grads))
    }

    /// Runs [`Optimizer::step`] with `update` calling Burn's optimizer.
    pub(crate) fn step_by<M: Module>(
        &mut self,
        model: M,
        grads: Grads,
        update: impl Fn(&mut ModuleOptimizer, M, GradientsParams) -> M,
    ) -> Result<M, Error> {
        let updated: Vec<usize> = grads.updated().collect();
        let grads = grads.into_burn(&model)?;
        self.zero.fence()?;
        let updated = updated.iter().map(|&index| &*self.zero.slots[index]);
        updated.clone().for_each(Slot::withdraw);
        if let Some(lamb) = &self.lamb {
            lamb.begin(updated.clone().map(Slot::counted));
        }
        let mut model = update(&mut self.inner, model, grads);
        if let Some(lamb) = &self.lamb {
            lamb.exchange(&*self.zero.shared.comm)?;
            let marks = mark(&model, updated.map(|slot| slot.index).collect(), &self.zero);
            model = update(&mut self.inner, model, marks);
        }
        Ok(self.zero.publish(model))
    }

    pub(crate) fn with_record(self, record: OptimizerRecord) -> Self {
        Self { inner: self.inner.load_record(record), ..self }
    }

    /// Returns Burn's optimizer. Its records hold this rank's shards.
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.inner
    }
}
