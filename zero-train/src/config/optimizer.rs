//! The optimizers, with DeepSpeed's names and defaults.

use serde::{Deserialize, Serialize};
use zero_burn::optim::Rule;

use super::node::Node;
use super::reader::Reader;

/// An optimizer and its parameters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "params")]
pub enum OptimizerPlan {
    /// Adam with decoupled weight decay, <https://arxiv.org/abs/1711.05101>. DeepSpeed's types "AdamW" and "Adam".
    AdamW {
        /// Learning rate.
        lr: f64,
        /// Decay of the first moment, in [0, 1).
        beta_1: f64,
        /// Decay of the second moment, in [0, 1).
        beta_2: f64,
        /// Added to the root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
        /// Whether the means are divided by what they lack in the first steps.
        bias_correction: bool,
    },
    /// Adam with weight decay added to the gradient, <https://arxiv.org/abs/1412.6980>. DeepSpeed's type "Adam" with
    /// `adam_w_mode: false`.
    Adam {
        /// Learning rate.
        lr: f64,
        /// Decay of the first moment, in [0, 1).
        beta_1: f64,
        /// Decay of the second moment, in [0, 1).
        beta_2: f64,
        /// Added to the root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
        /// Whether the means are divided by what they lack in the first steps.
        bias_correction: bool,
    },
    /// LAMB, <https://arxiv.org/abs/1904.00962>.
    Lamb {
        /// Learning rate.
        lr: f64,
        /// Decay of the first moment, in [0, 1).
        beta_1: f64,
        /// Decay of the second moment, in [0, 1).
        beta_2: f64,
        /// Added to the root of the second moment.
        #[serde(rename = "eps")]
        epsilon: f64,
        /// Weight decay, a part of the update.
        weight_decay: f64,
        /// Whether the means are divided by what they lack in the first steps.
        bias_correction: bool,
        /// The largest trust ratio.
        max_coeff: f64,
        /// The smallest trust ratio; at most `max_coeff`.
        min_coeff: f64,
    },
    /// Stochastic gradient descent.
    #[serde(rename = "SGD")]
    Sgd {
        /// Learning rate.
        lr: f64,
        /// Momentum; 0 has none.
        momentum: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
        /// Nesterov's momentum; `momentum` is then above 0.
        nesterov: bool,
    },
    /// Lion, <https://arxiv.org/abs/2302.06675>.
    Lion {
        /// Learning rate.
        lr: f64,
        /// Weight of the momentum in the update, in [0, 1).
        beta_1: f64,
        /// Decay of the momentum, in [0, 1).
        beta_2: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// Adagrad, <https://jmlr.org/papers/v12/duchi11a.html>.
    Adagrad {
        /// Learning rate.
        lr: f64,
        /// Added to the root of the sum of squares.
        #[serde(rename = "eps")]
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
}

impl OptimizerPlan {
    /// The optimizer of a plan that names none: AdamW with PyTorch's defaults.
    pub(super) const DEFAULT: Self = Self::adamw(1e-3, 0.9, 0.999, 1e-8, 0.01);

    /// AdamW with bias correction.
    pub(crate) const fn adamw(lr: f64, beta_1: f64, beta_2: f64, epsilon: f64, weight_decay: f64) -> Self {
        Self::AdamW { lr, beta_1, beta_2, epsilon, weight_decay, bias_correction: true }
    }

    /// The learning rate, before any schedule.
    pub fn learning_rate(&self) -> f64 {
        match *self {
            OptimizerPlan::AdamW { lr, .. }
            | OptimizerPlan::Adam { lr, .. }
            | OptimizerPlan::Lamb { lr, .. }
            | OptimizerPlan::Sgd { lr, .. }
            | OptimizerPlan::Lion { lr, .. }
            | OptimizerPlan::Adagrad { lr, .. } => lr,
        }
    }

    /// What updates parameters.
    pub(super) fn rule(&self) -> Rule {
        match *self {
            OptimizerPlan::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } => Rule::AdamW {
                beta_1: beta_1 as f32,
                beta_2: beta_2 as f32,
                epsilon: epsilon as f32,
                weight_decay: weight_decay as f32,
                bias_correction,
            },
            OptimizerPlan::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction, .. } => Rule::Adam {
                beta_1: beta_1 as f32,
                beta_2: beta_2 as f32,
                epsilon: epsilon as f32,
                weight_decay: weight_decay as f32,
                bias_correction,
            },
            OptimizerPlan::Lamb {
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
                bias_correction,
                max_coeff,
                min_coeff,
                ..
            } => Rule::Lamb {
                beta_1: beta_1 as f32,
                beta_2: beta_2 as f32,
                epsilon: epsilon as f32,
                weight_decay: weight_decay as f32,
                bias_correction,
                max_coeff: max_coeff as f32,
                min_coeff: min_coeff as f32,
            },
            OptimizerPlan::Sgd { momentum, weight_decay, nesterov, .. } => {
                Rule::Sgd { momentum: momentum as f32, nesterov, weight_decay: weight_decay as f32 }
            }
            OptimizerPlan::Lion { beta_1, beta_2, weight_decay, .. } => {
                Rule::Lion { beta_1: beta_1 as f32, beta_2: beta_2 as f32, weight_decay: weight_decay as f32 }
            }
            OptimizerPlan::Adagrad { epsilon, weight_decay, .. } => {
                Rule::Adagrad { epsilon: epsilon as f32, weight_decay: weight_decay as f32 }
            }
        }
    }

    /// In one line.
    pub(super) fn describe(&self) -> String {
        let bias = |corrected: bool| if corrected { "" } else { ", no bias correction" };
        match self {
            OptimizerPlan::AdamW { lr, beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
                let bias = bias(*bias_correction);
                format!(
                    "AdamW, lr {lr}, betas {beta_1} and {beta_2}, epsilon {epsilon}, weight decay {weight_decay}{bias}"
                )
            }
            OptimizerPlan::Adam { lr, beta_1, beta_2, epsilon, weight_decay, bias_correction } => {
                let bias = bias(*bias_correction);
                format!(
                    "Adam, lr {lr}, betas {beta_1} and {beta_2}, epsilon {epsilon}, L2 penalty {weight_decay}{bias}"
                )
            }
            OptimizerPlan::Lamb {
                lr,
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
                bias_correction,
                max_coeff,
                min_coeff,
            } => {
                let bias = bias(*bias_correction);
                format!(
                    "LAMB, lr {lr}, betas {beta_1} and {beta_2}, epsilon {epsilon}, weight decay {weight_decay}{bias}, \
                     trust ratio from {min_coeff} to {max_coeff}"
                )
            }
            OptimizerPlan::Sgd { lr, momentum, weight_decay, nesterov } => {
                let kind = if *nesterov { "Nesterov momentum" } else { "momentum" };
                format!("SGD, lr {lr}, {kind} {momentum}, L2 penalty {weight_decay}")
            }
            OptimizerPlan::Lion { lr, beta_1, beta_2, weight_decay } => {
                format!("Lion, lr {lr}, betas {beta_1} and {beta_2}, weight decay {weight_decay}")
            }
            OptimizerPlan::Adagrad { lr, epsilon, weight_decay } => {
                format!("Adagrad, lr {lr}, epsilon {epsilon}, L2 penalty {weight_decay}")
            }
        }
    }

    /// Betas, epsilon and weight decay, those that it has.
    pub(crate) fn hyperparameters(&self) -> (Option<f64>, Option<f64>, Option<f64>, f64) {
        match *self {
            OptimizerPlan::AdamW { beta_1, beta_2, epsilon, weight_decay, .. }
            | OptimizerPlan::Adam { beta_1, beta_2, epsilon, weight_decay, .. }
            | OptimizerPlan::Lamb { beta_1, beta_2, epsilon, weight_decay, .. } => {
                (Some(beta_1), Some(beta_2), Some(epsilon), weight_decay)
            }
            OptimizerPlan::Lion { beta_1, beta_2, weight_decay, .. } => {
                (Some(beta_1), Some(beta_2), None, weight_decay)
            }
            OptimizerPlan::Adagrad { epsilon, weight_decay, .. } => (None, None, Some(epsilon), weight_decay),
            OptimizerPlan::Sgd { weight_decay, .. } => (None, None, None, weight_decay),
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
        // torch.optim.AdamW is the one constructor whose weight decay is not 0 by default.
        if decoupled && params.get("torch_adam") && params.absent("weight_decay") {
            values.set("weight_decay", 0.01.into());
        }
        let plan = Node::map([("type", if decoupled { "AdamW" } else { name }.into()), ("params", values)]).to()?;
        if matches!(plan, OptimizerPlan::Sgd { nesterov: true, momentum: 0.0, .. }) {
            params.conflict("nesterov", "needs a momentum: give `momentum` above 0 or remove `nesterov`");
        }
        if let OptimizerPlan::Lamb { max_coeff, min_coeff, .. } = plan
            && min_coeff > max_coeff
        {
            let message =
                format!("{min_coeff} is above `max_coeff`, {max_coeff}: give a smaller one, or a larger `max_coeff`");
            params.conflict("min_coeff", &message);
        }
        Some(plan)
    }
}

/// The section DeepSpeed would have.
impl From<OptimizerPlan> for Node {
    fn from(plan: OptimizerPlan) -> Self {
        let mut node = Node::of(&plan);
        if let (Some(first), Some(second)) = (node.remove("params.beta_1"), node.remove("params.beta_2")) {
            node.set("params.betas", Node::List(vec![first, second]));
        }
        if matches!(plan, OptimizerPlan::Adam { .. }) {
            node.set("params.adam_w_mode", false.into());
        }
        node
    }
}
