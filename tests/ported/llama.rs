// A Llama with grouped heads, rotary tables, and a causal mask that is applied with masked_fill.

#[derive(Debug, Clone)]
pub struct Config {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f32,
    pub max_position_embeddings: usize,
}

impl Config {
    pub fn small() -> Self {
        Self {
            hidden_size: 32,
            intermediate_size: 56,
            vocab_size: 61,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            rms_norm_eps: 1e-5,
            rope_theta: 1e4,
            max_position_embeddings: 40,
        }
    }
}

/// The cosines and sines of every position, and the causal mask.
#[derive(Debug, Clone)]
struct Tables {
    cos: Tensor,
    sin: Tensor,
}

impl Tables {
    fn new(dtype: DType, cfg: &Config, device: &Device) -> Result<Self> {
        let head_dim = cfg.hidden_size / cfg.num_attention_heads;
        let theta: Vec<f32> =
            (0..head_dim).step_by(2).map(|i| 1.0 / cfg.rope_theta.powf(i as f32 / head_dim as f32)).collect();
        let theta = Tensor::new(theta.as_slice(), device)?;
        let idx_theta = Tensor::arange(0, cfg.max_position_embeddings as u32, device)?
            .to_dtype(DType::F32)?
            .reshape((cfg.max_position_embeddings, 1))?
            .matmul(&theta.reshape((1, theta.elem_count()))?)?;
        Ok(Self { cos: idx_theta.cos()?.to_dtype(dtype)?, sin: idx_theta.sin()?.to_dtype(dtype)? })
    }

    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let (_b_sz, _, seq_len, _) = x.dims4()?;
        let cos = self.cos.narrow(0, 0, seq_len)?;
        let sin = self.sin.narrow(0, 0, seq_len)?;
        candle_nn::rotary_emb::rope_slow(x, &cos, &sin)
    }
}

fn masked_fill(on_false: &Tensor, mask: &Tensor, on_true: f32) -> Result<Tensor> {
    let shape = mask.shape();
    let on_true = Tensor::new(on_true, on_false.device())?.to_dtype(on_false.dtype())?.broadcast_as(shape.dims())?;
    mask.where_cond(&on_true, on_false)
}

struct CausalSelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
}

impl CausalSelfAttention {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        let head_dim = cfg.hidden_size / cfg.num_attention_heads;
        let (size_q, size_kv) = (head_dim * cfg.num_attention_heads, head_dim * cfg.num_key_value_heads);
        Ok(Self {
            q_proj: linear_no_bias(cfg.hidden_size, size_q, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(cfg.hidden_size, size_kv, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(cfg.hidden_size, size_kv, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(size_q, cfg.hidden_size, vb.pp("o_proj"))?,
            num_attention_heads: cfg.num_attention_heads,
            num_key_value_heads: cfg.num_key_value_heads,
            head_dim,
        })
    }

    fn repeat_kv(&self, x: Tensor) -> Result<Tensor> {
        let n_rep = self.num_attention_heads / self.num_key_value_heads;
        let (b_sz, n_kv_head, seq_len, head_dim) = x.dims4()?;
        Tensor::cat(&vec![&x; n_rep], 2)?.reshape((b_sz, n_kv_head * n_rep, seq_len, head_dim))
    }

    fn forward(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        let (b_sz, seq_len, hidden_size) = x.dims3()?;
        let heads = |x: Tensor, heads: usize| {
            x.reshape((b_sz, seq_len, heads, self.head_dim))?.transpose(1, 2)?.contiguous()
        };
        let q = tables.apply(&heads(self.q_proj.forward(x)?, self.num_attention_heads)?)?;
        let k = tables.apply(&heads(self.k_proj.forward(x)?, self.num_key_value_heads)?)?;
        let v = heads(self.v_proj.forward(x)?, self.num_key_value_heads)?;
        let k = self.repeat_kv(k)?;
        let v = self.repeat_kv(v)?;
        let att = (q.matmul(&k.t()?)? / (self.head_dim as f64).sqrt())?;
        let mask: Vec<_> = (0..seq_len).flat_map(|i| (0..seq_len).map(move |j| u8::from(j > i))).collect();
        let mask = Tensor::from_slice(&mask, (seq_len, seq_len), x.device())?.broadcast_as(att.shape())?;
        let att = masked_fill(&att, &mask, f32::NEG_INFINITY)?;
        let att = candle_nn::ops::softmax(&att, D::Minus1)?;
        let y = att.matmul(&v.contiguous()?)?;
        self.o_proj.forward(&y.transpose(1, 2)?.reshape(&[b_sz, seq_len, hidden_size])?)
    }
}

struct Mlp {
    c_fc1: Linear,
    c_fc2: Linear,
    c_proj: Linear,
}

impl Mlp {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Ok(Self {
            c_fc1: linear_no_bias(cfg.hidden_size, cfg.intermediate_size, vb.pp("gate_proj"))?,
            c_fc2: linear_no_bias(cfg.hidden_size, cfg.intermediate_size, vb.pp("up_proj"))?,
            c_proj: linear_no_bias(cfg.intermediate_size, cfg.hidden_size, vb.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (candle_nn::ops::silu(&self.c_fc1.forward(x)?)? * self.c_fc2.forward(x)?)?;
        self.c_proj.forward(&x)
    }
}

struct Block {
    rms_1: RmsNorm,
    attn: CausalSelfAttention,
    rms_2: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Ok(Self {
            rms_1: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("input_layernorm"))?,
            attn: CausalSelfAttention::load(vb.pp("self_attn"), cfg)?,
            rms_2: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("post_attention_layernorm"))?,
            mlp: Mlp::load(vb.pp("mlp"), cfg)?,
        })
    }

    fn forward(&self, x: &Tensor, tables: &Tables) -> Result<Tensor> {
        let residual = x;
        let x = self.rms_1.forward(x)?;
        let x = (self.attn.forward(&x, tables)? + residual)?;
        let residual = &x;
        let x = (self.mlp.forward(&self.rms_2.forward(&x)?)? + residual)?;
        Ok(x)
    }
}

pub struct Model {
    wte: Embedding,
    blocks: Vec<Block>,
    ln_f: RmsNorm,
    lm_head: Linear,
    tables: Tables,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let blocks = (0..cfg.num_hidden_layers).map(|i| Block::load(vb.pp(format!("model.layers.{i}")), cfg));
        Ok(Self {
            wte: embedding(cfg.vocab_size, cfg.hidden_size, vb.pp("model.embed_tokens"))?,
            blocks: blocks.collect::<Result<Vec<_>>>()?,
            ln_f: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("model.norm"))?,
            lm_head: linear_no_bias(cfg.hidden_size, cfg.vocab_size, vb.pp("lm_head"))?,
            tables: Tables::new(vb.dtype(), cfg, vb.device())?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.wte.forward(x)?;
        for block in &self.blocks {
            x = block.forward(&x, &self.tables)?;
        }
        self.lm_head.forward(&self.ln_f.forward(&x)?)
    }
}
