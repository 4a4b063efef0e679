//! Evaluation and export with the moving averages of the weights.

use burn::module::AutodiffModule;
use zero_burn::module::ZeroAutodiff;

use super::{EngineError, EngineOptimizer, Result, ZeroEngine};

impl<A: ZeroAutodiff, M: AutodiffModule<A>, O: EngineOptimizer<A, M>> ZeroEngine<A, M, O> {
    /// Runs `f` with the parameters replaced by their exponential moving averages
    /// ([`ZeroConfig::ema_decay`](zero_burn::config::ZeroConfig::ema_decay)): [`evaluate`](Self::evaluate),
    /// [`export`](Self::export) and [`full_parameter`](Self::full_parameter) use these. Restores the weights afterwards,
    /// bit for bit. A parameter that is frozen or has not been updated has no average and keeps its value. Every rank calls
    /// it. `f` must not train.
    ///
    /// # Errors
    ///
    /// [`EngineError::Order`] between the micro-batches of an update, or without averages.
    pub fn with_averages<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> Result<R> {
        self.swap_averages()?;
        let result = f(self);
        self.swap_averages()?;
        Ok(result)
    }

    /// Swaps weights and averages.
    pub(crate) fn swap_averages(&mut self) -> Result<()> {
        let has_averages = zero_burn::ranks::config::<A::Base>().ema_decay.is_some();
        let fused = self.optimizer.fused_mut().filter(|_| has_averages && self.micro_batches == 0);
        let Some(fused) = fused else {
            return Err(EngineError::Order(
                "averages were requested between the micro-batches of an update, or none are kept: set \
                 ZeroConfig::ema_decay, and request them after step",
            ));
        };
        let model = self.model.take().expect("the module is absent only inside of step");
        self.model = Some(fused.swap_averages(model));
        Ok(())
    }
}
