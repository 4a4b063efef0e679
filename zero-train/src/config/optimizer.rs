//! The optimizers, with DeepSpeed's names and defaults.

use super::node::Node;
use super::reader::Reader;

/// An optimizer and its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
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
        epsilon: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
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
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
    /// Stochastic gradient descent.
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
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
}

impl OptimizerPlan {
    /// The learning rate, before any schedule.
    pub fn learning_rate(&self) -> f64 {
        match *self {
            OptimizerPlan::AdamW { lr, .. }
            | OptimizerPlan::Adam { lr, .. }
            | OptimizerPlan::Sgd { lr, .. }
            | OptimizerPlan::Lion { lr, .. }
            | OptimizerPlan::Adagrad { lr, .. } => lr,
        }
    }

    /// Reads `optimizer`.
    pub(super) fn read(top: &Reader<'_>) -> Option<Self> {
        let (name, params) = top.tagged("optimizer")?;
        let lr = params.f64("lr");
        Some(match name {
            "SGD" => {
                let (momentum, nesterov) = (params.f64("momentum"), params.bool("nesterov"));
                if nesterov && momentum == 0.0 {
                    params.conflict("nesterov", "needs a momentum: give `momentum` above 0 or remove `nesterov`");
                }
                OptimizerPlan::Sgd { lr, momentum, weight_decay: params.f64("weight_decay"), nesterov }
            }
            "Lion" => {
                let (beta_1, beta_2) = params.pair("betas");
                OptimizerPlan::Lion { lr, beta_1, beta_2, weight_decay: params.f64("weight_decay") }
            }
            "Adagrad" => {
                OptimizerPlan::Adagrad { lr, epsilon: params.f64("eps"), weight_decay: params.f64("weight_decay") }
            }
            adam => {
                let (beta_1, beta_2) = params.pair("betas");
                let epsilon = params.f64("eps");
                let decoupled = adam == "AdamW" || params.bool("adam_w_mode");
                // torch.optim.AdamW is the one constructor whose weight decay is not 0 by default.
                let torch_default = decoupled && params.bool("torch_adam");
                let weight_decay = if torch_default && !params.given("weight_decay") && !params.is_auto("weight_decay")
                {
                    0.01
                } else {
                    params.f64("weight_decay")
                };
                if decoupled {
                    OptimizerPlan::AdamW { lr, beta_1, beta_2, epsilon, weight_decay }
                } else {
                    OptimizerPlan::Adam { lr, beta_1, beta_2, epsilon, weight_decay }
                }
            }
        })
    }

    /// The section DeepSpeed would have.
    pub(super) fn to_node(self) -> Node {
        let betas = |first: f64, second: f64| Node::List(vec![first.into(), second.into()]);
        let (name, params) = match self {
            OptimizerPlan::AdamW { lr, beta_1, beta_2, epsilon, weight_decay } => (
                "AdamW",
                vec![
                    ("lr", lr.into()),
                    ("betas", betas(beta_1, beta_2)),
                    ("eps", epsilon.into()),
                    ("weight_decay", weight_decay.into()),
                ],
            ),
            OptimizerPlan::Adam { lr, beta_1, beta_2, epsilon, weight_decay } => (
                "Adam",
                vec![
                    ("lr", lr.into()),
                    ("betas", betas(beta_1, beta_2)),
                    ("eps", epsilon.into()),
                    ("weight_decay", weight_decay.into()),
                    ("adam_w_mode", false.into()),
                ],
            ),
            OptimizerPlan::Sgd { lr, momentum, weight_decay, nesterov } => (
                "SGD",
                vec![
                    ("lr", lr.into()),
                    ("momentum", momentum.into()),
                    ("weight_decay", weight_decay.into()),
                    ("nesterov", nesterov.into()),
                ],
            ),
            OptimizerPlan::Lion { lr, beta_1, beta_2, weight_decay } => (
                "Lion",
                vec![("lr", lr.into()), ("betas", betas(beta_1, beta_2)), ("weight_decay", weight_decay.into())],
            ),
            OptimizerPlan::Adagrad { lr, epsilon, weight_decay } => {
                ("Adagrad", vec![("lr", lr.into()), ("eps", epsilon.into()), ("weight_decay", weight_decay.into())])
            }
        };
        Node::tagged(name, params)
    }
}

impl Node {
    /// A `type` with its `params`.
    pub(super) fn tagged(name: &str, params: Vec<(&str, Node)>) -> Node {
        let params = params.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Node::Map(vec![("type".to_owned(), name.into()), ("params".to_owned(), Node::Map(params))])
    }
}
