//! Numbers that depend on the positions of tokens, which all layers share.

use gapless_engine::{Result, Tensor};

use crate::llama::LlamaConfig;
use crate::traits::{DynamicRope, LongRope, QueryGrowth};

/// The rotary base, and tables that are looked up by position. A table broadcasts to [batch, heads, tokens, columns].
#[derive(Debug)]
pub(crate) struct Tables {
    pub theta: f64,
    /// Cosines and sines, one column per frequency, if frequencies have a divisor each.
    pub rotation: Option<[Tensor; 2]>,
    /// The factor of queries, in one column.
    pub query_scale: Option<Tensor>,
    /// True if only the queries of layers without rotary positions have the factor.
    pub scales_unrotated: bool,
}

impl Tables {
    /// Returns the tables for `tokens` [batch, tokens]. `rotated` is the width of the rotated part of a head, and `x` has
    /// the type that the model computes in.
    pub(crate) fn new(config: &LlamaConfig, rotated: usize, tokens: &Tensor, x: &Tensor) -> Result<Self> {
        let (_, t) = tokens.dims2()?;
        let window = tokens.cache_window();
        let (length, is_continued) = (window.unwrap_or(t), window.is_some());
        let table = |columns: usize, at: &dyn Fn(usize, usize) -> f64| {
            let elements = (0..length * columns).map(|i| at(i / columns, i % columns)).collect::<Vec<_>>();
            let rows = Tensor::from_vec(elements, (length, columns), tokens.device())?.rows_of_positions(t)?;
            let rows = rows.to_dtype(x.dtype())?;
            if rows.rank() == 3 { rows.unsqueeze(1) } else { Ok(rows) }
        };
        let traits = &config.traits;
        // The base for a sequence of `length` tokens.
        let base = |length: usize| match traits.dynamic_rope {
            Some(DynamicRope { factor, positions }) if length > positions => {
                let grown = factor * length as f64 / positions as f64 - (factor - 1.0);
                config.rope_theta * grown.powf(rotated as f64 / (rotated as f64 - 2.0))
            }
            _ => config.rope_theta,
        };
        // When a text is continued, the base of a token's key is that of the text up to this token.
        let grows = traits.dynamic_rope.as_ref().is_some_and(|it| length > it.positions) && is_continued;
        let theta = base(length);
        let frequency = |theta: f64, i: usize| theta.powf(-2.0 * i as f64 / rotated as f64);
        let rotation = match &traits.long_rope {
            None if grows => {
                let angle = |position: usize, i: usize| position as f64 * frequency(base(position + 1), i);
                Some((1.0, Box::new(angle) as Box<dyn Fn(usize, usize) -> f64>))
            }
            None => None,
            Some(LongRope { short, long, original, amplitude }) => {
                let divisors = if length > *original { long } else { short };
                let angle = move |position: usize, i: usize| position as f64 * frequency(theta, i) / divisors[i];
                Some((*amplitude, Box::new(angle) as _))
            }
        };
        let rotation = match rotation {
            None => None,
            Some((amplitude, angle)) => Some([
                table(rotated / 2, &|position, i| amplitude * angle(position, i).cos())?,
                table(rotated / 2, &|position, i| amplitude * angle(position, i).sin())?,
            ]),
        };
        let query_scale = match traits.query_growth {
            Some(QueryGrowth { rate, length: each, unrotated }) if length + usize::from(unrotated) > each => {
                let part = |position: usize| (position + usize::from(unrotated)) / each;
                Some(table(1, &|position, _| 1.0 + rate * ((1 + part(position)) as f64).ln())?)
            }
            _ => None,
        };
        let scales_unrotated = traits.query_growth.as_ref().is_some_and(|it| it.unrotated);
        Ok(Self { theta, rotation, query_scale, scales_unrotated })
    }
}
