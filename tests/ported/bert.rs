// An encoder in the style of BERT: three embeddings, attention to all tokens except padding, and a head over the
// vocabulary.

#[derive(Debug, Clone)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub hidden_act: Activation,
    pub max_position_embeddings: usize,
    pub type_vocab_size: usize,
    pub layer_norm_eps: f64,
}

impl Config {
    pub fn small() -> Self {
        Self {
            vocab_size: 37,
            hidden_size: 24,
            num_hidden_layers: 2,
            num_attention_heads: 3,
            intermediate_size: 40,
            hidden_act: Activation::Gelu,
            max_position_embeddings: 20,
            type_vocab_size: 2,
            layer_norm_eps: 1e-12,
        }
    }
}

struct BertEmbeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    layer_norm: LayerNorm,
}

impl BertEmbeddings {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Ok(Self {
            word_embeddings: embedding(cfg.vocab_size, cfg.hidden_size, vb.pp("word_embeddings"))?,
            position_embeddings: embedding(
                cfg.max_position_embeddings,
                cfg.hidden_size,
                vb.pp("position_embeddings"),
            )?,
            token_type_embeddings: embedding(cfg.type_vocab_size, cfg.hidden_size, vb.pp("token_type_embeddings"))?,
            layer_norm: layer_norm(cfg.hidden_size, cfg.layer_norm_eps, vb.pp("LayerNorm"))?,
        })
    }

    fn forward(&self, input_ids: &Tensor, token_type_ids: &Tensor) -> Result<Tensor> {
        let (_bsize, seq_len) = input_ids.dims2()?;
        let input_embeddings = self.word_embeddings.forward(input_ids)?;
        let token_type_embeddings = self.token_type_embeddings.forward(token_type_ids)?;
        let mut embeddings = (&input_embeddings + token_type_embeddings)?;
        let position_ids = (0..seq_len as u32).collect::<Vec<_>>();
        let position_ids = Tensor::new(&position_ids[..], input_ids.device())?;
        embeddings = embeddings.broadcast_add(&self.position_embeddings.forward(&position_ids)?)?;
        self.layer_norm.forward(&embeddings)
    }
}

struct BertSelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    num_attention_heads: usize,
    attention_head_size: usize,
}

impl BertSelfAttention {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        let hidden_size = cfg.hidden_size;
        Ok(Self {
            query: linear(hidden_size, hidden_size, vb.pp("query"))?,
            key: linear(hidden_size, hidden_size, vb.pp("key"))?,
            value: linear(hidden_size, hidden_size, vb.pp("value"))?,
            num_attention_heads: cfg.num_attention_heads,
            attention_head_size: hidden_size / cfg.num_attention_heads,
        })
    }

    fn transpose_for_scores(&self, xs: &Tensor) -> Result<Tensor> {
        let mut new_x_shape = xs.dims().to_vec();
        new_x_shape.pop();
        new_x_shape.push(self.num_attention_heads);
        new_x_shape.push(self.attention_head_size);
        xs.reshape(new_x_shape.as_slice())?.transpose(1, 2)?.contiguous()
    }

    fn forward(&self, hidden_states: &Tensor, attention_mask: &Tensor) -> Result<Tensor> {
        let query_layer = self.transpose_for_scores(&self.query.forward(hidden_states)?)?;
        let key_layer = self.transpose_for_scores(&self.key.forward(hidden_states)?)?;
        let value_layer = self.transpose_for_scores(&self.value.forward(hidden_states)?)?;
        let attention_scores = query_layer.matmul(&key_layer.t()?)?;
        let attention_scores = (attention_scores / (self.attention_head_size as f64).sqrt())?;
        let attention_scores = attention_scores.broadcast_add(attention_mask)?;
        let attention_probs = candle_nn::ops::softmax(&attention_scores, D::Minus1)?;
        let context_layer = attention_probs.matmul(&value_layer)?;
        context_layer.transpose(1, 2)?.contiguous()?.flatten_from(D::Minus2)
    }
}

struct BertOutput {
    dense: Linear,
    layer_norm: LayerNorm,
    dropout: Dropout,
}

impl BertOutput {
    fn load(in_size: usize, vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Ok(Self {
            dense: linear(in_size, cfg.hidden_size, vb.pp("dense"))?,
            layer_norm: layer_norm(cfg.hidden_size, cfg.layer_norm_eps, vb.pp("LayerNorm"))?,
            dropout: Dropout::new(0.1),
        })
    }

    fn forward(&self, hidden_states: &Tensor, input_tensor: &Tensor) -> Result<Tensor> {
        let hidden_states = self.dense.forward(hidden_states)?;
        let hidden_states = self.dropout.forward(&hidden_states, false)?;
        self.layer_norm.forward(&(hidden_states + input_tensor)?)
    }
}

struct BertLayer {
    attention: BertSelfAttention,
    attention_output: BertOutput,
    intermediate: Linear,
    intermediate_act: Activation,
    output: BertOutput,
}

impl BertLayer {
    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        Ok(Self {
            attention: BertSelfAttention::load(vb.pp("attention.self"), cfg)?,
            attention_output: BertOutput::load(cfg.hidden_size, vb.pp("attention.output"), cfg)?,
            intermediate: linear(cfg.hidden_size, cfg.intermediate_size, vb.pp("intermediate.dense"))?,
            intermediate_act: cfg.hidden_act,
            output: BertOutput::load(cfg.intermediate_size, vb.pp("output"), cfg)?,
        })
    }

    fn forward(&self, hidden_states: &Tensor, attention_mask: &Tensor) -> Result<Tensor> {
        let self_outputs = self.attention.forward(hidden_states, attention_mask)?;
        let attention_output = self.attention_output.forward(&self_outputs, hidden_states)?;
        let intermediate = self.intermediate_act.forward(&self.intermediate.forward(&attention_output)?)?;
        self.output.forward(&intermediate, &attention_output)
    }
}

pub struct Model {
    embeddings: BertEmbeddings,
    layers: Vec<BertLayer>,
    transform: Sequential,
    decoder: Linear,
    dtype: DType,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let (bert, head) = (vb.pp("bert"), vb.pp("cls.predictions"));
        let layers = (0..cfg.num_hidden_layers).map(|i| BertLayer::load(bert.pp(format!("encoder.layer.{i}")), cfg));
        let transform = seq()
            .add(linear(cfg.hidden_size, cfg.hidden_size, head.pp("transform.dense"))?)
            .add(cfg.hidden_act)
            .add(layer_norm(cfg.hidden_size, cfg.layer_norm_eps, head.pp("transform.LayerNorm"))?);
        Ok(Self {
            embeddings: BertEmbeddings::load(bert.pp("embeddings"), cfg)?,
            layers: layers.collect::<Result<Vec<_>>>()?,
            transform,
            decoder: linear(cfg.hidden_size, cfg.vocab_size, head.pp("decoder"))?,
            dtype: vb.dtype(),
        })
    }

    pub fn forward(&self, input_ids: &Tensor) -> Result<Tensor> {
        let token_type_ids = input_ids.zeros_like()?;
        let mut hidden_states = self.embeddings.forward(input_ids, &token_type_ids)?;
        // Token 0 is padding.
        let attention_mask = input_ids.ne(0u32)?.unsqueeze(1)?.unsqueeze(2)?.to_dtype(self.dtype)?;
        let attention_mask = ((1.0 - attention_mask)? * -1e9)?;
        for layer in &self.layers {
            hidden_states = layer.forward(&hidden_states, &attention_mask)?;
        }
        self.decoder.forward(&self.transform.forward(&hidden_states)?)
    }
}
