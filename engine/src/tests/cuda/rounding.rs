//! The error that rounding may cause in a function's result, derived from the condition of the function.
//!
//! A kernel rounds each value that it stores by up to one unit roundoff, which is 2⁻⁸ for bf16. The compiler chooses
//! which values are stored between two operations. So one reader may see a rounded value, and another the exact one.
//! The effect on a result only depends on the function. It is measured by evaluating the function in f64 with random
//! changes: for each reader, every intermediate value is changed by as much as rounding could.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::DType;
use gapless_graph::{Numbers, Stream};
use gapless_testing::prelude::*;

use super::fused::{Function, any_function, random_function};
use super::memory::to_bf16;
use crate::graph::{Graph, Source, ValueId, lock};

use crate::reference::{Array, evaluate, evaluate_with};

/// The number of evaluations with random changes.
const DRAWS: u64 = 32;

/// The allowed error of a result, as a multiple of the largest error among the draws.
///
/// Roundings are not random. But an error composed of many roundings is close to normally distributed, and so are the
/// draws, whose changes are larger. The probability that all 32 draws are below a quarter of one further sample is
/// 10⁻⁹. The error of a single rounding is bounded, and the probability that all 32 draws stay below a quarter of the
/// bound is 10⁻¹⁹.
const FACTOR: f64 = 4.0;

/// The error of a kernel's f32 arithmetic: several unit roundoffs of 2⁻²⁴. It is relative to the value, and also
/// absolute, because derivatives such as 1 − tanh² are differences of values near 1.
const F32: f64 = 1.0 / (1 << 21) as f64;

/// Returns the relative error of a value stored in this type.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0 + F32,
        DType::F32 => F32,
        _ => 0.0,
    }
}

/// A function's exact values, and the allowed errors of its results.
pub struct Judged {
    /// Exact values, indexed by value.
    pub exact: Vec<Array>,
    /// The allowed distance ‖x − exact‖ of each result; infinite if an intermediate value overflows f32.
    pub allowed: Vec<f64>,
}

/// Evaluates a graph in f64, with and without random changes.
pub fn judged(graph: &Graph, given: &HashMap<String, Array>, stream: Stream, results: &[ValueId]) -> Judged {
    let exact = evaluate(graph, given, stream);
    let overflows =
        exact.iter().flat_map(|array| &array.data).any(|x| x.is_nan() || x.abs() > f64::from(f32::MAX) / 2.0);
    if overflows {
        return Judged { exact, allowed: vec![f64::INFINITY; results.len()] };
    }
    let mut furthest = vec![0.0f64; results.len()];
    for draw in 0..DRAWS {
        let changed = evaluate_with(graph, given, stream, |reader, id, x| {
            let value = graph.value(id);
            match graph.value(value.root).source {
                Source::Node { .. } => {
                    // Equal values are rounded in the same way, so a reader sees all of them changed by the same
                    // amount.
                    let size = unit(value.spec.dtype) * x.abs() + F32;
                    x + size * uniform((draw, reader, id.index(), x.to_bits()))
                }
                // Parameters are exact.
                _ => x,
            }
        });
        for (furthest, id) in furthest.iter_mut().zip(results) {
            *furthest = furthest.max(distance(&changed[id.index()].data, &exact[id.index()].data));
        }
    }
    Judged { exact, allowed: furthest.into_iter().map(|furthest| FACTOR * furthest).collect() }
}

/// ‖a − b‖.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}

/// Returns a hash of `of`, as a value in [-1, 1).
fn uniform(of: impl Hash) -> f64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    (hasher.finish() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

generated! {
    #![cases(64)]

    /// The error of functions whose values are really rounded to bf16, at randomly chosen readers, stays within the
    /// allowed one.
    #[test]
    fn roundings_take_nothing_further_than_allowed(chosen in any_function(), salt: u64) {
        let function = Function::new(DType::BF16, |parameter| random_function(&chosen, parameter)).unwrap();
        let graph = lock(&function.graph);
        let number = |place: usize| rounded(Numbers::from_seed(salt).normal(place));
        let parameter = |(id, name): (ValueId, &str)| {
            let dims = graph.value(id).spec.dims();
            let data = (0..dims.iter().product()).map(|i| number(1000 * id.index() + i)).collect();
            (name.to_owned(), Array::new(dims, data))
        };
        let parameters: HashMap<String, Array> = graph.persistent().map(parameter).collect();
        let stream = Stream::new(3, 0, 0);
        let results: Vec<ValueId> = function.outputs.iter().map(|output| output.value).collect();
        let judged = judged(&graph, &parameters, stream, &results);
        let stored = evaluate_with(&graph, &parameters, stream, |reader, id, x| {
            let is_stored = reader.is_none() || uniform((salt, reader, id.index())) < 0.5;
            if is_stored && graph.value(id).spec.dtype == DType::BF16 { rounded(x) } else { x }
        });
        for (id, allowed) in results.iter().zip(judged.allowed) {
            let (exact, stored) = (&judged.exact[id.index()].data, &stored[id.index()].data);
            let error = distance(stored, exact);
            prop_assert!(allowed.is_infinite() || error <= allowed, "{error}, allowed {allowed}");
        }
    }
}

/// The nearest bf16.
fn rounded(x: f64) -> f64 {
    f64::from(f32::from_bits(u32::from(to_bf16(x as f32)) << 16))
}
