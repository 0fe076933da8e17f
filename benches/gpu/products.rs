//! Measures the products of a GPT-2 124M step. Each is timed alone, many times in a row, with the algorithm that
//! cuBLASLt chose. The products are those of the layers, and those of the head for vocabularies with and without
//! aligned extents.

use anyhow::Context;
use gapless::DType;
use gapless::engine::cuda::launch::{Matrix, product_workspace, scratch_in};
use gapless::engine::cuda::{Cache, Device, Launch, Nvidia, Product};
use serde::Serialize;

use super::figures::median;
use super::probe::{Card, Gpu};
use super::record::Found;

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The GPU to use.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
    /// Rows of the batch; by default 16 × 1024 tokens
    #[arg(long, default_value_t = 16_384)]
    tokens: u64,
    /// Width of the model.
    #[arg(long, default_value_t = 768)]
    width: u64,
    /// Entries of the vocabulary.
    #[arg(long, default_value_t = 50_257)]
    vocabulary: u64,
    /// Number of measured products of each form
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    repeats: u64,
}

/// A product of row-major matrices, either of which may be read as its transpose.
#[derive(Debug, Clone)]
struct Form {
    name: String,
    extents: (u64, u64, u64),
    transposed: [bool; 2],
    /// Elements between the starts of consecutive rows, for a, b and c.
    pitches: [u64; 3],
}

#[derive(Debug, Serialize)]
struct Row {
    name: String,
    m: u64,
    n: u64,
    k: u64,
    is_aligned: bool,
    ms: f64,
    tflops: f64,
    algorithm: Option<String>,
}

#[derive(Debug, Serialize)]
struct Figures {
    #[serde(flatten)]
    card: Card,
    products: Vec<Row>,
}

/// Returns the three products of a linear layer that maps `rows` rows of `inner` elements to `outer` elements. The
/// rows of the output are `pitch` elements apart.
fn layer(name: &str, rows: u64, inner: u64, outer: u64, pitch: u64) -> [Form; 3] {
    let form = |what: &str, extents, transposed, pitches| Form {
        name: format!("{name}, {what}"),
        extents,
        transposed,
        pitches,
    };
    [
        form("forward", (rows, outer, inner), [false, true], [inner, inner, pitch]),
        form("gradient of the input", (rows, inner, outer), [false, false], [pitch, inner, inner]),
        form("gradient of the weight", (outer, inner, rows), [true, false], [pitch, inner, inner]),
    ]
}

fn forms(&Arguments { tokens, width, vocabulary, .. }: &Arguments) -> Vec<Form> {
    let layers = [("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)];
    let layers = layers
        .into_iter()
        .flat_map(|(name, inner, outer)| layer(name, tokens, inner * width, outer * width, outer * width));
    let padded = vocabulary.next_multiple_of(64);
    let heads = [(vocabulary, vocabulary), (vocabulary, padded), (vocabulary / 8 * 8, padded), (padded, padded)];
    let heads = heads.into_iter().flat_map(|(entries, pitch)| {
        [2048, 2816, 4096].into_iter().flat_map(move |rows| {
            let rows = tokens.min(rows);
            layer(&format!("head {entries}, pitch {pitch}, {rows} rows"), rows, width, entries, pitch)
        })
    });
    layers.chain(heads).collect()
}

impl Form {
    /// Returns the product with its operands at this address, and the address after the last operand.
    fn at(&self, base: u64) -> (Product, u64) {
        let &Self { extents: (m, n, k), transposed, pitches, .. } = self;
        // The number of rows of each matrix in memory.
        let rows = [if transposed[0] { k } else { m }, if transposed[1] { n } else { k }, m];
        let mut end = base;
        let [a, b, c] = [0, 1, 2].map(|index| {
            let address = end;
            end = (address + rows[index] * pitches[index] * 2).next_multiple_of(256);
            Matrix::dense(address, DType::BF16, pitches[index])
        });
        let factor = |matrix: Matrix, is_transposed| if is_transposed { matrix.t() } else { matrix };
        let bytes = product_workspace(m as usize, n as usize);
        let scratch = scratch_in(end, bytes);
        (Product::new((m, n, k), factor(a, transposed[0]), factor(b, transposed[1]), c, scratch), end + bytes)
    }
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    let forms = forms(arguments);
    let card = match arguments.device.found() {
        Ok(card) => card,
        Err(why) => return Ok(Found::skipped(&why)),
    };
    let mut device = Nvidia::new(arguments.device.0, Cache::of_user())?;
    let bytes = forms.iter().map(|form| form.at(0).1).max().context("there are forms")?;
    let base = device.reserve(bytes)?;
    let mut products = Vec::new();
    for form in &forms {
        let (product, _) = form.at(base);
        let launch = Launch::Product(product);
        let describe = |_: usize| form.name.clone();
        // Recording chooses the algorithm, on zeros.
        device.record(vec![Launch::Product(product)], &describe)?;
        let times = device.time(&vec![&launch; arguments.repeats as usize], &describe)?;
        let ms =
            median(times.iter().map(|time| time.as_secs_f64() * 1e3).collect()).context("--repeats is at least 1")?;
        let (m, n, k) = form.extents;
        let (tflops, algorithm) = (product.flops() as f64 / ms / 1e9, device.algorithm(&launch));
        products.push(Row {
            name: form.name.clone(),
            m,
            n,
            k,
            is_aligned: product.is_aligned(),
            ms,
            tflops,
            algorithm,
        });
    }
    let mut text = format!(
        "{card}: products of bf16 in a row, median of {}\n{:54} {:>6} {:>6} {:>6} {:>8} {:>9} {:>8}  algorithm",
        arguments.repeats, "product", "m", "n", "k", "aligned", "ms", "TFLOP/s"
    );
    for Row { name, m, n, k, is_aligned, ms, tflops, algorithm } in &products {
        let (is_aligned, algorithm) =
            (if *is_aligned { "yes" } else { "no" }, algorithm.as_deref().unwrap_or("unknown"));
        text += &format!("\n{name:54} {m:6} {n:6} {k:6} {is_aligned:>8} {ms:9.3} {tflops:8.1}  {algorithm}");
    }
    Found::new(true, text, &Figures { card, products })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The products are those of the layers, and those of the head with three chunk lengths and four vocabularies.
    /// The first two vocabularies are not aligned.
    #[test]
    fn forms_are_those_of_a_step_and_of_heads() {
        let arguments = Arguments { device: Gpu(0), tokens: 16_384, width: 768, vocabulary: 50_257, repeats: 1 };
        let forms = forms(&arguments);
        assert_eq!(forms.len(), 12 + 4 * 9);
        let off: Vec<&str> =
            forms.iter().filter(|form| !form.at(0).0.is_aligned()).map(|form| &form.name[..]).collect();
        assert!(off.len() == 18 && off.iter().all(|name| name.starts_with("head 50257")), "{off:?}");
        let (product, end) = forms[0].at(256);
        assert_eq!((product.m, product.n, product.k, product.flops()), (16_384, 2304, 768, 2 * 16_384 * 2304 * 768));
        assert!(product.reads().iter().all(|&(address, bytes)| address >= 256 && address + bytes as u64 <= end));
    }
}
