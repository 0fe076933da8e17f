//! Mixtures: several datasets as one.
//!
//! In: sources, or datasets, each with its weight. Out: one dataset with one vocabulary. Never: a mixture of two
//! vocabularies.

use super::folder::lock;
use super::{DataOptions, Dataset, Source, TOKENIZER, TokenStream};
use crate::encode::move_into_place;
use crate::tokenize::sample;
use crate::{DataError, Vocabulary, VocabularyChoice};

impl Dataset {
    /// Prepares several sources with one vocabulary, like [`Self::prepare`], and mixes them. Each source's share of the
    /// training and validation windows is its weight divided by the sum of weights. A vocabulary that must be trained
    /// is trained on all sources that are text.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::prepare`], if a weight is not positive and finite, or if a source
    /// of token ids has another vocabulary.
    pub fn prepare_mixture(sources: &[(Source, f64)], options: &DataOptions) -> Result<Self, DataError> {
        let options = DataOptions { vocabulary: shared_vocabulary(sources, options)?, ..options.clone() };
        let prepared = sources.iter().map(|(source, weight)| Ok((Self::prepare(source, &options)?, *weight)));
        Self::mixture(prepared.collect::<Result<_, DataError>>()?)
    }

    /// Mixes several datasets of one vocabulary. Their shares are those of [`Self::prepare_mixture`].
    ///
    /// # Errors
    /// Returns [`DataError::Mixture`] if a weight is not positive and finite, if the vocabularies differ, or if there
    /// is no dataset.
    pub fn mixture(parts: Vec<(Self, f64)>) -> Result<Self, DataError> {
        let fail = |why: String| Err(DataError::Mixture { why });
        if let Some((_, weight)) = parts.iter().find(|(_, weight)| !(*weight > 0.0 && weight.is_finite())) {
            return fail(format!("a weight is {weight}; set it above 0"));
        }
        let Some(vocabulary) = parts.first().map(|(first, _)| first.vocabulary.clone()) else {
            return fail("it has no source".into());
        };
        if parts.iter().any(|(part, _)| part.vocabulary.hash() != vocabulary.hash()) {
            return fail("its sources have different vocabularies; name one tokenizer for all".into());
        }
        let are_pairs = |(dataset, _): &(Self, f64)| dataset.are_pairs();
        if parts.iter().any(are_pairs) && !parts.iter().all(are_pairs) {
            return fail("it has pairs of answers and other data; mix sources of one format".into());
        }
        let largest = parts.iter().map(|(part, _)| part.largest).max().unwrap_or(0);
        let said: Vec<String> = parts.iter().map(|(part, weight)| format!("{weight} {}", part.hash)).collect();
        let of_part = |(dataset, weight): (Self, f64)| {
            let all: f64 = dataset.parts.iter().map(|part| part.weight).sum();
            dataset.parts.into_iter().map(move |part| TokenStream { weight: weight * part.weight / all, ..part })
        };
        Ok(Self {
            vocabulary,
            parts: parts.into_iter().flat_map(of_part).collect(),
            hash: blake3::hash(said.join("\n").as_bytes()).to_hex().to_string(),
            corpus: None,
            folder: None,
            largest,
        })
    }
}

/// Returns the vocabulary of a mixture: the chosen vocabulary, or one that is trained on all texts of the mixture and
/// kept in the cache.
fn shared_vocabulary(sources: &[(Source, f64)], options: &DataOptions) -> Result<VocabularyChoice, DataError> {
    let VocabularyChoice::Bpe { size } = options.vocabulary else { return Ok(options.vocabulary.clone()) };
    let mut texts = Vec::new();
    for (source, _) in sources {
        if !source.is_ids()? {
            texts.push(source.texts()?);
        }
    }
    if texts.is_empty() {
        return Ok(options.vocabulary.clone());
    }
    let mut hasher = blake3::Hasher::new();
    texts.iter().for_each(|texts| _ = hasher.update(texts.report().hash.as_bytes()));
    let folder = options.cache.join(format!("{}-bpe-{size}", &hasher.finalize().to_hex()[..16]));
    let tokenizer = folder.join(TOKENIZER);
    let _alone = lock(&folder)?;
    if !tokenizer.exists() {
        let mut pieces = Vec::new();
        for texts in texts {
            pieces.extend(sample(&*texts, &folder)?);
        }
        Vocabulary::train(pieces.iter().map(String::as_str), size)?.save(&tokenizer.with_extension("json.tmp"))?;
        move_into_place(&tokenizer)?;
    }
    Ok(VocabularyChoice::File(tokenizer))
}
