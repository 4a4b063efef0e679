//! Small models, and the parameters of any model.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_flex::Flex;
use zero_models::{BertConfig, Gpt2Config};

pub fn gpt2() -> Gpt2Config {
    Gpt2Config {
        vocab_size: 23,
        n_positions: 8,
        n_embd: 12,
        n_layer: 2,
        n_head: 3,
        ..Gpt2Config::preset("tiny").unwrap()
    }
}

pub fn bert() -> BertConfig {
    BertConfig {
        vocab_size: 23,
        hidden_size: 12,
        num_attention_heads: 3,
        intermediate_size: 20,
        max_position_embeddings: 8,
        ..BertConfig::preset("bert-tiny").unwrap()
    }
}

/// Returns the parameters' elements by their path in the module, in visiting order.
pub fn by_path<M: Module<Flex>>(model: &M) -> Vec<(String, Vec<f32>)> {
    #[derive(Default)]
    struct Values {
        path: Vec<String>,
        found: Vec<(String, Vec<f32>)>,
    }
    impl ModuleVisitor<Flex> for Values {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Flex, D>>) {
            self.found.push((self.path.join("."), param.val().into_data().to_vec().unwrap()));
        }
    }
    let mut values = Values::default();
    model.visit(&mut values);
    values.found
}
