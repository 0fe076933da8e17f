// A vision transformer: a convolution that produces patches, a class token, and a head over labels. Each input token
// is the brightness of a pixel.

#[derive(Debug, Clone)]
pub struct Config {
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub intermediate_size: usize,
    pub hidden_act: Activation,
    pub layer_norm_eps: f64,
    pub image_size: usize,
    pub patch_size: usize,
    pub num_channels: usize,
    pub num_labels: usize,
}

impl Config {
    pub fn small() -> Self {
        Self {
            hidden_size: 24,
            num_hidden_layers: 2,
            num_attention_heads: 3,
            intermediate_size: 40,
            hidden_act: Activation::Gelu,
            layer_norm_eps: 1e-12,
            image_size: 8,
            patch_size: 4,
            num_channels: 2,
            num_labels: 16,
        }
    }
}

struct PatchEmbeddings {
    num_patches: usize,
    projection: Conv2d,
}

impl PatchEmbeddings {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let num_patches = (cfg.image_size / cfg.patch_size) * (cfg.image_size / cfg.patch_size);
        let conv_cfg = candle_nn::Conv2dConfig { stride: cfg.patch_size, ..Default::default() };
        let projection = conv2d(cfg.num_channels, cfg.hidden_size, cfg.patch_size, conv_cfg, vb.pp("projection"))?;
        Ok(Self { num_patches, projection })
    }
}

impl Module for PatchEmbeddings {
    fn forward(&self, pixel_values: &Tensor) -> Result<Tensor> {
        self.projection.forward(pixel_values)?.flatten_from(2)?.transpose(1, 2)
    }
}

struct Embeddings {
    cls_token: Tensor,
    patch_embeddings: PatchEmbeddings,
    position_embeddings: Tensor,
    hidden_size: usize,
}

impl Embeddings {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let hidden_size = cfg.hidden_size;
        let cls_token = vb.get((1, 1, hidden_size), "cls_token")?;
        let patch_embeddings = PatchEmbeddings::new(cfg, vb.pp("patch_embeddings"))?;
        let position_embeddings = vb.get((1, patch_embeddings.num_patches + 1, hidden_size), "position_embeddings")?;
        Ok(Self { cls_token, patch_embeddings, position_embeddings, hidden_size })
    }

    fn forward(&self, pixel_values: &Tensor) -> Result<Tensor> {
        let (b_size, _num_channels, _height, _width) = pixel_values.dims4()?;
        let embeddings = self.patch_embeddings.forward(pixel_values)?;
        let cls_tokens = self.cls_token.broadcast_as((b_size, 1, self.hidden_size))?;
        let embeddings = Tensor::cat(&[&cls_tokens, &embeddings], 1)?;
        embeddings.broadcast_add(&self.position_embeddings)
    }
}

struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    dense: Linear,
    num_attention_heads: usize,
    attention_head_size: usize,
}

impl SelfAttention {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let linear = |name| linear(cfg.hidden_size, cfg.hidden_size, vb.pp(name));
        Ok(Self {
            query: linear("attention.query")?,
            key: linear("attention.key")?,
            value: linear("attention.value")?,
            dense: linear("output.dense")?,
            num_attention_heads: cfg.num_attention_heads,
            attention_head_size: cfg.hidden_size / cfg.num_attention_heads,
        })
    }

    fn transpose_for_scores(&self, xs: &Tensor) -> Result<Tensor> {
        let (b_size, seq_len, _) = xs.dims3()?;
        xs.reshape((b_size, seq_len, self.num_attention_heads, self.attention_head_size))?.permute((0, 2, 1, 3))
    }
}

impl Module for SelfAttention {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let query = self.transpose_for_scores(&self.query.forward(xs)?)?.contiguous()?;
        let key = self.transpose_for_scores(&self.key.forward(xs)?)?.contiguous()?;
        let value = self.transpose_for_scores(&self.value.forward(xs)?)?.contiguous()?;
        let attention_scores = (query.matmul(&key.t()?)? / f64::sqrt(self.attention_head_size as f64))?;
        let attention_probs = candle_nn::ops::softmax(&attention_scores, D::Minus1)?;
        let context = attention_probs.matmul(&value)?.permute((0, 2, 1, 3))?.contiguous()?;
        context.flatten_from(D::Minus2)?.apply(&self.dense)
    }
}

struct Layer {
    attention: SelfAttention,
    intermediate: Linear,
    intermediate_act_fn: Activation,
    output: Linear,
    layernorm_before: LayerNorm,
    layernorm_after: LayerNorm,
}

impl Layer {
    fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let h_sz = cfg.hidden_size;
        Ok(Self {
            attention: SelfAttention::new(cfg, vb.pp("attention"))?,
            intermediate: linear(h_sz, cfg.intermediate_size, vb.pp("intermediate.dense"))?,
            intermediate_act_fn: cfg.hidden_act,
            output: linear(cfg.intermediate_size, h_sz, vb.pp("output.dense"))?,
            layernorm_before: layer_norm(h_sz, cfg.layer_norm_eps, vb.pp("layernorm_before"))?,
            layernorm_after: layer_norm(h_sz, cfg.layer_norm_eps, vb.pp("layernorm_after"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = (xs.apply(&self.layernorm_before)?.apply(&self.attention)? + xs)?;
        let ys = xs.apply(&self.layernorm_after)?.apply(&self.intermediate)?.apply(&self.intermediate_act_fn)?;
        ys.apply(&self.output)? + xs
    }
}

pub struct Model {
    embeddings: Embeddings,
    layers: Vec<Layer>,
    layernorm: LayerNorm,
    classifier: Linear,
    config: Config,
    dtype: DType,
}

impl Model {
    pub fn new(cfg: &Config, vb: VarBuilder) -> Result<Self> {
        let vb_v = vb.pp("vit");
        let layers = (0..cfg.num_hidden_layers).map(|i| Layer::new(cfg, vb_v.pp("encoder.layer").pp(i)));
        Ok(Self {
            embeddings: Embeddings::new(cfg, vb_v.pp("embeddings"))?,
            layers: layers.collect::<Result<Vec<_>>>()?,
            layernorm: layer_norm(cfg.hidden_size, cfg.layer_norm_eps, vb_v.pp("layernorm"))?,
            classifier: linear(cfg.hidden_size, cfg.num_labels, vb.pp("classifier"))?,
            config: cfg.clone(),
            dtype: vb.dtype(),
        })
    }

    pub fn forward(&self, pixels: &Tensor) -> Result<Tensor> {
        let Config { image_size, num_channels, .. } = self.config;
        let xs = pixels.to_dtype(self.dtype)?.affine(1.0 / 8.0, -1.0)?;
        let mut xs = self.embeddings.forward(&xs.reshape(((), num_channels, image_size, image_size))?)?;
        for layer in &self.layers {
            xs = xs.apply(layer)?;
        }
        xs.apply(&self.layernorm)?.i((.., 0, ..))?.apply(&self.classifier)
    }
}
