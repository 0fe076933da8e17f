//! Textbook implementations of the models with candle's eager tensors and autograd. Tests use them as the reference
//! for gradients, and benchmarks compare their speed.
//!
//! They only share the names and shapes of parameters with the engine. Norms, softmax and rotary positions use
//! candle-nn's differentiable versions, because its fused ones have no backward.

mod gpt;
mod llama;
mod moe;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Init, Linear, VarBuilder, VarMap};
use gapless::Trainer;
use gapless::models::{GptConfig, LlamaConfig, MoeConfig};

pub use moe::Choice;

/// A model with candle's variables.
pub struct Reference {
    model: Box<dyn ReferenceModel>,
    variables: VarMap,
}

impl Reference {
    /// Creates a GPT. Variables that exist in `variables` are used by name. Missing ones are initialized as in GPT-2.
    pub fn gpt(config: &GptConfig, variables: VarMap, dtype: DType) -> Result<Self> {
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        Ok(Self { model: Box::new(gpt::Gpt::new(config, vb)?), variables })
    }

    /// Creates a Llama, with variables as in [`Self::gpt`].
    pub fn llama(config: &LlamaConfig, variables: VarMap, dtype: DType) -> Result<Self> {
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        Ok(Self { model: Box::new(llama::Llama::new(config, vb)?), variables })
    }

    /// Creates a mixture of experts, with variables as in [`Self::gpt`].
    pub fn moe(config: &MoeConfig, variables: VarMap, dtype: DType) -> Result<Self> {
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        Ok(Self { model: Box::new(moe::Moe::new(config, vb)?), variables })
    }

    /// Logits [batch, tokens, vocabulary] for ids [batch, tokens].
    pub fn logits(&self, tokens: &Tensor) -> Result<Tensor> {
        self.model.forward(tokens)
    }

    /// The mean cross-entropy over all tokens, as a scalar.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = self.logits(tokens)?;
        candle_nn::loss::cross_entropy(&logits.flatten_to(1)?, &targets.flatten_all()?)
    }

    /// The training loss, and the gradient of every variable.
    pub fn backward(&self, tokens: &Tensor, targets: &Tensor) -> Result<(Tensor, GradStore)> {
        let mut loss = self.loss(tokens, targets)?;
        if let Some(more) = self.model.training_loss(tokens)? {
            loss = (loss + more)?;
        }
        let gradients = loss.backward()?;
        Ok((loss, gradients))
    }

    /// The routers' choices by layer, for ids [batch, tokens].
    pub fn choices(&self, tokens: &Tensor) -> Result<Vec<(String, Choice)>> {
        self.model.choices(tokens)
    }

    /// Names and values of all variables.
    pub fn variables(&self) -> Vec<(String, Var)> {
        let variables = self.variables.data().lock().expect("no holder of the variables panics");
        variables.iter().map(|(name, variable)| (name.clone(), variable.clone())).collect()
    }
}

/// A model that, if it is a mixture of experts, has additional results.
trait ReferenceModel: Module {
    /// Returns the terms that training adds to the loss, as a scalar, or `None` if there are none.
    fn training_loss(&self, _tokens: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn choices(&self, _tokens: &Tensor) -> Result<Vec<(String, Choice)>> {
        Ok(Vec::new())
    }
}

impl ReferenceModel for gpt::Gpt {}
impl ReferenceModel for llama::Llama {}

/// Returns copies of a trainer's current parameters.
pub fn variables_of(trainer: &Trainer, dtype: DType) -> gapless::Result<VarMap> {
    let variables = VarMap::new();
    for name in trainer.parameter_names() {
        // The copy is needed, because a cast to the same type would share the arena's bytes, which the next step
        // overwrites.
        let value = trainer.tensor(name)?.copy()?.to_dtype(dtype)?;
        let variable = Var::from_tensor(&value)?;
        variables.data().lock().expect("no holder of the variables panics").insert(name.to_owned(), variable);
    }
    Ok(variables)
}

/// Converts ids to a candle tensor [rows, ids ÷ rows].
pub fn ids(ids: &[u32], rows: usize) -> Result<Tensor> {
    Tensor::from_slice(ids, (rows, ids.len() / rows), &Device::Cpu)
}

/// The initial weights of GPT-2. With candle-nn's defaults for linear layers and embeddings, the first losses would
/// be large.
const WEIGHT: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", WEIGHT)?;
    Ok(Linear::new(weight, Some(vb.get_with_hints(out_dim, "bias", Init::Const(0.0))?)))
}

fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    Ok(Linear::new(vb.get_with_hints((out_dim, in_dim), "weight", WEIGHT)?, None))
}

/// Computes softmax(q·kᵀ/√d + mask)·v for [batch, heads, tokens, head size]. A token attends to itself and earlier
/// tokens.
fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (.., t, head_size) = q.dims4()?;
    let scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? / (head_size as f64).sqrt())?;
    let mask: Vec<f32> = (0..t * t).map(|i| if i % t > i / t { f32::NEG_INFINITY } else { 0.0 }).collect();
    let mask = Tensor::from_vec(mask, (t, t), q.device())?.to_dtype(q.dtype())?;
    candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, 3)?.matmul(&v.contiguous()?)
}
