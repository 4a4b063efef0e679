//! Activations.

use burn_backend::Scalar;
use burn_backend::ops::ActivationOps;

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> ActivationOps<Self> for Zero<B> {
    recorded! {
        fn leaky_relu(tensor: float, negative_slope: (Scalar)) -> float;
        fn relu(tensor: float) -> float;
        fn gelu(tensor: float) -> float;
        fn prelu(tensor: float, alpha: float) -> float;
        fn sigmoid(tensor: float) -> float;
        fn hard_sigmoid(tensor: float, alpha: (Scalar), beta: (Scalar)) -> float;
        fn log_sigmoid(tensor: float) -> float;
        fn softmax(tensor: float, dim: (usize)) -> float = reductions::softmax::<B>;
        fn log_softmax(tensor: float, dim: (usize)) -> float = reductions::log_softmax::<B>;
        fn softmin(tensor: float, dim: (usize)) -> float = reductions::softmin::<B>;
    }

    forward! {
        fn relu_backward(output: float, grad: float) -> float;
        fn gelu_backward(x: float, grad: float) -> float;
        fn sigmoid_backward(output: float, grad: float) -> float;
        fn log_sigmoid_backward(x: float, grad: float) -> float;
    }
}
