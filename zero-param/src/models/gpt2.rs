//! GPT-2 on Burn 0.22. Its parameters have the paths, shapes and values of `zero_models::Gpt2`, so either model reads the other's
//! checkpoints and Hugging Face's.
//!
//! The model does not depend on ranks. Shape suffixes: `b` batch, `t` positions, `d` width, `v` vocabulary, `n` = `b * t` rows, `f` inner
//! width.

use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use zero_kernels::options::AttentionOptions;
use zero_models::{Activation, Documents, Gpt2Config};

use super::cache::KvCache;
use super::layers::{Masks, attend, dense, dense_activated, dense_onto, next_logits, next_token_loss, norm};
use crate::activations::checkpoint_block;
use crate::fused::{dropout, packed_attention};
use crate::layers::embedding;
use crate::random::draw_dropout;

/// A GPT-2 with its language-model head.
#[derive(Module, Debug)]
pub struct Gpt2 {
    wte: Param<Tensor<2>>,
    wpe: Param<Tensor<2>>,
    h: Vec<Block>,
    ln_f: LayerNorm,
    /// Weight of the head, if it is not tied.
    lm_head: Option<Param<Tensor<2>>>,
    /// A copy, as Burn's norms keep theirs private.
    epsilon: f64,
    embd_pdrop: f64,
}

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
    epsilon: f64,
    resid_pdrop: f64,
}

#[derive(Module, Debug)]
struct Attention {
    c_attn: Linear,
    c_proj: Linear,
    heads: usize,
    scale: f64,
    attn_pdrop: f64,
}

#[derive(Module, Debug)]
struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
    #[module(skip)]
    activation: Activation,
}

impl Gpt2 {
    /// Builds a GPT-2 of this configuration with placeholder values.
    pub fn new(config: &Gpt2Config, device: &Device) -> Self {
        let (d, f, epsilon) = (config.n_embd, config.inner_width(), config.layer_norm_epsilon);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let norm = || LayerNormConfig::new(d).with_epsilon(epsilon).init(device);
        let scale = if config.scale_attn_weights { ((d / config.n_head) as f64).sqrt().recip() } else { 1.0 };
        let table = |rows| Param::from_tensor(Tensor::zeros([rows, d], device));
        let block = |_| Block {
            ln_1: norm(),
            attn: Attention {
                c_attn: linear(d, 3 * d),
                c_proj: linear(d, d),
                heads: config.n_head,
                scale,
                attn_pdrop: config.attn_pdrop,
            },
            ln_2: norm(),
            mlp: Mlp { c_fc: linear(d, f), c_proj: linear(f, d), activation: config.activation },
            epsilon,
            resid_pdrop: config.resid_pdrop,
        };
        Self {
            wte: table(config.vocab_size),
            wpe: table(config.n_positions),
            h: (0..config.n_layer).map(block).collect(),
            ln_f: norm(),
            lm_head: (!config.tie_word_embeddings).then(|| table(config.vocab_size)),
            epsilon,
            embd_pdrop: config.embd_pdrop,
        }
    }

    /// Returns the mean cross-entropy in nats of predicting each label `[b, t]` from the tokens before it in its row, or in its document if
    /// rows are packed.
    pub fn loss(
        &self,
        ids_bt: Tensor<2, Int>,
        labels_bt: Tensor<2, Int>,
        documents: Option<&Arc<Documents>>,
    ) -> Tensor<1> {
        next_token_loss(self.hidden_rows(ids_bt, documents), self.head(), None, labels_bt, false)
    }

    /// Returns the mean loss of each row, `[b]`, like [`loss`](Self::loss) of that row alone.
    pub fn row_losses(&self, ids_bt: Tensor<2, Int>, labels_bt: Tensor<2, Int>) -> Tensor<1> {
        next_token_loss(self.hidden_rows(ids_bt, None), self.head(), None, labels_bt, true)
    }

    fn head(&self) -> &Param<Tensor<2>> {
        self.lm_head.as_ref().unwrap_or(&self.wte)
    }

    /// Returns the output of the final norm, `[b * t, d]`.
    fn hidden_rows(&self, ids_bt: Tensor<2, Int>, documents: Option<&Arc<Documents>>) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let device = ids_bt.device();
        let places = match documents {
            None => Tensor::<1, Int>::arange(0..t as i64, &device).reshape([1, t]),
            Some(documents) => {
                let positions: Vec<i32> = documents.positions().collect();
                Tensor::from_data(TensorData::new(positions, [b, t]), &device)
            }
        };
        let x_btd = embedding(&self.wte, ids_bt) + embedding(&self.wpe, places);
        let masks = Masks { documents: documents.cloned(), ..Masks::default() };
        let [_, _, d] = x_btd.dims();
        let mut x_nd = dropout(x_btd.reshape([b * t, d]), self.embd_pdrop);
        for block in &self.h {
            let (block, masks) = (block.clone(), masks.clone());
            x_nd = checkpoint_block(move |x_nd| block.forward(x_nd, |attn, x_nd| attn.mix(x_nd, &masks, b)), x_nd);
        }
        norm(&self.ln_f, self.epsilon, x_nd)
    }

    /// Returns the logits `[b, v]` of the token that follows each row, after reading its next tokens `[b, t]`.
    pub fn next_logits(&self, ids_bt: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let [b, t] = ids_bt.dims();
        let places: Vec<i32> = cache.rows.numbers(t).collect();
        let places_bt = Tensor::from_data(TensorData::new(places, [b, t]), &ids_bt.device());
        let x_btd = embedding(&self.wte, ids_bt) + embedding(&self.wpe, places_bt);
        let [_, _, d] = x_btd.dims();
        let mut x_nd = x_btd.reshape([b * t, d]);
        for (number, block) in self.h.iter().enumerate() {
            x_nd = block.forward(x_nd, |attn, x_nd| {
                let parts = dense(&attn.c_attn, x_nd, None).chunk(3, 1).try_into().expect("three thirds");
                cache.attend(number, parts, attn.options(b), None)
            });
        }
        next_logits(norm(&self.ln_f, self.epsilon, cache.end(x_nd, b)), self.head())
    }
}

impl Block {
    /// Adds attention, which `mix` computes, and the feed-forward layer to rows `[n, d]`.
    fn forward(&self, x_nd: Tensor<2>, mix: impl FnOnce(&Attention, Tensor<2>) -> Tensor<2>) -> Tensor<2> {
        let mixed_nd = mix(&self.attn, norm(&self.ln_1, self.epsilon, x_nd.clone()));
        let x_nd = dense_onto(&self.attn.c_proj, mixed_nd, self.resid_pdrop, x_nd);
        let Mlp { c_fc, c_proj, activation } = &self.mlp;
        let wide_nf = dense_activated(c_fc, *activation, norm(&self.ln_2, self.epsilon, x_nd.clone()));
        dense_onto(c_proj, wide_nf, self.resid_pdrop, x_nd)
    }
}

impl Attention {
    fn mix(&self, x_nd: Tensor<2>, masks: &Masks, batch: usize) -> Tensor<2> {
        if masks.documents.is_some() {
            let parts = dense(&self.c_attn, x_nd, None).chunk(3, 1).try_into().expect("three thirds");
            return attend(parts, masks, self.options(batch), self.attn_pdrop);
        }
        let dropout = draw_dropout(self.attn_pdrop, &x_nd.device());
        let options = AttentionOptions { dropout, ..self.options(batch) };
        packed_attention(dense(&self.c_attn, x_nd, None), None, options)
    }

    fn options(&self, batch: usize) -> AttentionOptions {
        AttentionOptions {
            batch,
            heads: self.heads,
            causal: true,
            window: None,
            scale: self.scale,
            dropout: None,
            cap: None,
        }
    }
}
