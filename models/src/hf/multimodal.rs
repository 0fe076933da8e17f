//! Multimodal models, of which the text part is read.
//!
//! In: the options of a multimodal model's config.json. Out: those of its text part, as the config.json of a model that
//! only has this part, and the names of the text part in the whole model. Never: an option of the other parts.
//!
//! The text part of a multimodal model gets ordinary rotary positions from texts: all three coordinates of a text token
//! (M-RoPE, Qwen2-VL, arXiv 2409.12191) are its position.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// The families of multimodal models: the option `model_type`, that of the text part if `text_config` does not name it, and
/// the path of the decoder in the model that transformers opens.
const FAMILIES: [(&str, &str, &str); 13] = [
    ("gemma3", "gemma3_text", LANGUAGE),
    ("glm4v", "glm4v_text", LANGUAGE),
    ("idefics3", "llama", "model.text_model"),
    ("internvl", "qwen2", LANGUAGE),
    // transformers' AutoModelForCausalLM opens the text part alone.
    ("llama4", "llama4_text", "model"),
    ("llava", "llama", LANGUAGE),
    ("llava_next", "llama", LANGUAGE),
    ("mistral3", "mistral", LANGUAGE),
    ("qwen2_5_vl", "qwen2_5_vl_text", LANGUAGE),
    ("qwen2_vl", "qwen2_vl_text", LANGUAGE),
    ("qwen3_vl", "qwen3_vl_text", LANGUAGE),
    ("qwen3_vl_moe", "qwen3_vl_moe_text", LANGUAGE),
    ("smolvlm", "llama", "model.text_model"),
];

const LANGUAGE: &str = "model.language_model";

/// The paths of the decoder in files. Older versions of transformers wrote the second (LLaVA, Gemma 3) and the last
/// (Qwen2-VL), and transformers 5 still does.
const STORED: [&str; 5] = [LANGUAGE, "language_model.model", "model.text_model", "language_model", "model"];

/// The names of the head in files.
const HEADS: [&str; 2] = ["lm_head", "language_model.lm_head"];

/// A family of text parts.
struct Text {
    /// The option `model_type` of the text part.
    name: &'static str,
    /// The family that computes the same, and its class in transformers.
    family: &'static str,
    class: &'static str,
    /// The vocabulary, the width, the width of the feed-forward layers, the layers and the heads, if `text_config` does not
    /// give them.
    sizes: [usize; 5],
}

const SIZES: [&str; 5] = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"];

const fn text(name: &'static str, family: &'static str, class: &'static str, sizes: [usize; 5]) -> Text {
    Text { name, family, class, sizes }
}

const TEXTS: [Text; 15] = [
    text("cohere2", "cohere2", "Cohere2ForCausalLM", [256_000, 8192, 22_528, 40, 64]),
    text("gemma", "gemma", "GemmaForCausalLM", [256_000, 3072, 24_576, 28, 16]),
    text("gemma2", "gemma2", "Gemma2ForCausalLM", [256_000, 2304, 9216, 26, 8]),
    text("gemma3_text", "gemma3_text", "Gemma3ForCausalLM", [262_208, 2304, 9216, 26, 8]),
    text("glm4v_text", "glm4", "Glm4ForCausalLM", [151_552, 4096, 13_696, 40, 32]),
    text("llama", "llama", "LlamaForCausalLM", [32_000, 4096, 11_008, 32, 32]),
    text("llama4_text", "llama4_text", "Llama4ForCausalLM", [202_048, 5120, 8192, 48, 40]),
    text("ministral3", "ministral3", "Ministral3ForCausalLM", [131_072, 4096, 14_336, 34, 32]),
    text("mistral", "mistral", "MistralForCausalLM", [32_000, 4096, 14_336, 32, 32]),
    text("qwen2", "qwen2", "Qwen2ForCausalLM", [151_936, 4096, 22_016, 32, 32]),
    text("qwen2_5_vl_text", "qwen2", "Qwen2ForCausalLM", [152_064, 8192, 29_568, 80, 64]),
    text("qwen2_vl_text", "qwen2", "Qwen2ForCausalLM", [152_064, 8192, 29_568, 80, 64]),
    text("qwen3", "qwen3", "Qwen3ForCausalLM", [151_936, 4096, 22_016, 32, 32]),
    text("qwen3_vl_moe_text", "qwen3_moe", "Qwen3MoeForCausalLM", [151_936, 2048, 5632, 24, 16]),
    text("qwen3_vl_text", "qwen3", "Qwen3ForCausalLM", [151_936, 4096, 22_016, 32, 32]),
];

/// The text part of a multimodal model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TextPart {
    options: Map<String, Value>,
    /// The class of the text part in transformers.
    class: Option<&'static str>,
    /// The path of the decoder in the names of parameters, which are those of the model that transformers opens.
    pub decoder: &'static str,
    /// The path of the decoder and the name of the head in files.
    stored: [&'static str; 2],
}

impl TextPart {
    /// Returns the text part of a model with these options, or `None` if it is not a multimodal model. The second value is
    /// the path of the text part's options in config.json.
    pub fn of(options: &Map<String, Value>) -> Option<(Self, &'static str)> {
        let model_type = options.get("model_type")?;
        let &(name, text, decoder) = FAMILIES.iter().find(|(name, ..)| model_type == name)?;
        let nested = options.get("text_config").and_then(Value::as_object);
        // Files of Qwen2-VL have the options of the text part beside those of the others.
        let mut part = nested.unwrap_or(options).clone();
        if nested.is_none() {
            part.remove("vision_config");
            part.insert("model_type".to_owned(), json!(text));
        }
        let text = part.entry("model_type").or_insert(json!(text)).clone();
        let tied = tied(name, options, nested);
        // The classes are those of the whole model.
        part.remove("architectures");
        let shared = ["dtype", "torch_dtype", "quantization_config"].map(|name| (name, options.get(name).cloned()));
        let own = [("tie_word_embeddings", tied), ("architectures", architectures(options))];
        for (name, value) in own.into_iter().chain(shared) {
            if let Some(value) = value {
                part.insert(name.to_owned(), value);
            }
        }
        let known = TEXTS.iter().find(|one| text == one.name);
        if let Some(text) = known {
            text.complete(&mut part);
        }
        let path = if nested.is_some() { "text_config." } else { "" };
        let class = known.map(|text| text.class);
        Some((Self { options: part, class, decoder, stored: [decoder, HEADS[0]] }, path))
    }

    /// True if transformers opens the whole model, not the text part alone. The whole model computes logits without a factor
    /// and without a cap.
    pub fn is_opened_whole(&self) -> bool {
        self.decoder != "model"
    }

    /// Finds the names of the text part among those in the files.
    pub fn find(&mut self, stored: &BTreeMap<&str, &[usize]>) {
        let is_stored = |name: &&&str, of: &str| stored.contains_key(format!("{name}{of}").as_str());
        let decoder = STORED.iter().find(|name| is_stored(name, ".embed_tokens.weight"));
        let head = HEADS.iter().find(|name| is_stored(name, ".weight"));
        self.stored = [decoder.unwrap_or(&self.stored[0]), head.unwrap_or(&self.stored[1])];
    }

    /// The options of the text part.
    pub fn options(&self) -> Map<String, Value> {
        self.options.clone()
    }

    /// Sets the names of the text part to those in a folder that has only this part. Returns the config.json of this folder.
    pub fn stand_alone(&mut self) -> Map<String, Value> {
        self.stored = ["model", HEADS[0]];
        let mut options = self.options();
        options.remove("architectures");
        options.extend(self.class.map(|class| ("architectures".to_owned(), json!([class]))));
        options
    }

    /// The stored name of a tensor of the text part.
    pub fn stored(&self, name: &str) -> String {
        let within = |path: &str| name.strip_prefix(path)?.strip_prefix('.');
        let [decoder, head] = self.stored;
        let of_decoder = within(self.decoder).map(|rest| format!("{decoder}.{rest}"));
        let stored = of_decoder.or_else(|| Some(format!("{head}.{}", within(HEADS[0])?)));
        stored.unwrap_or_else(|| name.to_owned())
    }

    /// Returns PEFT's option `target_modules` for layers of the text part: their names, or if other parts may have layers of
    /// the same names a pattern of paths.
    pub fn targets(&self, names: &[String]) -> Value {
        if !self.is_opened_whole() {
            return json!(names);
        }
        let escaped = |path: &str| path.replace('.', r"\.");
        let names: Vec<String> = names.iter().map(|name| escaped(name)).collect();
        json!(format!(r"({}\.(.*\.)?)?({})", escaped(self.decoder), names.join("|")))
    }

    /// True if a stored tensor belongs to another part of the model.
    pub fn is_of_other(&self, stored: &str) -> bool {
        let belongs = |path: &str| stored.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'));
        !self.stored.into_iter().any(belongs)
    }
}

impl Text {
    /// Adds the options that are missing and have another default than in the family that computes the same, and removes
    /// those that make no difference for texts.
    fn complete(&self, part: &mut Map<String, Value>) {
        let mut defaults: Vec<(&str, Value)> = SIZES.into_iter().zip(self.sizes.map(Value::from)).collect();
        match self.name {
            "glm4v_text" => defaults.extend([
                ("attention_bias", json!(true)),
                ("partial_rotary_factor", json!(1.0)),
                ("rms_norm_eps", json!(1e-5)),
                ("head_dim", width_of_heads(part)),
                ("max_position_embeddings", json!(32_768)),
                ("pad_token_id", json!(null)),
            ]),
            "qwen2_vl_text" | "qwen2_5_vl_text" => defaults.extend([
                ("num_key_value_heads", json!(8)),
                ("rms_norm_eps", json!(1e-5)),
                ("rope_theta", json!(1e6)),
                ("max_window_layers", json!(80)),
            ]),
            "qwen3_vl_text" => defaults.push(("rope_theta", json!(5e5))),
            "qwen3_vl_moe_text" => {
                // Its routers always renormalise.
                part.insert("norm_topk_prob".to_owned(), json!(true));
                defaults.extend([
                    ("num_key_value_heads", json!(16)),
                    ("rope_theta", json!(5e5)),
                    ("num_experts_per_tok", json!(4)),
                    ("moe_intermediate_size", json!(1408)),
                ]);
            }
            _ => {}
        }
        for (name, value) in defaults {
            part.entry(name).or_insert(value);
        }
        if self.name == self.family {
            return;
        }
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = part.get_mut(name).and_then(Value::as_object_mut) else { continue };
            rope.retain(|option, _| !["mrope_section", "mrope_interleaved"].contains(&option.as_str()));
            for kind in ["rope_type", "type"] {
                if rope.get(kind).is_some_and(|kind| kind == "mrope") {
                    rope.insert(kind.to_owned(), json!("default"));
                }
            }
        }
        part.insert("model_type".to_owned(), json!(self.family));
    }
}

/// Returns width ÷ heads, or null if they are not given.
fn width_of_heads(part: &Map<String, Value>) -> Value {
    let extent = |name: &str| part.get(name).and_then(Value::as_u64);
    extent(SIZES[1]).zip(extent(SIZES[4])).and_then(|(width, heads)| width.checked_div(heads)).into()
}

/// Returns whether the head is tied: the option of the whole model, or else of the text part.
fn tied(family: &str, options: &Map<String, Value>, nested: Option<&Map<String, Value>>) -> Option<Value> {
    let of = |options: &Map<String, Value>| options.get("tie_word_embeddings").filter(|it| !it.is_null()).cloned();
    let (whole, text) = (of(options), nested.and_then(of));
    match family {
        // transformers reads the options of the text part alone.
        "llama4" => text,
        // Older files have the option in the text part, and the whole model has its default.
        "glm4v" | "llava" | "qwen2_vl" | "qwen2_5_vl" if text == Some(json!(true)) => text,
        _ => whole.or(text),
    }
}

/// Returns the classes of the model, with that of the whole model as the class of a text model.
fn architectures(options: &Map<String, Value>) -> Option<Value> {
    let classes = options.get("architectures")?.as_array()?.iter();
    let class = |class: &Value| match class.as_str()?.strip_suffix("ForConditionalGeneration") {
        Some(family) => Some(json!(format!("{family}ForCausalLM"))),
        None => Some(class.clone()),
    };
    Some(classes.filter_map(class).collect())
}
