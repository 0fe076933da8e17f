//! Selection of the trained part of a model.
//!
//! In: the names of parameters and layers. Out: the parameters that are frozen, and the linear layers that have an
//! adapter. Never: the values of parameters.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Quantize;
use super::adapter::{LORA_A, LORA_B, MAGNITUDE};
use crate::error::{Error, Result};
use crate::graph::Graph;

/// Maximum number of names in an error.
const MAX_NAMED: usize = 24;

/// The trained part of a model. Frozen parameters have no gradient and no optimizer state. The forward keeps only the
/// activations that the gradients of the trained parameters need.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trainable {
    /// All parameters are trained.
    #[default]
    All,
    /// Low-rank adapters are added to some linear layers and trained. All other parameters are frozen.
    Lora(Lora),
    /// Only the parameters that match one of these patterns are trained. A pattern is the name of a parameter, or the
    /// path of a module, which matches all parameters of the module. `*` stands for any text.
    Only(Vec<String>),
}

/// Adapters of low rank (Hu et al., arXiv 2106.09685), as in PEFT: y = x·Wᵀ + scale · (x·Aᵀ)·Bᵀ with A [rank, in] and B
/// [out, rank].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Lora {
    /// The rank of the adapters.
    pub rank: usize,
    /// The numerator of the adapters' scale, which is alpha ÷ rank.
    pub alpha: f64,
    /// The dropout probability of the adapters' input.
    pub dropout: f64,
    /// The layers that have adapters. Each is named by the last components of its path, such as `q_proj` or
    /// `mlp.c_proj`. In a run file, the default is the query and value projections of the model's family.
    #[serde(default)]
    pub targets: Vec<String>,
    /// Whether the scale is alpha ÷ √rank (rsLoRA, arXiv 2312.03732) instead of alpha ÷ rank.
    pub rank_stabilised: bool,
    /// Whether the norms of the rows of adapted weights are trained, too (DoRA, arXiv 2402.09353).
    pub dora: bool,
    /// The initial values of the adapters.
    pub init: LoraInit,
    /// Quantized storage of the frozen weights of linear layers (QLoRA). In a run file, the default is the storage of the
    /// model folder's weights, which is quantized only if bitsandbytes quantized the folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantize: Option<Quantize>,
}

/// The initial values of adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoraInit {
    /// A is uniform within 1/√in, and B is zero, as in PEFT. So the model is unchanged at the start.
    #[default]
    Zero,
    /// B·A holds the principal components of the weight of a model folder, and the frozen weight holds the others (PiSSA,
    /// arXiv 2404.02948).
    Pissa,
}

impl Default for Lora {
    /// PEFT's default rank and alpha, for the query and value projections as in the paper.
    fn default() -> Self {
        let targets = vec!["q_proj".to_owned(), "v_proj".to_owned()];
        Self {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            targets,
            rank_stabilised: false,
            dora: false,
            init: LoraInit::Zero,
            quantize: None,
        }
    }
}

impl Lora {
    /// Returns the factor by which an adapter's contribution is multiplied.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilised { rank.sqrt() } else { rank }
    }

    /// Returns the name of the magnitudes of DoRA of the layer with this path.
    pub fn magnitude(layer: &str) -> String {
        format!("{layer}.{MAGNITUDE}")
    }

    /// Returns the names of the parameters A and B of the adapter of the layer with this path.
    pub fn parameters(layer: &str) -> [String; 2] {
        [LORA_A, LORA_B].map(|name| format!("{layer}.{name}"))
    }

    /// True if the layer with this path is one of the targets.
    pub fn is_target(&self, layer: &str) -> bool {
        self.targets.iter().any(|target| is_last_of(target, layer))
    }
}

/// True if `target` equals the path `layer` or the last components of that path.
fn is_last_of(target: &str, layer: &str) -> bool {
    layer.strip_suffix(target).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl Trainable {
    /// True if the parameter with this name is trained.
    pub fn trains(&self, parameter: &str) -> bool {
        match self {
            Self::All => true,
            Self::Lora(_) => self.is_adapter(parameter),
            Self::Only(patterns) => patterns.iter().any(|pattern| names(pattern, parameter)),
        }
    }

    /// True if an adapter adds the parameter with this name to the model.
    pub fn is_adapter(&self, parameter: &str) -> bool {
        matches!(self, Self::Lora(_)) && adapted(parameter).is_some()
    }

    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if a setting is out of range, or if there is no target or no pattern.
    pub fn check(&self) -> Result<()> {
        let fail = |why: String, remedy| Err(Error::config("trainable", why, remedy));
        match self {
            Self::Lora(Lora { rank: 0, .. }) => fail("the adapters' rank is 0".into(), "set it to at least 1"),
            Self::Lora(lora) if !lora.alpha.is_finite() => {
                fail(format!("alpha is {}", lora.alpha), "set alpha to a finite number")
            }
            Self::Lora(lora) if !(0.0..1.0).contains(&lora.dropout) => {
                fail(format!("dropout is {}", lora.dropout), "set it to at least 0 and below 1")
            }
            Self::Lora(Lora { init: LoraInit::Pissa, quantize: Some(_), .. }) => {
                fail("PiSSA changes the frozen weights, which are quantized".into(), "set init to \"zero\"")
            }
            Self::Lora(lora) if lora.targets.is_empty() => fail("no targets".into(), "name layers, e.g. q_proj"),
            Self::Only(patterns) if patterns.is_empty() => fail("no patterns".into(), "name parameters or modules"),
            _ => Ok(()),
        }
    }

    /// Checks that every pattern matches a parameter of the model, and that every target matches a linear layer.
    ///
    /// # Errors
    /// Returns [`Error::Config`] if a pattern or target matches nothing, or if a target matches a layer that is not
    /// linear.
    pub fn check_model(&self, graph: &Graph) -> Result<()> {
        let parameters = || graph.persistent().map(|(_, name)| name);
        let fail = |why: String, remedy| Err(Error::config("trainable", why, remedy));
        match self {
            Self::All => Ok(()),
            Self::Only(patterns) => {
                match patterns.iter().find(|pattern| !parameters().any(|name| names(pattern, name))) {
                    Some(pattern) => {
                        let names = shortened(parameters().map(any_number));
                        fail(
                            format!("{pattern:?} names no parameter of this model, which has {names}"),
                            "name one of them",
                        )
                    }
                    None => Ok(()),
                }
            }
            Self::Lora(lora) => {
                let layers: Vec<&str> = parameters().filter_map(adapted).collect();
                let ends = || {
                    let last = |layer: &String| layer.rsplit('.').next().unwrap_or(layer).to_owned();
                    shortened(graph.linear_layers().iter().map(last))
                };
                let is_raw = |layer: &&str| lora.is_target(layer) && !layers.contains(layer);
                if let Some(raw) = parameters().map(|name| name.strip_suffix(".weight").unwrap_or(name)).find(is_raw) {
                    let why = format!(
                        "the target {raw} is not a linear layer of its own; those of this model are {}",
                        ends()
                    );
                    return fail(why, "name some of them, by the ends of their paths");
                }
                match lora.targets.iter().find(|target| !layers.iter().any(|layer| is_last_of(target, layer))) {
                    Some(target) => {
                        let why = format!(
                            "the target {target:?} is not a linear layer of this model; its layers are {}",
                            ends()
                        );
                        fail(
                            why,
                            "name some of them, by the ends of their paths; a tied head is not a layer of its own",
                        )
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

/// Replaces the numbers in a path by `*`.
fn any_number(path: &str) -> String {
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    path.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Lists different names, at most [`MAX_NAMED`] of them.
fn shortened(names: impl Iterator<Item = String>) -> String {
    let mut different: Vec<String> = Vec::new();
    for name in names {
        if !different.contains(&name) {
            different.push(name);
        }
    }
    let more = different.len().saturating_sub(MAX_NAMED);
    different.truncate(MAX_NAMED);
    if more > 0 {
        different.push(format!("{more} more"));
    }
    if different.is_empty() { "none".to_owned() } else { different.join(", ") }
}

/// Returns the path of the layer whose adapter has this parameter. `None` if the parameter is not part of an adapter.
fn adapted(parameter: &str) -> Option<&str> {
    let layer = [LORA_A, LORA_B, MAGNITUDE].iter().find_map(|name| parameter.strip_suffix(name))?;
    layer.strip_suffix('.')
}

/// True if the pattern matches the parameter's name, or the path of a module that contains the parameter. Examples of
/// patterns: `h.0`, `*.bias`, `*norm*`.
pub fn names(pattern: &str, parameter: &str) -> bool {
    let ends = parameter.match_indices('.').map(|(at, _)| at).chain([parameter.len()]);
    ends.into_iter().any(|end| matches(pattern, &parameter[..end]))
}

/// True if the pattern, in which `*` stands for any text, matches the whole text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut left) = text.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    // Each literal part between two stars is matched at the earliest possible position.
    for part in middle.split('*').filter(|part| !part.is_empty()) {
        let Some(at) = left.find(part) else { return false };
        left = &left[at + part.len()..];
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_parameters_and_modules() {
        let check = |pattern: &str, parameter: &str, expected: bool| {
            assert_eq!(names(pattern, parameter), expected, "{pattern} {parameter}");
        };
        check("lm_head", "lm_head.weight", true);
        check("lm_head.weight", "lm_head.weight", true);
        check("head", "lm_head.weight", false);
        check("model.layers.1", "model.layers.1.mlp.up_proj.weight", true);
        check("model.layers.1", "model.layers.11.mlp.up_proj.weight", false);
        check("*", "wte.weight", true);
        check("*.bias", "h.0.ln_1.bias", true);
        check("*.bias", "h.0.ln_1.weight", false);
        check("h.*.ln_*.weight", "h.3.ln_1.weight", true);
        check("h.*.ln_*.weight", "h.3.attn.weight", false);
        check("*norm*", "model.norm.weight", true);
        check("a*a", "a", false);
    }

    #[test]
    fn targets_are_the_last_parts_of_paths() {
        let lora = |target: &str| Lora { targets: vec![target.into()], ..Lora::default() };
        for (target, layer, expected) in [
            ("q_proj", "model.layers.0.self_attn.q_proj", true),
            ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", true),
            ("proj", "model.layers.0.self_attn.q_proj", false),
            ("lm_head", "lm_head", true),
        ] {
            assert_eq!(lora(target).is_target(layer), expected, "{target} {layer}");
        }
        assert_eq!(Lora { rank: 4, alpha: 8.0, rank_stabilised: true, ..Lora::default() }.scale(), 4.0);
    }
}
