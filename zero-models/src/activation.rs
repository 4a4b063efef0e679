//! Activation functions of the feed-forward layers, by their Hugging Face names.

#[cfg(feature = "burn")]
use burn::tensor::{Tensor, activation};
#[cfg(feature = "burn")]
use zero_ops::{FusedBackend, Gelu};

use crate::suggest::closest;
use crate::{ModelError, Result};

/// An activation function that Hugging Face's GPT-2 and BERT configurations name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU by its tanh approximation (`gelu_new`, `gelu_pytorch_tanh` and `gelu_fast` in Hugging Face).
    GeluTanh,
    /// GELU by the error function (`gelu` in Hugging Face).
    GeluErf,
    /// The rectified linear unit (`relu` in Hugging Face).
    Relu,
}

/// Every accepted name with its function. If a function has several names, the first is written.
const NAMES: &[(&str, Activation)] = &[
    ("gelu_new", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu", Activation::GeluErf),
    ("relu", Activation::Relu),
];

impl Activation {
    /// Reads a Hugging Face name found under `key` in a configuration of `model`.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] when the name is not one of `gelu_new`, `gelu_pytorch_tanh`, `gelu_fast`, `gelu`
    /// and `relu`.
    pub fn from_hf_name(model: &'static str, key: &'static str, name: &str) -> Result<Self> {
        if let Some(&(_, found)) = NAMES.iter().find(|(known, _)| *known == name) {
            return Ok(found);
        }
        let known: Vec<&'static str> = NAMES.iter().map(|(known, _)| *known).collect();
        let hint = closest(name, &known).map(|word| format!(" (did you mean \"{word}\"?)")).unwrap_or_default();
        Err(ModelError::Unsupported {
            model,
            key,
            got: format!("\"{name}\""),
            supported: format!("one of {}{hint}", known.join(", ")),
        })
    }

    /// Returns the name of this function in Hugging Face.
    pub fn hf_name(self) -> &'static str {
        NAMES.iter().find(|(_, known)| *known == self).expect("every function has a name").0
    }
}

#[cfg(feature = "burn")]
impl Activation {
    /// Applies the function to every element of rows `[n, f]`.
    pub fn forward<B: FusedBackend>(self, x_nf: Tensor<B, 2>) -> Tensor<B, 2> {
        self.forward_with_bias(x_nf, None)
    }

    /// Adds the bias `[f]`, if there is one, to rows `[n, f]`, and applies the function.
    pub fn forward_with_bias<B: FusedBackend>(self, x_nf: Tensor<B, 2>, bias_f: Option<Tensor<B, 1>>) -> Tensor<B, 2> {
        let kind = match self {
            Activation::GeluTanh => Gelu::Tanh,
            Activation::GeluErf => Gelu::Erf,
            Activation::Relu => {
                let x_nf = match bias_f {
                    Some(bias_f) => x_nf + bias_f.unsqueeze(),
                    None => x_nf,
                };
                return activation::relu(x_nf);
            }
        };
        zero_ops::gelu(kind, x_nf, bias_f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    #[test]
    fn gelu_tanh_is_the_published_formula() {
        let xs: Vec<f32> = (-60..=60).map(|i| i as f32 / 10.0).collect();
        let x = Tensor::<Flex, 1>::from_floats(xs.as_slice(), &Default::default()).unsqueeze::<2>();
        let got: Vec<f32> = Activation::GeluTanh.forward(x).into_data().to_vec().unwrap();
        for (x, got) in xs.iter().map(|&x| x as f64).zip(got) {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            let expected = 0.5 * x * (1.0 + inner.tanh());
            assert!((expected - got as f64).abs() < 1e-6, "gelu({x}) = {expected}, got {got}");
        }
    }

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for activation in [Activation::GeluTanh, Activation::GeluErf, Activation::Relu] {
            let name = activation.hf_name();
            let read = Activation::from_hf_name("GPT-2", "activation_function", name).unwrap();
            assert_eq!(read, activation);
        }
        let error = Activation::from_hf_name("GPT-2", "activation_function", "gelu_nwe").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("did you mean \"gelu_new\"?"), "{text}");
    }
}
