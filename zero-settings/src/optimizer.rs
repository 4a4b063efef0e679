//! The optimizers, with DeepSpeed's names and defaults.

use zero_kernels::{NewtonSchulz, Rule};

use super::node::Node;
use super::reader::Reader;

/// An optimizer and its parameters. DeepSpeed's type "Adam" is [`Rule::AdamW`], or [`Rule::Adam`] with `adam_w_mode: false`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerPlan {
    /// Learning rate, before any schedule.
    pub lr: f64,
    /// The update rule.
    pub rule: Rule,
}

impl OptimizerPlan {
    /// The optimizer of a plan that does not name one: AdamW with PyTorch's defaults.
    pub(super) const DEFAULT: Self = Self { lr: 1e-3, rule: Rule::adamw() };

    /// Describes the optimizer in one line.
    pub(super) fn describe(&self) -> String {
        let Self { lr, rule } = *self;
        let (name, decay) = match rule {
            Rule::AdamW { .. } => ("AdamW", "weight decay"),
            Rule::Adam { .. } => ("Adam", "L2 penalty"),
            Rule::Lamb { .. } => ("LAMB", "weight decay"),
            Rule::Sgd { .. } => ("SGD", "L2 penalty"),
            Rule::Lion { .. } => ("Lion", "weight decay"),
            Rule::Adagrad { .. } => ("Adagrad", "L2 penalty"),
            Rule::Muon { .. } => ("Muon for matrices in layers, AdamW for the rest", "weight decay"),
        };
        let mut text = format!("{name}, lr {lr}");
        if let Rule::Muon { adam_lr, .. } = rule {
            text += &format!(" and {}", short(lr * adam_lr));
        }
        let (betas, epsilon) = self.hyperparameters();
        if let Some((beta_1, beta_2)) = betas {
            text += &format!(", betas {beta_1} and {beta_2}");
        }
        if let Some(epsilon) = epsilon {
            text += &format!(", epsilon {epsilon:?}");
        }
        if let Rule::Sgd { momentum, nesterov, .. } | Rule::Muon { momentum, nesterov, .. } = rule {
            text += &format!(", {} {momentum}", if nesterov { "Nesterov momentum" } else { "momentum" });
        }
        if let Rule::Muon { ns_method, .. } = rule {
            text += match ns_method {
                NewtonSchulz::Standard => ", standard Newton-Schulz iterations",
                NewtonSchulz::Gram => ", Gram Newton-Schulz iterations",
            };
        }
        text += &format!(", {decay} {}", rule.weight_decay());
        if let Rule::AdamW { bias_correction: false, .. }
        | Rule::Adam { bias_correction: false, .. }
        | Rule::Lamb { bias_correction: false, .. } = rule
        {
            text += ", no bias correction";
        }
        if let Rule::Lamb { max_coeff, min_coeff, .. } = rule {
            text += &format!(", trust ratio from {min_coeff} to {max_coeff}");
        }
        text
    }

    /// Returns betas and epsilon, if the rule has them.
    pub fn hyperparameters(&self) -> (Option<(f32, f32)>, Option<f32>) {
        match self.rule {
            Rule::AdamW { beta_1, beta_2, epsilon, .. }
            | Rule::Adam { beta_1, beta_2, epsilon, .. }
            | Rule::Lamb { beta_1, beta_2, epsilon, .. }
            | Rule::Muon { beta_1, beta_2, epsilon, .. } => (Some((beta_1, beta_2)), Some(epsilon)),
            Rule::Lion { beta_1, beta_2, .. } => (Some((beta_1, beta_2)), None),
            Rule::Adagrad { epsilon, .. } => (None, Some(epsilon)),
            Rule::Sgd { .. } => (None, None),
        }
    }

    /// Reads `optimizer`.
    pub(super) fn read(top: &Reader<'_>) -> Option<Self> {
        let (name, params) = top.tagged("optimizer")?;
        let decoupled = name == "AdamW" || name == "Adam" && params.get("adam_w_mode");
        let mut values = params.values(Vec::new());
        let (beta_1, beta_2): (f64, f64) = values.get("betas").and_then(Node::to).unwrap_or_default();
        values.set("beta_1", beta_1.into());
        values.set("beta_2", beta_2.into());
        // torch.optim.AdamW is the only constructor with a nonzero default weight decay.
        if decoupled && params.get("torch_adam") && params.absent("weight_decay") {
            values.set("weight_decay", 0.01.into());
        }
        let mut lr: f64 = params.get("lr");
        if name == "Muon" {
            let rate = |key: &str| values.get(key).and_then(Node::to::<f64>);
            // Without any, each half has its own default.
            let adam = rate("adam_lr").unwrap_or(if params.absent("lr") { 3e-4 } else { lr });
            lr = rate("muon_lr").unwrap_or(lr);
            if lr == 0.0 && adam != 0.0 {
                params.conflict("adam_lr", "cannot be above 0 while the rate of Muon is 0: give a `muon_lr` above 0");
            }
            values.set("adam_lr", (if lr == 0.0 { 1.0 } else { adam / lr }).into());
            let scale: String = params.get("adjust_lr_fn");
            values.set("match_rms", (scale == "match_rms_adamw").into());
        }
        let rule = Node::map([("type", if decoupled { "AdamW" } else { name }.into()), ("params", values)]).to()?;
        if matches!(rule, Rule::Sgd { nesterov: true, momentum: 0.0, .. }) {
            params.conflict("nesterov", "needs a momentum: give `momentum` above 0 or remove `nesterov`");
        }
        if let Rule::Lamb { max_coeff, min_coeff, .. } = rule
            && min_coeff > max_coeff
        {
            let message =
                format!("{min_coeff} is above `max_coeff`, {max_coeff}: give a smaller one, or a larger `max_coeff`");
            params.conflict("min_coeff", &message);
        }
        Some(Self { lr, rule })
    }
}

/// Converts to DeepSpeed's section.
impl From<OptimizerPlan> for Node {
    fn from(plan: OptimizerPlan) -> Self {
        let mut node = Node::of(&plan.rule);
        node.set("params.lr", plan.lr.into());
        if let (Some(first), Some(second)) = (node.remove("params.beta_1"), node.remove("params.beta_2")) {
            node.set("params.betas", Node::List(vec![first, second]));
        }
        if let Rule::Muon { match_rms, adam_lr, .. } = plan.rule {
            node.remove("params.match_rms");
            node.set("params.adjust_lr_fn", if match_rms { "match_rms_adamw" } else { "original" }.into());
            node.set("params.adam_lr", (plan.lr * adam_lr).into());
        }
        if matches!(plan.rule, Rule::Adam { .. }) {
            node.set("params.adam_w_mode", false.into());
        }
        node
    }
}

/// Rounds the result of a computation to the six digits that a reader needs: 0.0006 * 0.1 is 0.00006.
pub(crate) fn short(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    #[test]
    fn products_are_shown_without_their_rounding() {
        assert_eq!(
            [6e-4 * 0.1, 0.02 * 0.15, 1e-3, 0.0].map(|value| super::short(value).to_string()),
            ["0.00006", "0.003", "0.001", "0"]
        );
    }
}
