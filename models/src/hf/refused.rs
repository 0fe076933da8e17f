//! Families of transformers 5.24 that are known and not read, each with the part that the decoder does not have.

/// The missing part, and the options `model_type` of its families, separated by spaces.
const REFUSED: [(&str, &str); 38] = [
    ("state-space layers", "bamba falcon_h1 falcon_mamba jamba mamba mamba2 nemotron_h zamba zamba2"),
    (
        "linear attention",
        "bailing_hybrid kimi_linear lara_mini minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next \
         qwen4_exp qwen4_exp_text",
    ),
    ("recurrent layers", "recurrent_gemma rwkv xlstm"),
    ("short convolutions", "inkling2_loop_text inkling2_text inkling_text lfm2 lfm2_moe lfm3 zaya"),
    (
        "per-layer embeddings, AltUp, LAuReL, sparse activations and layers that share keys and values",
        "gemma3n gemma3n_text",
    ),
    (
        "heads of another width in layers with full attention, and in smaller models per-layer embeddings and shared keys",
        "gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text",
    ),
    (
        "an indexer that chooses the tokens to attend to",
        "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl minimax_m3_vl_text",
    ),
    ("numbers of heads that differ between layers", "laguna mimo_v2_flash"),
    ("rotary bases for single layers", "granite_swa granitemoe_swa"),
    ("norms after layers with experts alone", "axk1"),
    ("routing by SparseMixer", "phimoe"),
    ("a bias of the routers' logits that only chooses experts", "kolibri1"),
    ("rotary positions that depend on the type of the feed-forward layer", "cohere2_moe"),
    ("experts without weights, and two attentions in a layer", "longcat_flash"),
    ("experts of attention", "jetmoe"),
    ("attention that is the difference of two", "diffllama"),
    ("attention masks that depend on the data", "doge"),
    ("norms inside attention and feed-forward layers", "bitnet dory"),
    ("layers that are repeated", "hrm_text"),
    ("positions that are added to embeddings", "biogpt cpmant ctrl gpt_bigcode gpt_neo openai-gpt opt xglm"),
    ("ALiBi", "bloom mpt"),
    ("queries, keys and values in one tensor of another order", "codegen"),
    ("a bias in its last layer alone", "gpt_neox_japanese"),
    ("the names of Bailing's files", "sarvam_mla sarvam_moe"),
    ("a head for a part of the vocabulary", "apertus1p5_text"),
    ("experts in tensors of another form", "aria_text dbrx"),
    ("factors of residuals that depend on the layer", "beam"),
    ("sinks with rotary positions in layers with a window alone", "flint"),
    ("pooling and positions of images", "cohere_compass_text"),
    ("patches of bytes", "blt"),
    ("a head with layers of its own", "modernbert-decoder"),
    ("layers of attention to images, between those of its text part", "mllama"),
    ("attention of a prompt's tokens to later ones", "paligemma"),
    ("a factor of the logits, which transformers leaves out of the whole model", "aya_vision"),
    ("images or their codes in the text part", "emu3 fuyu git got_ocr2 phi4_multimodal"),
    ("audio in prompts or outputs", "moshi moss_transcribe_diarize musicgen musicgen_melody"),
    (
        "an encoder",
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper",
    ),
    (
        "attention to later tokens, or the layers of an encoder",
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta \
         roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod",
    ),
];

/// Returns the part that is missing to read a family. Returns `None` for an unknown `model_type`.
pub(super) fn missing_part(model_type: &str) -> Option<&'static str> {
    let has = |(_, families): &&(&str, &str)| families.split(' ').any(|family| family == model_type);
    REFUSED.iter().find(has).map(|(part, _)| *part)
}
