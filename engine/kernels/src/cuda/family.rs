//! The kernels' text, as it lies beside this file or was written for a program.

use std::collections::BTreeMap;
use std::sync::Mutex;

macro_rules! families {
    ($($(#[$doc:meta])* $family:ident = $file:literal,)*) => {
        /// Kernels that are compiled together: one source.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family {
            $($(#[$doc])* $family,)*
            /// One kernel that was written for several operations together.
            Generated(&'static Generated),
        }

        impl Family {
            /// All that are files here.
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

            /// Whether its kernels have instructions of compute capability 9.0 alone ([`Features::warpgroups`](super::launch::Features)).
            pub fn has_warpgroups(self) -> bool {
                self.source().contains("#include \"warpgroup.cuh\"")
            }

            /// Whether its kernels ask the slots of counted rows where these lie ([`SLOT`](super::launch::SLOT)).
            pub fn reads_slots(self) -> bool {
                matches!(self, Self::Experts | Self::Grouped | Self::GroupedTensorCores | Self::Generated(_))
            }
        }
    };
}

families! {
    /// AdamW, and the norm of gradients.
    AdamW = "adamw.cu",
    /// Fused attention.
    Attention = "attention.cu",
    /// The backward of fused attention on the tensor cores of compute capability 9.0.
    AttentionGradWarpgroups = "attention_grad_warpgroups.cu",
    /// Fused attention on tensor cores.
    AttentionTensorCores = "attention_tensor_cores.cu",
    /// The forward of fused attention on the tensor cores of compute capability 9.0.
    AttentionWarpgroups = "attention_warpgroups.cu",
    /// Copies between strides and types.
    Copy = "copy.cu",
    /// Rows of a table by ids.
    Embedding = "embedding.cu",
    /// The gradient of a table of which rows were looked up.
    EmbeddingGrad = "embedding_grad.cu",
    /// Rows to experts and back, and the experts' gated unit.
    Experts = "experts.cu",
    /// Elements that ids name, and the greatest of rows.
    Gather = "gather.cu",
    /// The experts' products.
    Grouped = "grouped.cu",
    /// The experts' products on tensor cores.
    GroupedTensorCores = "grouped_tensor_cores.cu",
    /// Normalisation of rows.
    Norm = "norm.cu",
    /// Sums.
    Reduce = "reduce.cu",
    /// Rotary position embedding.
    Rope = "rope.cu",
    /// Who goes where among experts.
    Route = "route.cu",
    /// Softmax of rows, and losses by it.
    Softmax = "softmax.cu",
}

/// A source that was written for a program.
#[derive(Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generated {
    file: String,
    text: String,
}

impl Generated {
    /// The source with this text. Each is kept until the process ends: there are as many as a program has different kernels, and
    /// a few kilobytes of each.
    pub fn of(file: String, text: String) -> &'static Self {
        static KNOWN: Mutex<BTreeMap<String, &'static Generated>> = Mutex::new(BTreeMap::new());
        let mut known = KNOWN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        known.entry(text).or_insert_with_key(|text| Box::leak(Box::new(Self { file, text: text.clone() })))
    }
}

/// What the sources include: names and texts.
pub const HEADERS: &[(&str, &str)] = &[
    ("attention.cuh", include_str!("kernels/attention.cuh")),
    ("attention_tensor_cores.cuh", include_str!("kernels/attention_tensor_cores.cuh")),
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
