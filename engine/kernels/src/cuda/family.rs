//! The sources of kernels. They are files in the folder `kernels`, or were generated for a program.

use std::collections::BTreeMap;
use std::sync::Mutex;

macro_rules! families {
    ($($(#[$doc:meta])* $family:ident = $file:literal,)*) => {
        /// Kernels that are compiled together: one source.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family {
            $($(#[$doc])* $family,)*
            /// One generated kernel, which fuses several operations, or a source of one's own ([`Self::of_text`]).
            Generated(&'static Generated),
        }

        impl Family {
            /// Returns the family of a source of one's own: CUDA C++ that defines kernels with `KERNEL` (`base.cuh`), and
            /// may include the headers of the folder `kernels`. `file` is the name that errors of the compiler show.
            /// Equal texts give the same family. A text is kept until the process ends, so it must not depend on data.
            pub fn of_text(file: &str, text: &str) -> Self {
                Self::Generated(Generated::of(file.into(), text.into()))
            }

            /// All families that are files in the folder `kernels`.
            pub const ALL: &[Self] = &[$(Self::$family),*];

            /// The name of the source file.
            pub fn file(self) -> &'static str {
                match self {
                    $(Self::$family => $file,)*
                    Self::Generated(generated) => &generated.file,
                }
            }

            /// The text of the source.
            pub fn source(self) -> &'static str {
                match self {
                    $(Self::$family => include_str!(concat!("kernels/", $file)),)*
                    Self::Generated(generated) => &generated.text,
                }
            }

            /// True if the family's kernels use instructions that only compute capability 9.0 has
            /// ([`Features::warpgroups`](super::launch::Features)).
            pub fn has_warpgroups(self) -> bool {
                self.source().contains("#include \"warpgroup.cuh\"")
            }

            /// True if the family's kernels can read the address and size of dynamic rows from a slot
            /// ([`SLOT`](super::launch::SLOT)).
            pub fn reads_slots(self) -> bool {
                match self {
                    Self::Generated(generated) => calls(&generated.text, "placed"),
                    _ => matches!(self, Self::Experts | Self::Grouped | Self::GroupedTensorCores | Self::GroupedWarpgroups),
                }
            }
        }
    };
}

families! {
    /// Adafactor.
    Adafactor = "adafactor.cu",
    /// AdamW, and the norms of gradients.
    AdamW = "adamw.cu",
    /// AdamW with eight-bit moments.
    AdamW8bit = "adamw_8bit.cu",
    /// Fused attention.
    Attention = "attention.cu",
    /// Fused attention of a rank's chunks of a sequence.
    AttentionFolded = "attention_folded.cu",
    /// The backward of fused attention on the tensor cores of compute capability 9.0.
    AttentionGradWarpgroups = "attention_grad_warpgroups.cu",
    /// [`Self::AttentionGradWarpgroups`] of a rank's chunks of a sequence.
    AttentionGradWarpgroupsFolded = "attention_grad_warpgroups_folded.cu",
    /// Fused attention on tensor cores.
    AttentionTensorCores = "attention_tensor_cores.cu",
    /// [`Self::AttentionTensorCores`] of a rank's chunks of a sequence.
    AttentionTensorCoresFolded = "attention_tensor_cores_folded.cu",
    /// The forward of fused attention on the tensor cores of compute capability 9.0.
    AttentionWarpgroups = "attention_warpgroups.cu",
    /// [`Self::AttentionWarpgroups`] of a rank's chunks of a sequence.
    AttentionWarpgroupsFolded = "attention_warpgroups_folded.cu",
    /// Caches of past keys and values, and attention over them.
    Cache = "cache.cu",
    /// Compression of activations to eight bits.
    Compress = "compress.cu",
    /// Copies between strides and types.
    Copy = "copy.cu",
    /// Lookup of a table's rows by ids (embedding).
    Embedding = "embedding.cu",
    /// The gradient of an embedding table.
    EmbeddingGrad = "embedding_grad.cu",
    /// Dispatch of rows to experts, their combination, and the experts' gated unit.
    Experts = "experts.cu",
    /// The projection of GaLore.
    GaLore = "galore.cu",
    /// Gathering and scattering of elements by ids, and maxima of rows.
    Gather = "gather.cu",
    /// Matrix products of experts (grouped products).
    Grouped = "grouped.cu",
    /// Matrix products of experts (grouped products) on tensor cores.
    GroupedTensorCores = "grouped_tensor_cores.cu",
    /// Matrix products of experts (grouped products) on the tensor cores of compute capability 9.0.
    GroupedWarpgroups = "grouped_warpgroups.cu",
    /// Normalization of rows.
    Norm = "norm.cu",
    /// Dequantization of weights, and norms of adapted weights.
    Quantized = "quantized.cu",
    /// Sums over dimensions.
    Reduce = "reduce.cu",
    /// Rotary position embedding.
    Rope = "rope.cu",
    /// Routing: the assignment of rows to experts.
    Route = "route.cu",
    /// Softmax of rows, and losses that use softmax.
    Softmax = "softmax.cu",
}

/// True if a text calls a function of exactly this name.
fn calls(text: &str, name: &str) -> bool {
    let continues_name = |before: char| before.is_ascii_alphanumeric() || before == '_';
    text.match_indices(name)
        .any(|(at, _)| text[at + name.len()..].starts_with('(') && !text[..at].ends_with(continues_name))
}

/// A source that was generated for a program, or brought by an operation.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generated {
    file: String,
    text: String,
}

impl Generated {
    /// Returns the source with this text. Equal texts give the same source. Each source is kept until the process
    /// ends. A program has few different kernels, and each source takes a few kilobytes.
    pub fn of(file: String, text: String) -> &'static Self {
        static KNOWN: Mutex<BTreeMap<String, &'static Generated>> = Mutex::new(BTreeMap::new());
        let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        known.entry(text).or_insert_with_key(|text| Box::leak(Box::new(Self { file, text: text.clone() })))
    }
}

/// The names and texts of the headers that the sources include.
pub const HEADERS: &[(&str, &str)] = &[
    ("attention.cu", include_str!("kernels/attention.cu")),
    ("attention.cuh", include_str!("kernels/attention.cuh")),
    ("attention_grad_warpgroups.cu", include_str!("kernels/attention_grad_warpgroups.cu")),
    ("attention_tensor_cores.cu", include_str!("kernels/attention_tensor_cores.cu")),
    ("attention_tensor_cores.cuh", include_str!("kernels/attention_tensor_cores.cuh")),
    ("attention_warpgroups.cu", include_str!("kernels/attention_warpgroups.cu")),
    ("base.cuh", include_str!("kernels/base.cuh")),
    ("copy_async.cuh", include_str!("kernels/copy_async.cuh")),
    ("fused.cuh", include_str!("kernels/fused.cuh")),
    ("grouped.cuh", include_str!("kernels/grouped.cuh")),
    ("last_block.cuh", include_str!("kernels/last_block.cuh")),
    ("math.cuh", include_str!("kernels/math.cuh")),
    ("norm.cuh", include_str!("kernels/norm.cuh")),
    ("pieces.cuh", include_str!("kernels/pieces.cuh")),
    ("random.cuh", include_str!("kernels/random.cuh")),
    ("reduce.cuh", include_str!("kernels/reduce.cuh")),
    ("rows.cuh", include_str!("kernels/rows.cuh")),
    ("slots.cuh", include_str!("kernels/slots.cuh")),
    ("strides.cuh", include_str!("kernels/strides.cuh")),
    ("tensor_cores.cuh", include_str!("kernels/tensor_cores.cuh")),
    ("warpgroup.cuh", include_str!("kernels/warpgroup.cuh")),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_that_call_placed_read_slots() {
        let reads = |text: &str| Family::of_text("own.cu", text).reads_slots();
        assert!(reads("const f32* x = placed(to.x);") && reads("load(placed((const f32*)to.x) + i)"));
        for other in ["replaced(x)", "un_placed(x)", "placed_at(x)", "2placed(x)", "placed"] {
            assert!(!reads(other), "{other}");
        }
    }
}
