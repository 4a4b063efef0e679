//! The GPT-2 module: computes logits or a loss from token ids.
//!
//! Between embedding and head, activations are rows `[n, d]`: a product of rank-2 matrices needs no batched weight gradient that is
//! summed afterwards.
//!
//! Shape suffixes: `b` batch, `t` positions, `d` width of the model, `v` vocabulary, `n` = `b * t` rows,
//! `f` inner width.

use burn::module::{Module, Param};
use burn::nn::{Dropout, DropoutConfig, LayerNorm};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, s};
use zero_ops::{AttentionOptions, FusedBackend, checkpoint_block, embedding};

use crate::attention::{Masks, attend_packed};
use crate::generate::{CausalLm, KvCache};
use crate::layers::{Ids, check_positions, dense, dense_activated, dense_onto, normed};
use crate::linear::{Adaptable, Adapter, Linear, VisitEmbedding, each_field, rows};
use crate::loss::next_token_model;
use crate::{Activation, Documents, Gpt2Config, init};

/// GPT-2 with its language-model head. Fields are named as in Hugging Face's `GPT2LMHeadModel`.
#[derive(Module, Debug)]
pub struct Gpt2<B: Backend> {
    /// Token embedding `[vocab_size, n_embd]`; also the head's weight if that is tied.
    pub wte: Param<Tensor<B, 2>>,
    /// LoRA adapter of the token embedding.
    pub wte_adapter: Option<Adapter<B>>,
    /// Position embedding `[n_positions, n_embd]`.
    pub wpe: Param<Tensor<B, 2>>,
    /// The blocks.
    pub h: Vec<Gpt2Block<B>>,
    /// The final layer norm.
    pub ln_f: LayerNorm<B>,
    /// Weight of the head `[vocab_size, n_embd]`, if it is not tied.
    pub lm_head: Option<Param<Tensor<B, 2>>>,
    embd_dropout: Dropout,
    layer_norm_epsilon: f64,
}

/// One block: attention and feed-forward layer, each applied to its normalized input and added to the input.
#[derive(Module, Debug)]
pub struct Gpt2Block<B: Backend> {
    /// Norm before attention.
    pub ln_1: LayerNorm<B>,
    /// Attention.
    pub attn: Gpt2Attention<B>,
    /// Norm before the feed-forward layer.
    pub ln_2: LayerNorm<B>,
    /// The feed-forward layer.
    pub mlp: Gpt2Mlp<B>,
    resid_dropout: Dropout,
    layer_norm_epsilon: f64,
}

/// Causal self-attention.
#[derive(Module, Debug)]
pub struct Gpt2Attention<B: Backend> {
    /// Projection to queries, keys and values, in this order, `[n_embd, 3 * n_embd]`.
    pub c_attn: Linear<B>,
    /// Output projection, from the heads back to the width of the model.
    pub c_proj: Linear<B>,
    n_head: usize,
    scale: f64,
    dropout: Dropout,
}

/// The feed-forward layer.
#[derive(Module, Debug)]
pub struct Gpt2Mlp<B: Backend> {
    /// Up projection, `[n_embd, inner_width]`.
    pub c_fc: Linear<B>,
    /// Down projection, `[inner_width, n_embd]`.
    pub c_proj: Linear<B>,
    activation: Activation,
}

impl Gpt2Config {
    /// Initializes a model as Hugging Face does: weights from a normal distribution with standard deviation `initializer_range`, divided
    /// by `sqrt(2 * n_layer)` for projections back into the residual stream, and biases zero. A parameter is allocated on its first use.
    ///
    /// # Panics
    /// If [`validate`](Self::validate) fails.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Gpt2<B> {
        self.validate().unwrap_or_else(|error| panic!("{error}"));
        let (v, d, std) = (self.vocab_size, self.n_embd, self.initializer_range);
        Gpt2 {
            wte: init::normal([v, d], std, device),
            wte_adapter: None,
            wpe: init::normal([self.n_positions, d], std, device),
            h: (0..self.n_layer).map(|_| self.init_block(device)).collect(),
            ln_f: init::norm(d, self.layer_norm_epsilon, device),
            lm_head: (!self.tie_word_embeddings).then(|| init::normal([v, d], std, device)),
            embd_dropout: DropoutConfig::new(self.embd_pdrop).init(),
            layer_norm_epsilon: self.layer_norm_epsilon,
        }
    }

    fn init_block<B: Backend>(&self, device: &B::Device) -> Gpt2Block<B> {
        let (d, f, std) = (self.n_embd, self.inner_width(), self.initializer_range);
        let residual_std = self.residual_std();
        let head_width = (d / self.n_head) as f64;
        Gpt2Block {
            ln_1: init::norm(d, self.layer_norm_epsilon, device),
            attn: Gpt2Attention {
                c_attn: init::linear(d, 3 * d, std, device),
                c_proj: init::linear(d, d, residual_std, device),
                n_head: self.n_head,
                scale: if self.scale_attn_weights { head_width.sqrt().recip() } else { 1.0 },
                dropout: DropoutConfig::new(self.attn_pdrop).init(),
            },
            ln_2: init::norm(d, self.layer_norm_epsilon, device),
            mlp: Gpt2Mlp {
                c_fc: init::linear(d, f, std, device),
                c_proj: init::linear(f, d, residual_std, device),
                activation: self.activation,
            },
            resid_dropout: DropoutConfig::new(self.resid_pdrop).init(),
            layer_norm_epsilon: self.layer_norm_epsilon,
        }
    }
}

next_token_model!(Gpt2, wte);

impl<B: FusedBackend> Gpt2<B> {
    fn hidden_rows(&self, input_ids_bt: Ids<B>, documents: Option<&Documents>) -> Tensor<B, 2> {
        let [b, t] = input_ids_bt.dims();
        let wpe = self.wpe.val();
        let [n_positions, d] = wpe.dims();
        check_positions(t, n_positions, "n_positions");
        let tokens = rows(&self.wte, &self.wte_adapter, input_ids_bt.reshape([b * t])).reshape([b, t * d]);
        let positions = match documents {
            None => wpe.slice(s![0..t, ..]).reshape([1, t * d]),
            Some(documents) => {
                let positions: Vec<i32> = documents.positions().collect();
                embedding(wpe, Tensor::from_ints(&*positions, &tokens.device())).reshape([b, t * d])
            }
        };
        let mut x_nd = self.embd_dropout.forward(tokens + positions).reshape([b * t, d]);
        let masks = Masks::none().within(documents);
        for block in &self.h {
            x_nd = checkpoint_block(|x_nd| block.forward(x_nd, |attn, x_nd| attn.mix(x_nd, &masks, b)), x_nd);
        }
        normed(&self.ln_f, self.layer_norm_epsilon, x_nd)
    }
}

impl<B: FusedBackend> Gpt2Block<B> {
    /// Adds attention, which `mix` computes, and the feed-forward layer to rows `[n, d]`.
    fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        mix: impl FnOnce(&Gpt2Attention<B>, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let epsilon = self.layer_norm_epsilon;
        let mixed_nd = mix(&self.attn, normed(&self.ln_1, epsilon, x_nd.clone()));
        let x_nd = dense_onto(&self.attn.c_proj, mixed_nd, &self.resid_dropout, x_nd);
        let normed_nd = normed(&self.ln_2, epsilon, x_nd.clone());
        let wide_nf = dense_activated(&self.mlp.c_fc, self.mlp.activation, normed_nd);
        dense_onto(&self.mlp.c_proj, wide_nf, &self.resid_dropout, x_nd)
    }
}

impl<B: FusedBackend> Gpt2Attention<B> {
    /// Computes causal attention over `b` sequences, one after the other. The caller applies `c_proj`.
    fn mix(&self, x_nd: Tensor<B, 2>, masks: &Masks<B>, b: usize) -> Tensor<B, 2> {
        attend_packed(dense(&self.c_attn, x_nd), masks, self.options(b), &self.dropout)
    }

    fn options(&self, b: usize) -> AttentionOptions {
        AttentionOptions {
            batch: b,
            heads: self.n_head,
            causal: true,
            window: None,
            scale: self.scale,
            dropout: None,
            cap: None,
        }
    }
}

impl<B: Backend> Adaptable<B> for Gpt2<B> {
    fn linears(&mut self, each: &mut dyn FnMut(String, &mut Linear<B>)) {
        for (i, Gpt2Block { attn, mlp, .. }) in self.h.iter_mut().enumerate() {
            each_field!(each, format!("h.{i}.attn"), attn.c_attn, attn.c_proj);
            each_field!(each, format!("h.{i}.mlp"), mlp.c_fc, mlp.c_proj);
        }
    }

    fn tables(&mut self, each: &mut VisitEmbedding<'_, B>) {
        each("wte", self.wte.lazy_shape().dims(), &mut self.wte_adapter);
    }
}

impl<B: FusedBackend> CausalLm<B> for Gpt2<B> {
    fn positions(&self) -> usize {
        self.wpe.lazy_shape()[0]
    }

    fn vocabulary(&self) -> usize {
        self.wte.lazy_shape()[0]
    }

    fn next_logits(&self, input_ids_bt: Ids<B>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let [b, t] = input_ids_bt.dims();
        let positions: Vec<i32> = cache.rows().numbers(t).collect();
        let positions_n = Tensor::from_ints(&*positions, &input_ids_bt.device());
        let tokens_nd = rows(&self.wte, &self.wte_adapter, input_ids_bt.reshape([b * t]));
        let mut x_nd = tokens_nd + embedding(self.wpe.val(), positions_n);
        for (layer, block) in self.h.iter().enumerate() {
            x_nd = block.forward(x_nd, |attn, x_nd| {
                let parts = dense(&attn.c_attn, x_nd).chunk(3, 1).try_into().expect("three thirds");
                cache.attend(layer, parts, attn.options(b), None)
            });
        }
        self.logits(normed(&self.ln_f, self.layer_norm_epsilon, cache.end(x_nd, b)))
    }
}
